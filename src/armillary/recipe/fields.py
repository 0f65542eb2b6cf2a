"""Reads config dataclasses: the type, default and one-line doc of each field."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import types
import typing
from pathlib import Path
from typing import Any, Literal, Union

from armillary.foundation.component import is_slot

MISSING = dataclasses.MISSING


@dataclasses.dataclass(frozen=True, slots=True)
class FieldInfo:
    """One field of a config dataclass."""

    name: str
    annotation: Any
    default: Any
    """The default, freshly made, or `MISSING`."""
    doc: str
    """First paragraph of the literal below the field, on one line."""


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """The fields of a config dataclass that its constructor takes, in order."""
    hints, docs = _hints(cls), docs_of(cls)
    found = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        default: Any = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        found[field.name] = FieldInfo(
            field.name, hints[field.name], default, docs.get(field.name, "")
        )
    return found


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def docs_of(cls: type) -> dict[str, str]:
    """Field name -> doc, read from the source of the class and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            docs.update(_class_docs(base))
    return docs


def _class_docs(cls: type) -> dict[str, str]:
    try:
        file = inspect.getsourcefile(cls)
    except TypeError:  # typed in at a prompt: there is no source
        file = None
    if file is None:
        return {}
    body = _classes_in(file).get(cls.__qualname__.replace("<locals>.", ""), [])
    docs = {}
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            docs[statement.target.id] = _first_paragraph(following.value.value)
    return docs


@functools.cache
def _classes_in(file: str) -> dict[str, list[ast.stmt]]:
    """Qualified class name (without `<locals>`) -> the statements of its body."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    classes: dict[str, list[ast.stmt]] = {}

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for statement in body:
            if isinstance(statement, ast.ClassDef):
                classes[prefix + statement.name] = statement.body
            if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                collect(statement.body, f"{prefix}{statement.name}.")

    collect(tree.body, "")
    return classes


def _first_paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def is_optional(annotation: Any) -> bool:
    """Whether `none` fits."""
    return type(None) in members(annotation)


def group_in(annotation: Any) -> type | None:
    """The slot or config dataclass that an annotation holds, itself or as `X | None`."""
    for member in members(annotation):
        if is_slot(member) or (isinstance(member, type) and dataclasses.is_dataclass(member)):
            return typing.cast("type", member)
    return None


def list_in(annotation: Any) -> Any | None:
    """The tuple type that an annotation holds, itself or as `tuple[...] | None`."""
    for member in members(annotation):
        if typing.get_origin(member) is tuple:
            return member
    return None


def element_of(list_annotation: Any, index: int) -> Any | None:
    """The annotation of one element of a tuple type; None past the end of a fixed tuple."""
    arguments = typing.get_args(list_annotation)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return arguments[0]
    return arguments[index] if index < len(arguments) else None


def is_open_list(list_annotation: Any) -> bool:
    """Whether a tuple type has any length."""
    return Ellipsis in typing.get_args(list_annotation)


def is_literal(annotation: Any) -> bool:
    """Whether an annotation lists its values."""
    return typing.get_origin(annotation) is Literal
