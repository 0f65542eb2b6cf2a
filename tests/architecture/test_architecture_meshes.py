"""Meshes are applied from outside: neither models nor the trainer know which one there is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import armillary

SOURCE = Path(armillary.__file__).parent
WITHOUT_MESHES = ("models", "kernels", "tasks", "data", "optim", "training", "inference")
OF_A_MESH = {
    *("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp", "fsdp", "expert_fsdp"),
    *(
        "degree",
        "degrees",
        "coordinate",
        "get_group",
        "is_initialized",
        "world_size",
        "get_world_size",
    ),
}
"""Names and words that a branch would have to look at."""


def branches(source: str) -> list[str]:
    """Conditions of a file that look at a mesh."""
    found = []
    for node in ast.walk(ast.parse(source)):
        tests: list[ast.expr] = []
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            tests = [node.test]
        elif isinstance(node, ast.comprehension):
            tests = node.ifs
        elif isinstance(node, ast.Match):
            tests = [node.subject]
        found += [ast.unparse(test) for test in tests if _words(test) & OF_A_MESH]
    return found


def _words(test: ast.expr) -> set[str]:
    words: set[str] = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value)
    return words


@pytest.mark.parametrize("room", WITHOUT_MESHES)
def test_no_branch_looks_at_the_mesh(room: str) -> None:
    files = sorted((SOURCE / room).rglob("*.py"))
    assert files
    found = {str(file): branches(file.read_text()) for file in files}
    assert {name: hits for name, hits in found.items() if hits} == {}


def test_models_and_kernels_do_not_know_of_distributed_torch() -> None:
    for room in ("models", "kernels", "tasks"):
        for file in (SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in getattr(node, "names", []) if alias.name]
                names.append(getattr(node, "module", None) or "")
                assert not [name for name in names if name.startswith("torch.distributed")], file


def test_the_search_finds_a_branch() -> None:
    assert branches("if mesh.degree('tp') > 1:\n    pass") == ["mesh.degree('tp') > 1"]
    assert branches("x = 1 if parallel.pp == 2 else 0") == ["parallel.pp == 2"]
    assert branches("if step > 1:\n    pass") == []
