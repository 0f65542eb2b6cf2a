"""Published weights as a run of ours, at step 0: recipe, tokenizer and a checkpoint of weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from armillary.checkpoint.hugging_face.check import check_conversion
from armillary.checkpoint.hugging_face.source import Source, Sources
from armillary.checkpoint.hugging_face.tokenizer import import_tokenizer, require_rows
from armillary.checkpoint.hugging_face.views import Cast
from armillary.checkpoint.hugging_face.weights import Foreign, foreign_weights, open_foreign
from armillary.checkpoint.hugging_face.writing import DTYPES, bytes_of, write_checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.place import unique
from armillary.data.config import Data
from armillary.data.tokenizer import Tokenizer
from armillary.data.tokenizer_subword import File
from armillary.foundation.errors import Problem, RunError, UserError
from armillary.foundation.files import make_folder, write_atomically
from armillary.foundation.progress import NoProgress, Progress
from armillary.foundation.run_folder import (
    CHECKPOINTS_FOLDER,
    EVENTS_FILE,
    IDENTITY_FILE,
    RECIPE_FILE,
    TOKENIZER_FOLDER,
)
from armillary.models.dense import DenseDecoder
from armillary.models.moe import MoEDecoder
from armillary.recipe.budget import Budget
from armillary.recipe.overrides import Option, apply
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml
from armillary.telemetry.events import EventLog
from armillary.training.initial import other_leaves

_KEPT_WIDE = (".expert_bias",)
"""Endings of names that stay float32 whatever the weights' format."""
_BATCH_LOSS = "router_aux_loss_coef"


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What an import has made."""

    folder: Path
    source: str
    family: str
    parameters: int
    bytes_read: int
    bytes_written: int
    has_tokenizer: bool
    checked: tuple[str, ...]
    """Parts whose results were compared with an independent reference."""
    notes: tuple[str, ...]
    """What a person should know."""


def import_run(
    source: str,
    folder: Path,
    *,
    options: Sequence[Option] = (),
    dtype: str = "",
    progress: Progress | None = None,
) -> Imported:
    """Makes a run folder of a folder of Hugging Face format, or of `hf:OWNER/NAME`.

    The recipe is there last: before, no command takes the folder for a run.

    Args:
        source: see above.
        folder: the run; not there, or empty.
        options: values of the recipe, such as `model.vocab_size`.
        dtype: of the weights; empty: as they are published, dequantised ones in bfloat16.
        progress: hears of bytes written.

    Raises:
        UserError: the source is not of a family that is known, lacks tensors or has others, or our
            modules do not give what the published ones do; nothing was made.
        RunError: something could not be read or written.
    """
    _require_free(folder)
    foreign = open_foreign(source)
    recipe = apply(Recipe(model=foreign.model, budget=_budget(foreign)), [], options)
    model = recipe.model
    if not isinstance(model, DenseDecoder):
        raise UserError(Problem("the model is not the one of the weights", fix="leave --model out"))
    weights = foreign_weights(foreign, model)
    checked = check_conversion(weights, model)
    kept = {name: _as(name, each, dtype) for name, each in weights.sources.items()}
    try:
        recipe, tokenizer = _write_run(foreign, recipe, kept, folder, progress or NoProgress())
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)  # it was not there, or empty
        if not isinstance(error, OSError):
            raise
        message = f"cannot import {source} into {folder}: {error.strerror or error}"
        raise RunError(Problem(message, fix="make room, and again")) from error
    return Imported(
        folder=folder,
        source=source,
        family=foreign.family.model_type,
        parameters=model.parameter_count(),
        bytes_read=weights.tally.bytes_read,
        bytes_written=sum(map(bytes_of, kept.values())),
        has_tokenizer=tokenizer is not None,
        checked=checked,
        notes=_notes(foreign, model, weights.left_out, tokenizer),
    )


def _write_run(
    foreign: Foreign, recipe: Recipe, weights: Sources, folder: Path, progress: Progress
) -> tuple[Recipe, Tokenizer | None]:
    """Writes tokenizer, checkpoint and, last, the recipe; returns it as written."""
    make_folder(folder)
    tokenizer = import_tokenizer(foreign.folder, folder / TOKENIZER_FOLDER)
    rows = recipe.model.vocab_size
    if rows < foreign.model.vocab_size:  # rows were cut off: not those of tokens
        require_rows(rows, folder / TOKENIZER_FOLDER, "--model.vocab-size")
    if tokenizer is not None and recipe.data.tokenizer == Data().tokenizer:
        data = replace(
            recipe.data,
            tokenizer=File(path=str((folder / TOKENIZER_FOLDER).absolute())),
            bos=recipe.data.bos and tokenizer.bos_id is not None,
            eos=recipe.data.eos and tokenizer.eos_id is not None,
        )
        recipe = replace(recipe, data=data)
    run = f"{folder.resolve().name}-{unique()}"
    manifest = {
        "weights_only": True,
        "recipe_sha256": recipe_sha256(recipe),
        "run": run,
        "provenance": {"from": foreign.address, "family": foreign.family.model_type},
    }
    place = LocalPlace(folder / CHECKPOINTS_FOLDER)
    with progress.task("writing weights", sum(map(bytes_of, weights.values())), "bytes") as advance:
        write_checkpoint(place, weights, {"tokens_total": 0}, manifest, advance)
    write_atomically(folder / IDENTITY_FILE, json.dumps({"run": run}) + "\n")
    with closing(EventLog(folder / EVENTS_FILE)) as log:
        log.emit("message", 0, message=f"imported from {foreign.address}")
    write_atomically(folder / RECIPE_FILE, to_toml(recipe))
    return recipe, tokenizer


def _budget(foreign: Foreign) -> Budget:
    """Rows that the model can read; the length of a run is for whoever trains it to say."""
    length = min(foreign.model.max_seq_len, 2048)
    return Budget(seq_len=length, batch_tokens=8 * length)


def _require_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        message = f"{folder} is there already"
        raise UserError(Problem(message, "a run folder that is not there", "another --run DIR"))


def _as(name: str, source: Source, dtype: str) -> Source:
    if not dtype or name.endswith(_KEPT_WIDE):
        return source
    wanted = DTYPES[dtype]
    return source if source.dtype == wanted else Cast(source, wanted)


def _notes(
    foreign: Foreign, model: DenseDecoder, left_out: Sequence[str], tokenizer: Tokenizer | None
) -> tuple[str, ...]:
    notes = [f"left out: {line}" for line in left_out]
    if foreign.ignored:
        notes.append(f"config.json has keys that were not read: {', '.join(foreign.ignored)}")
    rows = model.vocab_size - foreign.model.vocab_size
    notes += other_leaves(foreign.address, foreign.model, model)
    if _BATCH_LOSS in foreign.config and isinstance(model, MoEDecoder):
        coefficient, ours = foreign.config[_BATCH_LOSS], model.router.sequence_loss
        notes.append(
            f"{_BATCH_LOSS} = {str(coefficient)[:40]} is not taken over: model.router.sequence_loss"
            f" = {ours:g} weighs another loss, over each row"
        )
    if rows:
        what = "rows of zeros were added to" if rows > 0 else "rows were cut off"
        notes.append(f"{abs(rows)} {what} embedding and head")
    if tokenizer is None:
        notes.append("there is no tokenizer.json: generate needs one, in RUN/tokenizer")
    elif tokenizer.vocab_size > model.vocab_size:
        notes.append(f"the tokenizer has {tokenizer.vocab_size} tokens, more than the model")
    return tuple(notes)
