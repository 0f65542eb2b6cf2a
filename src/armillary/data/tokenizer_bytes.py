"""The tokenizer that needs no file and no training: one token a byte."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from armillary.data.tokenizer import (
    CHAT_TEMPLATE_FILE,
    DESCRIPTION_FILE,
    Ids,
    MarkedIds,
    Tokenizer,
    TokenizerConfig,
    description,
    fingerprint_of,
)
from armillary.data.tokenizer_marked import MarkedEncoder, Piece, Special
from armillary.foundation.component import component

_BOS_ID, _EOS_ID = 256, 257
_NAMES = {_BOS_ID: "<|bos|>", _EOS_ID: "<|eos|>"}


@component("bytes")
@dataclass(frozen=True, kw_only=True, slots=True)
class Bytes(TokenizerConfig):
    """One token a UTF-8 byte, and BOS 256 and EOS 257: vocabulary 258."""

    def build(self, texts: Iterable[str] = ()) -> Tokenizer:
        """See `TokenizerConfig.build`."""
        return ByteTokenizer()

    def expected_vocab_size(self) -> int:
        """See `TokenizerConfig.expected_vocab_size`."""
        return 258


class ByteTokenizer:
    """See `Bytes`."""

    vocab_size = 258
    bos_id = _BOS_ID
    eos_id = _EOS_ID

    def __init__(self, chat_template: str = "") -> None:
        self.chat_template = chat_template

    @property
    def special_tokens(self) -> dict[str, int]:
        """See `Tokenizer.special_tokens`."""
        return {name: number for number, name in _NAMES.items()}

    @property
    def fingerprint(self) -> str:
        """See `Tokenizer.fingerprint`."""
        return fingerprint_of(self.files())

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """See `Tokenizer.encode_batch`."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def encode_marked(self, text: str, template: Sequence[tuple[int, int]]) -> MarkedIds:
        """See `Tokenizer.encode_marked`."""
        return _MARKED.encode(text, template)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """See `Tokenizer.decode`."""
        names = {} if skip_special_tokens else _NAMES
        raw = b"".join(
            bytes((token,)) if token < _BOS_ID else names.get(token, "").encode()
            for token in map(int, ids)
        )
        return raw.decode("utf-8", "replace")

    def byte_count(self, token: int) -> int:
        """See `Tokenizer.byte_count`."""
        return 1 if token < _BOS_ID else 0

    def files(self) -> dict[str, str]:
        """See `Tokenizer.files`."""
        return {
            DESCRIPTION_FILE: description("bytes", self.bos_id, self.eos_id),
            **({CHAT_TEMPLATE_FILE: self.chat_template} if self.chat_template else {}),
        }


def _bytes_with_places(stretches: list[str]) -> list[Piece]:
    found: list[Piece] = []
    for text in stretches:
        sizes = [len(character.encode("utf-8")) for character in text]
        places = [(i, i + 1) for i, size in enumerate(sizes) for _ in range(size)]
        found.append((list(text.encode("utf-8")), places))
    return found


_MARKED = MarkedEncoder(
    {name: Special(number) for number, name in _NAMES.items()}, _bytes_with_places
)
