"""A config tree that can be edited leaf by leaf, then built, with every problem collected."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from typing import Any

from armillary.foundation.component import choices_of, is_slot
from armillary.foundation.errors import ArmillaryError, Problem
from armillary.recipe.coerce import NONE_WORD, Mismatch, coerce, describe, options_of
from armillary.recipe.fields import (
    MISSING,
    element_of,
    fields_of,
    group_in,
    is_open_list,
    is_optional,
    list_in,
)
from armillary.recipe.outside import find_component, is_outside

KIND = "kind"
"""The key that names a component where a slot is written as a table."""

Path = tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Draft:
    """A config dataclass that is not built yet. Values are leaves, drafts, or lists of these."""

    cls: type
    values: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads: a key of a draft's values, or an index of a list."""

    container: Any
    key: Any
    annotation: Any

    @property
    def value(self) -> Any:
        """What stands there now; None for a list element that would be added at its end."""
        if isinstance(self.container, list) and self.key == len(self.container):
            return None
        return self.container[self.key]

    def put(self, value: Any) -> None:
        """Puts a value there."""
        if isinstance(self.container, list) and self.key == len(self.container):
            self.container.append(value)
        else:
            self.container[self.key] = value


class Unknown(LookupError):
    """A path leads nowhere. Holds how much of it is right and which words would fit next."""

    def __init__(self, known: Path, word: str, valid: Iterable[str], rest: Path = ()) -> None:
        self.known, self.word, self.valid, self.rest = known, word, list(valid), rest
        super().__init__(".".join((*known, word, *rest)))


