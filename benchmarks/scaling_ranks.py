"""The jobs of `scaling.py`, and what one rank does for them."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from scaling_minimum import Sizes, minimum

ROWS, LENGTH = 8, 128
"""Of the global batch whose traffic is counted."""
ROWS_EACH = 4
"""Rows of each rank where processor time is measured."""
STEPS = 7
"""Of which the first is not measured."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One line of a table."""

    kind: str
    model: str
    world: int
    parallel: dict[str, Any] = field(default_factory=dict)
    rows: int = ROWS
    length: int = LENGTH


def _traffic_jobs() -> list[Job]:
    meshes: list[tuple[int, dict[str, Any]]] = [
        (2, {"dp_shard": 2}),
        (4, {"dp_shard": 4}),
        (2, {"tp": 2}),
        (2, {"pp": 2}),
        *[(2, {"cp": 2, "context": kind}) for kind in ("all-gather", "ring", "ulysses")],
        (4, {"tp": 2, "dp_shard": 2}),
    ]
    jobs = [
        Job(kind="traffic", model=model, world=world, parallel=parallel)
        for model in ("dense", "moe")
        for world, parallel in meshes
    ]
    mixtures: list[tuple[int, dict[str, Any]]] = [
        (2, {"dp_shard": 2, "ep": 2}),
        (4, {"dp_shard": 4, "ep": 4}),
        (4, {"dp_shard": 4, "ep": 2}),
    ]
    return jobs + [
        Job(kind="traffic", model="moe", world=world, parallel=parallel)
        for world, parallel in mixtures
    ]


TRAFFIC = _traffic_jobs()
SPEED = [
    Job(
        kind="speed",
        model=model,
        world=world,
        parallel={"dp_shard": world, "ep": world if model == "moe" else 1},
        rows=ROWS_EACH * world,
        length=256,
    )
    for model in ("dense", "moe")
    for world in (1, 2, 4)
]
MEMORY = [
    Job(kind="memory", model="large", world=world, parallel={"dp_shard": world}, rows=4, length=32)
    for world in (1, 2, 4)
]


def mesh_name(job: Job) -> str:
    """`tp2 x fsdp2`."""
    degrees = {k: v for k, v in job.parallel.items() if isinstance(v, int) and v > 1}
    parts = [f"{'fsdp' if axis == 'dp_shard' else axis}{n}" for axis, n in degrees.items()]
    kind = f" {job.parallel['context']}" if "context" in job.parallel else ""
    return (" x ".join(parts) or "one process") + kind


def model_config(name: str) -> Any:
    """The models: all dims divide by four ranks, so that no padding is sent."""
    from armillary.models import Llama, Qwen3MoE

    shape: dict[str, Any] = {
        "vocab_size": 512, "dim": 128, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4,
        "head_dim": 16, "max_seq_len": 256,
    }  # fmt: skip
    if name == "moe":
        return Qwen3MoE(**shape, n_experts=8, n_active=2, expert_dim=96)
    if name == "large":
        shape |= {"vocab_size": 4096, "dim": 512, "n_layers": 8, "head_dim": 64}
        return Llama(**shape, ffn_dim=1536)
    return Llama(**shape, ffn_dim=384)


