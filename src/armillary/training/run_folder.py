"""Where a run lives on disk, and what is asked of the folder before anything starts."""

from __future__ import annotations

from pathlib import Path

from armillary.data.tokenizer import Tokenizer, save_tokenizer
from armillary.foundation.files import write_atomically
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml

RECIPE_FILE = "recipe.toml"
EVENTS_FILE = "events.jsonl"
CHECKPOINTS = "checkpoints"
TOKENIZER_FOLDER = "tokenizer"


def default_run_folder(name: str, recipe: Recipe) -> Path:
    """`runs/NAME-HASH`: the same command finds its own run again, another recipe gets its own."""
    return Path("runs") / f"{Path(name).stem}-{recipe_sha256(recipe)[:8]}"


def write_recipe(folder: Path, recipe: Recipe) -> None:
    """Writes RUN/recipe.toml, whole and resolved; repeats of the run start from it."""
    write_atomically(folder / RECIPE_FILE, to_toml(recipe))


def keep_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Copies the tokenizer into the run folder, so that its model can be used without the data."""
    target = folder / TOKENIZER_FOLDER
    target.mkdir(exist_ok=True)
    save_tokenizer(tokenizer, target)
