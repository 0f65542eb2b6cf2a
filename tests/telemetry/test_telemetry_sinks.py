import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import telemetry_examples as examples
from armillary.foundation.errors import UserError
from armillary.telemetry.config import Telemetry
from armillary.telemetry.events import read_events
from armillary.telemetry.open import open_event_log


def points(folder: Path, name: str) -> dict[int, float]:
    """What TensorBoard would draw."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    return {point.step: point.value for point in reader.Scalars(name)}


def train(folder: Path, telemetry: Telemetry, first: int, last: int, resumed: int | None) -> None:
    with open_event_log(telemetry, folder) as log:
        log.emit("start", resumed or 0, **examples.start(resumed_from=resumed))
        for number in range(first, last + 1):
            log.emit("step", number, **examples.step(number, loss=float(number), mfu=None))
        log.emit("validation", last, **examples.validation())
        log.emit("sample", last, prompt="def ", text="f(): pass")
        log.emit("stop", last, reason="finished", exit_code=0)


def test_tensorboard_has_every_point_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    telemetry = Telemetry(tensorboard=True)
    train(tmp_path, telemetry, 1, 6, None)
    train(tmp_path, telemetry, 4, 8, 3)
    folder = tmp_path / "tensorboard"
    assert points(folder, "train/loss") == {n: float(n) for n in range(1, 9)}
    assert points(folder, "validation/bits_per_byte")[8] == pytest.approx(1.632)
    with pytest.raises(KeyError):
        points(folder, "speed/mfu")


class FakeWandb(types.ModuleType):
    """As much of W&B's interface as the sink uses; refuses what the real one refuses."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.opened: list[dict[str, Any]] = []
        self.points: list[tuple[str, dict[str, float]]] = []
        self.finished: list[int] = []

    def init(self, **arguments: Any) -> Any:
        assert arguments["mode"] in ("online", "offline", "disabled")
        assert arguments["resume"] == "allow"
        self.opened.append(arguments)
        fake = self

        class Run:
            def define_metric(self, name: str, step_metric: str | None = None) -> None:
                assert (name, step_metric) in (("step", None), ("*", "step"))

            def log(self, values: dict[str, float]) -> None:
                fake.points.append((arguments["id"], values))

            def finish(self, exit_code: int = 0) -> None:
                fake.finished.append(exit_code)

        return Run()


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_a_resumed_run_goes_on_as_the_same_wandb_run_with_its_own_steps(tmp_path, wandb):
    telemetry = Telemetry(wandb=True, wandb_mode="offline", log_every=2)
    assert telemetry.problems() == []
    train(tmp_path, telemetry, 1, 6, None)
    train(tmp_path, telemetry, 4, 8, 3)
    first, second = wandb.opened
    assert first["id"] == second["id"] == (tmp_path / "wandb-run-id").read_text()
    assert (first["mode"], first["project"], first["dir"]) == (
        "offline",
        "armillary",
        str(tmp_path),
    )
    assert [values["step"] for _, values in wandb.points] == [2, 4, 6, 6, 4, 6, 8, 8]
    assert wandb.points[0][1]["train/loss"] == 2.0
    assert wandb.finished == [0, 0]


def test_the_real_library_writes_two_starts_of_one_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    telemetry = Telemetry(wandb=True, wandb_mode="offline")
    train(tmp_path, telemetry, 1, 6, None)
    train(tmp_path, telemetry, 4, 8, 3)
    identity = (tmp_path / "wandb-run-id").read_text()
    found = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}*/run-{identity}.wandb"))
    assert [file.stat().st_size > 0 for file in found] == [True, True]
    assert not [e for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "warning"]


def test_a_service_that_fails_at_the_start_costs_one_warning(tmp_path, wandb, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **_: (_ for _ in ()).throw(OSError("no network")))
    train(tmp_path, Telemetry(wandb=True), 1, 3, None)
    kinds = [event["kind"] for event in read_events(tmp_path / "events.jsonl")]
    assert kinds == ["start", "warning", "step", "step", "step", "validation", "sample", "stop"]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_library_is_a_problem_before_the_run_and_an_error_in_it(
    tmp_path, monkeypatch, name
):
    for module in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    telemetry = Telemetry(**{name: True})
    (problem,) = telemetry.problems()
    assert f'pip install "armillary[{name}]"' in problem.render()
    with pytest.raises(UserError, match=f"optional dependency group '{name}'"):
        open_event_log(telemetry, tmp_path)


def test_other_ranks_open_no_sink_and_no_file(tmp_path, wandb):
    with open_event_log(Telemetry(wandb=True, tensorboard=True), tmp_path, rank=1) as log:
        log.emit("start", 0, **examples.start())
    assert wandb.opened == []
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_the_configuration_come_at_once():
    telemetry = Telemetry(
        console="lve", wandb_mode="on", log_every=0, profile_steps=0, peak_flops=-1.0
    )
    text = "\n".join(problem.render() for problem in telemetry.problems())
    assert "try: --telemetry.console live" in text
    assert "telemetry.wandb_mode = 'on' is not a choice" in text
    assert "try: --telemetry.log-every 1" in text
    assert "telemetry.profile_steps = 0" in text
    assert "telemetry.peak_flops = -1.0 is not positive" in text
    assert Telemetry().problems() == []
