"""Who is compared: recipes, each with its runs, and which of their figures mean the same thing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armillary.analysis.runs import FINISHED, Run, read_run, recipe_of
from armillary.analysis.significance import Group
from armillary.data.corpus import corpus_parts
from armillary.foundation.errors import Problem, UserError
from armillary.recipe.plain import leaf_value, recipe_sha256
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import spans_of
from armillary.recipe.tree import leaves

BITS, LOSS = "bits_per_byte", "loss"
_NAME_LEAVES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A recipe and the runs of it, one a seed."""

    key: str
    """A short sign for tables: A, B, ..."""
    name: str
    """What people call it."""
    recipe: Recipe | None
    """None where this version cannot read it."""
    runs: tuple[Run, ...]

    def group(self, figure: str) -> Group:
        """A figure of its runs by seed; None for a run without a result."""
        return {self._seed(place): getattr(run, figure) for place, run in enumerate(self.runs)}

    def _seed(self, place: int) -> int:
        seed = self.runs[place].seed
        if seed is not None:
            return seed
        return -(int.from_bytes(self.key.encode()) << 20) - place  # unknown seeds are no pair

    def values(self, figure: str | Callable[[Run], float | None]) -> list[float]:
        """A figure of those runs that have it."""
        read = figure if callable(figure) else lambda run: getattr(run, figure)
        return [value for run in self.runs if (value := read(run)) is not None]

    def count(self, outcome: str) -> int:
        """Runs that ended so."""
        return sum(run.outcome == outcome for run in self.runs)

    @property
    def seeds(self) -> list[int]:
        """Of its runs, as far as they are known."""
        return [run.seed for run in self.runs if run.seed is not None]


