"""How the sequences of one optimizer step are dealt to ranks and microbatches. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.parallel import Parallel
from armillary.parallel.schedules import rows_at_once


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """The global batch of one optimizer step, seen from one data-parallel rank.

    The global positions of a step are dealt in microbatches: the first `microbatch` positions go to
    data rank 0, the next to rank 1, and so on, `accumulation` times over. Which rank computes a
    sequence never changes what the step computes.
    """

    sequences: int
    """Sequences of one optimizer step, over all ranks."""
    microbatch: int
    """Sequences one rank computes at once."""
    data_rank: int
    """This rank's place among the ranks that hold different data."""
    data_size: int
    """How many ranks hold different data."""

    def __post_init__(self) -> None:
        assert self.sequences % (self.microbatch * self.data_size) == 0, self

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
    ) -> StepShape:
        """The shape for a budget; `microbatch` 0 is as large as `parallel`, resolved, allows."""
        sequences = batch_tokens // seq_len
        return cls(
            sequences=sequences,
            microbatch=rows_at_once(parallel, sequences // data_size, microbatch),
            data_rank=data_rank,
            data_size=data_size,
        )

    @property
    def accumulation(self) -> int:
        """Microbatches each rank computes before the optimizer steps."""
        return self.sequences // (self.microbatch * self.data_size)

    def rows(self) -> list[list[int]]:
        """Per microbatch, the offsets within the global step that this rank computes."""
        stride = self.microbatch * self.data_size
        starts = (
            index * stride + self.data_rank * self.microbatch for index in range(self.accumulation)
        )
        return [list(range(start, start + self.microbatch)) for start in starts]
