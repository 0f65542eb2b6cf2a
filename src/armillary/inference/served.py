"""A trained model on any mesh, only to be asked: opened by all its ranks together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from armillary.checkpoint.find import Found
from armillary.checkpoint.ranks import Ranks
from armillary.checkpoint.state import restore_model
from armillary.data.tokenizer import Tokenizer, load_tokenizer
from armillary.foundation.errors import UserError
from armillary.foundation.progress import Progress
from armillary.foundation.run_folder import RECIPE_FILE, TOKENIZER_FOLDER
from armillary.foundation.tell import seen_by_every_rank
from armillary.inference.load import find_saved, prompt_tokens, recipe_at, run_and_step
from armillary.parallel import process
from armillary.parallel.config import Compile, NoCheckpoint, Parallel, Scale
from armillary.parallel.materialise import allocate
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel
from armillary.parallel.parallelize import parallelize
from armillary.parallel.replicas.config import Replicas
from armillary.recipe import Recipe, read_toml
from armillary.recipe.build import build_model
from armillary.recipe.overrides import Option, apply
from armillary.recipe.problems_serving import serving_problems
from armillary.resilience.roll_call import RollCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model with its weights, spread over ranks, and what belongs to it."""

    model: ParallelModel
    tokenizer: Tokenizer
    recipe: Recipe
    """The run's at its checkpoint, with what was asked for; its mesh is the one it is on."""
    checkpoint: Found
    ranks: Ranks
    """For agreement between the ranks."""

    def encode(self, text: str) -> list[int]:
        """See `load.prompt_tokens`."""
        return prompt_tokens(self.tokenizer, self.recipe, text)

    def sums(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The sums of numbers over all ranks."""
        return self.ranks.sums_and_any(numbers, False)[0]


def served_recipe(path: Path, options: Sequence[Option], *, step: int | None = None) -> Recipe:
    """The recipe that a run's model is asked with.

    The mesh that it was trained on is no matter: all ranks share the weights, unless the options
    ask for something else.

    Args:
        path: a run folder, or one of its checkpoints.
        options: values over those of the run.
        step: of the checkpoint, which says the stage of the run; None: as the path has it, or its
            end.

    Raises:
        UserError: there is no run, or an option does not fit.
    """
    run, own_step = run_and_step(path)
    recipe = apply(Recipe(), [read_toml(run / RECIPE_FILE)])
    recipe = recipe_at(recipe, own_step if step is None else step)
    recipe = dataclasses.replace(
        recipe,
        parallel=Parallel(),
        compile=Compile(),
        activation_checkpoint=NoCheckpoint(),
        replicas=Replicas(),
    )
    return apply(recipe, options=options)


@contextmanager
def served(
    path: Path,
    options: Sequence[Option],
    *,
    step: int | None = None,
    exact: bool = False,
    more_ranks: str = "",
    progress: Progress,
) -> Iterator[Served]:
    """Loads what a run has saved, spread as the options say; called on each rank.

    Args:
        path: a run folder, or one of its checkpoints.
        options: values over those of the run; its own mesh is no matter.
        step: which of the run's checkpoints; None: the newest that verifies.
        exact: compute in fp32 on a CPU, whatever the run computes in.
        more_ranks: see `serving_problems`.
        progress: hears of the bytes read to verify.

    Raises:
        UserError: not a run, no such checkpoint, or one that does not fit the recipe or the ranks.
    """
    with ExitStack() as stack:
        with seen_by_every_rank():
            recipe = served_recipe(path, options, step=step)
            found = serving_problems(recipe, process.world_size(), more_ranks=more_ranks)
            if found:
                raise UserError(found)
            device = process.choose_device(recipe.parallel.device)
            if found := recipe.model.device_problems(device.type, recipe.precision.compute):
                raise UserError(found)
        if process.init_process_group(device):
            stack.callback(process.destroy)
        roll_call = stack.enter_context(
            RollCall(process.store(), rank=process.rank(), world_size=process.world_size())
        )
        with roll_call.naming_the_lost():
            ranks = stack.enter_context(closing(Ranks(roll_call.require_all)))
            run, saved = ranks.on_main(lambda: find_saved(path, step, progress))
            with seen_by_every_rank():
                recipe = served_recipe(path, options, step=saved.step)
                tokenizer = load_tokenizer(run / TOKENIZER_FOLDER)
            if exact and device.type == "cpu":
                precision = dataclasses.replace(recipe.precision, compute="float32")
                recipe = dataclasses.replace(recipe, precision=precision)
            yield Served(
                model=_load(recipe, saved, device),
                tokenizer=tokenizer,
                recipe=recipe,
                checkpoint=saved,
                ranks=ranks,
            )


def _load(recipe: Recipe, found: Found, device: torch.device) -> ParallelModel:
    """The model in its place, with the weights of a checkpoint."""
    with torch.device("meta"):
        whole = build_model(recipe)
    scale = Scale(parallel=recipe.parallel, precision=recipe.precision)
    model = parallelize(whole, Mesh.create(recipe.parallel, device), scale)
    for part in model.parts:
        allocate(part, device)
    restore_model(found, model)
    return model.eval()
