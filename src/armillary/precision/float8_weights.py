"""Weights that travel in 8 bits: data sharding gathers what `float8-tensorwise` would round anyway.

Shards stay float32 and plain: optimizers, checkpoints and norms see nothing of this. On its way to
a gather a shard is rounded to the format of computation and then to float8, with the scale of the
whole weight, on which all ranks have agreed before; so every number is the one that the product
would have made of a weight gathered at full width. Gradients are of the format of computation.

torch's data sharding asks the local tensor of a parameter for `fsdp_pre_all_gather` and
`fsdp_post_all_gather`, the extension that its documentation of `fully_shard` describes. They are
put on the tensor itself and looked for at the first forward pass, so they must be there by then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from armillary.kernels.float8 import E4M3, Scaled, largest, numbers, round_to_float8


class Float8Weight(Tensor):
    """A whole weight in e4m3 with one scale, which passes for one in the format of computation.

    `LowPrecisionProduct` takes it as it is; every other operation gets its numbers.
    """

    bits: Tensor
    """uint8 `[O, I]`, the memory into which weights are gathered."""
    scale: Tensor
    """fp32 []."""

    @staticmethod
    def __new__(cls, bits: Tensor, scale: Tensor, dtype: torch.dtype) -> Float8Weight:
        """Of one dtype for autograd, which gives gradients that of their tensor."""
        return torch.Tensor._make_wrapper_subclass(
            cls, bits.shape, strides=bits.stride(), dtype=dtype, device=bits.device
        )

    def __init__(self, bits: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.bits, self.scale = bits, scale

    def scaled(self) -> Scaled:
        """The numbers as the product rounds them."""
        return Scaled(self.bits.view(E4M3), self.scale)

    def numbers(self) -> Tensor:
        """The numbers in `dtype`, which holds them exactly."""
        return numbers(self.scaled()).to(self.dtype)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has an argument for itself
        """Without the numbers."""
        return f"Float8Weight({list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        """For compilation: the tensors inside."""
        return ["bits", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(
        inside: Mapping[str, Tensor], dtype: torch.dtype, size: object, stride: object
    ) -> Float8Weight:
        """The inverse."""
        return Float8Weight(inside["bits"], inside["scale"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it as if it had no class
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Keeps its kind where it is only passed on, and is a plain tensor for all else."""
        weight = args[0]
        if func in _SAME or (func == _STRIDED and _is_whole(weight, *args[1:])):
            return Float8Weight(weight.bits, weight.scale, weight.dtype)
        assert not func._schema.is_mutable, f"{func} would write to gathered weights"
        plain = tree_map_only(Float8Weight, Float8Weight.numbers, (tuple(args), kwargs or {}))
        return func(*plain[0], **plain[1])


_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_STRIDED = torch.ops.aten.as_strided.default


def _is_whole(
    weight: Float8Weight, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> bool:
    return (*size,) == (*weight.shape,) and (*stride,) == weight.stride() and not offset


class Float8Gather:
    """The weights of one part of a model that travel in 8 bits.

    Args:
        modules: whose `weight` does.
        local: the tensor in which this rank keeps its shard of a parameter.
        maximum: the largest of each element over the ranks that hold parts of a weight; called by
            all of them.
        dtype: in which the model computes.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        local: Callable[[nn.Parameter], Tensor],
        maximum: Callable[[Tensor], Tensor],
        dtype: torch.dtype,
    ) -> None:
        self._modules = list(modules)
        self._local, self._maximum, self._dtype = local, maximum, dtype

    @torch.no_grad()
    def agree(self) -> None:
        """Before weights are gathered that may have changed: one exchange for all of them.

        To be called on all ranks while the parameters show their shards.
        """
        if not self._modules:
            return
        shards = [self._local(module.get_parameter("weight")) for module in self._modules]
        # Rounding keeps order: the largest of the rounded weight is the rounded largest.
        own = torch.stack([largest(shard) for shard in shards]).to(self._dtype).float()
        # A maximum over ranks may lose a NaN, never infinity, whose scale makes all numbers NaN.
        own = own.nan_to_num(nan=torch.inf, posinf=torch.inf)
        maxima = self._maximum(own)
        # Made here and not on the way, where a GPU may be in a stream of torch's data sharding.
        scales = round_to_float8(maxima, maxima).scale
        for shard, maximum, scale in zip(shards, maxima.unbind(), scales.unbind(), strict=True):
            way = getattr(shard, "fsdp_way", None)
            if way is None:
                way = _Way(shard, self._dtype)
                shard.fsdp_way = way  # type: ignore[attr-defined]
                shard.fsdp_pre_all_gather = way.before  # type: ignore[attr-defined]
                shard.fsdp_post_all_gather = way.after  # type: ignore[attr-defined]
            way.maximum, way.scale = maximum, scale


class _Way:
    """How one shard travels."""

    def __init__(self, shard: Tensor, dtype: torch.dtype) -> None:
        self._shard = weakref.ref(shard)  # which holds this
        self._dtype = dtype
        self.maximum: Tensor | None = None
        """[] fp32, of the whole weight."""
        self.scale: Tensor | None = None
        """[] fp32, that goes with it."""

    def before(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[torch.Size, Tensor]]:
        """What is sent, uint8 as not all backends know float8, and what `after` is told."""
        shard = self._shard()
        assert shard is not None and self.maximum is not None and self.scale is not None
        bits = round_to_float8(shard.to(self._dtype), self.maximum).values.view(torch.uint8)
        rows = -(-outer_size[0] // mesh.size())  # the last shards are shorter, or empty
        return (F.pad(bits, (0, 0, 0, rows - bits.shape[0])),), (outer_size, self.scale)

    def after(
        self,
        gathered: tuple[Tensor, ...],
        known: tuple[torch.Size, Tensor],
        dtype: torch.dtype,
        *,
        out: Float8Weight | None = None,
    ) -> tuple[Float8Weight, tuple[Tensor, ...]] | None:
        """The whole weight; where there is one already, it has the same memory."""
        size, scale = known
        if out is not None:
            out.scale = scale
            return None
        return Float8Weight(gathered[0][: size[0]], scale, dtype), ()
