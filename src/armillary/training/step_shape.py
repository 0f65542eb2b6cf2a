"""How the sequences of one optimizer step are dealt to ranks and microbatches. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.parallel import Parallel
from armillary.parallel.schedules import deal


@dataclass(frozen=True, slots=True)
class Share:
    """The part of each step that one of several replica groups computes."""

    rank: int
    """Place of the group among those that take part, from 0."""
    size: int
    """Groups that take part."""


WHOLE = Share(0, 1)
"""The share of a run that is by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The global batch of one optimizer step, seen from one data-parallel rank.

    The global positions of a step are dealt in microbatches: the first `microbatch` positions go to
    data rank 0, the next to rank 1, and so on, `accumulation` times over. Which rank computes a
    sequence never changes what the step computes. Positions past the end of the step, where it
    cannot be dealt evenly, are rows of padding that weigh nothing.
    """

    sequences: int
    """Sequences of one optimizer step, over all ranks."""
    microbatch: int
    """Sequences one rank computes at once."""
    accumulation: int
    """Microbatches each rank computes before the optimizer steps, where its group is by itself."""
    data_rank: int
    """This rank's place among the ranks that hold different data."""
    data_size: int
    """How many ranks hold different data."""

    def __post_init__(self) -> None:
        assert self.sequences <= self.microbatch * self.accumulation * self.data_size, self

    @classmethod
    def of(
        cls,
        *,
        batch_tokens: int,
        seq_len: int,
        microbatch: int,
        data_rank: int,
        data_size: int,
        parallel: Parallel,
        uneven: bool = False,
        groups: int = 1,
    ) -> StepShape:
        """The shape for a budget that has no problems with so many data ranks.

        `microbatch` 0 is as large as `parallel`, resolved, allows; `uneven` allows padding. It is
        that of a step which so many groups of ranks share, also when fewer are there.
        """
        sequences = batch_tokens // seq_len
        dealt = deal(parallel, sequences, data_size * groups, microbatch, uneven=uneven)
        return cls(
            sequences=sequences,
            microbatch=dealt.rows,
            accumulation=dealt.microbatches * groups,
            data_rank=data_rank,
            data_size=data_size,
        )

    def rows(self, share: Share = WHOLE) -> list[list[int]]:
        """Per microbatch, the offsets within the global step that this rank computes.

        Those from `sequences` on are padding. Groups take turns, microbatch by microbatch.
        """
        stride = self.microbatch * self.data_size
        starts = (
            index * stride + self.data_rank * self.microbatch
            for index in range(share.rank, self.accumulation, share.size)
        )
        return [list(range(start, start + self.microbatch)) for start in starts]
