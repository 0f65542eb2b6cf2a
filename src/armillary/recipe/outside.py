"""Names of things outside the package: `path/to/file.py:name` and `some.module:name`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from armillary.foundation.component import choices_of, name_of
from armillary.foundation.errors import Problem, UserError, nearest

_PACKAGE = "armillary"
_FILE_PREFIX = "armillary_user_"


def is_outside(name: str) -> bool:
    """Whether a name points into a file or module rather than into a registry."""
    return ":" in name or name.endswith(".py")


def is_file_module(module: str) -> bool:
    """Whether a module was loaded from a file by `load`."""
    return module.startswith(_FILE_PREFIX)


def load(name: str) -> tuple[ModuleType, str]:
    """Imports the file or module before the colon; returns it and the word after the colon.

    Raises:
        UserError: there is no such file or module, or it fails while it is imported.
    """
    place, _, word = name.rpartition(":") if ":" in name else (name, "", "")
    with prints_on_stderr():
        return (_load_file(place) if place.endswith(".py") else _load_module(place)), word


def prints_on_stderr() -> contextlib.AbstractContextManager[object]:
    """What the user's code prints goes there: standard output is for results alone."""
    return contextlib.redirect_stdout(sys.stderr)


def _load_module(place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            Problem(
                f"cannot import module {place!r}: {type(error).__name__}: {error}",
                allowed="path/to/file.py:name, or some.module:name that Python can import",
            )
        ) from error


def _load_file(place: str) -> ModuleType:
    file = Path(place).expanduser().resolve()
    if not file.is_file():
        raise UserError(Problem(f"there is no file {place}", allowed="path/to/file.py:name"))
    name = f"{_FILE_PREFIX}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up by name
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, UserError) or not isinstance(error, Exception):
            raise
        raise UserError(
            Problem(f"{place} fails while it is imported: {type(error).__name__}: {error}")
        ) from error
    return module


def find_component(slot: type, word: str) -> type:
    """The component of a slot that is called `word`, here or in a file or module outside.

    Raises:
        UserError: there is none; names the nearest.
    """
    choices = choices_of(slot)
    if word in choices:
        return choices[word]
    if is_outside(word):
        module, name = load(word)
        choices = _components_in(module, slot)
        if name in choices:
            return choices[name]
        if not name and len({*choices.values()}) == 1:
            return next(iter(choices.values()))
    raise UserError(
        Problem(
            f"{word!r} is not {'an' if slot.__name__[0] in 'AEIOU' else 'a'} {slot.__name__}",
            allowed=", ".join(sorted(choices)) or "nothing: no component is registered there",
            fix=nearest(word.rpartition(":")[2], choices),
        )
    )


def _components_in(module: ModuleType, slot: type) -> dict[str, type]:
    """The components of a slot that a module defines, by registered name and by class name."""
    found: dict[str, type] = {}
    for value in vars(module).values():
        if (
            isinstance(value, type)
            and issubclass(value, slot)
            and value.__module__ == module.__name__
        ):
            with contextlib.suppress(KeyError):  # a base of components, not registered itself
                found |= {name_of(value): value, value.__name__: value}
    return found


def component_word(cls: type, *, where: bool = True) -> str:
    """The word that finds a component again: its name, with its file or module if outside."""
    name = name_of(cls)
    if not where or cls.__module__.split(".")[0] == _PACKAGE:
        return name
    module = sys.modules[cls.__module__]
    if is_file_module(cls.__module__) or cls.__module__ == "__main__":
        return f"{Path(str(module.__file__)).resolve()}:{name}"
    return f"{cls.__module__}:{name}"
