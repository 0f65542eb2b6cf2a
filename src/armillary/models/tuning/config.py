"""The slot "tuning": which weights a run moves. Imports no torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from armillary.foundation.component import Component, component
from armillary.foundation.errors import Problem

if TYPE_CHECKING:
    from armillary.models.decoder import Decoder

Scaling = Literal["alpha-over-rank", "rank-stabilised"]

TARGETS = ("*.attention.*", "*.feed_forward.*")
"""Matrices of attention and feed-forward, experts among them."""


class TuningConfig(Component, ABC):
    """Which weights a run moves."""

    __slots__ = ()

    @abstractmethod
    def problems(self) -> list[Problem]:
        """What is wrong with the values, whatever the model."""

    @abstractmethod
    def apply(self, model: Decoder) -> None:
        """Says of each parameter whether it is trained, and adds what is trained beside them.

        In place, on a whole model before any pass, on `meta` as a rule.

        Raises:
            UserError: a pattern matches nothing, or nothing would be trained.
        """

    @property
    def low_rank_scale(self) -> float | None:
        """s of the low-rank factors that are added beside weights; None: none are."""
        return None


@component("full")
@dataclass(frozen=True, kw_only=True, slots=True)
class Full(TuningConfig):
    """The weights themselves are trained: all of them, or all but some."""

    frozen: tuple[str, ...] = ()
    """Shell-style patterns of the parameters that keep their values."""

    def problems(self) -> list[Problem]:
        """See `TuningConfig.problems`."""
        return []

    def apply(self, model: Decoder) -> None:
        """See `TuningConfig.apply`."""
        from armillary.models.tuning.freezing import freeze

        freeze(model, self.frozen)


@component("lora")
@dataclass(frozen=True, kw_only=True, slots=True)
class LoRA(TuningConfig):
    """Weights keep their values; beside each target W, factors of a low rank are trained.

    y = x (W + s B A)ᵀ, with A `[rank, inputs]` and B `[outputs, rank]`, which is zeros at first.
    (Hu et al. 2021, arXiv 2106.09685, section 4.1)
    """

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """Numerator of the factors' scale s."""
    scaling: Scaling = "alpha-over-rank"
    """s: alpha / rank, or (rank-stabilised) alpha / sqrt(rank), with which the best learning rate
    does not move with the rank (Kalajdzievski 2023, arXiv 2312.03732)."""
    targets: tuple[str, ...] = TARGETS
    """Shell-style patterns of the matrices that get factors: names of linear layers
    (`layers.0.attention.query`) and of experts' weights (`layers.0.feed_forward.experts.gate`)."""
    trained: tuple[str, ...] = ()
    """Shell-style patterns of further parameters, which are trained themselves."""

    def problems(self) -> list[Problem]:
        """See `TuningConfig.problems`."""
        checks = (
            ("rank", self.rank, self.rank >= 1, "1 or more", "16"),
            ("alpha", self.alpha, 0 < self.alpha < math.inf, "a number above 0", "32"),
            (
                "scaling",
                self.scaling,
                self.scaling in get_args(Scaling),
                ", ".join(get_args(Scaling)),
                get_args(Scaling)[0],
            ),
            ("targets", list(self.targets), bool(self.targets), "one pattern or more", None),
        )
        return [
            Problem(
                f"tuning.{name} = {value} is out of range",
                allowed,
                None if good is None else f"--tuning.{name} {good}",
            )
            for name, value, right, allowed, good in checks
            if not right
        ]

    def apply(self, model: Decoder) -> None:
        """See `TuningConfig.apply`."""
        from armillary.models.tuning.freezing import add_low_rank

        add_low_rank(
            model,
            rank=self.rank,
            scale=self.low_rank_scale,
            targets=self.targets,
            trained=self.trained,
        )

    @property
    def low_rank_scale(self) -> float:
        """See `TuningConfig.low_rank_scale`."""
        stabilised = self.scaling == "rank-stabilised"
        return self.alpha / (math.sqrt(self.rank) if stabilised else self.rank)