def key_of(place: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA."""
    letters = ""
    place += 1
    while place:
        place, letter = divmod(place - 1, 26)
        letters = chr(ord("A") + letter) + letters
    return letters


def contenders_of(
    folders: Sequence[Path], ended: Mapping[Path, int], names: Mapping[Path, str]
) -> list[Contender]:
    """Run folders, put together where their recipes differ by the seed alone.

    Args:
        ended: exit codes of runs whose last process could not tell itself, by folder.
        names: what the recipes of a comparison's runs are called, by folder of the run; others are
            called like a run.

    Raises:
        UserError: a folder cannot be read, or two runs are of one recipe and one seed.
    """
    recipes = {folder: recipe_of(folder) for folder in folders}
    signs = {folder: _identity(recipe, folder) for folder, recipe in recipes.items()}
    keys: dict[tuple[Path, str], set[str]] = {}
    for folder in names:  # OUT/runs/KEY/SEED: a recipe held against itself stays two
        keys.setdefault((folder.parents[1], signs[folder]), set()).add(folder.parent.name)
    groups: dict[str, list[tuple[Run, Recipe | None]]] = {}
    for folder, sign in signs.items():
        twice = folder in names and len(keys[folder.parents[1], sign]) > 1
        group = groups.setdefault(sign + folder.parent.name if twice else sign, [])
        group.append((read_run(folder, ended.get(folder)), recipes[folder]))
    found = []
    for place, members in enumerate(groups.values()):
        runs = tuple(run for run, _ in members)
        require_other_seeds(runs)
        folder, recipe = runs[0].folder, members[0][1]
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        name = names.get(folder, f"{folder.absolute().name}{more}")
        found.append(Contender(key=key_of(place), name=name, recipe=recipe, runs=runs))
    return found


def _identity(recipe: Recipe | None, folder: Path) -> str:
    """Equal for runs that are seeds of one recipe, wherever they and their caches lie."""
    if recipe is None:
        return str(folder.absolute())
    plain = dataclasses.replace(
        recipe,
        seed=0,
        checkpoint=dataclasses.replace(recipe.checkpoint, folder=""),
        telemetry=type(recipe.telemetry)(),
    )
    return recipe_sha256(plain)


def require_other_seeds(runs: Iterable[Run]) -> None:
    """Refuses two runs of a recipe with one seed: a repeat is no further sample."""
    seen: dict[int, Run] = {}
    for run in runs:
        if run.seed is not None and (other := seen.setdefault(run.seed, run)) is not run:
            raise UserError(
                Problem(
                    f"{other.folder} and {run.folder} are of one recipe and one seed, {run.seed}",
                    "runs that differ by seed: a repeat tells nothing new about the recipe",
                    "leave one of them out",
                )
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparable:
    """Which losses of the contenders may be held against each other."""

    bits: bool
    """Bits per byte of held-out text: the same documents, whatever the tokenizer."""
    loss: bool
    """Training loss in nats per token: the same documents and the same tokenizer."""
    why: str
    """Where something may not, what differs."""

    @property
    def figure(self) -> str | None:
        """What the verdict is about; None where nothing can be compared."""
        return BITS if self.bits else (LOSS if self.loss else None)


def comparable(contenders: Sequence[Contender]) -> Comparable:
    """Looks at the documents, held-out sets and tokenizers of all runs."""
    runs = [run for contender in contenders for run in contender.runs]
    done = [run for run in runs if run.outcome == FINISHED]
    corpora = {run.text.corpus for run in runs if run.steps}
    held_out = {run.text.held_out for run in done}
    same_corpus = len(corpora) == 1 and () not in corpora
    scored = all(run.bits_per_byte is not None for run in done)
    shares = {_shares(contender.recipe) for contender in contenders}
    same_shares = len(shares) == 1
    tokenizers = [contender.recipe and contender.recipe.data.tokenizer for contender in contenders]
    same_tokenizer = None not in tokenizers and all(each == tokenizers[0] for each in tokenizers)
    if not same_corpus:
        return Comparable(bits=False, loss=False, why=_OTHER_DOCUMENTS)
    bits = len(held_out) == 1 and () not in held_out and scored
    why = []
    if not same_tokenizer:
        why.append(_OTHER_TOKENIZERS)
    if not same_shares:
        why.append(_OTHER_SHARES)
    if not bits and done:
        why.append(_NOT_HELD_OUT if not all(held_out) else _OTHER_HELD_OUT)
    return Comparable(bits=bits, loss=same_tokenizer and same_shares, why="; ".join(why))


def _shares(recipe: Recipe | None) -> tuple[object, ...]:
    """How often each document is read and which part of it is learned, stage by stage."""
    if recipe is None:
        return ()
    try:
        corpora = [corpus_parts(span.recipe.data.corpus) for span in spans_of(recipe)]
    except UserError:  # of a version that would not train it
        return ()
    found = []
    for parts in corpora:
        total = sum(part.weight for part in parts)
        learned = [getattr(part.corpus, "train_on", "all") for part in parts]
        found.append((tuple(round_to(part.weight / total, 6) for part in parts), tuple(learned)))
    return tuple(key for key, _ in itertools.groupby(found))


def round_to(value: float, digits: int = 3) -> float:
    """The value with so many digits."""
    return float(f"{value:.{digits - 1}e}")


_OTHER_DOCUMENTS = (
    "the runs read different documents, or do not say which, so their losses are not compared"
)
_OTHER_TOKENIZERS = (
    "the tokenizers differ, so losses per token are not compared; bits per byte of text are"
)
_OTHER_SHARES = (
    "the recipes read the documents in other shares, or learn other parts of them, so training"
    " losses are not compared"
)
_OTHER_HELD_OUT = "different held-out text was scored, so bits per byte are not compared"
_NOT_HELD_OUT = "some runs have scored no held-out text, so training losses are compared"


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafRow:
    """A leaf of the recipes that is not the same in all of them."""

    name: str
    values: tuple[Any, ...]
    """For each contender, in order, as plain data; `ABSENT` where the leaf is not there."""


ABSENT = object()


def differing_leaves(contenders: Sequence[Contender]) -> list[LeafRow]:
    """Every leaf that differs, in the order of the trees; seeds are no difference of recipes."""
    return _rows([contender.recipe for contender in contenders])


def _rows(recipes: Sequence[Recipe | None]) -> list[LeafRow]:
    tables = [{} if tree is None else _table(tree) for tree in recipes]
    names = dict.fromkeys(name for table in tables for name in table if name != "seed")
    groups = list(dict.fromkeys(name.partition(".")[0] for name in names))
    ordered = sorted(names, key=lambda name: groups.index(name.partition(".")[0]))
    known = [table for table in tables if table]
    return [
        LeafRow(name=name, values=tuple(table.get(name, ABSENT) for table in tables))
        for name in ordered
        if any(table.get(name, ABSENT) != known[0].get(name, ABSENT) for table in known[1:])
    ]


def _table(tree: Recipe) -> dict[str, Any]:
    return {each.name: leaf_value(each.value, each.annotation) for each in leaves(tree)}


def told_apart(words: Sequence[str], recipes: Sequence[Recipe]) -> list[str]:
    """A name for each recipe: its word, and what sets it apart from others of that word."""
    names: list[str] = []
    for word in words:
        like = [recipe for other, recipe in zip(words, recipes, strict=True) if other == word]
        rows = _rows(like)
        mine = recipes[len(names)]
        parts = [
            f"{_short(row.name)}={_shown(row.values[like.index(mine)])}"
            for row in rows
            if row.values[like.index(mine)] is not ABSENT
        ]
        more = ["..."] if len(parts) > _NAME_LEAVES else []
        names.append(" ".join([word, *parts[:_NAME_LEAVES], *more]))
    return [
        name if names.count(name) == 1 else f"{name} #{names[: place + 1].count(name)}"
        for place, name in enumerate(names)
    ]


def _short(leaf: str) -> str:
    return leaf.removeprefix("budget.").removeprefix("model.").removeprefix("optimizer.")


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(value)


def shown(value: Any) -> str:
    """A leaf's value as a person would type it."""
    if value is ABSENT:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(shown, value)) if isinstance(value, list) else str(value)
