"""What parallelism costs in communication, processor time and memory: counted on gloo ranks.

    python benchmarks/scaling.py [--json figures.json]

1. Bytes and calls that a rank sends in one optimizer step, by axis of the mesh, beside the least
   that the closed forms of `scaling_minimum.py` allow.
2. Processor seconds for each token of a rank on 1, 2 and 4 ranks, each with as many tokens.
3. Bytes of parameters, gradients and optimizer state that a rank holds on 1, 2 and 4 ranks of
   FSDP: accounted, and as the resident memory of the process shrinks without them.

Nothing here depends on how fast links are; processor seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing
from scaling_ranks import (
    MEMORY,
    SPEED,
    TRAFFIC,
    Job,
    mesh_name,
    run_jobs,
)

WORLDS = (1, 2, 4)


def main() -> int:
    """Parses the command line, runs all jobs, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", choices=("traffic", "speed", "memory"), help="one of the parts")
    arguments = parser.parse_args()
    kinds = {"traffic": TRAFFIC, "speed": SPEED, "memory": MEMORY}
    wanted = [arguments.only] if arguments.only else list(kinds)
    jobs = [job for kind in wanted for job in kinds[kind]]
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in wanted}
    for world in WORLDS:
        if own := [job for job in jobs if job.world == world]:
            print(f"{world} ranks: {len(own)} jobs", file=sys.stderr, flush=True)
            for job, by_rank in zip(own, _on_ranks(world, own), strict=True):
                results[job.kind].append(_merged(job, by_rank))
    for kind, table in (("traffic", _traffic), ("speed", _speed), ("memory", _memory)):
        if results.get(kind):
            table(results[kind])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


def _on_ranks(world: int, jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """What each rank found, by job and then by rank."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        torch.multiprocessing.start_processes(
            run_jobs, args=(world, list(jobs), folder), nprocs=world, start_method="spawn"
        )
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]
    return [list(of_job) for of_job in zip(*found, strict=True)]


def _merged(job: Job, by_rank: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of a table: of ranks that differ, the one with most."""
    merged: dict[str, Any] = {"mesh": mesh_name(job), "model": job.model, "ranks": job.world}
    if job.kind == "traffic":
        axes = sorted({axis for found in by_rank for axis in found["axes"]})
        nothing = {"calls": 0, "sent_bytes": 0}
        merged["axes"] = {
            axis: {
                "calls": max(found["axes"].get(axis, nothing)["calls"] for found in by_rank),
                "sent_bytes": max(
                    found["axes"].get(axis, nothing)["sent_bytes"] for found in by_rank
                ),
                "minimum_bytes": by_rank[0]["minimum"].get(axis),
            }
            for axis in axes
        }
        merged["entries"] = [found["entries"] for found in by_rank]
        return merged
    return merged | {name: max(found[name] for found in by_rank) for name in by_rank[0]}


def _traffic(lines: Sequence[dict[str, Any]]) -> None:
    print("\nSent by a rank in one optimizer step (the busiest rank)")
    print(f"{'mesh':22}{'model':8}{'axis':14}{'calls':>7}{'bytes':>13}{'minimum':>13}{'ratio':>8}")
    for line in lines:
        for index, (axis, found) in enumerate(line["axes"].items()):
            head = (line["mesh"], line["model"]) if index == 0 else ("", "")
            least = found["minimum_bytes"]
            ratio = f"{found['sent_bytes'] / least:8.3f}" if least else f"{'':>8}"
            least = f"{least:13,.0f}" if least else f"{'-':>13}"
            print(
                f"{head[0]:22}{head[1]:8}{axis:14}{found['calls']:7}"
                f"{found['sent_bytes']:13,}{least}{ratio}"
            )


def _speed(lines: Sequence[dict[str, Any]]) -> None:
    print("\nProcessor time, as many tokens on each rank (the busiest rank, median of steps)")
    print(f"{'mesh':22}{'model':8}{'ranks':>7}{'us/token':>12}{'of 1 rank':>12}")
    first = {line["model"]: line["cpu_seconds_per_token"] for line in reversed(lines)}
    for line in lines:
        seconds = line["cpu_seconds_per_token"]
        print(
            f"{line['mesh']:22}{line['model']:8}{line['ranks']:7}{seconds * 1e6:12.2f}"
            f"{seconds / first[line['model']]:11.2f}x"
        )


def _memory(lines: Sequence[dict[str, Any]]) -> None:
    print("\nHeld by a rank: parameters, gradients and optimizer state (the fullest rank)")
    print(
        f"{'mesh':22}{'model':8}{'accounted MB':>14}{'x ranks':>9}"
        f"{'resident MB':>13}{'x ranks':>9}{'grown MB':>10}"
    )
    first = lines[0]
    for line in lines:
        accounted, resident = line["accounted_bytes"], line["resident_bytes"]
        scale = line["ranks"]
        print(
            f"{line['mesh']:22}{line['model']:8}{accounted / 1e6:14.1f}"
            f"{accounted * scale / first['accounted_bytes']:9.3f}"
            f"{resident / 1e6:13.1f}{resident * scale / first['resident_bytes']:9.3f}"
            f"{line['grown_bytes'] / 1e6:10.1f}"
        )
    print("(x ranks: times the number of ranks, over that of one rank; 1 is ideal)")


if __name__ == "__main__":
    raise SystemExit(main())
