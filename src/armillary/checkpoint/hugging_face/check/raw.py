"""Published tensors by their own names, for the reference: no table and no view is used here."""

from __future__ import annotations

import torch
from torch import Tensor

from armillary.checkpoint.hugging_face.source import Box, Source, Sources, pieces_of, whole

_BLOCK = 128
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of float4 e2m1, by its three low bits. (OCP Microscaling Formats 1.0, table 5)"""


class Raw:
    """Reads parts of published tensors in float64, and multiplies by them a few rows at a time."""

    def __init__(self, tensors: Sources) -> None:
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor as it lies there."""
        return self._tensors[name].shape

    def vector(self, name: str) -> Tensor:
        """A whole small tensor."""
        source = self._tensors[name]
        return source.read(whole(source.shape)).double()

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows of a matrix."""
        return self._part(name, ((start, end), (0, self.shape(name)[1])))

    def product(self, x: Tensor, name: str) -> Tensor:
        """x `[..., I]` times a matrix `[O, I]`, transposed -> `[..., O]`."""
        box = whole(self.shape(name))
        return torch.cat([x @ self._part(name, part).mT for part in pieces_of(box, 8)], dim=-1)

    def expert(self, name: str, expert: int) -> Tensor:
        """One expert's matrix `[inputs, outputs]` of GPT-OSS, plain or in MXFP4."""
        if name in self._tensors:
            _, rows, columns = self.shape(name)
            part = self._tensors[name].read(((expert, expert + 1), (0, rows), (0, columns)))
            return part[0].double()
        packed = self._of_expert(f"{name}_blocks", expert).long()  # [O, I / 32, 16]
        scales = self._of_expert(f"{name}_scales", expert).double()  # [O, I / 32]
        magnitudes = torch.tensor(_MAGNITUDES, dtype=torch.float64)
        values = torch.empty(*packed.shape[:2], 32, dtype=torch.float64)
        for place, codes in ((0, packed % 16), (1, packed // 16)):
            signs = 1.0 - 2.0 * (codes // 8)
            values[..., place::2] = signs * magnitudes[codes % 8]
        values *= 2.0 ** (scales[..., None] - 127)
        return values.flatten(1).mT

    def _of_expert(self, name: str, expert: int) -> Tensor:
        source = self._tensors[name]
        return source.read(((expert, expert + 1), *whole(source.shape[1:])))[0]

    def _part(self, name: str, box: Box) -> Tensor:
        values = self._tensors[name].read(box).double()
        scale = self._tensors.get(f"{name}_scale_inv")
        if scale is None:
            return values
        # In the format that the model computes with, as published conversions write them.
        return (values * _factors(scale, box)).bfloat16().double()


def _factors(scale: Source, box: Box) -> Tensor:
    """What each value of a box of a float8 matrix is multiplied by."""
    (top, bottom), (left, right) = box
    blocks = scale.read(whole(scale.shape)).double()
    row = [index // _BLOCK for index in range(top, bottom)]
    column = [index // _BLOCK for index in range(left, right)]
    return blocks[row][:, column]
