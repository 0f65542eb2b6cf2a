"""A causal language model: embedding, blocks, norm, head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from armillary.models.layers.backends import Visible, backend_for
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Embedding, Head, Output
from armillary.models.layers.initializer import Initializer
from armillary.models.layers.rope import Rope, RotaryTables


@dataclass(frozen=True, slots=True)
class DecoderContext:
    """What all blocks of one forward pass share."""

    rope: RotaryTables
    visible: Mapping[int | None, Visible]
    """Which keys each query sees, by the window of the block."""


class Decoder(nn.Module):
    """Any stack of blocks with the signature of `layers.block.Block`, between tokens and logits.

    Plain single-device PyTorch. Positions and visibility come from `Documents` alone and are made
    once per forward pass; nothing here waits for the device.
    """

    def __init__(
        self,
        *,
        embedding: Embedding,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        head: Head,
        rope: Rope,
        head_width: int,
        max_seq_len: int,
        tied_embeddings: bool = False,
        attention: str = "auto",
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})
        self.norm = norm
        self.head = head
        if tied_embeddings:
            self.head.weight = self.embedding.weight
        self.rope = rope
        self.head_width = head_width
        """P of queries and keys, of which `rope` may rotate a part only."""
        self.attention = attention
        self.max_seq_len = max_seq_len

    def forward(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        cache: KeyValueCache | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """Logits `[B, S, V]` of tokens `[B, S]`, or `output(hidden, head)`.

        Args:
            tokens: token ids.
            documents: how rows are packed; None: each row is one document.
            cache: what was read before these tokens; it is extended by them.
            output: function of hidden `[B, S, D]` and the head, run inside the head.
        """
        context = self.context(tokens, documents, cache)
        hidden = self.run(self.embedding(tokens), context, cache)
        logits: Tensor = self.head(self.norm(hidden), output)
        return logits

    def run(
        self, hidden: Tensor, context: DecoderContext, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Hidden `[B, S, D]` through the main layers that are here."""
        for name, layer in self.main_layers():
            visible = context.visible[getattr(layer, "window", None)]
            if cache is None:
                hidden = layer(hidden, context.rope, visible)
            else:
                hidden = layer(hidden, context.rope, visible, cache.layers[name])
        return hidden

    def main_layers(self) -> Iterable[tuple[str, nn.Module]]:
        """Layers, by name, that lead from tokens to the next one: all of them."""
        return self.layers.items()

    def context(
        self, tokens: Tensor, documents: Documents | None, cache: KeyValueCache | None = None
    ) -> DecoderContext:
        """Rotary tables and visible keys of this pass, made once for all blocks."""
        windows = {getattr(layer, "window", None) for layer in self.layers.values()}
        if cache is not None:
            positions, masks = cache.extend(tokens, documents, windows)
            return DecoderContext(self.rope.tables(positions), masks)
        if documents is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            positions = documents.positions
        visible = {window: self.prepare(documents, tokens, window) for window in windows}
        return DecoderContext(self.rope.tables(positions), visible)

    def prepare(self, documents: Documents | None, tokens: Tensor, window: int | None) -> Visible:
        """What queries at tokens `[B, S]` see, in the form the attention backend reads."""
        if window is not None:
            documents = documents or Documents.whole_rows(tokens)
            documents = documents.within(window)
        backend = backend_for(self.attention, tokens.device.type, self.head_width)
        return backend.prepare(documents, tokens)

    def initializers(self) -> dict[str, Initializer]:
        """How each parameter starts, by its name; a tied weight starts as the embedding does.

        Raises:
            TypeError: a module holds parameters and does not say how they start.
        """
        owners: dict[str, Initializer] = {}
        for prefix, module in self.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if own and not hasattr(module, "initializers"):
                raise TypeError(f"{prefix} ({type(module).__name__}) needs initializers()")
            if own:
                declared = module.initializers()
                owners |= {f"{prefix}.{name}": declared[name] for name in own}
        return {name: owners[name] for name, _ in self.named_parameters()}
