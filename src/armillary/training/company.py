"""The groups that a run shares its steps with, as the loop sees them: as a rule, none.

A run of replica groups (`replicated.py`) may lose one in mid-step, get one back, or be behind and
receive the state of a peer. What the loop sees of all that is one exception, `DealtAnew`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from armillary.training.agreed_stop import AgreedStop
from armillary.training.state import Position
from armillary.training.step_shape import WHOLE, Share


class DealtAnew(Exception):
    """The steps from the position on are to be made again: of another share, or another position.

    Weights, optimizers and position are whole, those after some step; gradients are gone.
    """


class Company(Protocol):
    """Who else takes part in the steps. Every rank calls it alike."""

    most_in_flight: int | None
    """Steps that may be enqueued before the first of them is read; None: any number."""

    @property
    def saves(self) -> bool:
        """Whether the checkpoints during the run are this group's to write."""

    def deal(self) -> Share:
        """Which part of each step is this group's, from now until `DealtAnew`."""

    def begin_step(self, at: Callable[[], Position]) -> None:
        """Before each step.

        Args:
            at: the position after the last step, complete; it may be moved.

        Raises:
            DealtAnew: this group has another share now, or the state of a peer.
            Stopped: some rank was asked to stop.
            RunError: there is nobody to meet.
        """

    def sums(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The sums of numbers over all that take part in a step; see `AgreedStop.sums`.

        Raises:
            DealtAnew: a group was lost.
            Stopped: some rank was asked to stop.
        """

    def sum_step(self, loss: Tensor) -> Tensor:
        """Sums all gradients of a step, in place, and its loss, which is returned.

        Raises:
            DealtAnew: a group was lost.
        """

    def end_step(self, at: Callable[[], Position]) -> None:
        """After each step.

        Args:
            at: see `begin_step`.

        Raises:
            Stopped: some rank was asked to stop.
            RunError: there is nobody to meet.
        """

    def close(self) -> None:
        """Takes part in no further step."""


class Alone:
    """A run that is all of the training."""

    most_in_flight: int | None = None
    saves = True

    def __init__(self, stop: AgreedStop) -> None:
        self._stop = stop

    def deal(self) -> Share:
        """See `Company`."""
        return WHOLE

    def begin_step(self, at: Callable[[], Position]) -> None:
        """See `Company`."""

    def sums(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """See `Company`."""
        return self._stop.sums(numbers)

    def sum_step(self, loss: Tensor) -> Tensor:
        """See `Company`."""
        return loss

    def end_step(self, at: Callable[[], Position]) -> None:
        """See `Company`."""

    def close(self) -> None:
        """See `Company`."""
