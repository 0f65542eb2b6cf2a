"""What a run is at a moment, beside its tensors: the part of a checkpoint that is plain numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from armillary.foundation.errors import Problem, UserError

_COUNTS = ("step", "tokens_total", "cursor", "looked_at", "rewinds", "in_a_row")
"""Fields of `Position` that are 0 or more."""


@dataclass(kw_only=True, slots=True)
class Position:
    """How far a run has come."""

    step: int = 0
    """Optimizer steps finished."""
    tokens_total: int = 0
    """Valid tokens trained on."""
    cursor: int = 0
    """Global position of the next training sample."""
    looked_at: int = 0
    """Step of the newest look at held-out text; one that a stop cut short does not count."""
    data_fingerprint: str = ""
    """SHA-256 over what the cursor counts; a cursor means nothing for other data."""
    borders: list[list[int]] = field(default_factory=list)
    """Step and cursor at which each stage after the first began, in order."""
    jumped: list[list[int]] = field(default_factory=list)
    """Sample positions [first, last) that the run does not read, in order: bad ones, before which
    it went back."""
    rewinds: int = 0
    """How often the run has gone back."""
    in_a_row: int = 0
    """Bad steps up to this one, without a healthy one between them."""
    recent: list[list[float]] = field(default_factory=list)
    """Loss and gradient norm of the healthy steps that spikes are told by, oldest first."""

    def samples(self, count: int) -> tuple[int, int]:
        """Positions [first, last) of the next `count` samples; all of one step, one after the
        other."""
        first = self.cursor
        for begin, end in self.jumped:
            if first < end and begin < first + count:
                first = end
        return first, first + count

    def jump(self, first: int, last: int) -> None:
        """Will not read positions [first, last), as far as they are still to come."""
        first = max(first, self.cursor)
        if first < last:
            self.jumped = _joined([*self.jumped, [first, last]])

    def after(self, samples: tuple[int, int]) -> Position:
        """This position with the cursor behind a step's samples."""
        return replace(self, cursor=samples[1])

    def across(self, data_fingerprint: str) -> Position:
        """This position as the next stage begins with it, over data of that fingerprint.

        What was healthy there says nothing of what is here: spikes are told by steps from now on.
        """
        borders = [*self.borders, [self.step, self.cursor]]
        return replace(self, borders=borders, data_fingerprint=data_fingerprint, recent=[])

    def become(self, other: Position) -> None:
        """Takes over where another run stands."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def scalars(self) -> dict[str, Any]:
        """As JSON, for the checkpoint."""
        return asdict(self)

    @classmethod
    def from_scalars(cls, scalars: dict[str, Any], *, data_fingerprint: str, path: str) -> Position:
        """The position of a checkpoint, for a run over the data of `data_fingerprint`.

        Raises:
            UserError: see `read` and `require_data`.
        """
        position = cls.read(scalars, path=path)
        position.require_data(data_fingerprint, path=path)
        return position

    @classmethod
    def read(cls, scalars: dict[str, Any], *, path: str) -> Position:
        """The position of a checkpoint, whatever the data.

        Raises:
            UserError: these are no position.
        """
        scalars = {"borders": [], **scalars}  # runs were without stages once
        if not _are_a_position(scalars):
            raise UserError(
                Problem(f"{path} does not say how far the run has come", fix="take another one")
            )
        return cls(**scalars)

    def require_data(self, data_fingerprint: str, *, path: str) -> None:
        """Refuses a position that counts over other data.

        Raises:
            UserError: other documents, tokenizer, packing, sequence length, seed or mixture.
        """
        if self.data_fingerprint != data_fingerprint:
            raise UserError(
                Problem(
                    f"{path} was trained on other data: its fingerprint is"
                    f" {self.data_fingerprint[:12]}, this recipe's is {data_fingerprint[:12]}",
                    allowed="the same corpus, tokenizer, packing, seq_len, seed and mixture",
                    fix="undo the change, or begin a new run with --run DIR",
                )
            )


def _are_a_position(scalars: dict[str, Any]) -> bool:
    """Whether the values are of the kinds that `Position.scalars` gives."""
    if scalars.keys() != {each.name for each in fields(Position)}:
        return False
    jumped, borders, recent = scalars["jumped"], scalars["borders"], scalars["recent"]
    if not all(isinstance(each, list) for each in (jumped, borders, recent)):
        return False
    pairs = [*jumped, *borders, *recent]
    if not all(isinstance(each, list) and len(each) == 2 for each in pairs):
        return False
    counts = [scalars[name] for name in _COUNTS]
    counts += [value for each in (*jumped, *borders) for value in each]
    return (
        isinstance(scalars["data_fingerprint"], str)
        and all(type(v) is float and math.isfinite(v) for each in recent for v in each)
        and all(type(count) is int and count >= 0 for count in counts)
    )


def _joined(intervals: list[list[int]]) -> list[list[int]]:
    """In order, with those that touch as one."""
    joined: list[list[int]] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1][1] = max(last, joined[-1][1])
        else:
            joined.append([first, last])
    return joined
