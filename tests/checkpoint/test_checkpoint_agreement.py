"""What one rank fails at, all report, each in its own kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from armillary.checkpoint.ranks import Failure, Ranks
from armillary.foundation.errors import ArmillaryError, Problem, RunError, Stopped, UserError
from ranks import run_ranks

ERRORS = (
    UserError([Problem("bad value", "a good one", "--x 1"), Problem("another")]),
    RunError(Problem("broken", fix="mend it")),
    Stopped("SIGTERM"),
    ValueError("a mistake"),
)


def heard(work: Callable[[], Any]) -> tuple[str, str, int | None]:
    """Kind, words and exit code of what this rank was told."""
    try:
        work()
    except (ArmillaryError, Stopped) as error:
        assert isinstance(error, Stopped) or error.seen_by_every_rank
        return type(error).__name__, str(error), error.exit_code
    except Failure as error:
        return "Failure", str(error), None
    raise AssertionError("nothing was raised")


def all_that_can_fail() -> dict[str, Any]:
    with closing(Ranks()) as ranks:

        def fail(error: Exception, *on: int) -> None:
            if ranks.rank in on:
                raise error

        def with_each(way: Callable[[Callable[[], None]], Any], *on: int) -> list[Any]:
            return [heard(lambda error=e: way(lambda: fail(error, *on))) for e in ERRORS]

        calls: list[str] = []
        result = ranks.main_first(lambda: calls.append("once") or {"rank": ranks.rank})
        return {
            "on_main": with_each(ranks.on_main, 0),
            "together": with_each(ranks.together, 1),
            "first phase": with_each(ranks.main_first, 0),
            "second phase": with_each(ranks.main_first, 1),
            "both": heard(lambda: ranks.together(lambda: fail(ERRORS[ranks.rank], 0, 1))),
            "main first": (result, calls),
            "sum": ranks.sum_and_any(2**40 + ranks.rank, ranks.rank == 1),
            "no flag": ranks.sum_and_any(1, False),
        }


def test_every_rank_hears_of_an_error_in_its_own_kind_and_words() -> None:
    for rank, told in enumerate(run_ranks(all_that_can_fail, 2)):
        kinds = [
            ("UserError", str(ERRORS[0]), 2),
            ("RunError", str(ERRORS[1]), 1),
            ("Stopped", str(ERRORS[2]), 75),
        ]
        for way, where in (
            ("on_main", ""),
            ("together", "rank 1: "),
            ("first phase", ""),
            ("second phase", "rank 1: "),
        ):
            failure = ("Failure", f"{where}ValueError: a mistake", None)
            assert told[way] == [*kinds, failure], (rank, way)
        assert told["both"] == kinds[0]
        assert told["main first"] == ({"rank": rank}, ["once"])
        assert told["sum"] == (2**41 + 1, True)
        assert told["no flag"] == (2, False)


def test_one_process_agrees_with_itself_and_keeps_the_cause() -> None:
    ranks = Ranks()
    assert ranks.main_first(lambda: 3) == 3
    assert ranks.sum_and_any(5, True) == (5, True)
    mistake = ValueError("a mistake")

    def fail() -> None:
        raise mistake

    for way in (ranks.on_main, ranks.together):
        try:
            way(fail)
        except Failure as failure:
            assert failure.__cause__ is mistake


def wait_for_a_rank_that_never_comes() -> tuple[str, int]:
    glances = 0

    def find_it_lost() -> None:
        nonlocal glances
        glances += 1
        if glances == 2:
            raise RunError(Problem("rank 1 is gone"))

    ranks = Ranks(find_it_lost)
    if ranks.rank == 1:
        return "", 0
    try:
        ranks.together(lambda: None)
    except RunError as error:
        return str(error), glances
    raise AssertionError("it came")


def test_a_wait_ends_when_the_rank_it_is_for_is_found_lost() -> None:
    first, _ = run_ranks(wait_for_a_rank_that_never_comes, 2)
    assert first == ("error: rank 1 is gone", 2)


def slow_work() -> list[str]:
    glances = []
    with closing(Ranks(lambda: glances.append("glance"))) as ranks:
        long = "x" * 10_000 * (ranks.rank + 1)
        ranks.on_main(lambda: time.sleep(1.5))
        assert [len(text) for text in ranks.together(lambda: long)] == [10_000, 20_000]
        assert len(ranks.on_main(lambda: long)) == 10_000
    return glances


def test_one_that_waits_long_looks_about_and_then_goes_on() -> None:
    assert run_ranks(slow_work, 2) == [[], ["glance"]]
