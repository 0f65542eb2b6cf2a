"""Evaluation: the part of a recipe that says what a model is asked, and when. Loads no torch."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from armillary.foundation.component import Component
from armillary.foundation.errors import Problem

if TYPE_CHECKING:
    from armillary.evaluation.items import Encoder, Prepared

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")


class EvaluationTask(Component, ABC):
    """Slot of `evaluation.tasks`: questions from files, and how answers are counted.

    A component has a field `name`, under which its figures are told, and a field `limit`.
    """

    __slots__ = ()

    name: str
    limit: int

    @abstractmethod
    def prepare(self, encoder: Encoder) -> Prepared:
        """Reads and tokenises the items. Called on one rank.

        Raises:
            UserError: a file is not there, or is not what it should be.
        """

    def problems(self, where: str) -> list[Problem]:
        """What is wrong with the values themselves; looks for no file.

        Args:
            where: the task's place in the recipe.
        """
        return []

    def missing(self, where: str) -> list[Problem]:
        """Files that are not there."""
        return []


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What the model is asked on the way, and at the end of a run."""

    every: int = 0
    """Steps between two evaluations; 0: only at the end, where there are tasks."""
    tasks: tuple[EvaluationTask, ...] = ()
    """What to ask, each by its kind; none: nothing."""
    seq_len: int = 0
    """Tokens of the rows that texts are packed into, and most that is read before a token; 0:
    budget.seq_len."""
    stride: int = 0
    """Tokens between windows of a text longer than a row, fewer is more context; 0: a row."""
    tokens_at_once: int = 8_192
    """Tokens that a rank reads in one forward pass, at most; one row at least."""

    def row_length(self, seq_len: int) -> int:
        """Tokens of a row, of a recipe that trains on rows of `seq_len`."""
        return self.seq_len or seq_len

    def problems(self, seq_len: int, max_seq_len: int | None) -> list[Problem]:
        """What is wrong with the values, in a recipe that trains on rows of `seq_len`.

        Args:
            seq_len: `budget.seq_len`.
            max_seq_len: of the model; None: it has none.
        """
        found = [
            Problem(f"evaluation.{name} = {value} is out of range", f"{least} or more")
            for name, value, least in (
                ("every", self.every, 0),
                ("seq_len", self.seq_len, 0),
                ("stride", self.stride, 0),
                ("tokens_at_once", self.tokens_at_once, 1),
            )
            if value < least
        ]
        length = self.row_length(seq_len)
        if not found and max_seq_len is not None and self.seq_len > max_seq_len:
            message = f"evaluation.seq_len = {length} is beyond model.max_seq_len = {max_seq_len}"
            fix = f"--evaluation.seq-len {max_seq_len}"
            found.append(Problem(message, f"0 to {max_seq_len}", fix))
        if not found and self.stride > length:
            message = f"evaluation.stride = {self.stride}, and windows are {length} tokens long"
            found.append(Problem(message, f"0 (a row) to {length}", "--evaluation.stride 0"))
        if self.every > 0 and not self.tasks:
            message = f"evaluation.every = {self.every}, and there are no evaluation.tasks"
            found.append(Problem(message, "a task", "--evaluation.tasks.0 bits-per-byte"))
        return [*found, *self._task_problems()]

    def missing(self) -> list[Problem]:
        """Files of tasks that are not there."""
        return [p for place, task in self._places() for p in task.missing(place)]

    def _places(self) -> Iterator[tuple[str, EvaluationTask]]:
        return ((f"evaluation.tasks.{index}", task) for index, task in enumerate(self.tasks))

    def _task_problems(self) -> Iterator[Problem]:
        names: set[str] = set()
        for place, task in self._places():
            option = f"--{place}.name"
            if not _NAME.fullmatch(task.name):
                allowed = "letters, digits and . _ + -, 64 at most, the first a letter or digit"
                yield Problem(f"{place}.name = {task.name!r}", allowed, f"{option} mine")
            elif task.name in names:
                message = f"{place}.name = {task.name!r} is another task's name too"
                yield Problem(message, "a name for each task", f"{option} {task.name}-2")
            names.add(task.name)
            if task.limit < 0:
                message = f"{place}.limit = {task.limit} is out of range"
                yield Problem(message, "0 (all) or more", f"--{place}.limit 0")
            yield from task.problems(place)
