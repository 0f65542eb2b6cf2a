"""A checkpoint into the tensors of all ranks. What one cannot read, all report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from armillary.checkpoint.find import Found
from armillary.checkpoint.manifest import STATE_NAME, data_prefix, rng_name
from armillary.checkpoint.ranks import Failure, Ranks
from armillary.checkpoint.tensors import (
    Stored,
    held_by_all,
    read_tensors,
    require_match,
    stored_tensors,
)
from armillary.foundation.errors import Problem, RunError
from armillary.foundation.strict_json import parse_json


def stored_for_all(found: Found, ranks: Ranks) -> dict[str, Stored]:
    """The tensors in a checkpoint, on every rank; rank 0 alone reads the index, which is large.

    Raises:
        UserError: the index is not one of ours.
        RunError: it could not be read.
    """
    return ranks.on_main(lambda: stored_tensors(found.place, found.folder))


def load_tensors(
    found: Found,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    *,
    ignore: tuple[str, ...] = (),
    any_dtype: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Fills tensors in place; every rank calls it alike, for what it holds.

    Args:
        found: the checkpoint.
        tensors: what to fill, by their names in it.
        ranks: all that load.
        ignore: beginnings of names that may stay unread.
        any_dtype: values are converted where dtypes differ.
        check: called between reads and may raise to end them, on all ranks.

    Raises:
        UserError: names, shapes or dtypes differ; nothing was loaded.
        RunError: a file could not be read.
    """
    stored = stored_for_all(found, ranks)
    require_match(found.path, held_by_all(tensors, ranks), stored, ignore, any_dtype=any_dtype)
    read_tensors(found.place, found.folder, tensors, ranks, stored, check=check)


def load_rest(found: Found, ranks: Ranks) -> tuple[dict[str, Any], bytes | None]:
    """The scalars of a checkpoint and this rank's random states; every rank calls it alike.

    Raises:
        RunError: a file could not be read.
    """
    own = rng_name(ranks.rank)
    has_own = data_prefix(found.manifest) + own in found.manifest["files"]

    def read_scalars() -> dict[str, Any]:
        scalars = parse_json(found.place.read(f"{found.folder}/{STATE_NAME}"))
        if not isinstance(scalars, dict):
            raise ValueError(f"{STATE_NAME} is not an object")
        return scalars

    def read_own() -> bytes | None:
        return found.place.read(f"{found.folder}/{own}") or None if has_own else None

    try:
        return ranks.on_main(read_scalars), ranks.together(read_own)[ranks.rank]
    except Failure as failure:
        raise RunError(Problem(f"cannot read checkpoint {found.path}: {failure}")) from failure
