"""Trains Llama 3.2 1B and Llama 3.1 8B on one GPU, in bfloat16 and in float8, in four minutes.

    python benchmarks/gpu/pretraining.py [--json FILE] [--seconds 230] [--dry-run]

Compiled blocks, selective activation checkpointing, float32 masters and AdamW; the passes and the
task are those of every run. Of the 8B model only 8 of 32 layers are built, which are as wide as the
real ones: all of its state does not fit beside its activations on one device. Rows are random
tokens, the same at every step, so that the loss must fall; speed does not depend on them.

MFU counts the FLOPs of the model, not those of recomputation, against the bfloat16 peak of the
device, for float8 too: with all attention scores (as PaLM does), and with the causal half of them.

Exit code 1 if a loss is not finite or does not fall, or if a product in 8 bits is not near its
emulation. `--dry-run` runs everything on the CPU at tiny sizes, without the compiler's back end.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from armillary.data.batch import Batch
from armillary.kernels.float8 import float8_product, largest, round_to_float8
from armillary.models.layers.documents import Documents
from armillary.models.llama import Llama
from armillary.models.llama.config import llama3
from armillary.parallel.config import Compile, Parallel, Scale, Selective
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel
from armillary.parallel.parallelize import parallelize
from armillary.precision import Precision
from armillary.precision.config import (
    Float8Rowwise,
    Float8Tensorwise,
    LowPrecisionConfig,
    NoLowPrecision,
)
from armillary.tasks.next_token import NextToken
from armillary.telemetry.devices import device_name
from armillary.telemetry.memory import peak_memory_bytes
from armillary.telemetry.peaks import mfu, peak_flops

FORMATS: dict[str, LowPrecisionConfig] = {
    "bfloat16": NoLowPrecision(),
    "float8-tensorwise": Float8Tensorwise(),
    "float8-rowwise": Float8Rowwise(),
}
WARM_UP_STEPS = 3
TOLERANCE = 1e-2
"""Of a product in 8 bits, rounded to bfloat16, against its emulation, relative to the largest."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and what it is fed."""

    name: str
    model: Llama
    rows: int
    length: int
    seconds: float
    """Of timing, after warming up."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a model in one format did."""

    model: str
    format: str
    parameters: int
    first_loss: float
    last_loss: float
    steps: int
    tokens_per_second: float
    mfu: float | None
    """Share of the bfloat16 peak, all attention scores counted."""
    mfu_causal: float | None
    """The same with the causal half of them."""
    peak_memory_gib: float
    set_up_seconds: float
    """Building, compiling and warming up."""
    converted: int
    """Modules whose products run in 8 bits."""

    @property
    def passed(self) -> bool:
        """Whether the loss is a number and falls."""
        return math.isfinite(self.last_loss) and self.last_loss < self.first_loss


