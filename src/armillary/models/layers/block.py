"""One layer of a decoder."""

from __future__ import annotations

from torch import Tensor, nn

from armillary.models.layers.backends import Visible
from armillary.models.layers.cache import LayerCache
from armillary.models.layers.rope import RotaryTables


class Block(nn.Module):
    """Attention, then feed-forward, each normalised before and added to the residual stream."""

    def __init__(
        self,
        *,
        attention_norm: nn.Module,
        attention: nn.Module,
        feed_forward_norm: nn.Module,
        feed_forward: nn.Module,
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.feed_forward_norm = feed_forward_norm
        self.feed_forward = feed_forward

    @property
    def window(self) -> int | None:
        """Keys that a query of this block sees at most; None: all before it."""
        core = getattr(self.attention, "core", None)
        window: int | None = getattr(core, "window", None)
        return window

    def forward(
        self, x: Tensor, rope: RotaryTables, visible: Visible, cache: LayerCache | None = None
    ) -> Tensor:
        """x `[B, S, D]` -> `[B, S, D]`."""
        x = x + self.attention(self.attention_norm(x), rope, visible, cache)
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out
