"""Items of tasks from files that anybody may have written: JSON lines, and short texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from armillary.foundation.errors import Problem, UserError
from armillary.foundation.strict_json import parse_json

BUNDLED = "bundled:"
"""What names of texts that come with the package begin with, in the place of a path."""

_FOLDER = Path(__file__).parent / "bundled"

MOST_ITEM_BYTES = 1 << 20
"""Of one line, and of a prefix."""
MOST_ITEMS = 1_000_000

Item = tuple[str, dict[str, Any]]
"""Where it stands, for messages, and its fields."""


def path_of(file: str) -> Path:
    """The path that a name in a recipe means.

    Raises:
        UserError: no such text comes with the package.
    """
    if not file.startswith(BUNDLED):
        return Path(file).expanduser()
    names = sorted(path.name for path in _FOLDER.iterdir())
    name = file.removeprefix(BUNDLED)
    if name not in names:
        raise UserError(Problem(f"there is no {file}", ", ".join(BUNDLED + each for each in names)))
    return _FOLDER / name


def _from(file: str) -> str:
    """Where a relative path is looked for, as a note after it."""
    relative = not file.startswith(BUNDLED) and not path_of(file).is_absolute()
    return f" (looked for from {Path.cwd()})" if relative else ""


def missing_files(files: Sequence[str], where: str) -> list[Problem]:
    """Those that are no files.

    Args:
        files: as a recipe names them; empty ones are not wanted.
        where: the leaf that names them.
    """
    found = []
    for file in filter(None, files):
        try:
            if not path_of(file).is_file():
                message = f"{where}: {file} is not a file{_from(file)}"
                found.append(Problem(message, "a file"))
        except UserError as error:
            found += error.problems
    return found


def read_items(files: Sequence[str], limit: int) -> list[Item]:
    """The objects of files of JSON lines, in order; `limit` of them, or all for 0.

    Raises:
        UserError: a file cannot be read, a line is no JSON object or too long, or there is none.
    """
    most = min(limit or MOST_ITEMS + 1, MOST_ITEMS + 1)
    items: list[Item] = []
    for file in files:
        for item in _items(file):
            items.append(item)
            if len(items) == most:
                break
        if len(items) == most:
            break
    if len(items) > MOST_ITEMS:
        raise UserError(Problem(f"{', '.join(files)}: too many items", f"{MOST_ITEMS:,} at most"))
    if not items:
        raise UserError(Problem(f"{', '.join(files)}: no items", "one JSON object a line"))
    return items


def _items(file: str) -> Iterator[Item]:
    try:
        with path_of(file).open("rb") as stream:
            number = 0
            while line := stream.readline(MOST_ITEM_BYTES + 1):
                number += 1
                if line.strip():
                    yield f"{file}:{number}", _object(line, f"{file}:{number}")
    except OSError as error:
        raise UserError(Problem(f"cannot read {file}: {error.strerror}{_from(file)}")) from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    if len(line) > MOST_ITEM_BYTES:
        raise UserError(Problem(f"{where}: a line too long", f"{MOST_ITEM_BYTES:,} bytes at most"))
    try:
        value = parse_json(line)
    except ValueError as error:
        raise UserError(Problem(f"{where}: not JSON: {error}", "one JSON object a line")) from None
    if not isinstance(value, dict):
        raise UserError(Problem(f"{where}: {type(value).__name__}", "one JSON object a line"))
    return value


def text_in(item: Item, *names: str) -> str:
    """The text of the first of these fields that the item has.

    Raises:
        UserError: it has none of them, or no text there.
    """
    where, fields = item
    name = next((each for each in names if each in fields), None)
    wanted = " or ".join(map(repr, names))
    if name is None:
        raise UserError(Problem(f"{where}: no {wanted}", f"fields: {', '.join(fields) or 'none'}"))
    text = fields[name]
    if not isinstance(text, str) or _has_surrogates(text):
        raise UserError(Problem(f"{where}: {name!r} is not text", "a string"))
    return text


def _has_surrogates(text: str) -> bool:
    """Halves of characters, which JSON can say and UTF-8 cannot."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def require_text(value: Any, where: str) -> str:
    """The value, which is text.

    Raises:
        UserError: it is not.
    """
    return text_in((where, {"it": value}), "it")


def read_text(file: str) -> str:
    """A short text as it stands in a file; nothing for no file.

    Raises:
        UserError: it cannot be read, or is long, or is no UTF-8.
    """
    if not file:
        return ""
    try:
        with path_of(file).open("rb") as stream:
            raw = stream.read(MOST_ITEM_BYTES + 1)
        if len(raw) > MOST_ITEM_BYTES:
            raise UserError(Problem(f"{file} is too long", f"{MOST_ITEM_BYTES:,} bytes at most"))
        return raw.decode("utf-8")
    except OSError as error:
        raise UserError(Problem(f"cannot read {file}: {error.strerror}{_from(file)}")) from None
    except UnicodeDecodeError as error:
        raise UserError(Problem(f"{file} is not UTF-8 (byte {error.start})")) from None
