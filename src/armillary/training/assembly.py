"""From a recipe to the things that a run consists of, each built by the room that owns it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from armillary.checkpoint.ranks import Ranks
from armillary.data.config import Data
from armillary.data.dataset import PackedDataset, ValidationDataset, training_set
from armillary.data.standing import Standing, readings
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
from armillary.recipe.build import build_model
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Span, spans_of
from armillary.tasks.task import TaskConfig
from armillary.training.interruptible import leavable
from armillary.training.step_shape import StepShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """What a stage of a run reads."""

    stores: tuple[TokenStore, ...]
    """Of all stages of the run, in order."""
    store: TokenStore
    """Of this one."""
    training: PackedDataset
    validation: dict[str, ValidationDataset]
    """A part of the held-out documents, for looks during the run, by name of the set."""
    final_validation: dict[str, ValidationDataset]
    """More of them, as a rule all, for the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """Everything a recipe names, built and in its place on this rank."""

    run: Recipe
    """Of the whole run."""
    span: Span
    """The steps that are taken with what is here: a stage of the run, or all of it."""
    recipe: Recipe
    """Of these steps."""
    mesh: Mesh
    data: RunData
    shape: StepShape
    model: ParallelModel
    task: TaskConfig
    optimizers: Optimizers
    outer: Outer
    """What ends the rounds of replica groups."""
    schedule: Schedule

    @property
    def total_steps(self) -> int:
        """Of the whole run."""
        return self.span.total_steps


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
    """Finds or builds the tokens of all stages, once for all ranks; what the first one reads.

    Args:
        check: Called all the while; may raise to leave. The next build goes on from whole pieces.

    Raises:
        UserError: the corpus, the tokenizer and the model of a stage do not fit together.
    """
    stores: list[TokenStore] = []
    spans = spans_of(recipe)
    for span in spans:
        stores.append(_open_store(span.recipe.data, progress, ranks, check))
        _require_vocabulary(span.recipe, stores[-1])
        _require_one_tokenizer(span, stores)
    for span in reversed(spans[1:]):  # what cannot be read is not found out at its border
        data_at(recipe, stores, [0] * span.index)
    return data_at(recipe, stores, ())


def _open_store(
    data: Data, progress: Progress, ranks: Ranks, check: Callable[[], None]
) -> TokenStore:
    return ranks.main_first(lambda: leavable(lambda: build(data, progress), check))


def data_at(recipe: Recipe, stores: Sequence[TokenStore], borders: Sequence[int]) -> RunData:
    """What the stage reads that begins at the last of these borders.

    Args:
        recipe: of the whole run.
        stores: of all its stages.
        borders: cursors at the borders that were crossed.

    Raises:
        UserError: a corpus does not hold one sample.
    """
    standing, span = standing_at(recipe, stores, borders), spans_of(recipe)[len(borders)]
    recipe, store = span.recipe, stores[span.index]
    validation = recipe.validation
    return RunData(
        stores=tuple(stores),
        store=store,
        training=training_set(
            store,
            recipe.data,
            seq_len=recipe.budget.seq_len,
            seed=recipe.seed,
            standing=standing,
        ),
        validation=_held_out(recipe, store, limit=validation.sequences),
        final_validation=_held_out(
            recipe, store, limit=validation.final_sequences, stride=validation.final_stride
        ),
    )


def standing_at(recipe: Recipe, stores: Sequence[TokenStore], borders: Sequence[int]) -> Standing:
    """How far the corpora are read when the stage begins that does so at the last of the borders.

    Args and Raises: as `data_at`.
    """
    standing = Standing()
    for span, until in zip(spans_of(recipe), borders, strict=False):
        store, own = stores[span.index], span.recipe
        names = readings(store, own.data, own.budget.seq_len)
        standing = standing.after(names, own.seed, store.weights, until)
    return standing


def _require_vocabulary(recipe: Recipe, store: TokenStore) -> None:
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


def _require_one_tokenizer(span: Span, stores: Sequence[TokenStore]) -> None:
    """One that is learned from the text of a stage is another than that of other text."""
    if stores[0].tokenizer.fingerprint != stores[-1].tokenizer.fingerprint:
        raise UserError(
            Problem(
                f"stage {span.name}: its tokenizer is not that of the first stage, as it was"
                " learned from other text",
                "one tokenizer for the whole run",
                f"--data.tokenizer file --data.tokenizer.path {stores[0].folder / 'tokenizer'}",
            )
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


def assemble(recipe: Recipe, mesh: Mesh, data: RunData, span: Span | None = None) -> Assembly:
    """Builds model, optimizers and schedule in the order of the passes: meta, passes, weights.

    Args:
        recipe: of the whole run.
        mesh: that of the stage.
        data: what it reads.
        span: the stage; None: the first.
    """
    span = span or spans_of(recipe)[0]
    own = span.recipe
    with torch.device("meta"):
        whole = build_model(own)
    model = parallelize(whole, mesh, scale_of(own))
    materialise(model, mesh.device, own.seed)
    return Assembly(
        run=recipe,
        span=span,
        recipe=own,
        mesh=mesh,
        data=data,
        shape=StepShape.of(
            batch_tokens=own.budget.batch_tokens,
            seq_len=own.budget.seq_len,
            microbatch=own.budget.microbatch_sequences,
            data_rank=mesh.data_rank,
            data_size=mesh.data_size,
            parallel=mesh.parallel,
            uneven=own.budget.uneven,
            groups=own.replicas.groups,
        ),
        model=model,
        task=own.task,
        optimizers=own.optimizer.build(model),
        outer=build_outer(own.replicas, model),
        schedule=span.factor(),
    )


def require_one_state(recipe: Recipe) -> None:
    """Refuses stages that could not take over the state of the one before.

    Raises:
        UserError: one has other parameters, or other optimizers for them.
    """
    first, *rest = spans_of(recipe)
    for span in rest:
        own, before = span.recipe, first.recipe
        if (own.model, own.optimizer) == (before.model, before.optimizer):
            continue
        ours, theirs = _kinds_of_state(own), _kinds_of_state(before)
        if ours != theirs:
            names = [n for n in {**theirs, **ours} if ours.get(n) != theirs.get(n)]
            raise UserError(
                Problem(
                    f"stage {span.name}: the state of stage {first.name} does not fit: {names[0]}"
                    + (f" and {len(names) - 1} more" if names[1:] else ""),
                    "the same parameters and optimizers in all stages",
                )
            )


def _kinds_of_state(recipe: Recipe) -> dict[str, tuple[torch.Size, str]]:
    """The shape of each parameter, and what kind of optimizer it has."""
    with torch.device("meta"):
        model = build_model(recipe)
    kinds = {
        parameter: type(optimizer).__name__
        for optimizer in recipe.optimizer.build(model).optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {name: (p.shape, kinds.get(p, "")) for name, p in model.named_parameters()}
