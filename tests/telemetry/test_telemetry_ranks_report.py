"""Which rank the others wait for, told once it is no accident."""

from __future__ import annotations

from pathlib import Path

import telemetry_examples as examples
from armillary.telemetry.history import history_of
from armillary.telemetry.ranks_report import RankSeconds, RanksReport
from armillary.telemetry.schema import checked_event
from armillary.telemetry.summary import details_of, run_page

HOSTS = ["a", "a", "b", "b"]


def ranks(*busy: float) -> list[RankSeconds]:
    return [
        RankSeconds(step=2.0, busy=each, data=0.1 * rank, garbage=0.0, checkpoint=0.0)
        for rank, each in enumerate(busy)
    ]


def test_a_report_tells_the_spread_and_the_slowest_with_its_host() -> None:
    event = RanksReport(HOSTS).event(ranks(1.0, 1.0, 1.8, 1.2), steps=50)
    assert (event["slowest"], event["slowest_host"], event["steps"]) == (2, "b", 50)
    assert event["slowest_over_median"] == 1.8 / 1.1
    assert event["busy_seconds"] == {"min": 1.0, "median": 1.1, "max": 1.8, "rank": 2}
    assert event["data_seconds"]["rank"] == 3
    assert checked_event("ranks", time=1.0, rank=0, step=50, fields=event)["slowest"] == 2


def test_a_row_of_numbers_reads_back() -> None:
    (one,) = ranks(0.5)
    assert RankSeconds.of(one.row()) == one


def warnings(reports: list[list[RankSeconds]], steps: int = 50) -> list[str | None]:
    report = RanksReport(HOSTS)
    return [report.warning(report.event(each, steps)) for each in reports]


def test_a_warning_needs_the_same_slow_rank_three_times_in_a_row_and_comes_once() -> None:
    slow, other, even = ranks(1, 1, 2, 1), ranks(2, 1, 1, 1), ranks(1, 1, 1.2, 1)
    *before, told, after = warnings([slow, slow, slow, slow])
    assert before == [None, None] and after is None
    assert told is not None and "rank 2 (b) holds the others up" in told and "2.00 times" in told
    assert warnings([slow, slow, other, slow, slow, even, slow]) == [None] * 7
    assert warnings([even] * 5) == [None] * 5
    assert warnings([slow] * 5, steps=2) == [None] * 5  # 4 s tell too little


def test_the_newest_report_is_on_the_page_of_a_run(tmp_path: Path) -> None:
    report = RanksReport(HOSTS)
    events = [
        {"time": examples.BEGUN, "kind": "start", "rank": 0, "step": 0, **examples.start()},
        {"time": 2.0, "kind": "ranks", "rank": 0, "step": 50, **report.event(ranks(1, 1, 1, 3), 5)},
        {"time": 3.0, "kind": "ranks", "rank": 0, "step": 99, **report.event(ranks(1, 1, 3, 1), 7)},
    ]
    history = history_of(tmp_path, events)
    page = run_page(history)
    assert "slowest is rank 2 (b), 3.00 times the median over 7 steps to step 99" in page
    assert "median of a step: busy 1 s (rank 2: 3 s), data 0.15 s (rank 3: 0.3 s)" in page
    assert details_of(history)["ranks"]["step"] == 99
    without = history_of(tmp_path, events[:1])
    assert "slowest" not in run_page(without) and details_of(without)["ranks"] is None
