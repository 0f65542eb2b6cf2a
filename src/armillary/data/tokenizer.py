"""The tokenizer slot, the protocol of what it builds, and tokenizers on disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from armillary.foundation.component import Component, name_of
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.foundation.strict_json import parse_json

DESCRIPTION_FILE = "armillary_tokenizer.json"
TOKENIZER_FILE = "tokenizer.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_LARGEST_CONFIG = 1 << 24
"""Bytes of a chat template, or of a file that holds one among other things."""

Ids = NDArray[Any]
"""The ids of one text: one-dimensional, unsigned integers."""


@dataclass(frozen=True, slots=True)
class MarkedIds:
    """The ids of a text and where they stand in it."""

    ids: NDArray[np.uint32]
    """[T] token ids."""
    starts: NDArray[np.int64]
    """[T] first character of each token; tokens that share a character both have it."""
    ends: NDArray[np.int64]
    """[T] one past the last character of each token."""
    special: NDArray[np.bool_]
    """[T] whether it is a special token, which stands for no text."""


class Tokenizer(Protocol):
    """Text to token ids and back. Never adds BOS or EOS by itself, nor reads them out of text."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, special tokens included."""

    @property
    def bos_id(self) -> int | None:
        """Id that begins a document, where the vocabulary has one."""

    @property
    def eos_id(self) -> int | None:
        """Id that ends a document, where the vocabulary has one."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their names, BOS and EOS among them."""

    chat_template: str
    """Jinja template of conversations; empty where there is none."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides which ids a text gets."""

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of many texts, as arrays of unsigned integers."""

    def encode_marked(self, text: str, template: Sequence[tuple[int, int]]) -> MarkedIds:
        """The ids of a text whose template names special tokens, with their places.

        Args:
            text: the text.
            template: stretches of characters, in order, in which a special token's name stands for
                that token. Names anywhere else, also such as lie partly within, are text.
        """

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""

    def byte_count(self, token: int) -> int:
        """UTF-8 bytes of the text that a token at the beginning of a document stands for."""

    def files(self) -> dict[str, str]:
        """What `save_tokenizer` writes: file name to content."""


class TokenizerConfig(Component, ABC):
    """Slot `data.tokenizer`: how text becomes token ids."""

    __slots__ = ()

    @abstractmethod
    def build(self, texts: Iterable[str] = ()) -> Tokenizer:
        """The tokenizer.

        Args:
            texts: training documents, `text_needed()` bytes of them in all.

        Raises:
            UserError: the configuration, or the file that it names, is wrong.
        """

    def problems(self) -> list[Problem]:
        """What is wrong with the values themselves; looks for no file."""
        return []

    def text_needed(self) -> int:
        """UTF-8 bytes of training text that `build` wants; 0 for a tokenizer that is ready."""
        return 0

    @abstractmethod
    def expected_vocab_size(self) -> int:
        """The vocabulary's size before anything is built."""

    def identity(self) -> dict[str, Any]:
        """What decides the result together with the training text: part of the cache key."""
        return {"name": name_of(type(self)), **dataclasses.asdict(self)}  # type: ignore[call-overload]  # every component is a dataclass


def fingerprint_of(files: dict[str, str]) -> str:
    """SHA-256 over named contents; a chat template decides nothing about the ids of a text."""
    digest = hashlib.sha256()
    for name in sorted(files.keys() - {CHAT_TEMPLATE_FILE}):
        content = files[name].encode()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def description(kind: str, bos_id: int | None, eos_id: int | None) -> str:
    """The small JSON file that says which ids begin and end a document."""
    return json.dumps({"kind": kind, "bos_id": bos_id, "eos_id": eos_id}, indent=2) + "\n"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes a tokenizer into a folder, which is made; `tokenizer.json` works with other tools."""
    folder.mkdir(parents=True, exist_ok=True)
    files = tokenizer.files()
    for name in sorted(files, key=lambda name: name == DESCRIPTION_FILE):  # the description last
        write_atomically(folder / name, files[name])


def load_tokenizer(folder: Path) -> Tokenizer:
    """Reads what `save_tokenizer` wrote.

    Raises:
        UserError: the folder holds no tokenizer, or a damaged one.
    """
    from armillary.data.tokenizer_bytes import ByteTokenizer
    from armillary.data.tokenizer_subword import SubwordTokenizer, parse_tokenizer

    path = folder / DESCRIPTION_FILE
    try:
        found = parse_json(path.read_bytes())
        kind, bos_id, eos_id = found["kind"], found["bos_id"], found["eos_id"]
    except OSError as error:
        raise UserError(Problem(f"no tokenizer in {folder}: {error.strerror}")) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(Problem(f"{path} is damaged ({error!r})")) from error
    template = read_chat_template(folder)
    if kind == "bytes":
        return ByteTokenizer(template)
    parsed = parse_tokenizer(folder / TOKENIZER_FILE)
    return SubwordTokenizer(parsed, bos_id, eos_id, template)


def read_chat_template(folder: Path) -> str:
    """The chat template in a tokenizer's folder: a file of its own, or in tokenizer_config.json.

    Raises:
        UserError: the file is no text, or too large.
    """
    path = folder / CHAT_TEMPLATE_FILE
    try:
        if path.exists():
            return _text_of(path)
        path = folder / TOKENIZER_CONFIG_FILE
        stated = json.loads(_text_of(path))["chat_template"] if path.exists() else ""
    except (KeyError, TypeError, RecursionError):
        return ""
    except (OSError, ValueError) as error:
        raise UserError(Problem(f"{path} cannot be read: {error}")) from error
    if isinstance(stated, list):  # templates by name
        named = [each for each in stated if isinstance(each, dict)]
        stated = next((one.get("template") for one in named if one.get("name") == "default"), "")
    return stated if isinstance(stated, str) else ""


def _text_of(path: Path) -> str:
    if path.stat().st_size > _LARGEST_CONFIG:
        raise ValueError(f"it has more than {_LARGEST_CONFIG} bytes")
    return path.read_text("utf-8")


def check_special_tokens(tokenizer: Tokenizer, *, bos: bool, eos: bool) -> None:
    """Raises UserError where the recipe asks for a token that the vocabulary lacks."""
    problems = [
        Problem(
            f"data.{name} = true, but the tokenizer has no {name.upper()} token",
            "a token that the vocabulary holds, by name",
            f"--data.tokenizer.{name} NAME, or --data.{name} false",
        )
        for name, wanted, found in (
            ("bos", bos, tokenizer.bos_id),
            ("eos", eos, tokenizer.eos_id),
        )
        if wanted and found is None
    ]
    if problems:
        raise UserError(problems)
