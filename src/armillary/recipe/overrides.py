"""Values from the command line and from TOML files, put over a config tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from armillary.foundation.component import is_slot
from armillary.foundation.errors import Problem, UserError
from armillary.recipe.draft import KIND, Layer, Unknown, build, draft_of, find
from armillary.recipe.fields import group_in, members

T = TypeVar("T")

_NO = "no_"


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One `--name value`, `--name=value`, `--name` or `--no-name`, as it was typed."""

    name: str
    value: str | None

    @property
    def path(self) -> tuple[str, ...]:
        """The words of the name, `-` and `_` alike."""
        return tuple(self.name.replace("-", "_").split("."))


@dataclasses.dataclass(frozen=True, slots=True)
class TableLayer:
    """Values of one TOML document."""

    table: dict[str, Any]
    where: str
    """The file, for messages."""


def split_options(tokens: Sequence[str]) -> tuple[list[str], list[Option]]:
    """Splits what was typed into plain words and options.

    A word after `--name` is its value, so words come first; `--no-name` takes no value.
    """
    words: list[str] = []
    options: list[Option] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if not token.startswith("--") or token == "--":
            words.append(token)
            continue
        name, equals, value = token[2:].partition("=")
        if equals:
            options.append(Option(name, value))
        elif (
            position < len(tokens)
            and not tokens[position].startswith("--")
            and not name.startswith(("no-", "no_"))
        ):
            options.append(Option(name, tokens[position]))
            position += 1
        else:
            options.append(Option(name, None))
    return words, options


def apply(base: T, tables: Sequence[TableLayer] = (), options: Sequence[Option] = ()) -> T:
    """The tree with the tables put over it, in order, and then the options, in order.

    Raises:
        UserError: unknown names, values that do not fit, or what the classes themselves refuse;
            all of them at once.
    """
    problems: list[Problem] = []
    draft = draft_of(base)
    for layer in tables:
        Layer(draft, problems, layer.where).put_all((), layer.table)
    command_line = Layer(draft, problems)
    for option in options:
        _put_option(command_line, option)
    result: T = build(draft, problems)
    if problems:
        raise UserError(problems)
    return result


def _put_option(layer: Layer, option: Option) -> None:
    path, value = _without_kind(layer, option.path), option.value
    try:
        place = find(layer.draft, path)
    except Unknown as unknown:
        positive = _without_no(path)
        try:
            if positive is None:
                raise
            place = find(layer.draft, positive)
            if bool not in members(place.annotation):
                raise
        except Unknown:
            layer.refuse_unknown(unknown)
            return
        if value is None:
            layer.put(positive, place, "false", text=True)
        else:
            _refuse_flag_with_value(layer, option, positive)
        return
    if value is None:
        if bool not in members(place.annotation):
            layer.refuse_missing(path, place)
            return
        value = "true"
    layer.put(path, place, value, text=True)


def _without_kind(layer: Layer, path: tuple[str, ...]) -> tuple[str, ...]:
    """`optimizer.kind`, as in TOML, means `optimizer`."""
    if len(path) < 2 or path[-1] != KIND:
        return path
    try:
        group = group_in(find(layer.draft, path[:-1]).annotation)
    except Unknown:
        return path
    return path[:-1] if group is not None and is_slot(group) else path


def _without_no(path: tuple[str, ...]) -> tuple[str, ...] | None:
    """`no_a.b` or `a.no_b` -> `a.b`."""
    if path[0].startswith(_NO):
        return (path[0].removeprefix(_NO), *path[1:])
    if path[-1].startswith(_NO):
        return (*path[:-1], path[-1].removeprefix(_NO))
    return None


def _refuse_flag_with_value(layer: Layer, option: Option, positive: tuple[str, ...]) -> None:
    layer.problems.append(
        Problem(
            f"--{option.name} takes no value, but {option.value!r} follows",
            fix=f"--{option.name}, or --{'.'.join(positive).replace('_', '-')} false",
        )
    )
