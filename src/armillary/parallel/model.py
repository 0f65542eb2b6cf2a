"""A model in its place: the parts of it that this rank holds, and how a batch goes through them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from armillary.models.layers.end_step import end_step, layers_that_end_steps
from armillary.models.layers.initializer import Initializer
from armillary.parallel.collectives import all_gather, group_name
from armillary.parallel.context.batches import shard_batch
from armillary.parallel.layout import (
    Layouts,
    local_ranges,
    local_shape,
    local_tensor,
    whole_view,
)
from armillary.parallel.mesh import Mesh
from armillary.parallel.tensor.region import whole_rows
from armillary.precision.low_precision import Report

if TYPE_CHECKING:
    from armillary.data.batch import Batch
    from armillary.models.layers.cache import KeyValueCache
    from armillary.models.layers.documents import Documents
    from armillary.models.layers.embedding import Output
    from armillary.tasks.task import TaskConfig

TOKEN_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes whose ranks see different tokens, between the regions in which tp ranks see the same."""

LOSS_AXES = ("pp", "dp_replicate", "dp_shard", "cp")
"""Axes over which the losses of `forward_backward` and `evaluate` add up; tp ranks agree."""

_BUCKET = 1 << 24
"""Most gradient elements summed by one collective."""


class Executor(Protocol):
    """How batches go through the parts of all ranks; of rows, a batch has the tokens held here."""

    def forward_backward(self, task: TaskConfig, microbatches: Sequence[Batch]) -> Tensor:
        """See `ParallelModel.forward_backward`; gradients may still be partial."""

    def evaluate(self, task: TaskConfig, batch: Batch) -> Tensor:
        """See `ParallelModel.evaluate`."""

    def __call__(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        cache: KeyValueCache | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """See `ParallelModel.__call__`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeModel:
    """What is remembered of the model that the passes began with."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of every parameter, by canonical name."""
    initializers: Mapping[str, Initializer]
    """How each parameter and persistent buffer starts, by canonical name."""
    max_seq_len: int
    """Longest row it is meant for, in tokens."""
    frozen: frozenset[str] = frozenset()
    """Canonical names of the parameters that are not trained."""
    statistics: tuple[str, ...] = ()
    """Names of what its layers may report of a step."""

    @classmethod
    def of(cls, model: nn.Module) -> WholeModel:
        """Of a model before any pass."""
        ending = layers_that_end_steps(model.modules())
        return cls(
            shapes={name: tuple(p.shape) for name, p in model.named_parameters()},
            initializers=declared_initializers(model),
            max_seq_len=getattr(model, "max_seq_len", 0),
            frozen=frozenset(n for n, p in model.named_parameters() if not p.requires_grad),
            statistics=tuple(dict.fromkeys(name for e in ending for name in e.statistics)),
        )


class ParallelModel:
    """What the trainer holds: it is used alike on every mesh, by all ranks together.

    Names of parameters are canonical, those of the plain model, and a tied one has its first name.

    Args:
        parts: the parts of the model that this rank holds; the whole one without a pipeline.
        layouts: how each parameter is cut.
        mesh: the ranks.
        whole: of the model that the parts are of.
        executor: how batches go through the parts.
        before_use: run before weights are used, which may have changed since the last time.
        gradient_hooks: run after the backward passes of a step, before other sums over ranks.
        counted_elsewhere: names of parameters here that another rank counts for this one as well.
        conversions: of each part, which layers compute in low precision, and why others do not.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        *,
        layouts: Layouts,
        mesh: Mesh,
        whole: WholeModel,
        executor: Executor,
        before_use: Sequence[Callable[[], None]] = (),
        gradient_hooks: Sequence[Callable[[], None]] = (),
        counted_elsewhere: Collection[str] = (),
        conversions: Sequence[Report] = (),
    ) -> None:
        self.parts = list(parts)
        self.layouts = layouts
        self.mesh = mesh
        self.whole = whole
        self.conversions = tuple(conversions)
        self._executor = executor
        self._before_use = tuple(before_use)
        self._gradient_hooks = tuple(gradient_hooks)
        self._counted_elsewhere = frozenset(counted_elsewhere)
        self._ending_steps = layers_that_end_steps(self.modules())
        self._added: Tensor | None = None

    def forward_backward(self, task: TaskConfig, microbatches: Sequence[Batch]) -> Tensor:
        """Adds the gradient of the loss, summed over all microbatches of all ranks, to each `grad`.

        It is the gradient of a sum: see `gradients.scale_and_clip`.

        Args:
            task: how a batch becomes a loss.
            microbatches: whole rows, the same on all ranks that share a part of the batch.

        Returns:
            [] float64, this rank's share of the sum of the loss; shares add up over `LOSS_AXES`.
        """
        own = [shard_batch(batch, self.mesh) for batch in microbatches]
        self._prepare()
        loss = self._executor.forward_backward(task, own)
        for hook in self._gradient_hooks:
            hook()
        self._sum_partial_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, task: TaskConfig, batch: Batch) -> Tensor:
        """This rank's share of the loss of a batch of whole rows, without gradients."""
        self._prepare()
        return self._executor.evaluate(task, shard_batch(batch, self.mesh))

    def __call__(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        cache: KeyValueCache | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """`Decoder.forward`, without gradients; every rank gets the result for the same tokens.

        An `output` of one's own is given hidden states of whole rows, on every rank that has the
        head.
        """
        self._prepare()
        with torch.no_grad(), whole_rows():
            return self._executor(tokens, documents, cache=cache, output=output)

    def agreed(self, numbers: list[int]) -> list[int]:
        """Rank 0's numbers, on every rank.

        For choices made from logits: where ranks multiply the same rows beside other ones, as the
        owners of experts do, the last bits may differ, and ranks that go on with different tokens
        wait for each other for ever.
        """
        if self.mesh.dense_view is None:
            return numbers
        first = torch.tensor(numbers, dtype=torch.int64, device=self.mesh.device)
        dist.broadcast(first, src=0)
        return [int(number) for number in first.tolist()]

    def end_step(self, skipped: Tensor | None = None) -> Tensor:
        """After each optimizer step: what layers do once a step, and what they report of it.

        Nothing waits for the device.

        Args:
            skipped: [] bool, whether the step shall change nothing; None: it counts.

        Returns:
            `[n]` fp32 for `statistics`: the largest over layers, the same on every rank.
        """

        added, self._added = self._added, None

        def total(tensor: Tensor) -> Tensor:
            counts = tensor if added is None else tensor + added
            return self.mesh.sum_over(counts.to(self.mesh.device), TOKEN_AXES)

        names = self.whole.statistics
        largest = end_step(self._ending_steps, total, names, self.mesh.device, skipped)
        if names and (group := self.mesh.group("pp")) is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return largest

    def take_counts(self) -> Tensor | None:
        """`[n]` int64, what layers of this rank counted for `end_step`; they start again from 0."""
        counts = [layer.take_counts() for layer in self._ending_steps]
        return torch.cat(counts) if counts else None

    def add_counts(self, counts: Tensor) -> None:
        """Has the next `end_step` count these, of `take_counts`, as well."""
        self._added = counts

    def statistics(self, figures: Sequence[float]) -> dict[str, float]:
        """The figures of `end_step`, on the host, by name; without those that none reports."""
        values = zip(self.whole.statistics, figures, strict=True)
        return {name: value for name, value in values if value != -math.inf}

    # What a rank holds, as a module shows it.

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters held here, each name once.

        Where the first and the last stage are both here, a weight that they share is the first's,
        which the last one follows.
        """
        seen: set[str] = set()
        for part in self.parts:
            for name, parameter in part.named_parameters():
                if (canonical := self.layouts.canonical(name)) not in seen:
                    seen.add(canonical)
                    yield canonical, parameter

    def counted_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same without copies of parameters that another stage holds and counts."""
        return (
            (name, parameter)
            for name, parameter in self.named_parameters()
            if name not in self._counted_elsewhere
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """See `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self, *, keep_vars: bool = False) -> dict[str, Tensor]:
        """Parameters and persistent buffers held here, each name once; see `named_parameters`."""
        # The module's own, and not named_parameters: data sharding's hooks see to it that these
        # are the shards.
        named: dict[str, Tensor] = {}
        for part in self.parts:
            for name, tensor in part.state_dict(keep_vars=keep_vars).items():
                named.setdefault(self.layouts.canonical(name), tensor)
        return named

    def modules(self) -> Iterator[nn.Module]:
        """All modules of all parts."""
        return itertools.chain.from_iterable(part.modules() for part in self.parts)

    def train(self, mode: bool = True) -> ParallelModel:
        """See `nn.Module.train`."""
        for part in self.parts:
            part.train(mode)
        return self

    def eval(self) -> ParallelModel:
        """See `nn.Module.eval`."""
        return self.train(False)

    @property
    def training(self) -> bool:
        """Whether the parts are in training mode."""
        return all(part.training for part in self.parts)

    @property
    def max_seq_len(self) -> int:
        """Longest row the model is meant for, in tokens."""
        return self.whole.max_seq_len

    @property
    def counts_rows(self) -> bool:
        """Whether this rank is the one, of those that have the same rows, that counts them."""
        return all(self.mesh.coordinate(axis) == 0 for axis in ("pp", "cp", "tp"))

    @property
    def device(self) -> torch.device:
        """Where tokens are expected."""
        return self.mesh.device

    # Whole parameters, for those who need them.

    def whole_view(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or anything cut as it is, as a DTensor of the whole; nothing is copied."""
        return whole_view(name, tensor, self.layouts, self.mesh)

    def gather(self, name: str, tensor: Tensor, *, stacked: bool = False) -> Tensor:
        """The whole of anything that is cut as a parameter is, on every rank that holds a part.

        Args:
            name: the parameter's.
            tensor: what this rank holds.
            stacked: leave dim 0 as it is cut: each of the stacked matrices becomes whole, where it
                is.
        """
        layout = self.layouts.layout(name)
        whole = local_tensor(tensor).to(self.mesh.device)
        for index in reversed(range(len(layout.splits))):
            axis, dim = layout.splits[index]
            if stacked and dim == 0:
                continue
            before = dataclasses.replace(layout, splits=layout.splits[:index])
            length = local_shape(before, self.mesh)[dim]
            most = -(-length // self.mesh.degree(axis))
            padding = [0, 0] * (whole.ndim - 1 - dim) + [0, most - whole.shape[dim]]
            parts = all_gather(F.pad(whole, padding), dim, group_name(self.mesh.group(axis)))
            whole = parts.narrow(dim, 0, length)  # of the parts, the last ones are padded
        return whole

    def own_part(self, name: str, whole: Tensor, *, stacked: bool = False) -> Tensor:
        """The inverse of `gather`: of what is whole, this rank's part, in the same memory."""
        ranges = local_ranges(self.layouts.layout(name), self.mesh)
        for dim, (start, end) in enumerate(ranges):
            if dim > 0 or not stacked:
                whole = whole.narrow(dim, start, end - start)
        return whole

    def _prepare(self) -> None:
        for hook in self._before_use:
            hook()

    @torch.no_grad()
    def _sum_partial_gradients(self) -> None:
        """Sums, over axes that hold copies of a parameter, gradients that each rank has a part of.

        All ranks of a group hold the same parameters, so they agree on what is summed.
        """
        partial: dict[str, list[Tensor]] = {}
        for name, parameter in self.named_parameters():
            for axis in self.layouts.layout(name).partial:
                if self.mesh.group(axis) is None or not parameter.requires_grad:
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                partial.setdefault(axis, []).append(local_tensor(parameter.grad))
        for axis in sorted(partial):
            group = self.mesh.group(axis)
            assert group is not None
            for bucket in _buckets(partial[axis]):
                flat = torch.cat([each.flatten() for each in bucket]).to(self.mesh.device)
                dist.all_reduce(flat, group=group)
                sums = torch.split(flat, [each.numel() for each in bucket])
                for each, total in zip(bucket, sums, strict=True):
                    each.copy_(total.view_as(each))


def declared_initializers(model: nn.Module) -> dict[str, Initializer]:
    """How parameters and persistent buffers start, by their first names."""
    found: dict[str, Initializer] = dict(model.initializers())  # type: ignore[operator]  # nn.Module types it as a tensor
    for prefix, module in model.named_modules():
        own = [name for name, buffer in module.named_buffers(recurse=False) if buffer is not None]
        if own and hasattr(module, "initializers") and prefix:
            declared = module.initializers()
            found |= {f"{prefix}.{name}": declared[name] for name in own if name in declared}
    return found


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype together, up to `_BUCKET` elements."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in (tensor for tensor in tensors if tensor.dtype == dtype):
            if bucket and size + tensor.numel() > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        yield bucket
