"""A causal language model: embedding, blocks, norm, head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from armillary.models.layers.backends import Visible, backend_for
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Embedding, Head, Output
from armillary.models.layers.initializer import Initializer
from armillary.models.layers.rope import Rope, RotaryTables


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
        """Logits `[B, S, V]` of tokens `[B, S]`, or `output(hidden, head weight)`.

        Args:
            tokens: token ids.
            documents: how rows are packed; None: each row is one document.
            cache: what was read before these tokens; it is extended by them.
            output: function of hidden `[B, S, D]` and weight `[V, D]`, run inside the head.
        """
        rope, visible = self._context(tokens, documents, cache)
        hidden = self.embedding(tokens)
        for name, layer in self.layers.items():
            if cache is None:
                hidden = layer(hidden, rope, visible)
            else:
                hidden = layer(hidden, rope, visible, cache.layers[name])
        logits: Tensor = self.head(self.norm(hidden), output)
        return logits

    def _context(
        self, tokens: Tensor, documents: Documents | None, cache: KeyValueCache | None
    ) -> tuple[RotaryTables, Visible]:
        """Rotary tables and visible keys of this pass, shared by all blocks."""
        if cache is not None:
            positions, mask = cache.extend(tokens, documents)
            return self.rope.tables(positions), mask
        if documents is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            positions = documents.positions
        backend = backend_for(self.attention, tokens.device.type, self.rope.head_dim)
        return self.rope.tables(positions), backend.prepare(documents, tokens)

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
