"""From a run folder or a checkpoint to a model that can be asked."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from armillary.checkpoint.find import Found, Words, find_checkpoint
from armillary.checkpoint.manifest import step_of
from armillary.checkpoint.places.open import open_reachable
from armillary.checkpoint.state import restore_model
from armillary.data.tokenizer import Tokenizer, load_tokenizer
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.progress import Progress
from armillary.foundation.run_folder import (
    CHECKPOINTS_FOLDER,
    RECIPE_FILE,
    TOKENIZER_FOLDER,
    checkpoints_address,
)
from armillary.models.decoder import Decoder
from armillary.models.tuning.merge import merge_low_rank
from armillary.parallel.materialise import allocate
from armillary.recipe import Recipe, read_toml
from armillary.recipe.build import build_model
from armillary.recipe.overrides import apply

_WORDS = Words("--step", "leaving --step out", "restore a copy, or name another run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A model with its weights, and what belongs to it."""

    model: Decoder
    tokenizer: Tokenizer
    recipe: Recipe
    checkpoint: Found

    def encode(self, text: str) -> list[int]:
        """See `prompt_tokens`."""
        return prompt_tokens(self.tokenizer, self.recipe, text)


def prompt_tokens(tokenizer: Tokenizer, recipe: Recipe, text: str) -> list[int]:
    """Token ids of a prompt, begun as the documents of the training data began."""
    bos = tokenizer.bos_id if recipe.data.bos else None
    return [*([] if bos is None else [bos]), *tokenizer.encode(text)]


def recipe_at(recipe: Recipe, step: int | None) -> Recipe:
    """The recipe that a run had at a step, for its model; None: at its end."""
    if not recipe.stages:
        return recipe
    return recipe.stage_at(recipe.total_steps if step is None else max(1, step))[1]


def load_trained(
    path: Path,
    *,
    step: int | None = None,
    device: torch.device,
    progress: Progress | None = None,
    merge: bool = False,
) -> Trained:
    """Loads what a run has saved.

    Computes in fp32 on a CPU, elsewhere in the run's own format, parameters included.

    Args:
        path: a run folder, or one of its checkpoints.
        step: which of the run's checkpoints; None: the newest that verifies.
        device: where the model will be.
        progress: hears of the bytes read to verify.
        merge: add low-rank factors to their weights, so that each product is a single one.

    Raises:
        UserError: not a run, no such checkpoint, or one that does not verify.
    """
    run, found = find_saved(path, step, progress)
    recipe = recipe_at(apply(Recipe(), [read_toml(run / RECIPE_FILE)]), found.step)
    tokenizer = load_tokenizer(run / TOKENIZER_FOLDER)
    with torch.device("meta"):
        model = build_model(recipe)
    allocate(model, device)
    restore_model(found, model)
    if merge:
        merge_low_rank(model.modules())
    if device.type != "cpu":
        round_parameters(model, recipe.precision.compute_dtype)
    return Trained(model=model.eval(), tokenizer=tokenizer, recipe=recipe, checkpoint=found)


def round_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Keeps parameters in the format in which training computes with them.

    Buffers stay as they are: selection biases of experts move by less than a bfloat16 can tell.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def find_saved(
    path: Path, step: int | None = None, progress: Progress | None = None
) -> tuple[Path, Found]:
    """The run folder that a path belongs to, and the checkpoint to take.

    Raises:
        UserError: not a run, no such checkpoint, or one that does not verify.
    """
    run, own_step = run_and_step(path)
    if own_step is not None and step not in (None, own_step):
        message = f"--step {step}: {path} is the checkpoint of step {own_step}"
        raise UserError(Problem(message, fix=f"armillary generate {run} --step {step}"))
    wanted = own_step if step is None else step
    asked = "auto" if wanted is None else str(wanted)
    found = find_checkpoint(open_reachable(checkpoints_address(run)), asked, progress, _WORDS)
    if found is None:
        recipe, folder = shlex.quote(str(run / RECIPE_FILE)), shlex.quote(str(run))
        fix = f"armillary train --from-file {recipe} --run {folder}"
        raise UserError(Problem(f"{run} has no checkpoint yet", fix=fix))
    return run, found


def run_and_step(path: Path) -> tuple[Path, int | None]:
    """The run folder, and the step when the path names a checkpoint in it."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise UserError(
            Problem(f"{path} {what}", "a run folder, or a checkpoint in one", "armillary runs list")
        )
    path = path.resolve()
    step, run = step_of(path.name), path
    if step is not None:
        run = path.parent.parent
    elif path.name == CHECKPOINTS_FOLDER:
        run = path.parent
    if not (run / RECIPE_FILE).is_file():
        message = f"{path} is not a run folder or a checkpoint in one: no {run / RECIPE_FILE}"
        raise UserError(Problem(message, "a folder that `armillary train` wrote"))
    return run, step
