"""Who is missing when a run stands still, and how ranks come to agree on it."""

from __future__ import annotations

import bdb
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from armillary.foundation.errors import RunError
from armillary.foundation.progress import mark, marks, watched
from armillary.resilience.roll_call import RollCall, post_call
from armillary.resilience.watchdog import HANG_FOLDER, Recorder, Watch
from armillary.resilience.watchdog_conference import Conference
from armillary.resilience.watchdog_config import Watchdog
from armillary.resilience.watchdog_verdict import Answer, Verdict, judge

PERIOD = 0.05
LIMIT = 10.0


class Remembered:
    """A store in memory, for ranks that are threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.values: dict[str, str] = {}

    def add(self, key: str, amount: int, /) -> int:
        with self.lock:
            self.counts[key] += amount
            return self.counts[key]

    def set(self, key: str, value: str, /) -> None:
        self.values[key] = value

    def get(self, key: str, /) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str], /) -> bool:
        return all(key in self.values for key in keys)


def answer(rank: int, waits_in: str = "", **changes: object) -> Answer:
    base = Answer(
        about="training",
        rank=rank,
        host=f"host-{rank}",
        step=11,
        quiet_seconds=LIMIT + 1,
        doing="data" if not waits_in else "after data",
        frames=("place.py:1 read", "loop.py:7 run"),
        waits_in=waits_in,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def told(answers: list[Answer], world_size: int | None = None, **kwargs: object) -> Verdict:
    verdict = judge(answers, world_size or len(answers), LIMIT, **kwargs)  # type: ignore[arg-type]
    assert verdict.hung
    return verdict


def test_a_rank_outside_of_collectives_is_missing_while_the_others_wait() -> None:
    verdict = told([answer(0, "all_reduce"), answer(1), answer(2, "all_reduce")])
    assert verdict.missing == (1,)
    assert (
        "rank 1 (host-1) is at data (11 steps finished), in place.py:1 read < loop.py:7 run;"
        " ranks 0, 2 wait in all_reduce" in verdict.message
    )


def test_ranks_late_in_different_places_are_told_as_such() -> None:
    answers = [answer(0, "barrier"), answer(1), answer(2, frames=("disk.py:3 write",))]
    verdict = told(answers)
    assert verdict.missing == (1, 2)
    assert "rank 1 (host-1) is at data" in verdict.message
    assert "rank 2 (host-2) is at data (11 steps finished), in disk.py:3 write" in verdict.message


def test_where_all_wait_in_collectives_the_one_behind_is_missing() -> None:
    everyone = [answer(rank, "all_reduce", collectives={"world": 40}) for rank in range(3)]
    assert told(everyone).missing == ()  # the network, perhaps: nobody is to blame
    by_step = [*everyone[:2], replace(everyone[2], step=10)]
    assert told(by_step).missing == (2,)
    by_count = [replace(everyone[0], collectives={"world": 39}), *everyone[1:]]
    assert told(by_count).missing == (0,)
    other_group = [replace(everyone[0], collectives={"world": 40, "tp": 3}), *everyone[1:]]
    assert told(other_group).missing == ()
    elsewhere = [everyone[0], replace(everyone[1], waits_in="broadcast"), everyone[2]]
    assert told(elsewhere).missing == (0, 1, 2)


def test_a_backward_pass_in_native_code_may_be_a_wait() -> None:
    waiting = answer(0, "", opaque=True, collectives={"world": 41})
    computing = answer(1, "", opaque=True, collectives={"world": 40})
    assert told([waiting, computing]).missing == (1,)
    assert told([waiting, answer(1)]).missing == (1,)
    assert told([answer(0, "all_reduce"), replace(computing, collectives={})]).missing == (1,)


def test_ranks_that_do_not_answer_are_missing_and_what_else_is_known_of_them_is_told() -> None:
    answers = [answer(0, "all_reduce"), answer(3, "all_reduce")]
    verdict = told(answers, world_size=5)
    assert verdict.missing == (1, 2, 4) and verdict.speaker == 0
    assert "ranks 1, 2, 4 do not answer: gone, stopped, cut off, or stuck" in verdict.message
    known = told(answers[1:], world_size=4, stuck_at=lambda rank: "sort.py:9 sort" * (rank == 1))
    assert known.speaker == 3
    assert "native code that keeps Python from running: rank 1 is in sort.py:9" in known.message
    assert "ranks 0 to 2 do not answer" in known.message


def test_a_run_in_which_any_rank_gets_something_done_does_not_stand_still() -> None:
    building = answer(0, quiet_seconds=2.0)
    others = [answer(rank, "broadcast", quiet_seconds=1000.0) for rank in (1, 2)]
    verdict = judge([building, *others], 3, LIMIT)
    assert not verdict.hung and verdict.quiet_seconds == 2.0
    assert told([replace(building, quiet_seconds=LIMIT * 0.95), *others]).missing == (0,)
    done = answer(1, "nothing: it is done with this", quiet_seconds=math.inf)
    assert told([answer(0), done]).missing == (0,)


def test_ranks_that_wait_for_silent_ones_give_up_sooner_once_a_stop_was_asked_for() -> None:
    waiting, late = (
        answer(0, quiet_seconds=6.0, waits_in="all_reduce"),
        answer(0, quiet_seconds=6.0),
    )
    for answers, world_size, hung in (
        ([waiting], 2, True),
        ([waiting], 1, False),
        ([late], 2, False),
    ):
        verdict = judge(answers, world_size, 300.0, silent_limit=5.0)
        assert verdict.hung is hung
        assert not judge(answers, world_size, 300.0).hung


def test_thousands_are_told_in_a_line_of_people_s_length() -> None:
    answers = [answer(rank, "all_reduce") for rank in range(5000) if rank % 2]
    verdict = told(answers, world_size=5000)
    assert len(verdict.missing) == 2500 and len(verdict.message) < 1000


def test_what_is_sent_reads_back_as_it_was() -> None:
    one = answer(3, "all_reduce", collectives={"world": 4}, quiet_seconds=math.inf)
    assert Answer.from_json(one.to_json()) == one
    verdict = Verdict(hung=True, quiet_seconds=1.5, message="m", missing=(1, 2), speaker=1)
    assert Verdict.from_json(verdict.to_json()) == verdict


def conferences(store: Remembered, world_size: int) -> list[Conference]:
    ranks = [
        RollCall(store, rank=rank, world_size=world_size, period=PERIOD)
        for rank in range(world_size)
    ]
    return [Conference(rank, 0, grace=4 * PERIOD, limit=LIMIT) for rank in ranks]


def test_all_ranks_hear_the_same_verdict_whoever_calls() -> None:
    store = Remembered()
    answers = [answer(rank, "" if rank == 1 else "all_reduce") for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        meetings = conferences(store, 3)
        verdicts = list(pool.map(lambda rank: meetings[rank].hold(answers[rank]), range(3)))
        list(pool.map(lambda rank: meetings[rank].agree_to_leave(), range(3)))
    assert verdicts[0].missing == (1,)
    assert verdicts == [verdicts[0]] * 3
    assert store.values["armillary/call"] == "0 training"


def test_a_judge_that_is_lost_itself_is_replaced() -> None:
    store = Remembered()
    store.add("armillary/conference/0/opened", 1)  # and nothing more was heard of it
    verdict = conferences(store, 3)[2].hold(answer(2, "all_reduce"))
    assert verdict.missing == (0, 1)


def test_a_stop_and_a_call_reach_every_rank_with_a_sign_of_life() -> None:
    store = Remembered()
    first, second = (RollCall(store, rank=r, world_size=2, period=PERIOD) for r in (0, 1))
    alone = RollCall(None, rank=0, world_size=1)
    alone.post_stop("SIGINT")
    assert alone.stop_posted == "SIGINT"
    with first, second:
        assert first.stop_posted is None and second.call is None
        first.post_stop("SIGTERM")
        first.post_stop("SIGUSR1")  # the first one counts
        post_call(store, "3 training")
        deadline = time.monotonic() + 30
        while second.stop_posted is None or second.call is None:
            assert time.monotonic() < deadline
            time.sleep(PERIOD)
    assert (first.stop_posted, second.stop_posted) == ("SIGTERM", "SIGTERM")
    assert second.call == "3 training"


class Left(threading.Event):
    """Instead of the end of the process."""

    code: int | None = None

    def __call__(self, code: int) -> None:
        self.code = code
        self.set()


def watching(folder: Path, left: Left, said: list[RunError], **changes: float) -> Watch:
    config = replace(Watchdog(first_step_seconds=1.0, step_seconds=1.0, grace_seconds=5), **changes)
    alone = RollCall(None, rank=0, world_size=1)
    recorder = Recorder(counts=lambda: {"world": 7}, dump=lambda: b"{}")
    watch = Watch(config, folder=folder, roll_call=alone, recorder=recorder, leave=left)
    watch.tell = lambda error, speaks: said.append(error)
    return watch


def test_one_process_that_stands_still_leaves_its_stacks_and_ends_with_code_1(
    tmp_path: Path,
) -> None:
    left, said = Left(), []
    with watching(tmp_path, left, said) as watch:
        watch.step = 4
        mark("reading the tape")
        assert left.wait(60) and left.code == 1
    (error,) = said
    assert "rank 0" in str(error) and "reading the tape (4 steps finished)" in str(error)
    written = (tmp_path / HANG_FOLDER / "rank-00000.txt").read_text()
    assert "test_one_process_that_stands_still" in written and "{'world': 7}" in written
    assert (tmp_path / HANG_FOLDER / "rank-00000-collectives.json").read_text() == "{}"


def test_marks_of_the_main_thread_or_of_one_that_works_for_it_are_progress(tmp_path: Path) -> None:
    left, said = Left(), []
    with watching(tmp_path, left, said):
        for _ in range(15):
            time.sleep(0.1)
            mark()
        helped = threading.Event()

        def help_out() -> None:
            for _ in range(15):
                time.sleep(0.1)
                mark()
            helped.set()

        threading.Thread(target=help_out, daemon=True).start()
        assert helped.wait(30)
        mark()
    assert not left.is_set() and not said
    assert not (tmp_path / HANG_FOLDER).exists()


def test_work_of_another_thread_that_stands_still_is_noticed_while_training_goes_on(
    tmp_path: Path,
) -> None:
    left, said, free = Left(), [], threading.Event()

    def save() -> None:
        with watched("saving step 20"):
            free.wait(60)

    with watching(tmp_path, left, said):
        thread = threading.Thread(target=save, name="checkpoint-20", daemon=True)
        thread.start()
        deadline = time.monotonic() + 60
        while not left.is_set() and time.monotonic() < deadline:
            time.sleep(0.05)
            mark("training on")
        free.set()
        thread.join()
    assert "checkpoint-20 stands still" in str(said[0]) and "saving step 20" in str(said[0])
    assert thread.ident is not None
    left_over = marks().get(thread.ident)  # of an earlier thread: numbers are used again
    assert left_over is None or not left_over.watched


def test_who_looks_around_with_a_debugger_is_given_all_the_time(tmp_path: Path) -> None:
    left, said = Left(), []
    with watching(tmp_path, left, said, first_step_seconds=0.2, step_seconds=0.2):
        bdb.Bdb().runcall(time.sleep, 1.0)
    assert not left.is_set() and not said


def test_a_recorder_that_never_answers_does_not_keep_the_watch_from_its_end(tmp_path: Path) -> None:
    left, said = Left(), []
    config = Watchdog(first_step_seconds=0.2, step_seconds=0.2, grace_seconds=0.2)
    recorder = Recorder(counts=lambda: {"never": int(left.wait(60))})
    alone = RollCall(None, rank=0, world_size=1)
    watch = Watch(config, folder=tmp_path, roll_call=alone, recorder=recorder, leave=left)
    watch.tell = lambda error, speaks: said.append(error)
    with watch:
        assert left.wait(30) and left.code == 1
    assert "stands still" in str(said[0])


def test_nothing_is_watched_where_that_is_not_wanted(tmp_path: Path) -> None:
    before = threading.active_count()
    with watching(tmp_path, Left(), [], enabled=False):
        assert threading.active_count() == before
    assert not (tmp_path / HANG_FOLDER).exists()


def test_impossible_times_are_refused_and_groups_wait_longer_than_the_watchdog() -> None:
    bad = Watchdog(step_seconds=0, grace_seconds=math.inf, ranks_every=-1)
    told_of = [problem.message for problem in bad.problems()]
    assert len(told_of) == 3 and "watchdog.step_seconds = 0 is out of range" in told_of[0]
    assert Watchdog().problems() == []
    assert Watchdog(first_step_seconds=5, step_seconds=90).group_seconds > 90 + 2 * 10
    assert Watchdog(enabled=False).group_seconds == 600
