"""What a run keeps in its folder beside events and checkpoints."""

from __future__ import annotations

from pathlib import Path

from armillary.data.tokenizer import Tokenizer, save_tokenizer
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.run_folder import RECIPE_FILE, TOKENIZER_FOLDER
from armillary.recipe.plain import recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.toml import to_toml


def default_run_folder(name: str, recipe: Recipe) -> Path:
    """`runs/NAME-HASH`: the same command finds its own run again, another recipe gets its own."""
    return Path("runs") / f"{_short(name)}-{recipe_sha256(recipe)[:8]}"


def _short(name: str) -> str:
    """A recipe's own name: without the folder, the suffix or the module it is in."""
    return Path(name.removesuffix(".toml").rpartition(":")[2]).name


def describe_run(folder: Path, recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Writes what the folder needs to be understood.

    That is recipe.toml, whole and resolved, from which a repeat of the run can start, and the
    tokenizer, so that the model can be used without the data.

    Raises:
        UserError: the folder cannot be written to.
    """
    try:
        write_atomically(folder / RECIPE_FILE, to_toml(recipe))
        (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
        save_tokenizer(tokenizer, folder / TOKENIZER_FOLDER)
    except OSError as error:
        raise UserError(
            Problem(
                f"run folder {folder} cannot be written to ({error.strerror})",
                fix="check its permissions and its disk, or choose another folder with --run DIR",
            )
        ) from error
