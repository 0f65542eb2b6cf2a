"""The recipe part of a command line, the same for every command that takes a recipe."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from armillary.foundation.errors import Problem, UserError
from armillary.recipe.fields import fields_of
from armillary.recipe.overrides import Option, apply, split_options
from armillary.recipe.problems_stages import stage_problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import get
from armillary.recipe.toml import read_toml

DEFAULT_RECIPE = "starter"
FROM_FILE = "from_file"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A recipe with everything applied that was typed."""

    recipe: Recipe
    name: str
    """What it was called: a registered name, `file.py:function`, or the TOML file."""

    def at(self, step: int) -> Resolved:
        """The recipe of the stage that a step is in, counting from 1.

        Raises:
            UserError: the stages are not as they should be, or the step is none of the run.
        """
        if not self.recipe.stages:
            return self
        if found := stage_problems(self.recipe, lambda recipe: []):
            raise UserError(found)
        if not 1 <= step <= (last := self.recipe.total_steps):
            raise UserError(Problem(f"--step {step}", f"1 to {last}", f"--step {last}"))
        return Resolved(self.recipe.stage_at(step)[1], self.name)


def resolve(tokens: Sequence[str], *, default: str | None = None) -> Resolved:
    """Reads `[RECIPE] [--from-file FILE.toml ...] [--LEAF VALUE ...]`.

    Values apply in order: the recipe, the files, the command line. Without a recipe, the files are
    the whole of it; without files too, it is `default`.

    Raises:
        UserError: with every problem of the values at once.
    """
    words, options = split_options(tokens)
    _refuse_files(words)
    if len(words) > 1:
        raise UserError(
            Problem(
                f"more than one recipe: {_listed(words)}",
                allowed="one word, first; a value follows its --name",
                fix=f"{words[0]} first, then --NAME VALUE",
            )
        )
    return _resolved(words[0] if words else None, options, _own_options(tokens), default)


def _refuse_files(words: list[str]) -> None:
    """The shell puts many words in the place of a glob that is not quoted."""
    recipes = () if len(words) > 1 else (".toml", ".py")
    files = [word for word in words if Path(word).is_file() and not word.endswith(recipes)]
    if files:
        raise UserError(
            Problem(
                f"files where the name of a recipe would stand: {_listed(files)}",
                allowed="one recipe, first; globs in quotes, so that the shell leaves them alone",
                fix="--data.corpus.files 'FOLDER/*.txt', in quotes",
            )
        )


def _listed(words: list[str], most: int = 3) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def resolve_each(tokens: Sequence[str]) -> list[Resolved]:
    """Reads `RECIPE RECIPE ... [--LEAF VALUE ...]`: the same values over each recipe."""
    words, options = split_options(tokens)
    return [_resolved(word, options, _own_options(tokens)) for word in words]


def _own_options(tokens: Sequence[str]) -> Sequence[str]:
    own: Sequence[str] = getattr(tokens, "own_options", ())
    return own


def _resolved(
    word: str | None, typed: Sequence[Option], own: Sequence[str], default: str | None = None
) -> Resolved:
    """The recipe `word` with the options over it; `own` are the command's other options."""
    if word is not None and not word.strip():
        raise UserError(Problem("the name of the recipe is empty", fix="armillary recipes list"))
    files = [_file(option) for option in typed if option.path == (FROM_FILE,)]
    options = [option for option in typed if option.path != (FROM_FILE,)]
    if word is None and not files and default is None:
        raise UserError(Problem("no recipe is given", fix="armillary recipes list"))
    name = word or (files[0] if files else str(default))
    base = Recipe() if word is None and files else get(name)
    tables = [read_toml(file) for file in files]
    slips = _slips(options, own)
    others = [option for option in options if option not in slips]
    try:
        made = apply(base, tables, others)
    except UserError as error:
        raise UserError([*slips.values(), *error.problems]) from None
    if slips:
        raise UserError(slips.values())
    return Resolved(made, name)


def _file(option: Option) -> str:
    if not option.value:
        raise UserError(
            Problem("--from-file needs a value", allowed="a TOML file of recipe values")
        )
    return option.value


def _slips(options: list[Option], own: Sequence[str]) -> dict[Option, Problem]:
    """Options that are no value of a recipe but look like one of the command's own."""
    slips = {}
    for option in options:
        if len(option.path) == 1 and option.path[0] not in fields_of(Recipe):
            close = difflib.get_close_matches(f"--{option.name}", own, n=1, cutoff=0.75)
            if close:
                slips[option] = Problem(f"there is no --{option.name}", fix=close[0])
    return slips
