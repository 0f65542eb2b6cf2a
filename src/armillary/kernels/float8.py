"""Matrices in 8 bits: rounding to float8 with a scale, and products of what was rounded.

A number x is kept as a float8 value v and a scale s, x ≈ v s, where s is chosen so that the largest
number of what shares it fits. (Micikevicius et al. 2022, arXiv 2209.05433) Products are written for
operands `[M, K]` and `[N, K]`, a bᵀ, so that both have what is reduced last, as the hardware wants.

A number that is not finite makes everything that shares its scale NaN, and so the sums over it:
rounding hides no overflow from whoever looks for one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.scaled_mm import scaled_mm

E4M3 = torch.float8_e4m3fn
"""Four bits of exponent, three of mantissa; up to 448."""
E5M2 = torch.float8_e5m2
"""Five bits of exponent, two of mantissa; up to 57344."""

SMALLEST = 2.0**-100
"""Least maximum that a scale is made for; below it, as in a row of zeros, numbers go to zero."""

_EXPONENT_BITS = 0x7F800000


class Scaled(NamedTuple):
    """A matrix `[M, K]` in 8 bits, or a stack of them."""

    values: Tensor
    """float8, `[..., M, K]`."""
    scale: Tensor
    """fp32, `[..., M, 1]`, `[..., 1, 1]` or `[]`; values times scale are the numbers."""


def largest(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """The largest absolute value in fp32, of all or (keeping the dims) along some; of none, 0."""
    if x.numel() == 0:
        return _largest_of_none(x, dim)
    size = x.abs()
    return (size.amax() if dim is None else size.amax(dim, keepdim=True)).float()


def round_to_float8(x: Tensor, maximum: Tensor, dtype: torch.dtype = E4M3) -> Scaled:
    """Rounds x, saturating, with a power of two that takes `maximum` to the top of the format.

    It is the largest for which `maximum` still fits. The product with it is exact, and so is what
    is kept, in bfloat16 too; that costs at most one bit of range.

    Args:
        x: `[..., M, K]`.
        maximum: as `largest` gives it; in fp32.
        dtype: one of the float8 formats.
    """
    limit = torch.finfo(dtype).max
    # In float64, so that no device's division decides on which side of a power of two it falls.
    factor = power_of_two_below((limit / maximum.double().clamp(min=SMALLEST)).float())
    # Clamped by hand: before torch 2.13, casts on a CPU made NaN of what is too large.
    values = (x.float() * factor).clamp(-limit, limit).to(dtype)
    return Scaled(values, factor.reciprocal())


def power_of_two_below(x: Tensor) -> Tensor:
    """The largest power of two that is not above x; fp32, positive and normal. Exact."""
    bits = x.view(torch.int32)
    power = (bits & _EXPONENT_BITS).view(torch.float32)
    return torch.where(x.isnan(), x, power)


def numbers(x: Scaled) -> Tensor:
    """What is kept, in fp32."""
    return x.values.float() * x.scale


def transposed(x: Scaled) -> Scaled:
    """The transpose of a matrix with a single scale."""
    return Scaled(x.values.mT, x.scale)


def float8_product(
    a: Scaled, b: Scaled, dtype: torch.dtype, *, emulate: bool, fast: bool = False
) -> Tensor:
    """a bᵀ, summed in fp32.

    Args:
        a: `[M, K]`.
        b: `[N, K]`; N a multiple of 16.
        dtype: of the result.
        emulate: multiply the numbers in fp32, which is the definition; else in 8 bits, where the
            device can. On a CPU both give the same bits, in fp32.
        fast: in 8 bits, let a GPU sum with fewer bits than fp32 has.
    """
    a, b = _padded(a), _padded(b)
    if emulate or not can_multiply(dtype, a.values.device):
        return (numbers(a) @ numbers(b).mT).to(dtype)
    if a.scale.dim() == b.scale.dim() == 0:
        scale_a, scale_b = a.scale, b.scale
    else:
        scale_a, scale_b = _by_row(a), _by_row(b).mT
    left, right = a.values.contiguous(), b.values.contiguous().mT
    return scaled_mm(left, right, scale_a, scale_b, dtype, fast=fast)


def can_multiply(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether 8-bit products come out in this dtype. Those of GPUs with a scale a row do not."""
    return dtype == torch.bfloat16 or device.type == "cpu"


def has_float8_units(device: torch.device) -> bool:
    """Whether the device multiplies in 8 bits faster than in 16."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _padded(x: Scaled) -> Scaled:
    """With columns of zeros, which add nothing, up to the 16 that the hardware reads at once.

    Emulation does the same, so that it adds up in the same order.
    """
    missing = -x.values.shape[-1] % 16
    if missing == 0:
        return x
    bits = F.pad(x.values.view(torch.uint8), (0, missing))  # a float8 tensor cannot be padded
    return Scaled(bits.view(x.values.dtype), x.scale)


def _by_row(x: Scaled) -> Tensor:
    """Scales `[M, 1]`."""
    return x.scale.reshape(-1, 1).expand(x.values.shape[0], 1).contiguous()


def _largest_of_none(x: Tensor, dim: int | tuple[int, ...] | None) -> Tensor:
    shape = list(x.shape)
    for index in (dim,) if isinstance(dim, int) else dim or ():
        shape[index] = 1
    return x.new_zeros([] if dim is None else shape, dtype=torch.float32)
