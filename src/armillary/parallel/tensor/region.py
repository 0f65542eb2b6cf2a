"""What the boundaries of tensor parallelism do to activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor, nn

from armillary.kernels import swiglu
from armillary.models.layers.linear import GatedLinear, Linear
from armillary.parallel.collectives import all_gather, all_reduce, reduce_scatter

SEQUENCE = -2
"""The dim of activations `[..., S, D]` that is cut over ranks between regions."""

_whole_rows = ContextVar("whole_rows", default=False)


@contextmanager
def whole_rows() -> Iterator[None]:
    """In forward passes inside, which all ranks make, each rank of tp holds all tokens of a row.

    For those who look at hidden states by their place in the row.
    """
    token = _whole_rows.set(True)
    try:
        yield
    finally:
        _whole_rows.reset(token)


class TensorRanks:
    """The ranks that share matrices, and whether they share out the tokens in this forward pass.

    Between regions each rank holds its own share of the sequence (Korthikanti et al. 2022, arXiv
    2205.05198, section 4.2.2). Generation, token by token, cannot cut it: there, and in all that is
    asked for `whole_rows`, every rank holds all tokens, and no gradients are computed.
    """

    def __init__(self, group: str | None, size: int, rank: int) -> None:
        self.group = group
        self.size = size
        self.rank = rank
        self.sequence_split = False

    def begin(self, length: int, *, cached: bool, training: bool) -> None:
        """A forward pass over so many tokens a row begins; all ranks decide alike."""
        assert self.group is not None, "on an imagined mesh nothing is computed"
        whole = cached or _whole_rows.get()
        self.sequence_split = not whole and length % self.size == 0
        assert self.sequence_split or not training, (
            f"{length} tokens a row in training, which {self.size} ranks do not divide"
        )

    def enter(self, x: Tensor) -> Tensor:
        """Share `[..., S/R, D]` -> whole rows `[..., S, D]`, on every rank."""
        return all_gather(x, SEQUENCE, self.group) if self.sequence_split else x

    def leave(self, partial: Tensor) -> Tensor:
        """Partial sums `[..., S, D]` -> their sum over ranks, this rank's share `[..., S/R, D]`."""
        if self.sequence_split:
            return reduce_scatter(partial, SEQUENCE, self.group)
        return all_reduce(partial, self.group)


def product_input(linear: Linear, inputs: tuple[Tensor, ...]) -> Tensor:
    """What a Linear multiplies by its weight, of what it is called with."""
    return swiglu(*inputs) if isinstance(linear, GatedLinear) else inputs[0]


def declared_splits(region: nn.Module) -> dict[str, str]:
    """What a region says of how its insides are split."""
    splits: dict[str, str] = region.tensor_split  # type: ignore[assignment]
    return splits


def declared_linears(region: nn.Module, kind: str) -> list[Linear]:
    """The Linears of a region that are split this way, in the order of the declaration."""
    found = []
    for path, declared in declared_splits(region).items():
        if declared == kind:
            linear = region.get_submodule(path)
            assert isinstance(linear, Linear), f"{path} is split by {kind} and is no Linear"
            found.append(linear)
    return found
