"""W + s B A in the place of W: a tuned model as a plain one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from armillary.models.layers.low_rank import WithLowRank, factor_names, is_factor

Box = tuple[tuple[int, int], ...]


class Readable(Protocol):
    """A tensor that lies somewhere, of which boxes are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its values as `read` gives them."""

    def read(self, box: Box) -> Tensor:
        """The values in a box: of each dim, the indices [start, end)."""


@dataclass(frozen=True, slots=True)
class Merged:
    """A weight `[..., O, I]` with the product of its factors added, where it is read."""

    weight: Readable
    a: Readable
    """`[..., r, I]`."""
    b: Readable
    """`[..., O, r]`."""
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """See `Readable.shape`."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """See `Readable.dtype`."""
        return self.weight.dtype

    def read(self, box: Box) -> Tensor:
        """See `Readable.read`; of the factors too, only what the box needs is read."""
        *stack, outputs, inputs = box
        rank = (0, self.a.shape[-2])
        a = self.a.read((*stack, rank, inputs))
        b = self.b.read((*stack, outputs, rank))
        return merged(self.weight.read(box), a, b, self.scale)


def merged_sources(sources: Mapping[str, Readable], scale: float | None) -> dict[str, Readable]:
    """The tensors of a tuned model as those of the plain one: names without factors.

    Args:
        sources: by name.
        scale: `TuningConfig.low_rank_scale` of the recipe; None: nothing is changed.
    """
    if scale is None:
        return dict(sources)
    found: dict[str, Readable] = {}
    for name, source in sources.items():
        a, b = factor_names(name)
        if a in sources and b in sources:
            found[name] = Merged(source, sources[a], sources[b], scale)
        elif not is_factor(name):
            found[name] = source
    return found


@torch.no_grad()
def merge_low_rank(modules: Iterable[nn.Module]) -> None:
    """Adds the product of all factors to their weights, and takes them away. In place.

    For inference: products are then single ones again. Weights have to be whole.
    """
    for module in modules:
        if isinstance(module, WithLowRank):
            for attribute in list(module.low_rank_scales):
                factors = module.low_rank(attribute)
                assert factors is not None
                weight = module.get_parameter(attribute)
                weight.copy_(merged(weight, *factors))
                module.remove_low_rank(attribute)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, added in float32 or wider and rounded once to the format of W.

    Args:
        weight: `[O, I]`, or a stack `[E, O, I]`.
        a: `[r, I]`, or `[E, r, I]`.
        b: `[O, r]`, or `[E, O, r]`.
        scale: s.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    add_product = wide.addmm_ if wide.ndim == 2 else wide.baddbmm_
    add_product(b.to(wide), a.to(wide), alpha=scale)
    return wide.to(weight.dtype)
