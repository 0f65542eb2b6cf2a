"""The whole table by one command, with what it measured: `python tests/invariance/report.py`.

With `--write`, docs/invariance.md gets the table. Names of cases, if given, run only those.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from invariance.cases import CASES
from invariance.harness import (
    EXACT,
    Deviation,
    Trace,
    deviation,
    exact_fields,
    oracle_name,
    run_cases,
)
from invariance.recipes import models
from ranks import run_ranks
from tiny_runs import write_corpus

PAGE = Path(__file__).parents[2] / "docs" / "invariance.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
SECONDS_PER_CASE = 90


def main() -> int:
    """Runs what is asked for; 0 if every case is within its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="cases; none: all")
    parser.add_argument("--write", action="store_true", help="write the table into the docs")
    arguments = parser.parse_args()
    names = arguments.names or list(CASES)
    began = time.monotonic()
    measured, wrong = _measure(names)
    lines = _table(measured)
    print("\n".join(lines))
    for name, why in wrong.items():
        print(f"\n{name}: {why}")
    minutes = (time.monotonic() - began) / 60
    print(f"\n{len(measured)} of {len(names)} cases within their limit, {minutes:.0f} minutes")
    if arguments.write and not wrong:
        before, rest = PAGE.read_text().split(BEGIN)
        text = "\n".join([before + BEGIN, "", *lines, "", END]) + rest.split(END)[1]
        PAGE.write_text(text)
    return 1 if wrong else 0


def _measure(names: list[str]) -> tuple[dict[str, Deviation], dict[str, str]]:
    traces: dict[str, Trace | str] = {}
    with tempfile.TemporaryDirectory(prefix="invariance-") as folder:
        write_corpus(Path(folder), documents=400)
        for world in sorted({CASES[name].world for name in names} | {1}):
            of_world = [name for name in names if CASES[name].world == world]
            if world == 1:
                of_world = [*(oracle_name(model) for model in models()), *of_world]
            limit = SECONDS_PER_CASE * len(of_world)
            print(f"{world} rank(s): {len(of_world)} runs", file=sys.stderr)
            traces |= run_ranks(run_cases, world, folder, of_world, timeout=limit)[0]
    measured: dict[str, Deviation] = {}
    wrong: dict[str, str] = {}
    for name in names:
        trace, oracle = traces[name], traces[oracle_name(CASES[name].model)]
        if isinstance(trace, str) or isinstance(oracle, str):
            wrong[name] = str(trace)
            continue
        unequal = [
            field
            for field in (*EXACT, *exact_fields(oracle))
            if [step[field] for step in trace.steps] != [step[field] for step in oracle.steps]
        ]
        if trace.weights != oracle.weights:
            unequal.append("initial weights")
        found = deviation(trace, oracle)
        if unequal or not found.worst <= CASES[name].limit:
            wrong[name] = f"not equal: {unequal}; {found}"
        else:
            measured[name] = found
    return measured, wrong


def _table(measured: dict[str, Deviation]) -> list[str]:
    lines = [
        "| case | ranks | model | what differs from one process | loss | gradient norm |"
        " worst norm of a parameter | validation |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in measured.items():
        case = CASES[name]
        leaves = ", ".join(
            f"{leaf.removeprefix('parallel.')} {value.removeprefix(f'{Path(__file__).parent}/')}"
            for leaf, value in case.leaves.items()
        )
        figures = (found.loss, found.gradient_norm, found.parameter_norm, found.validation)
        numbers = " | ".join("0" if value == 0 else f"{value:.0e}" for value in figures)
        lines.append(f"| {name} | {case.world} | {case.model} | {leaves} | {numbers} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
