"""Weights into a model in its place: every rank reads the boxes that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from armillary.checkpoint.hugging_face.source import Source, narrowed, pieces_of
from armillary.checkpoint.hugging_face.table import Difference, shapes_of
from armillary.checkpoint.hugging_face.weights import Weights
from armillary.checkpoint.ranks import Failure, Ranks
from armillary.checkpoint.state import Model, gather_state
from armillary.checkpoint.tensors import Piece, held_by_all
from armillary.checkpoint.tensors import pieces_of as held_pieces
from armillary.foundation.errors import Problem, RunError, UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a load has done."""

    bytes_read: tuple[int, ...]
    """By each rank."""
    fresh: tuple[str, ...]
    """Names of the model that kept their first values."""


def load_weights(
    model: Model,
    weights: Weights,
    ranks: Ranks,
    *,
    is_new: Callable[[str], bool] = lambda name: False,
    check: Callable[[], None] = lambda: None,
) -> Loaded:
    """Fills a model, on whatever mesh; every rank calls it alike. dtypes may differ.

    Args:
        model: what each rank holds of it.
        weights: of the plain model.
        ranks: all of them.
        is_new: whether the model may have a name that the weights lack, which then stays as it is.
        check: called between reads; may raise to leave, with the model half filled.

    Raises:
        UserError: names or shapes differ; nothing was loaded.
        RunError: a rank could not read.
    """
    held = gather_state(model)["model"]
    everywhere = held_by_all(held, ranks)
    wanted = {name: tuple(stored.shape) for name, stored in everywhere.items()}
    found = shapes_of(weights.sources)
    fresh = tuple(name for name in wanted if name not in found and is_new(name))
    _require_match(weights.address, wanted, found, fresh)
    before = weights.tally.bytes_read

    def read_own() -> int:
        for piece in held_pieces({n: t for n, t in held.items() if n not in fresh}):
            _fill(piece, weights.sources[piece.name], check)
        return weights.tally.bytes_read - before

    try:
        counts = ranks.together(read_own)
    except Failure as failure:
        raise RunError(Problem(f"cannot read {weights.address}: {failure}")) from failure
    return Loaded(bytes_read=tuple(counts), fresh=fresh)


def _require_match(
    address: str,
    wanted: dict[str, tuple[int, ...]],
    found: dict[str, tuple[int, ...]],
    fresh: Collection[str],
) -> None:
    old = {name: shape for name, shape in wanted.items() if name not in fresh}
    lines = Difference.between(old, found).lines()
    if lines:
        fix = "take the model from the recipe.toml or config.json beside the weights"
        raise UserError([Problem(f"{address} {line}", None, fix) for line in lines])


@torch.no_grad()
def _fill(piece: Piece, source: Source, check: Callable[[], None]) -> None:
    sizes = zip(piece.offset, piece.data.shape, strict=True)
    box = tuple((start, start + size) for start, size in sizes)
    for part in pieces_of(box, max(source.dtype.itemsize, piece.data.element_size())):
        check()
        here = tuple((s - o, e - o) for (s, e), o in zip(part, piece.offset, strict=True))
        narrowed(piece.data, here).copy_(source.read(part))