def main() -> int:
    """Runs all cases; prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the results there")
    parser.add_argument("--seconds", type=float, default=230, help="no case begins after these")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry-run runs tiny sizes on the CPU")
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    began = time.perf_counter()
    print(f"{device_name(device)}, torch {torch.__version__}")
    error = product_error(device)
    print(f"products in 8 bits: within {error:.1e} of their emulation")
    print(
        f"{'model':22} {'format':18} {'tokens/s':>10} {'MFU':>6} {'causal':>6} {'GiB':>6}"
        f"  loss    {'set-up':>6}"
    )
    results: list[Result] = []
    for case in dry_cases() if arguments.dry_run else gpu_cases():
        for name in FORMATS:
            if time.perf_counter() - began > arguments.seconds:
                print(f"{case.name:22} {name:18} left out: {arguments.seconds:g} s are over")
                continue
            results.append(measure(case, name, device))
            print(_line(results[-1]))
    if arguments.json:
        table: dict[str, Any] = {
            "device": device_name(device),
            "torch": torch.__version__,
            "product_error": error,
            "results": [dataclasses.asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(table, indent=2) + "\n")
    passed = error < TOLERANCE and all(result.passed for result in results)
    print(f"{'passed' if passed else 'FAILED'} in {time.perf_counter() - began:.0f} s")
    return 0 if passed and results else 1


def gpu_cases() -> list[Case]:
    """For a device of 140 GB."""
    eight = dataclasses.replace(llama3("8B", release="3.1"), n_layers=8)
    return [
        Case(name="llama3.2-1b", model=llama3("1B"), rows=4, length=4096, seconds=6),
        Case(name="llama3.1-8b, 8 layers", model=eight, rows=2, length=4096, seconds=6),
    ]


def dry_cases() -> list[Case]:
    """A model of the same kind in miniature."""
    tiny = Llama(
        vocab_size=256, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=128, max_seq_len=64
    )
    return [Case(name="tiny", model=tiny, rows=2, length=64, seconds=0.1)]


def measure(case: Case, number_format: str, device: torch.device) -> Result:
    """Trains for a while; everything is freed at the end."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()
    began = time.perf_counter()
    scale = Scale(
        parallel=Parallel(device=device.type),
        precision=Precision(linears=FORMATS[number_format]),
        activation_checkpoint=Selective(),
        compile=Compile(enabled=True, backend="inductor" if device.type == "cuda" else "aot_eager"),
    )
    with torch.device("meta"):
        whole = case.model.build()
    model = parallelize(whole, Mesh.create(scale.parallel, device), scale)
    materialise(model, device, 0)
    steps = _steps(model, case, device)
    losses = [next(steps) for _ in range(WARM_UP_STEPS)]
    _wait(device)
    warm = time.perf_counter()
    while time.perf_counter() - warm < case.seconds:
        losses.append(next(steps))
        _wait(device)
    seconds = time.perf_counter() - warm
    timed = len(losses) - WARM_UP_STEPS
    rate = timed * case.rows * case.length / seconds
    peak = peak_flops(device_name(device), "bfloat16")
    per_token = {c: case.model.flops_per_token(case.length, causal=c) for c in (False, True)}
    result = Result(
        model=case.name,
        format=number_format,
        parameters=case.model.parameter_count(),
        first_loss=float(losses[0]),
        last_loss=float(losses[-1]),
        steps=len(losses),
        tokens_per_second=rate,
        mfu=mfu(per_token[False], rate, peak),
        mfu_causal=mfu(per_token[True], rate, peak),
        peak_memory_gib=peak_memory_bytes(device) / 2**30,
        set_up_seconds=warm - began,
        converted=sum(hasattr(m, "product") and _is_low(m.product) for m in model.modules()),
    )
    del steps, model, whole, losses
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def product_error(device: torch.device) -> float:
    """The largest difference of the device's products in 8 bits to what they are defined as."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 256, generator=generator).to(device) for _ in range(2))
    worst = 0.0
    for dim in (None, 1):  # one scale, and one a row
        left, right = (round_to_float8(x, largest(x, dim)) for x in (a, b))
        found = float8_product(left, right, torch.bfloat16, emulate=False)
        wanted = float8_product(left, right, torch.float32, emulate=True)
        worst = max(worst, float((found.float() - wanted).abs().max() / wanted.abs().max()))
    return worst


def _steps(model: ParallelModel, case: Case, device: torch.device) -> Iterator[Tensor]:
    """Endless optimizer steps on one batch; the mean loss of each, left on the device."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.rows, case.length)
    tokens = torch.randint(case.model.vocab_size, shape, generator=generator).to(device)
    batch = Batch(
        tokens=tokens,
        labels=tokens.roll(-1, 1),
        documents=Documents.from_lengths([(case.length,)] * case.rows, device),
        sample_ids=tuple(range(case.rows)),
    )
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=fused)
    task = NextToken()
    weight = tokens.numel()
    while True:
        loss = model.forward_backward(task, [batch]) / weight
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, 1 / weight)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def _is_low(product: object) -> bool:
    return type(product).__module__.startswith("armillary.precision")


def _line(result: Result) -> str:
    shares = [
        f"{share:6.1%}" if share else f"{'-':>6}" for share in (result.mfu, result.mfu_causal)
    ]
    return (
        f"{result.model:22} {result.format:18} {result.tokens_per_second:10,.0f} {shares[0]}"
        f" {shares[1]} {result.peak_memory_gib:6.1f}  {result.first_loss:.2f} to"
        f" {result.last_loss:.2f} {result.set_up_seconds:5.0f} s"
        f" {'ok' if result.passed else 'FAILED'}"
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
