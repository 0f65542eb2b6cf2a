"""How ranks tell each other what they wait for, at the store where they met. Loads no torch.

Conferences are numbered. The first rank to open one judges it: it collects the answers, for as long
as the grace lasts, and leaves its verdict. Should it not come to that, every rank judges by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from armillary.resilience.roll_call import RollCall, Store, post_call, read
from armillary.resilience.watchdog_verdict import Answer, Verdict, judge

_PREFIX = "armillary/conference"
_PAUSE_SECONDS = 0.5
_HEARING_PERIODS = 2
"""How long it takes until every rank has heard of a call and answered."""


class Conference:
    """One of them, as a rank takes part in it.

    Args:
        roll_call: where this rank is among the others, and where they met.
        number: which conference, counting from 0.
        grace: seconds for the answers, beside those of hearing.
        limit: seconds without progress that make a standstill.
        silent_limit: the same where ranks do not answer; see `judge`.
        stuck_at: where a rank is that does not answer, as far as something else tells.
    """

    def __init__(
        self,
        roll_call: RollCall,
        number: int,
        *,
        grace: float,
        limit: float,
        silent_limit: float | None = None,
        stuck_at: Callable[[int], str] = lambda rank: "",
    ) -> None:
        self._roll_call, self._number = roll_call, number
        self._pause = min(_PAUSE_SECONDS, roll_call.period / 4)
        self._answers_within = grace + _HEARING_PERIODS * roll_call.period
        self._limit, self._silent_limit, self._stuck_at = limit, silent_limit, stuck_at

    @property
    def seconds(self) -> float:
        """How long it takes at most, where the store answers."""
        return 3 * self._answers_within + 1.0  # the verdict of another that never comes, the own

    def hold(self, answer: Answer) -> Verdict:
        """Answers, and returns the verdict; calls the others first if nobody has."""
        store = self._store
        judges = store.add(self._key("opened"), 1) == 1
        if judges:
            post_call(store, f"{self._number} {answer.about}")
        store.set(self._key(f"answer/{answer.rank}"), answer.to_json())
        store.add(self._key("answers"), 1)
        verdict = None if judges else self._told()
        return verdict or self._judged()

    def agree_to_leave(self) -> None:
        """Waits, for no longer than hearing takes, until those who answered have the verdict too.

        Who leaves breaks the collectives of the others, and may take the store along.
        """
        self._store.add(self._key("leaving"), 1)
        answered = self._store.add(self._key("answers"), 0)
        self._count_to("leaving", answered)

    def _judged(self) -> Verdict:
        world_size = self._roll_call.world_size
        self._count_to("answers", world_size)
        found = [read(self._store, self._key(f"answer/{rank}")) for rank in range(world_size)]
        answers = [Answer.from_json(text) for text in found if text is not None]
        verdict = judge(answers, world_size, self._limit, self._stuck_at, self._silent_limit)
        self._store.set(self._key("verdict"), verdict.to_json())
        return verdict

    def _told(self) -> Verdict | None:
        """The verdict of the rank that judges; None: it did not come to that."""
        key = self._key("verdict")
        self._wait(lambda: self._store.check([key]), 2 * self._answers_within)
        text = read(self._store, key)
        return None if text is None else Verdict.from_json(text)

    def _count_to(self, what: str, ranks: int) -> None:
        """Waits until so many ranks have done something, or for as long as answers may take."""
        self._wait(lambda: self._store.add(self._key(what), 0) >= ranks, self._answers_within)

    def _wait(self, done: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            time.sleep(self._pause)

    @property
    def _store(self) -> Store:
        store = self._roll_call.store
        assert store is not None, "one rank has nobody to confer with"
        return store

    def _key(self, what: str) -> str:
        return f"{_PREFIX}/{self._number}/{what}"