def run_jobs(rank: int, world: int, jobs: Sequence[Job], folder: str) -> None:
    """What one process of a world does; it writes what it found to `<rank>.json`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    import torch
    import torch.distributed as dist

    from armillary.kernels import tune_host_allocator

    tune_host_allocator()
    torch.set_num_threads(1)
    if world > 1:
        store = dist.FileStore(str(Path(folder, "store")), world)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120)
        )
    work = {"traffic": count_traffic, "speed": measure_speed, "memory": measure_memory}
    found = [work[job.kind](job) for job in jobs]
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


class Run:
    """A model in its place, and a global batch to take steps with."""

    def __init__(self, job: Job) -> None:
        import torch

        from armillary.optim.adamw import AdamW
        from armillary.optim.schedule import Constant
        from armillary.parallel.config import Parallel
        from armillary.parallel.mesh import Mesh
        from armillary.precision import Precision
        from armillary.recipe.budget import Budget
        from armillary.recipe.recipe import Recipe
        from armillary.resilience.guard import Detector
        from armillary.telemetry.timing import StepTimer
        from armillary.training.assembly import assemble

        degrees = {"dp_shard": 1} | job.parallel
        recipe = Recipe(
            model=model_config(job.model),
            budget=Budget(steps=100, batch_tokens=job.rows * job.length, seq_len=job.length),
            optimizer=AdamW(lr=1e-4),
            schedule=Constant(warmup_steps=0),
            precision=Precision(compute="float32"),
            parallel=Parallel(**degrees, device="cpu"),
        )
        self.mesh = Mesh.create(recipe.parallel, torch.device("cpu"))
        self.assembly = assemble(recipe, self.mesh, cast(Any, None))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(512, (job.rows, job.length), generator=generator)
        own = job.rows // self.mesh.data_size
        # A pipeline needs a microbatch for each stage; bytes do not depend on their number.
        part = own // self.mesh.degree("pp")
        mine = tokens[own * self.mesh.data_rank :][:own]
        self.batches = [_batch(rows) for rows in mine.split(part)]
        self.recipe, self.taken = recipe, 0
        self.weights = recipe.task.weights(_batch(tokens))
        self.timer = StepTimer(self.mesh.device)
        self.detector = Detector(recipe.guard, self.mesh.device, agree=self.mesh.largest)

    def step(self) -> None:
        """One step of the trainer."""
        from armillary.training.step import optimizer_step

        self.taken += 1
        optimizer_step(
            self.assembly,
            self.batches,
            weights=self.weights,
            step=self.taken,
            timer=self.timer,
            detector=self.detector,
            asks=True,
        )


def _batch(tokens: Any) -> Any:
    """Rows of one document each, whose labels are the tokens after."""
    from armillary.data.batch import Batch
    from armillary.models.layers.documents import Documents

    rows, length = tokens.shape
    documents = Documents.from_lengths([(length,)] * rows)
    return Batch(tokens, tokens.roll(-1, 1), documents, tuple(range(rows)))


def count_traffic(job: Job) -> dict[str, Any]:
    """What is sent in the third step; the first one also agrees on shapes."""
    from armillary.parallel.ledger import Ledger

    run = Run(job)
    run.step()
    run.step()
    with Ledger(run.mesh) as ledger:
        run.step()
    sizes = Sizes.of(run.recipe.model, rows=job.rows, length=job.length, element_bytes=4)
    return {
        "axes": {
            axis: {"calls": traffic.calls, "sent_bytes": traffic.sent_bytes}
            for axis, traffic in ledger.by_axis().items()
        },
        "entries": {
            f"{axis} {operation}": [traffic.calls, traffic.sent_bytes]
            for (axis, operation), traffic in ledger.entries().items()
        },
        "minimum": minimum(run.mesh.parallel, sizes),
    }


def measure_speed(job: Job) -> dict[str, Any]:
    """Processor seconds of this rank for each of its tokens."""
    run = Run(job)
    seconds = []
    for _ in range(STEPS):
        began = time.process_time()
        run.step()
        seconds.append(time.process_time() - began)
    tokens = job.rows * job.length / job.world
    return {"cpu_seconds_per_token": statistics.median(seconds[1:]) / tokens}


def measure_memory(job: Job) -> dict[str, Any]:
    """Bytes held after a backward pass, when gradients and optimizer state are there.

    Resident is by how much the process shrinks when exactly they are freed; grown is by how much it
    grew since before the model, with the buffers of communication.
    """
    from armillary.parallel.layout import local_tensor

    # Libraries and communicators of the first step are not the model's: a small one loads them.
    Run(dataclasses.replace(job, model="dense")).step()
    before = _resident_bytes()
    run = Run(job)
    run.step()
    model = run.assembly.model
    model.forward_backward(run.recipe.task.within(run.weights), run.batches)
    held = list(model.parameters()) + [p.grad for p in model.parameters()]
    held += [
        value
        for optimizer in run.assembly.optimizers.optimizers
        for state in optimizer.state.values()
        for value in state.values()
    ]
    local = [local_tensor(tensor) for tensor in held]
    accounted = sum(tensor.numel() * tensor.element_size() for tensor in local)
    full = _resident_bytes()
    for tensor in local:
        _forget(tensor.data_ptr(), tensor.numel() * tensor.element_size())
    return {
        "accounted_bytes": accounted,
        "resident_bytes": full - _resident_bytes(),
        "grown_bytes": full - before,
    }


def _forget(address: int, size: int) -> None:
    """Gives whole pages back to the system, whoever still refers to them: the run is over."""
    import ctypes

    page, dont_need = os.sysconf("SC_PAGE_SIZE"), 4
    first, last = -(-address // page) * page, (address + size) // page * page
    if last > first:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), dont_need) == 0


def _resident_bytes() -> int:
    """Memory of this process now, after what is free has been given back."""
    import ctypes

    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
