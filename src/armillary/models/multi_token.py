"""Multi-token prediction: one more block that learns the token after the next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from armillary.models.decoder import Decoder
from armillary.models.layers.backends import Visible
from armillary.models.layers.block import Block
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Output
from armillary.models.layers.linear import Linear
from armillary.models.layers.rope import RotaryTables


class AheadBlock(nn.Module):
    """From the decoder's hidden state at a token, and the token after it, one token further.

    h' = block(W [norm(h_i); norm(embedding(t_{i+1}))]), normalised for the head that both share.
    (DeepSeek-V3, arXiv 2412.19437, section 2.2, eq. 21-23, depth 1)
    """

    def __init__(
        self,
        *,
        hidden_norm: nn.Module,
        embedding_norm: nn.Module,
        projection: Linear,
        block: Block,
        norm: nn.Module,
    ) -> None:
        super().__init__()
        self.hidden_norm = hidden_norm
        self.embedding_norm = embedding_norm
        self.projection = projection
        self.attention_norm = block.attention_norm
        self.attention = block.attention
        self.feed_forward_norm = block.feed_forward_norm
        self.feed_forward = block.feed_forward
        self.norm = norm

    @property
    def window(self) -> int | None:
        """See `Block.window`."""
        core = getattr(self.attention, "core", None)
        window: int | None = getattr(core, "window", None)
        return window

    def forward(
        self, hidden: Tensor, following: Tensor, rope: RotaryTables, visible: Visible
    ) -> Tensor:
        """Hidden `[B, S, D]` and embeddings `[B, S, D]` of the next tokens -> `[B, S, D]`."""
        both = torch.cat((self.hidden_norm(hidden), self.embedding_norm(following)), dim=-1)
        x: Tensor = self.projection(both)
        x = x + self.attention(self.attention_norm(x), rope, visible)
        x = x + self.feed_forward(self.feed_forward_norm(x))
        out: Tensor = self.norm(x)
        return out


class MultiTokenDecoder(Decoder):
    """A decoder that, in training, predicts the next token and the one after it.

    The last of `layers` is the `AheadBlock`; it shares embedding and head with the main model and
    serves in training only, where `output` gets hidden states `[2 B, S, D]`: those of the main
    model, then those that look one token further ahead. What they see past the end of a document
    or row is the task's to ignore.
    """

    def __init__(self, *, layers: Sequence[nn.Module], ahead: AheadBlock, **parts: Any) -> None:
        super().__init__(layers=[*layers, ahead], **parts)

    def forward(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        cache: KeyValueCache | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """See `Decoder.forward`; in training `output` gets twice as many rows."""
        training = self.training and torch.is_grad_enabled()
        if output is None or cache is not None or not training:
            return super().forward(tokens, documents, cache=cache, output=output)
        context = self.context(tokens, documents)
        both = self.embedding(torch.cat((tokens, tokens.roll(-1, dims=1))))
        embedded, following = both.chunk(2)
        hidden = self.run(embedded, context)
        *_, ahead = self.layers.values()
        visible = context.visible[getattr(ahead, "window", None)]
        further = ahead(hidden, following, context.rope, visible)
        result: Tensor = self.head(torch.cat((self.norm(hidden), further)), output)
        return result

    def main_layers(self) -> Iterable[tuple[str, nn.Module]]:
        """See `Decoder.main_layers`: all but the last."""
        *main, _ = self.layers.items()
        return main
