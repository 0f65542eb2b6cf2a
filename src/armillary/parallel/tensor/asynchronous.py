"""Asynchronous tensor parallelism: regions whose communication hides behind their own products."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from armillary.models.layers.linear import Linear
from armillary.parallel.tensor.decomposed import gather_linear, linear_scatter
from armillary.parallel.tensor.region import (
    TensorRanks,
    declared_linears,
    product_input,
)


def overlap_region(region: nn.Module, ranks: TensorRanks) -> bool:
    """Moves the boundaries of a region into its first and last products, and overlaps them.

    A region can be overlapped if all of its input goes through `project`, which multiplies it by
    the Linears declared as split by outputs, in that order, and all of its output comes from one
    Linear split by inputs. Returns whether this one can; nothing is changed otherwise.

    The products are multiplied as they are in full precision. Where a Linear has got another
    `product` or low-rank factors, or rows are not split in this pass, the collectives stand before
    and after, as without overlap.
    """
    project: Callable[..., tuple[Tensor, ...]] | None = getattr(region, "project", None)
    first, last = (declared_linears(region, kind) for kind in ("outputs", "inputs"))
    if project is None or len(last) != 1:
        return False
    region.project = _overlapped_projection(project, first, ranks)  # type: ignore[assignment]
    last[0].forward = _overlapped_output(last[0], ranks)  # type: ignore[method-assign]
    return True


def _overlapped_projection(
    project: Callable[..., tuple[Tensor, ...]], linears: list[Linear], ranks: TensorRanks
) -> Callable[..., tuple[Tensor, ...]]:
    def overlapped(x: Tensor) -> tuple[Tensor, ...]:
        if not _is_plain(linears, ranks):
            return project(ranks.enter(x))
        assert ranks.group is not None
        weights = [linear.weight.to(x.dtype) for linear in linears]
        products = gather_linear(x, weights, ranks.group)
        return tuple(_biased(*pair) for pair in zip(linears, products, strict=True))

    return overlapped


def _overlapped_output(linear: Linear, ranks: TensorRanks) -> Callable[..., Tensor]:
    def overlapped(*inputs: Tensor) -> Tensor:
        if _is_plain([linear], ranks):
            assert ranks.group is not None
            y = linear_scatter(inputs, linear.weight.to(inputs[0].dtype), ranks.group)
        else:
            y = ranks.leave(linear.multiply(product_input(linear, inputs)))
        return _biased(linear, y)  # added once: each rank has its own tokens now

    return overlapped


def _is_plain(linears: list[Linear], ranks: TensorRanks) -> bool:
    return ranks.sequence_split and all(linear.is_plain for linear in linears)


def _biased(linear: Linear, y: Tensor) -> Tensor:
    return y if linear.bias is None else y + linear.bias.to(y.dtype)
