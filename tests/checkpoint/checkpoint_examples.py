"""Small states, and a store that is watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from armillary.checkpoint.store import CheckpointStore


class Log:
    """Collects what a store tells."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append((kind, fields))

    def states(self) -> list[tuple[str, int]]:
        return [(f["state"], f["step"]) for kind, f in self.events if kind == "checkpoint"]

    def warnings(self) -> list[str]:
        return [f["message"] + " " + f["hint"] for kind, f in self.events if kind == "warning"]


def tensors_of(step: int) -> dict[str, Any]:
    weight = torch.full((5, 3), float(step))
    return {"model": {"weight": weight}, "optimizer": {"weight.step": torch.tensor(float(step))}}


def save(store: CheckpointStore, *steps: int, **manifest: Any) -> None:
    for step in steps:
        scalars = {"tokens_total": 100 * step, "cursor": {"samples": step}}
        store.save(step, tensors_of(step), scalars, b"{}", {"recipe_sha256": "ab", **manifest})
    store.wait()


def loaded_step(store: CheckpointStore, resume: str = "auto") -> int:
    found = store.find(resume)
    assert found is not None
    state = tensors_of(0)
    scalars, _ = store.load(found, state)
    assert scalars["tokens_total"] == 100 * found.step
    assert torch.equal(state["model"]["weight"], tensors_of(found.step)["model"]["weight"])
    return found.step


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def files_in(folder: Path) -> list[str]:
    """Relative paths of all files below a folder."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def flip_bit(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def tensors_file(folder: Path) -> Path:
    return folder / "rank-00000.safetensors"
