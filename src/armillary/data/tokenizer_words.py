"""Byte-level BPE, faster: each distinct word goes through the merges once.

GPT-2's pattern (Radford et al. 2019, `encoder.py`) cuts a text into words, and no merge crosses a
word's edge, so the ids of a text are those of its words. The cutting is done here by a regular
expression where the text is ASCII, for there the pattern's Unicode classes are plain ranges; what
is not ASCII goes to the tokenizers library, as do words not met before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from armillary.data.tokenizer import Ids

if TYPE_CHECKING:
    import tokenizers

_WORDS = re.compile(
    r"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", re.ASCII
)
_SAFE_CUT = re.compile(r"(?<=[!-~])(?=\n)")
"""Before a new line that follows a visible character: always the edge of a word, and nothing that
the pattern does on one side depends on the other."""
_MOST_WORDS = 1_000_000
"""Words that are remembered; then it starts afresh."""


def cuts_words_like_gpt2(parsed: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer is BPE over the words of GPT-2's pattern and nothing besides."""
    if parsed.normalizer is not None or type(parsed.pre_tokenizer).__name__ != "ByteLevel":
        return False
    found = json.loads(parsed.to_str())
    model, cutting = found["model"], found["pre_tokenizer"]
    return (
        cutting.get("add_prefix_space") is False
        and cutting.get("use_regex") is True
        and model.get("type") == "BPE"
        and not any(
            model.get(name)
            for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        )
        and all(token["special"] for token in found["added_tokens"])
    )


class WordEncoder:
    """Encodes batches of texts by words; for tokenizers that `cuts_words_like_gpt2`."""

    def __init__(self, parsed: tokenizers.Tokenizer) -> None:
        self._parsed = parsed
        self._known: dict[str, bytes] = {}  # ASCII word -> its ids as uint32

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, the same as the library's."""
        cut = [_cut(text) for text in texts]
        new = self._learn(cut)
        known = self._known.__getitem__
        found = [np.frombuffer(b"".join(map(known, words)), np.uint32) for words in cut]
        for text in new:
            if not text.isascii():  # a whole line, hardly ever seen again
                del self._known[text]
        return found

    def _learn(self, cut: list[list[str]]) -> list[str]:
        """Encodes what is not known yet, and returns it."""
        if len(self._known) > _MOST_WORDS:
            self._known.clear()
        new = list(set().union(*cut).difference(self._known))
        found = self._parsed.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, found, strict=True):
            self._known[word] = np.array(encoding.ids, np.uint32).tobytes()
        return new


def _cut(text: str) -> list[str]:
    """Words of what is ASCII, and lines of what is not; together the text."""
    if text.isascii():
        return _WORDS.findall(text)
    words: list[str] = []
    pending: list[str] = []
    for line in _SAFE_CUT.split(text):
        if line.isascii():
            pending.append(line)
            continue
        words += _WORDS.findall("".join(pending))
        pending.clear()
        words.append(line)
    return words + _WORDS.findall("".join(pending))
