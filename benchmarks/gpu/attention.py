"""Checks and times every attention backend on this machine's device, in under four minutes.

    python benchmarks/gpu/attention.py [--device cuda] [--rows 4] [--length 4096] [--seconds 3]

For each backend that can train here: the largest difference to a float64 oracle, of outputs and of
gradients, over packed documents; the largest change of one document's outputs when another is
replaced, which must be 0; and forward and backward per second beside plain causal SDPA, which knows
no documents. Exit code 1 if a check fails. `--device cpu` runs the same on a CPU: give it small
sizes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.reference import attention as oracle
from armillary.models.layers.backends import BACKENDS
from armillary.models.layers.backends.base import AttentionBackend, Conditions
from armillary.models.layers.documents import Documents

HEADS, KV_HEADS, HEAD_WIDTH = 16, 4, 64
TOLERANCE = 2e-2
"""Of bfloat16 outputs and gradients of order 1, relative to the largest of the oracle."""

Tensors = tuple[Tensor, Tensor, Tensor]


def main() -> int:
    """Runs all checks; prints a line for each backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each backend")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    print(
        f"{name}, torch {torch.__version__}, rows {arguments.rows} x {arguments.length}, bfloat16"
    )

    documents = _documents(arguments.rows, arguments.length, device)
    inputs = _inputs(arguments.rows, arguments.length, device)
    plain = _rate(lambda: _step(_plain, inputs), device, arguments.seconds)
    print(f"{'plain causal SDPA':20} {plain:8.1f} steps/s")
    conditions = Conditions(device_type=device.type, head_width=HEAD_WIDTH)
    passed = True
    for name, backend in BACKENDS.items():
        if problems := backend.problems(conditions):
            print(f"{name:20} not here: {problems[0].message}")
            continue
        error, leak = _check(backend, documents, device)
        visible = backend.prepare(documents, torch.zeros(inputs[0].shape[::2][:2], device=device))
        rate = _rate(
            lambda b=backend, v=visible: _step(lambda *x: b.attend(*x, v), inputs),
            device,
            arguments.seconds,
        )
        good = error < TOLERANCE and leak == 0
        passed = passed and good
        print(
            f"{name:20} {rate:8.1f} steps/s  {rate / plain:5.2f} of plain"
            f"  error {error:.1e}  leak {leak:.1e}  {'ok' if good else 'FAILED'}"
        )
    return 0 if passed else 1


def _documents(rows: int, length: int, device: torch.device) -> Documents:
    """A long, some short and a one-token document in every row, cut differently."""
    cuts = [[length - 3 * (row + 17) - 1, row + 17, 2 * (row + 17), 1] for row in range(rows)]
    return Documents.from_lengths(cuts, device)


def _inputs(rows: int, length: int, device: torch.device) -> Tensors:
    torch.manual_seed(0)

    def draw(heads: int) -> Tensor:
        x = torch.randn(rows, heads, length, HEAD_WIDTH, device=device, dtype=torch.bfloat16)
        return x.requires_grad_()

    return draw(HEADS), draw(KV_HEADS), draw(KV_HEADS)


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _step(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Tensors) -> Tensor:
    out = attend(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    return out


def _check(
    backend: AttentionBackend, documents: Documents, device: torch.device
) -> tuple[float, float]:
    """The largest relative error over a short batch, and the largest leak between documents."""
    rows, length = 2, 256
    documents = _documents(rows, length, device)
    inputs = _inputs(rows, length, device)
    tokens = torch.zeros(rows, length, device=device)
    visible = backend.prepare(documents, tokens)
    out = backend.attend(*inputs, visible)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))

    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = oracle(exact[0], exact[1], exact[2], documents.starts)
    wanted_grads = torch.autograd.grad(wanted, exact, torch.ones_like(wanted))
    error = max(
        float(((mine.double() - theirs).abs().max() / theirs.abs().max()).detach())
        for mine, theirs in zip((out, *grads), (wanted, *wanted_grads), strict=True)
    )
    first = documents.lengths[0][0]  # replace the first document: the rest of row 0 must not move
    changed = [x.detach().clone() for x in inputs]
    for x in changed:
        x[0, :, :first] = torch.randn_like(x[0, :, :first])
    moved = backend.attend(changed[0], changed[1], changed[2], visible)
    leak = float((moved[0, :, first:] - out[0, :, first:]).abs().max().detach())
    return error, leak


def _rate(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Steps a second, after warming up."""
    for _ in range(2):
        step()
    _wait(device)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        step()
        _wait(device)
        steps += 1
    return steps / (time.perf_counter() - began)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
