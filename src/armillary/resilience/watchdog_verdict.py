"""From what every rank says to who holds the others up. Loads no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from armillary.foundation.errors import Problem

_TOLD = 4
"""Ranks that are described; the files describe all."""
_SLACK = 0.1
"""Of the limit: ranks that wait made their last mark a little after the one they wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a rank says when one is late."""

    about: str
    """The work that stands still: training, or that of a thread of this name."""
    rank: int
    host: str
    step: int
    """Optimizer steps that it has finished."""
    quiet_seconds: float
    """Since it last got something done in this work; infinite: it has none of it."""
    doing: str = ""
    """What it began last, in words."""
    frames: tuple[str, ...] = ()
    """Where it is, innermost first."""
    waits_in: str = ""
    """The collective in which it waits; empty: none."""
    opaque: bool = False
    """Whether it may wait for other ranks unseen, in native code."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """By process group, how many collectives it has begun; empty where nobody counts them."""

    def to_json(self) -> str:
        """For the others."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """See `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "frames": tuple(fields["frames"])})

    @property
    def where(self) -> str:
        """`data (11 steps finished), in armillary/data/dataset.py:120 batch < ...`."""
        doing = self.doing or "work without a name"
        return f"{doing} ({self.step} steps finished), in {' < '.join(self.frames)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the run stands still, and who is to be looked at."""

    hung: bool
    quiet_seconds: float
    """Since any rank got something done."""
    message: str = ""
    missing: tuple[int, ...] = ()
    """Ranks that hold the others up; empty: nobody in particular."""
    speaker: int = 0
    """The rank that writes the verdict into the log."""

    def to_json(self) -> str:
        """For the others."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """See `to_json`."""
        fields = json.loads(text)
        return cls(**{**fields, "missing": tuple(fields["missing"])})

    def problem(self, folder: str) -> Problem:
        """For people."""
        return Problem(
            self.message,
            fix=f"read the stacks in {folder}; the same command goes on from the newest"
            " checkpoint. Slow work that is no hang: a larger --watchdog.step-seconds or"
            " --watchdog.first-step-seconds",
        )


def judge(
    answers: Sequence[Answer],
    world_size: int,
    limit: float,
    stuck_at: Callable[[int], str] = lambda rank: "",
    silent_limit: float | None = None,
) -> Verdict:
    """Who is missing, from the answers of those ranks that gave one (at least one).

    Args:
        limit: seconds without progress that make a standstill.
        silent_limit: the same where all who answer wait for ranks that do not; None: no other.
        stuck_at: where a rank is that did not answer, as far as something else tells.
    """
    quiet = min(answer.quiet_seconds for answer in answers)
    silent = sorted(set(range(world_size)) - {answer.rank for answer in answers})
    if (
        silent
        and silent_limit is not None
        and all(each.waits_in or each.opaque for each in answers)
    ):
        limit = silent_limit
    if quiet < limit * (1 - _SLACK):
        return Verdict(hung=False, quiet_seconds=quiet)
    if silent:
        missing = [answer for answer in answers if not (answer.waits_in or answer.opaque)]
    else:
        missing = _behind(answers)
    parts = [_silence(silent, stuck_at)] if silent else []
    parts += [f"rank {each.rank} ({each.host}) is at {each.where}" for each in missing[:_TOLD]]
    if len(missing) > _TOLD:
        parts.append(f"{len(missing) - _TOLD} more ranks are late in places of their own")
    if waiting := [answer for answer in answers if answer not in missing]:
        parts.append(_waiting(waiting))
    return Verdict(
        hung=True,
        quiet_seconds=quiet,
        message=f"{answers[0].about} stands still: no rank has got anything done in it for"
        f" {quiet:.0f} s; {'; '.join(parts)}",
        missing=(*silent, *(each.rank for each in missing)),
        speaker=min(answer.rank for answer in answers),
    )


def _silence(silent: Sequence[int], stuck_at: Callable[[int], str]) -> str:
    """What is known of ranks that did not answer."""
    words = f"{_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    found = [f"rank {rank} is in {where}" for rank in silent[:_TOLD] if (where := stuck_at(rank))]
    if found:
        return f"{words}, stuck in native code that keeps Python from running: {'; '.join(found)}"
    return f"{words}: gone, stopped, cut off, or stuck in native code"


def _behind(answers: Sequence[Answer]) -> list[Answer]:
    """Those that the others wait for; empty: all wait in the same place.

    Stacks tell most. Where all of them end in collectives, the rank of an earlier step is late,
    then one that has begun fewer collectives, then one whose native code may be no wait at all.
    """
    if elsewhere := [each for each in answers if not (each.waits_in or each.opaque)]:
        return elsewhere
    newest = max(each.step for each in answers)
    if late := [each for each in answers if each.step < newest]:
        return late
    if fewer := _with_fewer_collectives(answers):
        return fewer
    opaque = [each for each in answers if not each.waits_in]
    if 0 < len(opaque) < len(answers):
        return opaque
    places = {(each.waits_in, each.frames[:1]) for each in answers}
    return list(answers) if len(places) > 1 else []


def _with_fewer_collectives(answers: Sequence[Answer]) -> list[Answer]:
    """Those that have begun fewer collectives than another member of a group of theirs."""
    most: Counter[str] = Counter()
    for each in answers:
        for group, count in each.collectives.items():
            most[group] = max(most[group], count)
    return [
        each
        for each in answers
        if any(count < most[group] for group, count in each.collectives.items())
    ]


def _waiting(waiting: Sequence[Answer]) -> str:
    """Where those are that wait, most ranks first."""
    places: dict[str, list[int]] = {}
    for answer in waiting:
        place = answer.waits_in or "native code"
        near = answer.frames[0] if answer.frames else "?"
        places.setdefault(f"{place} ({answer.doing}, {near})", []).append(answer.rank)
    told = sorted(places.items(), key=lambda each: -len(each[1]))
    words = [
        f"{_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {place}"
        for place, ranks in told[:_TOLD]
    ]
    return ", ".join(words)


def _ranks(ranks: Sequence[int]) -> str:
    """`ranks 0 to 2, 7`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words: list[str] = []
    for run in runs[: 2 * _TOLD]:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    more = ", ..." if len(runs) > 2 * _TOLD else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}{more}"
