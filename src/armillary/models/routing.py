"""How a mixture of experts chooses, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from armillary.foundation.divisors import divisors, listed
from armillary.foundation.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """Scores, choice and balance of a token-choice router."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become scores of experts, in fp32."""
    normalize: bool = True
    """Whether the weights of a token's chosen experts are divided by their sum. With softmax that
    is the softmax over the chosen logits alone."""
    scale: float = 1.0
    """Factor of the weights of the chosen experts."""
    n_groups: int = 1
    """Groups of neighbouring experts, of which a token may use a few only; 1: off."""
    n_top_groups: int = 1
    """Groups that a token may use."""
    group_score: Literal["top-2", "max"] = "top-2"
    """Score of a group: sum of its two largest (DeepSeek-V3), or its largest (DeepSeek-V2)."""
    bias: bool = False
    """Whether logits have a learned bias."""
    balance_rate: float = 0.0
    """What is added to, or taken from, an expert's selection bias after each step so that loads
    become even; 0: there is no such bias."""
    sequence_loss: float = 0.0
    """Coefficient of the auxiliary loss that evens loads within each row; 0: off."""
    z_loss: float = 0.0
    """Coefficient of the squared logarithm of the softmax's denominator; 0: off."""

    def problems(self, n_experts: int, n_active: int) -> list[Problem]:
        """What is inconsistent, for so many experts of which a token uses so many."""
        found = [
            Problem(f"model.router.{name} = {getattr(self, name)} is out of range", allowed)
            for name, right, allowed in (
                ("scale", self.scale > 0, "numbers above 0"),
                ("balance_rate", self.balance_rate >= 0, "0 (off) and up"),
                ("sequence_loss", self.sequence_loss >= 0, "0 (off) and up"),
                ("z_loss", self.z_loss >= 0, "0 (off) and up"),
                ("n_groups", self.n_groups >= 1, "numbers from 1"),
            )
            if not right
        ]
        if self.n_groups < 1 or n_experts < 1:
            return found
        if n_experts % self.n_groups:
            message = f"model.router.n_groups = {self.n_groups} does not divide the experts"
            allowed = listed(divisors(n_experts))
            found.append(Problem(f"{message}, model.n_experts = {n_experts}", allowed))
            return found
        per_group = n_experts // self.n_groups
        least = -(-n_active // per_group)
        if not least <= self.n_top_groups <= self.n_groups:
            message = f"model.router.n_top_groups = {self.n_top_groups} is out of range"
            found.append(Problem(message, f"{least} to {self.n_groups}"))
        if self.n_groups > 1 and self.group_score == "top-2" and per_group < 2:
            message = "model.router.group_score = top-2 needs groups of two experts or more"
            found.append(Problem(message, "max", "--model.router.group-score max"))
        return found
