"""Factors of a low rank beside a weight, trained in its place.

x (W + s B A)ᵀ with A `[r, I]` and B `[O, r]`, for W `[O, I]`. (Hu et al. 2021, arXiv 2106.09685,
section 4.1) B starts as zeros, so that the model starts as it was.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from armillary.models.layers.initializer import ZEROS, Initializer, truncated_normal


class LowRank(NamedTuple):
    """The factors of one weight, or of a stack of them."""

    a: Tensor
    """`[..., r, I]`."""
    b: Tensor
    """`[..., O, r]`."""
    scale: float

    def linear(self, x: Tensor) -> Tensor:
        """x `[..., I]` -> s x Aᵀ Bᵀ `[..., O]`, computed in the dtype of x."""
        return F.linear(F.linear(x, self.a.to(x.dtype)) * self.scale, self.b.to(x.dtype))


class WithLowRank(nn.Module):
    """A module whose weights may have low-rank factors beside them, as parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.low_rank_scales: dict[str, float] = {}
        """s, by the attribute of each weight that has factors."""

    def add_low_rank(self, attribute: str, *, rank: int, scale: float) -> None:
        """Puts factors beside the weight `[..., O, I]` that is called so."""
        weight = self.get_parameter(attribute)
        *stack, outputs, inputs = weight.shape
        a, b = factor_names(attribute)
        self.register_parameter(a, nn.Parameter(weight.new_empty(*stack, rank, inputs)))
        self.register_parameter(b, nn.Parameter(weight.new_empty(*stack, outputs, rank)))
        self.low_rank_scales[attribute] = scale

    def remove_low_rank(self, attribute: str) -> None:
        """Takes the factors of a weight away."""
        del self.low_rank_scales[attribute]
        for name in factor_names(attribute):
            delattr(self, name)

    def low_rank(self, attribute: str) -> LowRank | None:
        """The factors beside a weight; None: there are none."""
        scale = self.low_rank_scales.get(attribute)
        if scale is None:
            return None
        a, b = factor_names(attribute)
        return LowRank(getattr(self, a), getattr(self, b), scale)

    def low_rank_initializers(self) -> dict[str, Initializer]:
        """How the factors start, by their names.

        A has the variance of a uniform distribution within 1 / sqrt(I), which is what the paper's
        own code (github.com/microsoft/LoRA) draws from, so that published rates can be kept.
        """
        found: dict[str, Initializer] = {}
        for attribute in self.low_rank_scales:
            a, b = factor_names(attribute)
            inputs = self.get_parameter(attribute).shape[-1]
            found |= {a: truncated_normal(1 / math.sqrt(3 * inputs)), b: ZEROS}
        return found


def factor_names(weight: str) -> tuple[str, str]:
    """Names of A and B of the weight of this name: `lora_a` beside `weight`, else `NAME_lora_a`."""
    path, dot, attribute = weight.rpartition(".")
    prefix = f"{path}{dot}" if attribute == "weight" else f"{weight}_"
    return f"{prefix}lora_a", f"{prefix}lora_b"


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is one of the low-rank factors."""
    return name.endswith(("lora_a", "lora_b"))
