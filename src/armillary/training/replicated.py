"""A run of replica groups: what it costs when one of them is lost in a step, and how that is kept.

**Every step.** Before each step the groups that are there meet, so that it is known who takes part
before the data is dealt: the same global batch whoever is there. Gradients and loss are raw sums
over all of them. If a group is lost before the sums are whole, nothing has changed; the others meet
again and take the same step. So the training is that of a run without faults, but for the order of
sums.

**Rounds.** With `local-sgd` and `diloco` groups meet after `every` steps only, each having trained
on its share of the data order. A group that is lost takes its part of the round with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from armillary.parallel.replicas.link import LinkBroken
from armillary.parallel.replicas.sums import sum_numbers, sum_step
from armillary.telemetry.events import EventLog
from armillary.training.agreed_stop import AgreedStop
from armillary.training.assembly import Assembly
from armillary.training.company import Alone, Company, DealtAnew
from armillary.training.replicated_meeting import Meeting
from armillary.training.state import Position
from armillary.training.step_shape import WHOLE, Share


def company_of(assembly: Assembly, stop: AgreedStop, log: EventLog) -> Company:
    """What the recipe asks for; all ranks call it together."""
    replicas = assembly.recipe.replicas
    if replicas.alone:
        return Alone(stop)
    kind = Rounds if replicas.mode.round_steps else EveryStep
    return kind(assembly, stop, log)


class _Groups:
    """What both ways have in common."""

    most_in_flight: int | None = 0

    def __init__(self, assembly: Assembly, stop: AgreedStop, log: EventLog) -> None:
        self._assembly, self._stop = assembly, stop
        self._meeting = Meeting(assembly, stop, log, facts=self._facts)
        self._dealt = WHOLE
        self._has_met = False
        self._moved = False  # to another group's state

    @property
    def saves(self) -> bool:
        """See `Company`."""
        return self._meeting.share.rank == 0

    def deal(self) -> Share:
        """See `Company`."""
        self._dealt, self._moved = self._meeting.share, False
        return self._dealt

    def begin_step(self, at: Callable[[], Position]) -> None:
        """See `Company`."""
        if not self._has_met:
            self._meet(at())
            self._has_met = True
        if self._moved or self._meeting.share != self._dealt:
            raise DealtAnew

    def close(self) -> None:
        """See `Company`."""
        self._meeting.close()

    def _meet(self, position: Position) -> None:
        self._moved |= self._meeting.meet(position) is not None

    def _facts(self) -> dict[str, Any]:
        return {}


class EveryStep(_Groups):
    """Gradients are summed in each step; see the top of this file."""

    def __init__(self, assembly: Assembly, stop: AgreedStop, log: EventLog) -> None:
        super().__init__(assembly, stop, log)
        self._position = Position()

    def _meet(self, position: Position) -> None:
        self._position = position
        super()._meet(position)

    def sums(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Company`."""
        mine, why = tuple(numbers), ""
        try:
            mine = sum_numbers(self._meeting.link, numbers)
        except LinkBroken as error:
            why = str(error) or "no reason given"
        *totals, failed = self._stop.sums((*mine, int(bool(why))))
        if failed:
            self._lose_step(why or "a peer of another rank was lost")
        return tuple(totals)

    def sum_step(self, loss: Tensor) -> Tensor:
        """See `Company`."""
        total, model = loss.detach().clone(), self._assembly.model
        _, why = self._meeting.attempt(lambda: sum_step(self._meeting.link, model, [total]))
        if why is not None:
            self._lose_step(why)
        self._has_met = False
        return total

    def end_step(self, at: Callable[[], Position]) -> None:
        """See `Company`."""

    def _lose_step(self, why: str) -> NoReturn:
        self._assembly.optimizers.zero_grad()
        self._assembly.model.take_counts()
        self._has_met = False
        self._meeting.break_off(why, self._position)
        raise DealtAnew


class Rounds(_Groups):
    """Each group trains by itself, and after `every` steps the weights are brought together."""

    def __init__(self, assembly: Assembly, stop: AgreedStop, log: EventLog) -> None:
        super().__init__(assembly, stop, log)
        self._due = False
        self._tokens_before = 0  # the run's, when the round began

    def sums(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Company`."""
        return self._stop.sums(numbers)

    def sum_step(self, loss: Tensor) -> Tensor:
        """See `Company`."""
        return loss

    def end_step(self, at: Callable[[], Position]) -> None:
        """See `Company`."""
        every, last = self._assembly.recipe.replicas.mode.round_steps, self._assembly.total_steps
        position = at()
        if position.step % every == 0 or position.step == last:
            self._due = True
            self._meet(position)

    def _facts(self) -> dict[str, Any]:
        return {"due": self._due, "tokens_before": self._tokens_before}

    def _meet(self, position: Position) -> None:
        """Also ends the round, where it is due; a group that took no part in it weighs nothing."""
        weight = int(self._due)
        if not self._due:
            self._tokens_before = position.tokens_total
        while True:
            facts = self._meeting.meet(position, due=self._due)
            if facts is not None:
                self._moved, weight = True, 0
                self._due, self._tokens_before = facts["due"], facts["tokens_before"]
            if not self._due:
                return
            why = self._end_round(position, weight)
            if why is None:
                return
            self._meeting.break_off(why, position)

    def _end_round(self, position: Position, weight: int) -> str | None:
        """The outer step of all groups; what went wrong, and then nothing has changed."""
        link, outer = self._meeting.link, self._assembly.outer
        own = position.tokens_total - self._tokens_before

        def exchange() -> tuple[list[Tensor], tuple[int, ...]]:
            (there,) = sum_numbers(link, (weight,))
            # Where none is left that took part, one that has its state stands for it.
            counts = weight if there else int(self._meeting.share.rank == 0)
            return outer.mean(link, counts), sum_numbers(link, (own * counts,))

        result, why = self._meeting.attempt(exchange)
        if why is not None:
            return why
        assert result is not None
        means, (tokens,) = result
        outer.apply(means)
        self._tokens_before += tokens
        position.tokens_total = self._tokens_before
        self._due = False
        return None
