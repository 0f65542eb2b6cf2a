"""Trials of `armillary compare` on a model of seconds: false differences, true ones, kills.

    python tests/reliability/compare.py [--repeats 20] [--out FILE.md]

1. The same recipe twice, with other seeds, 20 times, through the command itself: at most 2 of 20
   may be called different. Then groups of seeds drawn anew from the same runs: how often chance
   alone is called a difference, with Welch's test and, seeds paired at random, the paired one.
2. No warm-up against a good one, at a high rate: the difference is found, and named.
3. A comparison killed with SIGKILL half-way, again and again, and started again: figures equal to
   those of one that nobody disturbed, to the last bit.

Runs are forks of one process that has torch (`zygote.py`), so that a run takes about a second.
Prints Markdown; exits with 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zygote import Process, Zygote

from armillary.analysis.significance import compare_pair
from armillary.cli.main import main as armillary
from armillary.launch import local

TINY = """
[model]
kind = "llama"
vocab_size = 260
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_dim = 64
max_seq_len = 64
[data]
workers = 1
[data.tokenizer]
kind = "bytes"
[budget]
steps = 40
batch_tokens = 512
seq_len = 32
[validation]
every = 40
final_sequences = 64
[parallel]
device = "cpu"
[precision]
compute = "float32"
[optimizer]
lr = 3e-3
[schedule]
warmup_steps = 8
[telemetry]
console = "off"
"""
DRAWS = 4_000
RATE, WARMUP = "3e-2", "20"
"""So high a rate that the first steps without a warm-up cost what the rest cannot win back."""


def main() -> int:
    """Runs the trials; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    lines, failures = ["# Comparisons", ""], []
    with tempfile.TemporaryDirectory() as name, Zygote() as zygote:
        folder = Path(name)
        os.chdir(folder)
        os.environ["ARMILLARY_CACHE"] = str(folder / "cache")
        Path("tiny.toml").write_text(TINY)
        kills(lines, failures, arguments.kills)
        fork_runs(zygote)
        same_recipe(lines, failures, arguments.repeats)
        warm_up(lines, failures)
    lines += ["", *(f"FAILED: {failure}" for failure in failures)]
    text = "\n".join(lines)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 1 if failures else 0


def fork_runs(zygote: Zygote) -> None:
    """From now on the command's runs are forks; everything else of it is as it is."""

    def run_once(argv: Sequence[str], nproc: int, *, signals: object) -> local.Ended:
        assert nproc == 1
        process: Process = zygote.start(argv, output="runs.log")
        return local.Ended(process.wait(300))

    local.run_once = run_once  # type: ignore[assignment]


def compare(*words: str) -> dict[str, Any]:
    """The document of a comparison, through the command."""
    out, told = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
        code = armillary(["compare", *words, "--json"])
    assert code == 0, told.getvalue()
    document: dict[str, Any] = json.loads(out.getvalue())
    return document


def same_recipe(lines: list[str], failures: list[str], repeats: int) -> None:
    """One recipe against itself with other seeds."""
    verdicts, values = [], []
    for repeat in range(repeats):
        first = 1_000 + 6 * repeat
        document = compare(
            "tiny.toml", "--seed", str(first), "tiny.toml", "--seed", str(first + 3),
            "--out", f"same-{repeat}",
        )  # fmt: skip
        verdicts.append(document["verdict"]["kind"])
        runs = [run for recipe in document["recipes"] for run in recipe["runs"]]
        values += [run["bits_per_byte"] for run in runs]
    same = verdicts.count("no significant difference")
    lines += ["## The same recipe, other seeds", ""]
    lines.append(f"{same} of {repeats} comparisons of 3 seeds each: no significant difference.")
    if same < 0.9 * repeats:
        failures.append(f"{repeats - same} of {repeats} times one recipe differed from itself")
    draw = random.Random(1)
    for count in (2, 3, 5, 10):
        shares = [share_called(values, count, draw, paired=paired) for paired in (False, True)]
        lines.append(
            f"{count} seeds, {DRAWS:,} draws from {len(values)} runs: called different"
            f" {shares[0]:.1%} (Welch), {shares[1]:.1%} (paired)."
        )
        if max(shares) > 0.07:
            failures.append(f"chance alone is called a difference in {max(shares):.1%}")


def share_called(values: list[float], count: int, draw: random.Random, *, paired: bool) -> float:
    """How often disjoint groups of the runs of one recipe are called different."""
    called = 0
    for _ in range(DRAWS):
        found = draw.sample(values, 2 * count)
        shift = 0 if paired else count
        one = dict(enumerate(found[:count]))
        other = {shift + place: value for place, value in enumerate(found[count:])}
        pair = compare_pair("A", one, "B", other)
        called += pair.p is not None and pair.p <= 0.05
    return called / DRAWS


def warm_up(lines: list[str], failures: list[str]) -> None:
    """No warm-up against a good one."""
    document = compare(
        "--optimizer.lr", RATE, "tiny.toml", "--schedule.warmup-steps", "0",
        "tiny.toml", "--schedule.warmup-steps", WARMUP,
        "--seeds", "5", "--out", "warm-up",
    )  # fmt: skip
    verdict, pair = document["verdict"], document["pairs"][0]
    lines += ["", f"## No warm-up (A) or {WARMUP} steps (B), at a rate of {RATE}", ""]
    lines += [verdict["text"], f"Leaves that differ: {document['differences']}"]
    if verdict["kind"] != "different" or not pair["difference"] > 0:
        failures.append("the harm of no warm-up was not found")


def kills(lines: list[str], failures: list[str], wanted: int) -> None:
    """The command as a process, killed half-way and started again."""
    words = ["compare", "tiny.toml", "tiny.toml", "--optimizer.lr", "1e-2", "--seeds", "2"]
    calm = finished([*words, "--out", "calm"])
    draw, killed = random.Random(2), 0
    command = [sys.executable, "-m", "armillary", *words, "--out", "killed", "--json"]
    while killed < wanted:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + draw.uniform(4.0, 12.0)
        while time.monotonic() < until and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is not None:
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
    again = finished([*words, "--out", "killed"])
    same = figures(calm) == figures(again)
    lines += ["## Killed half-way", ""]
    lines.append(
        f"{killed} times SIGKILL, then to its end: verdict and losses of all runs"
        f" {'equal' if same else 'NOT equal'} those of an undisturbed comparison, bit for bit."
    )
    lines.append("")
    if not same or killed == 0:
        failures.append("a killed comparison does not give the same figures")


def finished(words: list[str]) -> dict[str, Any]:
    """The document of a comparison that runs as a process of its own, to its end."""
    command = [sys.executable, "-m", "armillary", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def figures(document: dict[str, Any]) -> list[Any]:
    """What no machine's speed can change."""
    runs = [run for recipe in document["recipes"] for run in recipe["runs"]]
    names = ("seed", "outcome", "steps", "tokens", "bits_per_byte", "loss")
    return [document["verdict"], [[run[name] for name in names] for run in runs]]


if __name__ == "__main__":
    sys.exit(main())
