"""One answer on every mesh: each case of the table against one process.

The subset marked `fast` always runs; `pytest tests/invariance --full` runs the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from invariance.cases import CASES, LIMIT
from invariance.harness import EXACT, Trace, deviation, exact_fields, oracle_name, run_cases
from invariance.recipes import STEPS, models
from invariance.report import BEGIN, END, PAGE
from ranks import run_ranks
from tiny_runs import write_corpus

SECONDS_PER_CASE = 60
"""After which a world of ranks is taken to hang."""

FAST = [name for name, case in CASES.items() if case.fast]
REST = [name for name in CASES if name not in FAST]

TraceOf = Callable[[str], Trace]


@pytest.fixture(scope="module")
def trace_of(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> TraceOf:
    """The trace of a case or oracle; the first one asked for of a world runs all of that world."""
    folder = tmp_path_factory.mktemp("invariance")
    write_corpus(folder, documents=400)
    wanted = {item.callspec.params["name"] for item in request.session.items if _is_case(item)}
    found: dict[str, Trace | str] = {}

    def trace(name: str) -> Trace:
        if name not in found:
            world = CASES[name].world if name in CASES else 1
            names = [n for n in CASES if n in wanted and CASES[n].world == world]
            if world == 1:
                names = [*(oracle_name(model) for model in models()), *names]
            limit = SECONDS_PER_CASE * len(names)
            found.update(run_ranks(run_cases, world, str(folder), names, timeout=limit)[0])
        result = found[name]
        if isinstance(result, str):
            pytest.fail(result)
        return result

    return trace


def _is_case(item: pytest.Item) -> bool:
    return item.path == Path(__file__) and hasattr(item, "callspec")


@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.full) for name in REST)]
)
def test_a_run_is_the_same_on_every_mesh(name: str, trace_of: TraceOf) -> None:
    case = CASES[name]
    oracle, trace = trace_of(oracle_name(case.model)), trace_of(name)
    assert trace.weights == oracle.weights
    assert len(trace.steps) == len(oracle.steps) == STEPS
    for field in (*EXACT, *exact_fields(oracle)):
        assert [step[field] for step in trace.steps] == [step[field] for step in oracle.steps]
    found = deviation(trace, oracle)
    assert found.worst <= case.limit, found


def test_the_documented_table_is_of_these_cases_and_within_their_limits() -> None:
    page = PAGE.read_text()
    measured = page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in measured]
    assert [row[0] for row in rows] == list(CASES)
    for row in rows:
        assert max(float(figure) for figure in row[4:]) <= CASES[row[0]].limit, row[0]


def test_the_table_is_wide_enough_and_says_why_a_limit_is_wider() -> None:
    assert len(CASES) >= 60
    assert {case.world for case in CASES.values()} == {1, 2, 4, 8}
    assert all(case.why for case in CASES.values() if case.limit > LIMIT)
