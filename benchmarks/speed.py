"""Trains the same model with Armillary, transformers and a plain loop, in turn, and compares.

    python benchmarks/speed.py [--precision float32|bfloat16|both] [--rounds 4] [--steps 2]

Each system lives in a process of its own; rounds of a few steps go from one to the next, so that a
noisy neighbour hits all alike. The driver itself imports no torch. Needs the extra `benchmark`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 3
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
"""Nats by which the losses of the first steps may differ between systems."""
OURS = ("armillary", "armillary compiled")
NAMES = (*OURS, "transformers", "transformers compiled", "plain loop")


def main() -> int:
    """Parses the command line, runs the comparison, prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", default="both", choices=("float32", "bfloat16", "both"))
    parser.add_argument("--rounds", type=int, default=4, help="turns of each system")
    parser.add_argument("--steps", type=int, default=2, help="steps in a turn")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments)
        return 0
    both = ("float32", "bfloat16")
    precisions = both if arguments.precision == "both" else (arguments.precision,)
    reports = [_compare(precision, arguments) for precision in precisions]
    if arguments.json:
        arguments.json.write_text(json.dumps(reports, indent=2) + "\n")
    return 0 if all(report["losses_agree"] for report in reports) else 1


@dataclass
class _Worker:
    """A system in its own process, driven by lines of JSON."""

    name: str
    process: subprocess.Popen[str]
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def start(cls, name: str, precision: str, weights: str, threads: int) -> _Worker:
        command = [sys.executable, __file__, "--worker", name, "--weights", weights]
        command += ["--precision", precision, "--threads", str(threads)]
        # Threads that wait must not spin: the next system needs the cores.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "10000"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        return cls(name, process)

    def ask(self, request: str) -> dict[str, Any]:
        """Sends one line and waits for the answer."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(request + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended, see its error above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def _compare(precision: str, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder, "weights.pt"))
        first = _Worker.start("measure", precision, weights, arguments.threads)
        machine = first.ask("measure")
        first.stop()
        workers = [
            _Worker.start(name, precision, weights, arguments.threads) for name in arguments.systems
        ]
        try:
            for worker in workers:
                _say(f"{precision}: {worker.name}: first {WARM_UP_STEPS} steps")
                worker.facts = worker.ask("warm")
            for turn in range(arguments.rounds):
                _say(f"{precision}: round {turn + 1} of {arguments.rounds}")
                for worker in workers:
                    worker.seconds += worker.ask(f"steps {arguments.steps}")["seconds"]
            for worker in workers:
                worker.facts |= worker.ask("memory")
        finally:
            for worker in workers:
                worker.stop()
    report = _report(precision, workers, machine)
    _print(report)
    return report


def _report(precision: str, workers: list[_Worker], machine: dict[str, Any]) -> dict[str, Any]:
    rows = {}
    for worker in workers:
        seconds = statistics.median(worker.seconds)
        rate = machine["flops_per_step"] / seconds / machine["gemm_flops"]
        rows[worker.name] = {
            "tokens_per_second": machine["tokens"] / seconds,
            "share_of_gemm_rate": rate,
            "step_seconds": worker.seconds,
            **worker.facts,
        }
    others = [rows[name] for name in rows if name not in OURS]
    if others:
        best_speed = max(row["tokens_per_second"] for row in others)
        for row in rows.values():
            row["speed_over_best_other"] = row["tokens_per_second"] / best_speed
        leanest = min(row["peak_bytes"] for row in others)
        for row in rows.values():
            row["memory_over_best_other"] = row["peak_bytes"] / leanest
    losses = [worker.facts["losses"] for worker in workers]
    spread = max(max(step) - min(step) for step in zip(*losses, strict=True))
    agree = spread <= LOSS_TOLERANCE[precision]
    return {
        "precision": precision,
        "machine": machine,
        "systems": rows,
        "loss_spread": spread,
        "losses_agree": agree,
    }


def _print(report: dict[str, Any]) -> None:
    machine = report["machine"]
    print(
        f"\n{report['precision']}, {machine['threads']} threads, torch {machine['torch']},"
        f" GEMM {machine['gemm_flops'] / 1e9:.0f} GFLOP/s,"
        f" {machine['flops_per_step'] / 1e9:.0f} GFLOP a step (attention counted causally)"
    )
    print(
        f"{'system':24}{'tokens/s':>10}{'vs best':>9}{'of GEMM':>9}"
        f"{'peak MB':>9}{'vs best':>9}{'grown MB':>10}{'CPU s/step':>12}"
    )
    for name, row in report["systems"].items():
        print(
            f"{name:24}{row['tokens_per_second']:10.0f}"
            f"{row.get('speed_over_best_other', float('nan')):8.2f}x"
            f"{row['share_of_gemm_rate']:9.0%}{row['peak_bytes'] / 1e6:9.0f}"
            f"{row.get('memory_over_best_other', float('nan')):8.2f}x"
            f"{(row['peak_bytes'] - row['start_bytes']) / 1e6:10.0f}"
            f"{row['cpu_seconds_per_step']:12.2f}"
        )
    verdict = "agree" if report["losses_agree"] else "DISAGREE"
    print(f"first losses {verdict}: spread {report['loss_spread']:.1e} nats")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _work(arguments: argparse.Namespace) -> None:
    """The loop of one process: answers requests until its input ends."""
    import torch
    from systems import SYSTEMS, Setting

    torch.set_num_threads(arguments.threads)
    setting = Setting(precision=arguments.precision)
    answers = os.fdopen(os.dup(1), "w")  # libraries may print: that goes to standard error
    os.dup2(2, 1)
    step = None
    taken, cpu = 0, 0.0
    start_bytes = 0
    for request in sys.stdin:
        verb, _, count = request.strip().partition(" ")
        if verb == "measure":
            answer = _measure(setting, arguments)
        elif verb == "warm":
            start_bytes = _peak_bytes()
            weights = torch.load(arguments.weights, mmap=True)
            step = SYSTEMS[arguments.worker](setting, weights)
            answer = {"losses": [step() for _ in range(WARM_UP_STEPS)], "start_bytes": start_bytes}
        elif verb == "memory":
            answer = {"peak_bytes": _peak_bytes(), "cpu_seconds_per_step": cpu / max(taken, 1)}
        else:
            assert step is not None
            seconds = []
            for _ in range(int(count)):
                began, used = time.perf_counter(), time.process_time()
                step()
                seconds.append(time.perf_counter() - began)
                cpu += time.process_time() - used
                taken += 1
            answer = {"seconds": seconds}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _measure(setting: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the initial weights; the machine's matrix-product rate and the work of a step."""
    import torch
    from systems import initial_weights

    torch.save(initial_weights(setting), arguments.weights)
    dtype = getattr(torch, setting.precision)
    left = torch.randn(setting.tokens, setting.dim, dtype=dtype)
    right = torch.randn(setting.dim, setting.ffn, dtype=dtype)
    best = float("inf")
    for _ in range(50):
        began = time.perf_counter()
        left @ right
        best = min(best, time.perf_counter() - began)
    model = setting.recipe().model
    return {
        "gemm_flops": 2 * setting.tokens * setting.dim * setting.ffn / best,
        "flops_per_step": setting.tokens * model.flops_per_token(setting.length, causal=True),
        "tokens": setting.tokens,
        "threads": arguments.threads,
        "torch": torch.__version__,
    }


def _peak_bytes() -> int:
    """Largest resident memory so far, in bytes. `ru_maxrss` would count the parent's as well."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    raise SystemExit(main())
