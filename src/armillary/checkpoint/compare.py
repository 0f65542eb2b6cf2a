"""What two checkpoints do not have in common, a tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from armillary.checkpoint.find import Found
from armillary.checkpoint.tensors import Differences, compare, read_tensor, stored_tensors
from armillary.foundation.errors import Problem, RunError
from armillary.foundation.progress import NoProgress, Progress

_AT_ONCE = 1 << 24  # values that are widened to float64 at a time
_NOT_COMPARED = ("files", "sha256", "created")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """How far apart one tensor is in two checkpoints."""

    name: str
    largest: float
    """Largest absolute difference of a value; NaN where a value is NaN in one of them."""
    relative: float
    """2-norm of the difference over that of the first one; inf where that is 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Two checkpoints side by side."""

    fields: dict[str, tuple[Any, Any]]
    """Fields of the manifests that differ; files, checksums and dates aside."""
    names: Differences
    """Tensors that only one has, or both in other shapes or dtypes; the second is the model."""
    tensors: tuple[TensorDifference, ...]
    """Tensors of both whose values differ, the largest relative difference first."""
    equal: int
    """Tensors of both with the same bits."""


def compare_checkpoints(
    first: Found, second: Found, progress: Progress | None = None
) -> Comparison:
    """Reads two checkpoints; never holds more of them than one tensor of each.

    Raises:
        UserError: one is not ours.
        RunError: one could not be read.
    """
    own = stored_tensors(first.place, first.folder)
    other = stored_tensors(second.place, second.folder)
    names = compare(other, own)
    both = [n for n in own if n in other and n not in {*names.shapes, *names.dtypes}]
    differing = []
    total = sum(own[name].bytes for name in both)
    with (progress or NoProgress()).task("comparing", total, "bytes") as advance:
        for name in both:
            try:
                a = read_tensor(first.place, first.folder, own[name])
                b = read_tensor(second.place, second.folder, other[name])
            except OSError as error:
                raise RunError(Problem(f"cannot read {name}: {error}")) from error
            if not _same_bits(a, b):
                largest, relative = distance(a, b)
                differing.append(TensorDifference(name=name, largest=largest, relative=relative))
            advance(own[name].bytes)
    differing.sort(key=lambda each: -_rank(each.relative))
    return Comparison(
        fields=dict(_fields(first.manifest, second.manifest)),
        names=names,
        tensors=tuple(differing),
        equal=len(both) - len(differing),
    )


def distance(first: Tensor, second: Tensor) -> tuple[float, float]:
    """Largest absolute difference, and 2-norm of the difference over that of the first."""
    largest = of_difference = of_first = 0.0
    a, b = first.reshape(-1), second.reshape(-1)
    for start in range(0, a.numel(), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        wide = a[part].to(torch.float64)
        difference = wide - b[part].to(torch.float64)
        # max() of Python would pass over a NaN.
        largest = float(torch.stack([difference.abs().max(), torch.tensor(largest)]).max())
        of_difference += float(difference.square().sum())
        of_first += float(wide.square().sum())
    if of_first == 0:
        return largest, 0.0 if of_difference == 0 else math.inf
    return largest, math.sqrt(of_difference / of_first)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    a, b = (each.contiguous().reshape(-1).view(torch.uint8) for each in (first, second))
    return torch.equal(a, b)


def _rank(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _fields(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Any, Any]]]:
    for name in dict.fromkeys([*first, *second]):
        if name not in _NOT_COMPARED and first.get(name) != second.get(name):
            yield name, (first.get(name), second.get(name))
