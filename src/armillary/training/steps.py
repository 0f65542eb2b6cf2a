"""Steps in a row, read by the host some time after the device was given them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from armillary.foundation.errors import Problem, RunError
from armillary.foundation.tell import seen_by_every_rank
from armillary.resilience.guard import Detector
from armillary.telemetry.timing import StepEnded, StepTimer
from armillary.training.assembly import Assembly
from armillary.training.feed import StepInput
from armillary.training.state import Position
from armillary.training.step import Enqueued, StepResult, optimizer_step

Sums = Callable[[Sequence[int]], tuple[int, ...]]
"""The sums of numbers over all ranks; see `AgreedStop.sums`."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken, and what it measured."""

    step: int
    mine: StepInput
    weights: tuple[int, ...]
    """Of each term of the loss over the global step; the first, its valid tokens."""
    result: StepResult
    ended: StepEnded
    """How long it took."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    mine: StepInput
    weights: tuple[int, ...]
    enqueued: Enqueued
    ended: StepEnded


class Steps:
    """Takes steps from a position; what they measured comes `lag` steps later.

    So the device never waits for the host. `position` is that of the last step that was read, which
    is also where the weights stand once nothing is in flight: a bad step changes nothing, nor does
    what was enqueued after one that ends the run.

    Args:
        assembly: what takes the steps.
        position: from where; it moves along.
        timer: hears of the phases.
        sums: of the weights over all ranks.
        before_update: called right before anything changes that a checkpoint holds.
        sum_step: adds what others than the ranks of the mesh contribute; see `Company`.
        lag: None: as short as keeps the device busy.
    """

    def __init__(
        self,
        assembly: Assembly,
        position: Position,
        *,
        timer: StepTimer,
        sums: Sums,
        before_update: Callable[[], None] = lambda: None,
        sum_step: Callable[[Tensor], Tensor] = lambda loss: loss,
        lag: int | None = None,
    ) -> None:
        self.position = position
        self.lag = lag_of(assembly) if lag is None else lag
        self._assembly, self._timer = assembly, timer
        self._sums, self._before_update, self._sum_step = sums, before_update, sum_step
        self._in_flight: deque[_InFlight] = deque()
        self._detector = Detector(
            assembly.recipe.guard,
            assembly.mesh.device,
            recent=position.recent,
            in_a_row=position.in_a_row,
            agree=assembly.mesh.largest,
        )

    @property
    def begun(self) -> int:
        """The last step that was enqueued."""
        return self.position.step + len(self._in_flight)

    def take(self, mine: StepInput) -> None:
        """Enqueues the next step.

        Raises:
            Stopped: some rank was asked to stop; the step was not begun.
            RunError: the step has no token to learn.
        """
        step = self.begun + 1
        weights = self._sums(mine.weights)
        if weights[0] == 0:
            first, last = mine.samples
            with seen_by_every_rank():
                message = f"step {step}, samples [{first}, {last}): no token to learn"
                raise RunError(Problem(message))
        enqueued = optimizer_step(
            self._assembly,
            mine.microbatches,
            weights=weights,
            step=step,
            timer=self._timer,
            detector=self._detector,
            asks=self.lag == 0,
            before_update=self._before_update,
            sum_step=self._sum_step,
        )
        self._in_flight.append(_InFlight(mine, weights, enqueued, self._timer.end()))

    def read(self, *, leave: int = 0) -> Iterator[Taken]:
        """What the oldest steps measured, until `leave` are in flight; the position moves along.

        Of a bad step it moves where the policy allows to go on, else the step does not count.
        """
        while len(self._in_flight) > leave:
            one = self._in_flight.popleft()
            result, step = one.enqueued.result(), self.position.step + 1
            if result.health.frozen:
                self._in_flight.clear()  # they have changed nothing
            else:
                self.position.step = step
                self.position.cursor = one.mine.samples[1]
                self.position.tokens_total += 0 if result.health.skipped else one.weights[0]
                self.position.in_a_row = result.health.in_a_row
            yield Taken(step, one.mine, one.weights, result, one.ended)

    def noted(self) -> Position:
        """The position with all that belongs to it; nothing may be in flight."""
        assert not self._in_flight
        self.position.recent = self._detector.recent()  # what spikes are told by
        return self.position


def lag_of(assembly: Assembly) -> int:
    """Steps between a step and its reading: 0 where the host computes, or has to ask for each."""
    device = assembly.mesh.device
    on_device = all(p.device.type == device.type for p in assembly.model.parameters())
    return int(device.type == "cuda" and on_device and assembly.optimizers.can_skip)
