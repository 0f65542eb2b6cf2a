"""Host memory and bytes read while weights come in: `armillary import`, and a start on four ranks.

    python benchmarks/import_memory.py [--gigabytes 2] [--limit-mb 400] [--folder DIR]

Writes a checkpoint of Llama's shape, of random bfloat16 numbers, in Hugging Face format; imports
it on one rank, and loads it into a model that is sharded over four. Memory is the highest resident
size above that before the work (all modules loaded; on four ranks, the model there with its
memory), as Linux counts it. Prints Markdown; exits with 1 beyond a limit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKS = 4
MOST_READ = 0.27
"""Share of all bytes that one of four ranks may read."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one process has measured."""

    above_baseline: int
    """Bytes of resident memory."""
    bytes_read: int


def resident(kind: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {kind}")


def from_here() -> int:
    """Resident memory now, from which the highest is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def write_source(folder: Path, gigabytes: float) -> int:
    """A Llama of about this size; returns the bytes of its weights."""
    import torch

    from armillary.checkpoint.hugging_face.exporting import plan_export, write_export
    from armillary.checkpoint.hugging_face.source import shape_of
    from armillary.checkpoint.hugging_face.weights import our_shapes
    from armillary.models.llama import Llama

    class Random:
        """Numbers that are made when they are read."""

        dtype = torch.bfloat16

        def __init__(self, shape: tuple[int, ...]) -> None:
            self.shape = shape

        def read(self, box: Any) -> torch.Tensor:
            return torch.empty(shape_of(box), dtype=torch.bfloat16).normal_(0, 0.02)

    sizes = {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192, "head_dim": 64}
    one, two = (
        Llama(vocab_size=32_000, n_layers=layers, **sizes).parameter_count() for layers in (1, 2)
    )
    layers = max(1, round((gigabytes * 1e9 / 2 - one) / (two - one)) + 1)
    model = Llama(vocab_size=32_000, n_layers=layers, **sizes)
    sources = {name: Random(shape) for name, shape in our_shapes(model).items()}
    return write_export(plan_export(model, sources), folder, shard_bytes=10**9).bytes


def import_it(source: str, run: str) -> Figures:
    """The command's own work."""
    from armillary.training.importing import import_run

    before = from_here()
    made = import_run(source, Path(run))
    return Figures(above_baseline=resident("VmHWM") - before, bytes_read=made.bytes_read)


def load_it(rank: int, source: str, meeting: str) -> Figures:
    """One of four ranks that start from the weights."""
    import torch
    import torch.distributed as dist

    from armillary.checkpoint.hugging_face.load import load_weights
    from armillary.checkpoint.hugging_face.weights import open_foreign, open_weights
    from armillary.checkpoint.ranks import Ranks
    from armillary.parallel import Parallel, Scale
    from armillary.parallel.materialise import allocate
    from armillary.parallel.mesh import Mesh
    from armillary.parallel.parallelize import parallelize

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    store = dist.FileStore(meeting, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    parallel = Parallel(device="cpu")
    mesh = Mesh.create(parallel, torch.device("cpu"))
    config = open_foreign(source).model
    with torch.device("meta"):
        whole = config.build()
    model = parallelize(whole, mesh, Scale(parallel=parallel))
    for part in model.parts:
        allocate(part, mesh.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # pages are there only once they were written to
    ranks = Ranks()
    before = from_here()
    loaded = load_weights(model, open_weights(source, config), ranks)
    figures = Figures(above_baseline=resident("VmHWM") - before, bytes_read=loaded.bytes_read[rank])
    ranks.close()
    dist.destroy_process_group()
    return figures


def _load_each(rank: int, source: str, meeting: str, results: Any) -> None:
    results.put(load_it(rank, source, meeting))


def _import(source: str, run: str, results: Any) -> None:
    results.put(import_it(source, run))


def measured(target: Any, arguments: list[tuple[Any, ...]]) -> list[Figures]:
    """The figures of some processes that work at the same time."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=target, args=(*each, results)) for each in arguments]
    for process in processes:
        process.start()
    found = [results.get(timeout=1200) for _ in processes]
    for process in processes:
        process.join()
    return found


def main() -> int:
    """Writes, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--limit-mb", type=float, default=400.0)
    parser.add_argument("--folder", type=Path, help="where to write (a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="import-memory-", dir=arguments.folder))
    try:
        source = str(folder / "source")
        size = write_source(Path(source), arguments.gigabytes)
        (alone,) = measured(_import, [(source, str(folder / "run"))])
        each = [(rank, source, str(folder / "meeting")) for rank in range(RANKS)]
        four = measured(_load_each, each)
    finally:
        shutil.rmtree(folder)
    most_memory = max(figures.above_baseline for figures in (alone, *four)) / 1e6
    most_read = max(figures.bytes_read for figures in four) / size
    print(f"| {size / 1e9:.2f} GB of bfloat16 | above baseline, MB | read, share of the bytes |")
    print("|---|---|---|")
    print(
        f"| import, one rank | {alone.above_baseline / 1e6:.0f} | {alone.bytes_read / size:.2f} |"
    )
    for figures in four:
        memory, read = figures.above_baseline / 1e6, figures.bytes_read / size
        print(f"| start on four ranks, a rank | {memory:.0f} | {read:.3f} |")
    if arguments.json:
        report = {"most_memory_mb": most_memory, "most_read_share": most_read}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    passed = most_memory <= arguments.limit_mb and most_read <= MOST_READ
    print("passed" if passed else f"beyond {arguments.limit_mb:.0f} MB or {MOST_READ} of the bytes")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
