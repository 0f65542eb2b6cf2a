"""The pass that lets the ranks of `cp` share the tokens of each row.

Everything but attention treats tokens one by one, so only the cores of attention change: how a
query reaches the keys of other ranks is one of three ways, see `gathered`, `ring`, `ulysses`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from armillary.models.layers.attention_core import AttentionCore
from armillary.models.layers.backends import BACKENDS, Visible, backend_for
from armillary.models.layers.cache import LayerCache
from armillary.models.layers.documents import Documents
from armillary.parallel.collectives import group_name
from armillary.parallel.context import gathered, ring, ulysses
from armillary.parallel.context.balance import head_tail, indices_by_rank
from armillary.parallel.context.gathered import GatheredSight, block_mask
from armillary.parallel.context.ring import RingSight
from armillary.parallel.context.ulysses import UlyssesSight
from armillary.parallel.mesh import Mesh

Sight = GatheredSight | RingSight | UlyssesSight
Prepare = Callable[[Documents | None, Tensor, int | None], Visible]


def split_context(model: nn.Module, mesh: Mesh) -> None:
    """Lets attention see the tokens of all ranks of `cp`, each of which brings its own.

    In place; after expert and tensor parallelism, whose heads it takes as they are, and before
    activation checkpointing, which repeats the exchange too. Batches come from `shard_batch`; with
    whole rows (no `indices` in the documents: generation) every rank computes all of them.
    """
    if mesh.degree("cp") == 1:
        return
    cores = [module for module in model.modules() if isinstance(module, AttentionCore)]
    if not cores:
        return  # a stage of a pipeline without blocks
    for core in cores:
        _replace(core, "forward", types.MethodType(_forward, core))
    width = min(core.head_dim for core in cores)
    _replace(model, "prepare", _Preparation(model.prepare, mesh, width))


def _replace(module: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Gives one instance another method."""
    module.__dict__[name] = function


def _forward(  # noqa: PLR0917 - the signature that it stands in for
    core: AttentionCore,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Any,
    cache: LayerCache | None = None,
) -> Tensor:
    """`AttentionCore.forward`, of the tokens that are here."""
    if isinstance(visible, GatheredSight):
        return gathered.attend(core, query, key, value, visible)
    if isinstance(visible, RingSight):
        return ring.attend(core, query, key, value, visible)
    if isinstance(visible, UlyssesSight):
        return ulysses.attend(core, query, key, value, visible)
    return type(core).forward(core, query, key, value, visible, cache)


@dataclass(frozen=True, eq=False, slots=True)
class _Preparation:
    """What stands in for `Decoder.prepare`."""

    whole_rows: Any
    """The method itself."""
    mesh: Mesh
    head_width: int
    """P of the narrowest head."""

    def __call__(
        self, documents: Documents | None, tokens: Tensor, window: int | None
    ) -> Visible | Sight:
        """What queries at tokens `[B, S / R]` see through a window."""
        if documents is None or documents.indices is None:
            visible: Visible = self.whole_rows(documents, tokens, window)
            return visible
        group = group_name(self.mesh.group("cp"))
        assert group is not None, "ranks of cp have a group"
        seen = documents if window is None else documents.within(window)
        kind = self.mesh.parallel.context
        if kind == "ulysses":
            return self._ulysses(documents.whole(), window, group)
        length = sum(documents.lengths[0])
        if kind == "ring":
            return RingSight(seen.starts, self._indices(length, tokens.device), group)
        return self._gathered(seen, documents.indices, length, group)

    def _indices(self, length: int, device: torch.device) -> Tensor:
        parallel = self.mesh.parallel
        return indices_by_rank(length, parallel.cp, head_tail=head_tail(parallel), device=device)

    def _ulysses(self, rows: Documents, window: int | None, group: str) -> UlyssesSight:
        return UlyssesSight(
            whole=self.whole_rows(rows, rows.positions, window),
            rank=self.mesh.coordinate("cp"),
            ranks=self.mesh.degree("cp"),
            group=group,
        )

    def _gathered(self, seen: Documents, indices: Tensor, length: int, group: str) -> GatheredSight:
        device = seen.starts.device.type
        fused = (
            device == "cuda" and backend_for("auto", device, self.head_width) is BACKENDS["flex"]
        )
        return GatheredSight(
            starts=seen.starts,
            query_index=indices,
            key_index=torch.arange(length, device=seen.starts.device),
            mask=block_mask(seen.starts, indices, length) if fused else None,
            ranks=self.mesh.degree("cp"),
            head_tail=head_tail(self.mesh.parallel),
            group=group,
        )
