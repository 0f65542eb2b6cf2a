"""Which activations a block keeps for the backward pass. Importing this module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem


class ActivationCheckpointConfig(Component):
    """Slot: which activations of a block are kept for the backward pass and which recomputed."""

    __slots__ = ()

    def kept(self, block: int) -> tuple[str, ...] | None:
        """Operators whose results block number `block` keeps.

        None keeps everything (no checkpointing); an empty tuple keeps only the block's inputs.
        """
        raise AssertionError("a component of this slot defines kept()")

    @property
    def offloads(self) -> bool:
        """Whether what a block keeps waits for the backward pass in host memory."""
        return False

    @property
    def memory_budget(self) -> float | None:
        """Share of the activations that compiled blocks may keep; None: all that speed asks for."""
        return None

    def problems(self) -> list[Problem]:
        """Values that make no sense."""
        return []


@component("none")
@dataclass(frozen=True, kw_only=True, slots=True)
class NoCheckpoint(ActivationCheckpointConfig):
    """Keeps every activation: fastest, most memory."""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return None


@component("full")
@dataclass(frozen=True, kw_only=True, slots=True)
class Full(ActivationCheckpointConfig):
    """Recomputes every block in the backward pass. (Chen et al. 2016, arXiv 1604.06174)"""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return ()


@component("every-k")
@dataclass(frozen=True, kw_only=True, slots=True)
class EveryK(ActivationCheckpointConfig):
    """Recomputes every k-th block and keeps the others whole."""

    k: int = 2
    """Of how many blocks one is recomputed (blocks)."""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return () if block % self.k == 0 else None

    def problems(self) -> list[Problem]:
        """See `ActivationCheckpointConfig.problems`."""
        if self.k >= 1:
            return []
        return [
            Problem(
                f"activation_checkpoint.k = {self.k} is not a number of blocks",
                allowed="1 or more",
                fix="--activation-checkpoint.k 2",
            )
        ]


COSTLY_OPERATORS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::linear",
    "aten::_grouped_mm",
    "aten::_scaled_mm",
    "aten::_scaled_mm_v2",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",
    "higher_order::flex_attention",
    "armillary::blocked_attention",
    "armillary::partial_attention",
    "armillary::ring_attention",
    "armillary::grouped_by_row",
    "armillary::gather_linear",
    "armillary::linear_scatter",
)
"""Matrix products and attention: nearly all of a block's arithmetic."""


@component("selective")
@dataclass(frozen=True, kw_only=True, slots=True)
class Selective(ActivationCheckpointConfig):
    """Keeps the results of costly operators and recomputes the cheap ones between them.

    (Korthikanti et al. 2022, arXiv 2205.05198)
    """

    save: tuple[str, ...] = COSTLY_OPERATORS
    """Operators whose results are kept, as namespace::name."""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return self.save

    def problems(self) -> list[Problem]:
        """See `ActivationCheckpointConfig.problems`."""
        own = [name for name in self.save if name not in COSTLY_OPERATORS]
        if not own:
            return []
        from armillary.parallel.operators import operator_problems  # it asks torch

        return operator_problems(own)


@component("offload")
@dataclass(frozen=True, kw_only=True, slots=True)
class Offload(ActivationCheckpointConfig):
    """Keeps every activation, in host memory: nothing is recomputed, the bus carries it twice.

    (Rajbhandari et al. 2021, arXiv 2104.07857, section 5.1.3, offloads checkpoints the same way)
    """

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return None

    @property
    def offloads(self) -> bool:
        """See `ActivationCheckpointConfig.offloads`."""
        return True


@component("memory-budget")
@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget(ActivationCheckpointConfig):
    """Lets the compiler choose what to recompute so that a share of the activations is kept.

    The choice is a knapsack over the compiled block's operators; it needs `compile.enabled`.
    (https://pytorch.org/blog/activation-checkpointing-techniques/, "Memory Budget API")
    """

    budget: float = 0.5
    """Share of the activations of an uncheckpointed block, in [0, 1]; 0 recomputes all of it."""

    def kept(self, block: int) -> tuple[str, ...] | None:
        """See `ActivationCheckpointConfig.kept`."""
        return None

    @property
    def memory_budget(self) -> float | None:
        """See `ActivationCheckpointConfig.memory_budget`."""
        return self.budget

    def problems(self) -> list[Problem]:
        """See `ActivationCheckpointConfig.problems`."""
        if 0 <= self.budget <= 1:
            return []
        return [
            Problem(
                f"activation_checkpoint.budget = {self.budget} is no share",
                allowed="0 to 1",
                fix="--activation-checkpoint.budget 0.5",
            )
        ]
