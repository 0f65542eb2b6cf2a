"""Recipes by name.

@recipe("my-llama", sources={"optimizer.lr": "ours: half of what diverged"})
def my_llama() -> Recipe:
    \"""One line that says what it is for.\"""
    return Recipe(...)
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from armillary.foundation.errors import ArmillaryError, Problem, UserError, nearest
from armillary.recipe.outside import is_file_module, is_outside, load, prints_on_stderr

if TYPE_CHECKING:
    from armillary.recipe.recipe import Recipe

RecipeFunction = Callable[[], "Recipe"]

_CLOSE = 6
"""Names that an error proposes, at most."""

_RECIPES: dict[str, RecipeFunction] = {}
_IN_FILES: dict[str, dict[str, RecipeFunction]] = {}
"""Recipes in files of the user's own, by module: two files may use one name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What is told of a recipe beside its values."""

    family: str = "others"
    """What it is listed under."""
    gpus: int | None = None
    """GPUs of 80 GB it is made for; 0: a CPU, None: as many as there are."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where values come from, by the name of a leaf or of a group of leaves: a publication with
    its section or table, or `ours: reason`. Of several names that hold a leaf the longest counts.
    """


_CARDS: dict[object, Card] = {}
"""By the function that makes the recipe."""


def recipe(
    name: str,
    *,
    family: str = "others",
    gpus: int | None = None,
    sources: Mapping[str, str] | None = None,
) -> Callable[[RecipeFunction], RecipeFunction]:
    """Registers a function without arguments as the recipe `name`; for the rest see `Card`.

    Raises:
        ValueError: another function holds the name.
    """

    def register(function: RecipeFunction) -> RecipeFunction:
        _CARDS[function] = Card(family=family, gpus=gpus, sources=dict(sources or {}))
        if is_file_module(function.__module__):
            _IN_FILES.setdefault(function.__module__, {})[name] = function
            return function
        holder = _RECIPES.get(name)
        if holder is not None and _where(holder) != _where(function):
            raise ValueError(f"{_where(holder)} already holds the recipe name {name!r}")
        _RECIPES[name] = function
        return function

    return register


def _where(function: RecipeFunction) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def names() -> list[str]:
    """The names of all registered recipes, those of the package first read in."""
    import armillary.recipes as curated

    for module in pkgutil.iter_modules(curated.__path__):
        importlib.import_module(f"{curated.__name__}.{module.name}")
    return sorted(_RECIPES, key=_natural)


def _natural(name: str) -> list[tuple[int, float, str]]:
    """Sorts 8b before 70b."""
    import re

    parts = re.findall(r"\d+(?:\.\d+)?|\D+", name)
    return [(0, float(part), "") if part[0].isdigit() else (1, 0.0, part) for part in parts]


def describe(name: str) -> str:
    """The first line of a registered recipe's docstring."""
    return (inspect.getdoc(_RECIPES[name]) or "").partition("\n")[0]


def card(name: str) -> Card:
    """What is told of the recipe called `name` beside its values; an empty card if nothing is.

    Raises:
        UserError: see `get`.
    """
    if name.endswith(".toml"):
        return Card()
    function = _outside(name) if is_outside(name) else _registered(name)
    return _CARDS.get(function, Card())


def get(name: str) -> Recipe:
    """The recipe called `name`: a registered one, `path/to/file.py:name`, or a `.toml` file.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name.endswith(".toml"):
        return _from_file(name)
    if is_outside(name):
        return _from_outside(name)
    return _registered(name)()


def _registered(name: str) -> RecipeFunction:
    known = names()
    if name not in _RECIPES:
        close = sorted(difflib.get_close_matches(name, known, n=_CLOSE, cutoff=0.5), key=_natural)
        listed = "the names that armillary recipes list shows"
        fix = "--from-file FILE.toml" if Path(name).exists() else "armillary recipes list"
        raise UserError(
            Problem(
                f"there is no recipe {name!r}",
                f"{listed}, such as {', '.join(close)}" if close else listed,
                nearest(name, known) or fix,
            )
        )
    return _RECIPES[name]


def _from_file(name: str) -> Recipe:
    from armillary.recipe.overrides import apply
    from armillary.recipe.recipe import Recipe
    from armillary.recipe.toml import read_toml

    return apply(Recipe(), [read_toml(name)])


def _outside(name: str) -> Callable[[], object]:
    """The function that a file or module of the user's own has under this name."""
    module, word = load(name)
    found = {key: item for key, item in _RECIPES.items() if item.__module__ == module.__name__}
    found |= _IN_FILES.get(module.__name__, {})
    by_function = {item.__name__: item for item in found.values()}
    function = found.get(word) or by_function.get(word) or getattr(module, word, None)
    if not word and len(found) == 1:
        function = next(iter(found.values()))
    place = name.rpartition(":")[0] or name
    if not callable(function):
        best = nearest(word, [*found, *by_function])
        raise UserError(
            Problem(
                f"{place} has no recipe {word!r}"
                if word
                else f"{place} needs the name of a recipe",
                ", ".join(found) or 'a function marked @recipe("name")',
                best and f"{place}:{best}",
            )
        )
    return function


def _from_outside(name: str) -> Recipe:
    from armillary.recipe.recipe import Recipe

    made = _call(_outside(name), name)
    if not isinstance(made, Recipe):
        raise UserError(
            Problem(f"{name} returns {type(made).__name__}", "a function that returns a Recipe")
        )
    _check_types(made, name)
    return made


def _call(function: Callable[[], object], name: str) -> object:
    try:
        with prints_on_stderr():
            return function()
    except ArmillaryError:
        raise
    except Exception as error:
        code = getattr(inspect.unwrap(function), "__code__", None)
        lines = [
            (frame.filename, frame.lineno)
            for frame in traceback.extract_tb(error.__traceback__)[1:]
            if code is None or frame.filename == code.co_filename
        ]
        if not lines and code is not None:  # it could not even be called
            lines = [(code.co_filename, code.co_firstlineno)]
        where = " ({}:{})".format(*lines[-1]) if lines else ""
        raise UserError(
            Problem(
                f"{name} fails: {type(error).__name__}: {error}{where}",
                "a function without arguments that returns a Recipe",
            )
        ) from error


def _check_types(made: Recipe, name: str) -> None:
    """Raises UserError where a value of the tree is not of its field's type."""
    from armillary.recipe.coerce import mismatch_of
    from armillary.recipe.tree import leaves, value_at

    found = []
    for leaf in leaves(made):
        value = value_at(made, leaf.name)  # of a component its tree, not its name
        wanted = mismatch_of(value, leaf.annotation)
        if wanted is not None:
            found.append(Problem(f"{leaf.name} = {value!r} does not fit (in {name})", wanted))
    if found:
        raise UserError(found)
