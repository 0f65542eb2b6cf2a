"""The recipe's own parts: how long to train, what to look at, what to write at the end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """How much to train. One of `steps` and `tokens` is set; setting one unsets the other."""

    ALTERNATIVES: ClassVar[tuple[tuple[str, ...], ...]] = (("steps", "tokens"),)
    """Fields that exclude each other: an override of one sets the others to none."""

    steps: int | None = None
    """Optimizer steps of the whole run."""
    tokens: float | None = None
    """Tokens of the whole run, rounded up to whole steps."""
    batch_tokens: int = 4096
    """Tokens of one optimizer step over all ranks; a multiple of seq_len."""
    seq_len: int = 256
    """Tokens of one sequence."""
    microbatch_sequences: int = 0
    """Sequences that a rank computes at once; 0: its whole share of the step, or with a pipeline
    as many as leave its schedule enough microbatches."""
    uneven: bool = False
    """Whether a step may be padded with rows that weigh nothing where the ranks, or microbatches of
    at most `microbatch_sequences`, cannot share its sequences evenly; else that is refused."""

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self.steps is not None:
            return self.steps
        assert self.tokens is not None, "a recipe without problems has steps or tokens"
        return math.ceil(Fraction(self.tokens) / self.batch_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """Looks at held-out documents, during the run and at its end."""

    every: int = 0
    """Steps between two looks; 0: only at the end."""
    sequences: int = 64
    """Rows' worth of tokens that a look during the run reads, in sequences; 0: all there is."""
    final_sequences: int = 0
    """The same for the look at the end; 0: all there is."""
    final_stride: int = 0
    """Tokens between windows of a long document at the end, fewer is more context; 0: seq_len."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Text written by the model at the end of the run."""

    prompts: tuple[str, ...] = ()
    """Beginnings to go on from; none: nothing is written."""
    tokens: int = 64
    """Tokens written for each prompt, at most."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
