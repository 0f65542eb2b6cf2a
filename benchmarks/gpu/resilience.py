"""Checks and times on a GPU what only a GPU can show of saving and of the guard, in a minute.

    python benchmarks/gpu/resilience.py [--gibibytes 2] [--json FILE] [--dry-run]

The copy of the state: equal to the state when the save began, though updates were queued at once;
how long the host and the device were held up, beside a copy that is waited for. The guard: a step
with gradients that are not finite leaves weights and moments as they were, and neither judging nor
the update waits for the device. Exit code 1 if something is not so. `--dry-run` does the same on
the CPU, at tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from armillary.checkpoint.staging import Stager
from armillary.checkpoint.state import gather_state
from armillary.checkpoint.tensors import digest, flatten, pieces_of
from armillary.optim.optimizers import Optimizers
from armillary.resilience.guard import Detector
from armillary.resilience.guard_config import Guard
from armillary.telemetry.devices import device_name

_MATRICES = 16
_UPDATES = 5


def main() -> int:
    """Runs both checks, prints what was found; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gibibytes", type=float, default=2.0, help="of weights and moments")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at tiny sizes")
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    size = 1 << 20 if arguments.dry_run else int(arguments.gibibytes * (1 << 30))
    model, optimizers = _model(device, size)
    found = {"device": device_name(device)}
    found |= _staging(model, optimizers, device) | _guard(model, optimizers, device)
    wrong = [name for name, value in found.items() if value is False]
    for name, value in found.items():
        print(f"{name:32} {value:.6f}" if isinstance(value, float) else f"{name:32} {value}")
    print(f"wrong: {', '.join(wrong)}" if wrong else "passed")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if wrong else 0


def _model(device: torch.device, size: int) -> tuple[nn.Module, Optimizers]:
    """Float32 weights whose state, AdamW's moments included, has `size` bytes; once updated."""
    width = int((size / 12 / _MATRICES) ** 0.5)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_MATRICES)))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    optimizers = Optimizers([optimizer])
    _set_gradients(model, 1.0)
    optimizers.step()
    return model, optimizers


def _set_gradients(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def _staging(model: nn.Module, optimizers: Optimizers, device: torch.device) -> dict[str, Any]:
    stager = Stager()
    found: dict[str, Any] = {}
    for turn in ("first", "again"):  # the first one takes and pins the memory
        pieces = pieces_of(flatten(gather_state(model, optimizers.optimizers)))
        before = digest(pieces)
        _synchronize(device)
        began = time.perf_counter()
        copied = [piece.data.to("cpu", copy=True) for piece in pieces]
        _synchronize(device)
        at_once = time.perf_counter() - began
        del copied
        began = time.perf_counter()
        staging = stager.stage(pieces)
        staging.wait()
        held_up = time.perf_counter() - began
        for _ in range(_UPDATES):
            optimizers.step()
        found[f"staged_is_the_step_{turn}"] = staging.digest() == before
        after = digest(pieces_of(flatten(gather_state(model, optimizers.optimizers))))
        found[f"updates_went_on_{turn}"] = after != before
        found[f"host_held_up_seconds_{turn}"] = held_up
        found[f"copy_at_once_seconds_{turn}"] = at_once
        staging.release()
    return found


def _guard(model: nn.Module, optimizers: Optimizers, device: torch.device) -> dict[str, Any]:
    detector = Detector(Guard(), device)
    loss = torch.ones((), device=device)
    found: dict[str, Any] = {}
    for name, value, bad in (("healthy", 1.0, False), ("not_finite", float("nan"), True)):
        _set_gradients(model, value)
        before = digest(pieces_of(flatten(gather_state(model, optimizers.optimizers))))
        with _no_waiting(device):
            verdict = detector.judge(loss, _norm(model))
            optimizers.step(verdict.skipped)
            read = verdict.read_later(torch.zeros(0, device=device))
        health, _ = read.wait()
        after = digest(pieces_of(flatten(gather_state(model, optimizers.optimizers))))
        found[f"{name}_step_does_right"] = (after == before) == bad
        found[f"{name}_step_is_told"] = health.skipped == bad
    return found


def _norm(model: nn.Module) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


@contextlib.contextmanager
def _no_waiting(device: torch.device) -> Iterator[None]:
    """An error if the host waits for the device inside."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
