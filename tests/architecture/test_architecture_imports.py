"""Who may import whom, and how long a file may be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp
import pytest

import armillary

SOURCE = Path(armillary.__file__).parent

LINES = [
    {"cli"},
    {"planning", "analysis", "launch"},
    {"training"},
    {"inference"},  # a run ends with a sample of what was learned
    {"recipe", "recipes"},
    {"resilience", "checkpoint", "parallel"},
    {"tasks", "evaluation"},  # a task reads the batches that data makes
    {"data", "optim", "precision", "telemetry"},
    {"models"},
    {"kernels"},
    {"foundation"},
]
"""Rooms from top to bottom: a room imports from lower lines only, never from beside it."""

OF_ONE_KIND = {"recipe", "recipes"}
"""The one pair that may: curated recipes are built of parts, and found by name."""

OUTSIDE_THE_ROOMS = {"__main__", "version"}


def violations(package: str, lines: list[set[str]]) -> list[str]:
    """Imports of a package that point up or sideways, as `importer -> imported`."""
    graph = grimp.build_graph(package, cache_dir=None)
    layers = [grimp.Layer(*line, independent=line != OF_ONE_KIND) for line in lines]
    illegal = graph.find_illegal_dependencies_for_layers(layers=layers, containers={package})
    return sorted(
        " -> ".join([min(route.heads), *route.middle, min(route.tails)])
        for dependency in illegal
        for route in dependency.routes
    )


def test_rooms_import_lower_lines_only() -> None:
    assert not (found := violations("armillary", LINES)), "\n".join(found)


def test_every_room_has_its_line() -> None:
    rooms = {
        path.stem
        for path in SOURCE.iterdir()
        if (path.is_dir() and any(path.glob("**/*.py"))) or path.suffix == ".py"
    }
    assert rooms - {"__init__", "__pycache__"} - OUTSIDE_THE_ROOMS <= set.union(*LINES)


@pytest.mark.parametrize(
    ("importer", "imported"), [("models/dense", "training.loop"), ("data/store", "optim.muon")]
)
def test_an_import_up_or_sideways_is_found(
    importer: str, imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"planted_{importer.partition('/')[0]}"
    for room in set.union(*LINES):
        (tmp_path / package / room).mkdir(parents=True)
        (tmp_path / package / room / "__init__.py").touch()
    (tmp_path / package / "__init__.py").touch()
    (tmp_path / package / f"{imported.replace('.', '/')}.py").touch()
    lazily = f"def build():\n    from {package}.{imported} import anything\n"
    (tmp_path / package / f"{importer}.py").write_text(lazily)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert violations(package, LINES) == [
        f"{package}.{importer.replace('/', '.')} -> {package}.{imported}"
    ]


def test_models_know_nothing_of_ranks() -> None:
    offenders = [
        str(path)
        for room in ("models", "kernels")
        for path in (SOURCE / room).rglob("*.py")
        if "torch.distributed" in path.read_text()
    ]
    assert offenders == []


def test_configuration_and_launch_load_no_torch() -> None:
    modules = [
        "parallel", "precision", "launch.local", "foundation.errors", "foundation.machine",
        "data.config", "optim.adamw", "optim.muon", "optim.schedule", "tasks.next_token",
        "evaluation.config", "telemetry.config", "models", "recipe",
    ]  # fmt: skip
    imports = "".join(f"import armillary.{module}\n" for module in modules)
    code = f"import sys\n{imports}assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > 400} == {}
