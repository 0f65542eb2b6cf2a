"""Whether a checkpoint and a model have the same tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.tensors.index import Stored
from armillary.foundation.errors import Problem, UserError

_NAMES_SHOWN = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """What a checkpoint and a model do not have in common; nothing, if all is empty."""

    missing: tuple[str, ...] = ()
    """Names that the model has and the checkpoint lacks."""
    unexpected: tuple[str, ...] = ()
    """Names that the checkpoint has and the model has no place for."""
    shapes: tuple[str, ...] = ()
    """Names of both whose shapes differ."""
    dtypes: tuple[str, ...] = ()
    """Names of both whose dtypes differ."""
    described: Mapping[str, str]
    """Of those of other shapes or dtypes: both of them, for people."""

    def lines(self, most: int = _NAMES_SHOWN) -> list[str]:
        """One line for each kind that there is: what it is, and the names, `most` at most."""
        kinds = {
            "lacks tensors that this recipe needs": self.missing,
            "holds tensors that this recipe has no place for": self.unexpected,
            "holds tensors of other shapes": self.shapes,
            "holds tensors of other dtypes": self.dtypes,
        }
        return [f"{what}: {self._names(names, most)}" for what, names in kinds.items() if names]

    def _names(self, names: tuple[str, ...], most: int) -> str:
        shown = ", ".join(name + self.described.get(name, "") for name in names[:most])
        return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def compare(
    wanted: Mapping[str, Stored], stored: Mapping[str, Stored], ignore: tuple[str, ...] = ()
) -> Differences:
    """Compares names, shapes and dtypes both ways.

    Args:
        wanted: what all ranks together want, see `held_by_all`.
        stored: what the checkpoint has.
        ignore: beginnings of names that may stay unread.
    """
    both = [name for name in wanted if name in stored]
    shapes = {
        name: f" (checkpoint {list(stored[name].shape)}, model {list(wanted[name].shape)})"
        for name in both
        if stored[name].shape != wanted[name].shape
    }
    dtypes = {
        name: f" (checkpoint {stored[name].dtype}, model {wanted[name].dtype})"
        for name in both
        if stored[name].dtype != wanted[name].dtype and name not in shapes
    }
    return Differences(
        missing=tuple(name for name in wanted if name not in stored),
        unexpected=tuple(n for n in stored if n not in wanted and not n.startswith(ignore)),
        shapes=tuple(shapes),
        dtypes=tuple(dtypes),
        described=shapes | dtypes,
    )


def require_match(
    address: str,
    wanted: Mapping[str, Stored],
    stored: Mapping[str, Stored],
    ignore: tuple[str, ...] = (),
    *,
    any_dtype: bool = False,
) -> None:
    """Checks names, shapes and dtypes both ways; see `compare`.

    Args:
        address: of the checkpoint, for people.
        wanted: see `compare`.
        stored: see `compare`.
        ignore: see `compare`.
        any_dtype: values are converted where dtypes differ.

    Raises:
        UserError: one problem for each kind of mismatch, naming the tensors.
    """
    found = compare(wanted, stored, ignore)
    if any_dtype:
        found = replace(found, dtypes=())
    problems = [
        Problem(
            f"checkpoint {address} {line}",
            "the model and optimizer that the checkpoint was written with",
            "take the model and optimizer from the recipe.toml of its run, or --resume never",
        )
        for line in found.lines()
    ]
    if problems:
        raise UserError(problems)


def held_by_all(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Stored]:
    """Names, global shapes and dtypes of the tensors that any rank holds, on every rank.

    Stages of a pipeline hold different ones; of ranks that hold the same, one speaks.
    """
    own = {name: Stored(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    digest = hashlib.sha256(repr(sorted((n, s.shape, s.dtype) for n, s in own.items())).encode())
    digests = ranks.together(digest.hexdigest)
    speaks = digests.index(digests[ranks.rank]) == ranks.rank
    tables = ranks.together(lambda: own if speaks else {})
    return {name: stored for table in tables for name, stored in table.items()}
