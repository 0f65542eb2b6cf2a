"""One row of a family's table of published sizes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from armillary.foundation.errors import Problem, UserError, nearest

Row = TypeVar("Row")


class Size(NamedTuple):
    """What differs between the sizes of a family."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    tied_embeddings: bool

    def fields(self) -> dict[str, Any]:
        """The size as fields of a `DenseDecoder`."""
        return self._asdict()


def named(family: str, name: str, table: Mapping[str, Row]) -> Row:
    """The row called `name`.

    Raises:
        UserError: the family has no such size.
    """
    if name in table:
        return table[name]
    close = nearest(name, table)
    fix = f'{family}("{close}")' if close else None
    raise UserError(Problem(f"{family} has no size {name!r}", ", ".join(table), fix))
