"""MXFP8: blocks of 32 numbers that share one power of two. (OCP Microscaling Formats v1.0, 2023)

A block along the last dim is kept as 32 e4m3 values and one e8m0 scale, an exponent with a bias of
127 and no sign (sections 5.2 and 5.4). A number that is not finite makes its block NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from armillary.kernels.float8 import E4M3

BLOCK = 32
"""Numbers that share a scale."""

_LARGEST_EXPONENT = 8
"""Of e4m3: 448 is 1.75 x 2^8."""
_BIAS = 127
_NAN = 255


class Blocks(NamedTuple):
    """A matrix in MXFP8, its last dim filled up with zeros to whole blocks."""

    values: Tensor
    """e4m3 `[..., M, K]`."""
    scale: Tensor
    """uint8 `[..., M, K/32]`, the bits of e8m0: 2^(scale - 127), and 255 is NaN."""


def round_to_mx(x: Tensor) -> Blocks:
    """Rounds x `[..., M, K]` in blocks along its last dim.

    The scale is the largest power of two not above the block's maximum, over that of e4m3; numbers
    between 448 and 512 times it saturate (section 6.3). It is never 2^-127, the least of e8m0: fp32
    holds that as a subnormal number only, which some devices take for zero.
    """
    x = F.pad(x.float(), (0, -x.shape[-1] % BLOCK))
    blocks = _in_blocks(x)
    maximum = blocks.abs().amax(-1)
    exponent = (maximum.view(torch.int32) >> 23) & 0xFF  # floor(log2) + 127; 255: not finite
    biased = (exponent - _LARGEST_EXPONENT).clamp(min=1)
    biased = torch.where(exponent == 255, _NAN, biased)
    limit = torch.finfo(E4M3).max
    inverse = _power_of_two(2 * _BIAS - biased)
    scaled = (blocks * inverse[..., None]).clamp(-limit, limit)
    scaled = torch.where((biased == _NAN)[..., None], torch.nan, scaled)
    return Blocks(scaled.to(E4M3).flatten(-2), biased.to(torch.uint8))


def mx_numbers(x: Blocks) -> Tensor:
    """What is kept, in fp32 `[..., M, K]`. Exact in bfloat16 as well."""
    scale = x.scale.to(torch.int32)
    factor = torch.where(scale == _NAN, torch.nan, _power_of_two(scale))
    return (_in_blocks(x.values.float()) * factor[..., None]).flatten(-2)


def mx_product(a: Blocks, b: Blocks, dtype: torch.dtype) -> Tensor:
    """a `[M, K]` by b `[N, K]`: a bᵀ, of the numbers, summed in fp32."""
    return exact_product(mx_numbers(a), mx_numbers(b), dtype)


def exact_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a bᵀ of fp32 numbers that bfloat16 holds too, summed in fp32.

    A GPU multiplies them as bfloat16, which changes no product and is many times faster.
    """
    if a.device.type != "cpu" and dtype == torch.bfloat16:
        return a.bfloat16() @ b.bfloat16().mT
    return (a @ b.mT).to(dtype)


def _in_blocks(x: Tensor) -> Tensor:
    """`[..., M, K]` -> `[..., M, K/32, 32]`."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _power_of_two(biased: Tensor) -> Tensor:
    """2^(biased - 127) in fp32, of int32 from 1 to 254."""
    return (biased.clamp(1, 254) << 23).view(torch.float32)