def draft_of(value: Any) -> Any:
    """An editable copy of a config tree; leaves are kept as they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = fields_of(type(value))
        return Draft(type(value), {name: draft_of(getattr(value, name)) for name in names})
    if isinstance(value, tuple):
        return [draft_of(part) for part in value]
    return value


def default_draft(cls: type) -> Draft:
    """A draft of a class with its defaults; a field without one stays `MISSING`."""
    return Draft(cls, {name: draft_of(info.default) for name, info in fields_of(cls).items()})


def build(draft: Any, problems: list[Problem], path: Path = ()) -> Any:
    """The frozen tree, or None with the reasons added to `problems`."""
    if isinstance(draft, list):
        return tuple(build(part, problems, (*path, str(i))) for i, part in enumerate(draft))
    if not isinstance(draft, Draft):
        return draft
    before = len(problems)
    values = {}
    for name, value in draft.values.items():
        if value is MISSING:
            allowed = describe(fields_of(draft.cls)[name].annotation)
            problems.append(Problem(f"{'.'.join((*path, name))} needs a value", allowed=allowed))
        else:
            values[name] = build(value, problems, (*path, name))
    if len(problems) > before:
        return None
    try:
        return draft.cls(**values)
    except ArmillaryError as error:
        problems.extend(error.problems)
    except (ValueError, TypeError) as error:
        problems.append(Problem(f"{'.'.join(path) or draft.cls.__name__}: {error}"))
    return None


def find(draft: Draft, path: Path) -> Place:
    """The place that a path leads to; optional groups on the way are made with their defaults.

    Raises:
        Unknown: it leads nowhere.
    """
    place = _step_to(draft, None, path, 0)
    for position in range(1, len(path)):
        group = group_in(place.annotation)
        if place.value is None and group is not None and not is_slot(group):
            place.put(default_draft(group))
        place = _step_to(place.value, place.annotation, path, position)
    return place


def _step_to(value: Any, annotation: Any, path: Path, position: int) -> Place:
    try:
        return _step(value, annotation, path[:position], path[position])
    except Unknown as unknown:
        unknown.rest = path[position + 1 :]
        raise


def _step(value: Any, annotation: Any, known: Path, word: str) -> Place:
    if isinstance(value, Draft):
        infos = fields_of(value.cls)
        if word in infos:
            return Place(value.values, word, infos[word].annotation)
        raise Unknown(known, word, infos)
    elements = list_in(annotation)
    if isinstance(value, list) and elements is not None:
        end = len(value) + is_open_list(elements)
        if word.isdecimal() and int(word) < end:
            return Place(value, int(word), element_of(elements, int(word)))
        raise Unknown(known, word, map(str, range(end)))
    raise Unknown(known, word, ())


class Layer:
    """One source of values, a file or a command line, put over a draft.

    Names in `problems` which value does not fit, where it stands, and what would.
    """

    def __init__(self, draft: Draft, problems: list[Problem], where: str = "") -> None:
        self.draft, self.problems = draft, problems
        self.where = f" ({where})" if where else ""
        self._typed = not where
        self._set: list[Path] = []

    def put(self, path: Path, place: Place, value: object, *, text: bool) -> None:
        """Puts one value at a place that `find` gave for `path`."""
        group = group_in(place.annotation)
        elements = list_in(place.annotation)
        if is_optional(place.annotation) and isinstance(value, str) and value.lower() == NONE_WORD:
            place.put(None)
        elif isinstance(value, dict) and group is not None:
            self._put_table(path, place, group, value)
        elif isinstance(value, str) and group is not None and is_slot(group):
            self._choose(path, place, group, value)
        elif (
            isinstance(value, list)
            and elements is not None
            and group_in(element_of(elements, 0)) is not None
        ):
            self._put_groups(path, place, value)
        else:
            try:
                place.put(draft_of(coerce(value, place.annotation, text=text)))
            except Mismatch as mismatch:
                self._refuse(path, value, str(mismatch), place.annotation, text=text)
                return
            self._clear_alternatives(path, place)
        self._set.append(path)

    def _put_table(self, path: Path, place: Place, group: type, table: dict[str, Any]) -> None:
        if is_slot(group) and KIND in table:
            if not isinstance(table[KIND], str) or not self._choose(
                path, place, group, table[KIND]
            ):
                return
        elif not isinstance(place.value, Draft):
            if is_slot(group):
                self.refuse_missing((*path, KIND), place)
                return
            place.put(default_draft(group))
        self.put_all(
            path, {key: value for key, value in table.items() if key != KIND or not is_slot(group)}
        )

    def _put_groups(self, path: Path, place: Place, tables: list[Any]) -> None:
        place.put([])
        for index, table in enumerate(tables):
            words = (*path, str(index))
            element = _step(place.value, place.annotation, path, str(index))
            element.put(None)
            self.put(words, Place(place.value, index, element.annotation), table, text=False)

    def put_all(self, path: Path, table: dict[str, Any]) -> None:
        """Puts a whole TOML table over the group at `path`."""
        for key, value in table.items():
            words = (*path, key.replace("-", "_"))
            try:
                place = find(self.draft, words)
            except Unknown as unknown:
                self.refuse_unknown(unknown)
                continue
            self.put(words, place, value, text=False)

    def _choose(self, path: Path, place: Place, slot: type, word: str) -> bool:
        if word not in choices_of(slot) and not is_outside(word):
            self._refuse(path, word, describe(place.annotation), place.annotation, text=True)
            return False
        try:
            chosen = find_component(slot, word)
        except ArmillaryError as error:
            name = ".".join(path)
            self.problems += [
                Problem(
                    f"{name} = {word}: {problem.message}{self.where}", problem.allowed, problem.fix
                )
                for problem in error.problems
            ]
            return False
        if isinstance(place.value, Draft) and place.value.cls is chosen:
            return True  # it is there already: its fields stay
        lost = [words for words in self._set if words[: len(path)] == path and words != path]
        if lost:
            name, earlier = ".".join(path), ", ".join(".".join(words) for words in lost)
            self.problems.append(
                Problem(
                    f"{earlier} is set before {name} = {word}, which replaces it{self.where}",
                    allowed="first the component, then its fields",
                    fix=f"{self._example(name, word)} in front of them",
                )
            )
        place.put(default_draft(chosen))
        return True

    def _clear_alternatives(self, path: Path, place: Place) -> None:
        """Setting one of several fields that exclude each other sets the others to none."""
        if place.value is None or not isinstance(place.container, dict):
            return
        owner = self._owner(path)
        for group in getattr(owner.cls, "ALTERNATIVES", ()):
            if place.key in group:
                for other in group:
                    if other != place.key and (*path[:-1], other) not in self._set:
                        owner.values[other] = None

    def _owner(self, path: Path) -> Draft:
        owner: Any = find(self.draft, path[:-1]).value if len(path) > 1 else self.draft
        assert isinstance(owner, Draft)
        return owner

    def refuse_missing(self, path: Path, place: Place) -> None:
        """Adds the problem of a name that stands without its value."""
        name, options = ".".join(path), options_of(place.annotation)
        self.problems.append(
            Problem(
                f"{self._option(name)} needs a value{self.where}",
                describe(place.annotation),
                self._example(name, options[0]) if options else None,
            )
        )

    def _refuse(
        self, path: Path, value: object, allowed: str, annotation: Any, *, text: bool
    ) -> None:
        name, options = ".".join(path), options_of(annotation)
        best = _nearest(value, options) if options and isinstance(value, str) else None
        shown = value if text and value else _toml_like(value)
        fix = self._example(name, best) if best else None
        self.problems.append(Problem(f"{name} = {shown} does not fit{self.where}", allowed, fix))

    def _example(self, name: str, option: str) -> str:
        return f"{self._option(name)} {option}" if self._typed else f'{name} = "{option}"'

    def _option(self, name: str) -> str:
        """A name as it is written here: with dashes on a command line."""
        return f"--{name.replace('_', '-')}" if self._typed else name

    def refuse_unknown(self, unknown: Unknown) -> None:
        """Adds the problem of a path that leads nowhere."""
        prefix = ".".join(unknown.known)
        name = ".".join((*unknown.known, unknown.word, *unknown.rest))
        candidates = self._meant(unknown)
        allowed = ", ".join(unknown.valid) or f"nothing below {prefix}: it is a single value"
        if not unknown.valid and unknown.known and find(self.draft, unknown.known).value is None:
            allowed = f"nothing below {prefix} while it is none"
        self.problems.append(
            Problem(
                f"there is no {name}{self.where}",
                allowed=allowed,
                fix=" or ".join(map(self._option, candidates[:3])) or None,
            )
        )

    def _meant(self, unknown: Unknown) -> list[str]:
        """A close name in the same group, or that very name elsewhere, or something like it."""
        prefix = "".join(f"{word}." for word in unknown.known)
        for cutoff, elsewhere in ((0.75, 1.0), (0.5, 0.75)):
            best = _nearest(unknown.word, unknown.valid, cutoff)
            if best is not None:
                return [".".join((prefix + best, *unknown.rest))]
            last = (unknown.word, *unknown.rest)[-1]
            found = _leaves_called(self.draft, last, elsewhere)
            if found:
                return found
        return []


def _leaves_called(draft: Draft, word: str, cutoff: float) -> list[str]:
    """Dotted names of the leaves whose last word is like `word`."""
    names = [".".join(path) for path in _paths(draft)]
    best = _nearest(word, {name.rpartition(".")[2] for name in names}, cutoff)
    return [name for name in names if name.rpartition(".")[2] == best]


def _paths(value: Any, path: Path = ()) -> Iterator[Path]:
    if isinstance(value, Draft):
        for name, part in value.values.items():
            yield (*path, name)
            yield from _paths(part, (*path, name))


def _toml_like(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _nearest(word: str, valid: Iterable[str], cutoff: float = 0.5) -> str | None:
    matches = difflib.get_close_matches(word, sorted(valid), n=1, cutoff=cutoff)
    return matches[0] if matches else None
