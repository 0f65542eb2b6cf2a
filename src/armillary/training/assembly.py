"""From a recipe to the things that a run consists of, each built by the room that owns it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from armillary.checkpoint.ranks import Ranks
from armillary.data.dataset import PackedDataset, ValidationDataset, training_set
from armillary.data.store import TokenStore, build
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.progress import Progress
from armillary.optim.optimizers import Optimizers
from armillary.optim.schedule import Schedule
from armillary.parallel import Scale
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel
from armillary.parallel.parallelize import parallelize
from armillary.parallel.replicas.outer import Outer, build_outer
from armillary.recipe.recipe import Recipe
from armillary.tasks.task import TaskConfig
from armillary.training.interruptible import leavable
from armillary.training.step_shape import StepShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """What a run reads."""

    store: TokenStore
    training: PackedDataset
    validation: dict[str, ValidationDataset]
    """A part of the held-out documents, for looks during the run, by name of the set."""
    final_validation: dict[str, ValidationDataset]
    """More of them, as a rule all, for the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """Everything a recipe names, built and in its place on this rank."""

    recipe: Recipe
    mesh: Mesh
    data: RunData
    shape: StepShape
    model: ParallelModel
    task: TaskConfig
    optimizers: Optimizers
    outer: Outer
    """What ends the rounds of replica groups."""
    schedule: Schedule
    total_steps: int


def scale_of(recipe: Recipe) -> Scale:
    """The part of a recipe about parallelism, precision and memory."""
    return Scale(
        parallel=recipe.parallel,
        precision=recipe.precision,
        activation_checkpoint=recipe.activation_checkpoint,
        compile=recipe.compile,
    )


def open_data(
    recipe: Recipe,
    progress: Progress,
    ranks: Ranks,
    check: Callable[[], None] = lambda: None,
) -> RunData:
    """Finds or builds the tokens, once for all ranks.

    Args:
        check: Called all the while; may raise to leave. The next build goes on from whole pieces.

    Raises:
        UserError: the corpus, the tokenizer and the model do not fit together.
    """
    store = ranks.main_first(lambda: leavable(lambda: build(recipe.data, progress), check))
    vocabulary = store.tokenizer.vocab_size
    if vocabulary > recipe.model.vocab_size:
        raise UserError(
            Problem(
                f"model.vocab_size = {recipe.model.vocab_size} is smaller than the tokenizer's"
                f" {vocabulary} tokens",
                allowed=f"{vocabulary} or more",
                fix=f"--model.vocab-size {math.ceil(vocabulary / 64) * 64}",
            )
        )
    validation = recipe.validation
    return RunData(
        store=store,
        training=training_set(store, recipe.data, seq_len=recipe.budget.seq_len, seed=recipe.seed),
        validation=_held_out(recipe, store, limit=validation.sequences),
        final_validation=_held_out(
            recipe, store, limit=validation.final_sequences, stride=validation.final_stride
        ),
    )


def _held_out(
    recipe: Recipe, store: TokenStore, *, limit: int, stride: int = 0
) -> dict[str, ValidationDataset]:
    """One set, or for a mixture one for each part; none where nothing is held out."""
    names = recipe.data.held_out_names()
    splits = store.validation if names else ()
    return {
        name: ValidationDataset(
            split,
            seq_len=recipe.budget.seq_len,
            stride=stride or None,
            limit=limit,
            source=store.fingerprint,
        )
        for name, split in zip(names, splits, strict=True)
    }


def assemble(recipe: Recipe, mesh: Mesh, data: RunData) -> Assembly:
    """Builds model, optimizers and schedule in the order of the passes: meta, passes, weights."""
    with torch.device("meta"):
        whole = recipe.model.build()
    model = parallelize(whole, mesh, scale_of(recipe))
    materialise(model, mesh.device, recipe.seed)
    total_steps = recipe.budget.total_steps
    return Assembly(
        recipe=recipe,
        mesh=mesh,
        data=data,
        shape=StepShape.of(
            batch_tokens=recipe.budget.batch_tokens,
            seq_len=recipe.budget.seq_len,
            microbatch=recipe.budget.microbatch_sequences,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            parallel=mesh.parallel,
            uneven=recipe.budget.uneven,
            groups=recipe.replicas.groups,
        ),
        model=model,
        task=recipe.task,
        optimizers=recipe.optimizer.build(model),
        outer=build_outer(recipe.replicas, model),
        schedule=recipe.schedule.build(total_steps),
        total_steps=total_steps,
    )
