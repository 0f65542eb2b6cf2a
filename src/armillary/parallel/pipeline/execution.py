"""Runs a model whose stages are on different ranks: training by a schedule, the rest in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from armillary.data.batch import Batch
from armillary.models.decoder import Decoder
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Output
from armillary.parallel.mesh import Mesh
from armillary.parallel.pipeline.rules import splits_backward
from armillary.parallel.pipeline.schedules import Schedule, build_schedule, run_schedule
from armillary.parallel.pipeline.stage import StageForward, Work, stage_of
from armillary.parallel.pipeline.tied import follow_first
from armillary.parallel.pipeline.transfer import broadcast, receive, send
from armillary.tasks.task import TaskConfig


class Pipelined:
    """The stages of this rank, after all passes, and what drives them with the other ranks.

    Every rank of the pipeline calls the same methods with the same batches.
    """

    def __init__(self, parts: Sequence[nn.Module], mesh: Mesh) -> None:
        """Replaces the forward of each part by that of a stage.

        Args:
            parts: this rank's, from `split_pipeline`, after all other passes.
            mesh: where.
        """
        self._parts = list(parts)
        self._mesh = mesh
        group = mesh.group("pp")
        assert group is not None, "a pipeline has a process group"
        self._group = group
        self._forwards: list[StageForward] = []
        self._schedule: tuple[tuple[int, ...], Schedule] | None = None
        self._caches: WeakKeyDictionary[KeyValueCache, list[KeyValueCache]] = WeakKeyDictionary()
        for part in self._parts:
            assert isinstance(part, Decoder)
            self._forwards.append(StageForward(part))
            vars(part)["forward"] = self._forwards[-1]
            if isinstance(part, FSDPModule) and splits_backward(mesh.parallel):
                # Gradients of weights are sought after those of activations, by the weights that
                # were gathered for the forward pass; the schedule frees them after its last use.
                part.set_reshard_after_forward(False)

    def forward_backward(self, task: TaskConfig, microbatches: Sequence[Batch]) -> Tensor:
        """Adds the gradients of the sum of losses over all microbatches.

        Args:
            task: what the loss is; it calls its model once.
            microbatches: of equal shape, with the tokens of this rank.

        Returns:
            The sum of losses, [] float64; 0 where the last stage is not.
        """
        follow_first(self._parts, self._mesh)
        shapes = {tuple(batch.tokens.shape) for batch in microbatches}
        assert len(shapes) == 1, f"microbatches of a step have one shape, not {shapes}"
        rows, tokens = shapes.pop()
        key = (len(microbatches), rows, tokens // self._mesh.degree("tp"))
        if self._schedule is None or self._schedule[0] != key:
            self._schedule = (
                key,
                build_schedule(
                    self._parts, self._mesh, microbatches=key[0], rows=key[1], length=key[2]
                ),
            )
        works = [_work(task, batch) for batch in microbatches]
        for forward in self._forwards:
            forward.works = iter(works)
        losses = run_schedule(self._schedule[1], len(microbatches))
        total = self._nothing()
        for loss in losses:
            total += loss
        return total

    @torch.no_grad()
    def evaluate(self, task: TaskConfig, batch: Batch) -> Tensor:
        """The sum of losses of one batch, of any number of rows, as `forward_backward` has it."""
        result = self._in_turn([_work(task, batch)] * len(self._parts))
        return self._nothing() if result is None else self._nothing() + result

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        documents: Documents | None = None,
        *,
        cache: KeyValueCache | None = None,
        output: Output | None = None,
    ) -> Tensor:
        """See `Decoder.forward`; the same on every rank of the pipeline, and without gradients."""

        def finish(model: Any) -> Tensor:
            result: Tensor = model(tokens, documents, output=output)
            return result

        caches: list[KeyValueCache | None] = [None] * len(self._parts)
        if cache is not None:
            # Each stage extends a cache by itself: the first one here the caller's.
            further = self._caches.setdefault(
                cache, [KeyValueCache(cache.capacity) for _ in self._parts[1:]]
            )
            caches = [cache, *further]
        result = self._in_turn([Work(tokens, documents, finish, own) for own in caches])
        last = stage_of(self._parts[0]).ranks[-1]
        return broadcast(result, last, self._group, self._mesh.device)

    def _in_turn(self, works: Sequence[Work]) -> Tensor | None:
        """One forward pass, stage after stage; the result where the last stage is."""
        follow_first(self._parts, self._mesh)
        hidden = works[0].tokens
        for part, forward, work in zip(self._parts, self._forwards, works, strict=True):
            stage = stage_of(part)
            forward.works = iter((work,))
            if stage.source is not None:
                hidden = receive(stage.source, self._group, self._mesh.device)
            hidden = part(hidden)
            if stage.target is not None:
                send(hidden, stage.target, self._group)
        return hidden if stage_of(self._parts[-1]).is_last else None

    def _nothing(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._mesh.device)


def _work(task: TaskConfig, batch: Batch) -> Work:
    return Work(batch.tokens, batch.documents, lambda model: task.loss(model, batch).sum)
