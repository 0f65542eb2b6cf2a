"""The slot "model": what every model's configuration answers. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from armillary.foundation.component import Component
from armillary.foundation.errors import Problem

if TYPE_CHECKING:
    from armillary.models.decoder import Decoder


class Refusal(NamedTuple):
    """Why a model cannot be split along an axis."""

    reason: str
    """Follows `cannot be had: `."""
    fix: str | None = None
    """The option that makes another model of it, one that can."""


class ModelConfig(Component, ABC):
    """A model as data: it can be counted and priced without being built."""

    __slots__ = ()

    vocab_size: int

    @abstractmethod
    def build(self) -> Decoder:
        """The module on the current default device (`torch.device("meta")` touches no memory)."""

    @abstractmethod
    def parameter_count(self) -> int:
        """Parameters, a tied one counted once. Arithmetic only."""

    @abstractmethod
    def flops_breakdown(self, seq_len: int, *, causal: bool) -> dict[str, float]:
        """Floating point operations of training on one token, by layer kind.

        Args:
            seq_len: tokens of a row.
            causal: count the scores that causal attention needs, half of all; else all of them.
        """

    def flops_per_token(self, seq_len: int, *, causal: bool) -> float:
        """Sum of `flops_breakdown`: forward and backward, recomputation not counted."""
        return sum(self.flops_breakdown(seq_len, causal=causal).values())

    @abstractmethod
    def problems(self, seq_len: int) -> list[Problem]:
        """What is inconsistent, all at once; empty if rows of `seq_len` tokens can be trained."""

    def divisors(self) -> dict[str, dict[str, int]]:
        """By parallel axis, the fields that its degree must divide, as {field: value}.

        Axes: tp, ulysses (context parallelism by heads, after tp), ep, expert_tp. For pp the value
        is the most stages there can be.
        """
        return {}

    def refusals(self) -> dict[str, Refusal]:
        """By parallel axis, why this model cannot be split along it; empty: along all of them."""
        return {}

    def device_problems(self, device_type: str, compute_dtype: str = "bfloat16") -> list[Problem]:
        """What keeps the model from being trained on such a device; needs torch to ask it.

        Args:
            device_type: cpu, cuda, ...
            compute_dtype: see `Precision.compute`.
        """
        return []
