"""Encoding texts of which only some stretches may name special tokens, with places of the tokens.

The text is cut at the special tokens that its template names; what lies between is encoded as text,
so that no content can bring a special token in. Where content names none, the ids are those that
the tokenizers library finds in the whole text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from armillary.data.tokenizer import MarkedIds

if TYPE_CHECKING:
    import tokenizers

Piece = tuple[Sequence[int], Sequence[tuple[int, int]]]
"""The ids of a stretch of text, and the characters of each, counted from its beginning."""


@dataclass(frozen=True, slots=True)
class Special:
    """A special token, by its name in a text."""

    id: int
    takes_spaces_before: bool = False
    takes_spaces_after: bool = False
    """Whether blanks around the name belong to the token."""


class MarkedEncoder:
    """Encodes marked texts.

    Args:
        specials: the special tokens by their names.
        encode: encodes the stretches of one text that hold no special tokens, in order.
    """

    def __init__(
        self,
        specials: dict[str, Special],
        encode: Callable[[list[str]], list[Piece]],
    ) -> None:
        self._specials = specials
        names = sorted(specials, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        self._encode = encode

    def encode(self, text: str, template: Sequence[tuple[int, int]]) -> MarkedIds:
        """See `Tokenizer.encode_marked`."""
        found = list(self._find(text, template))
        begins = [0, *(end for _, end, _ in found)]
        ends = [*(start for start, _, _ in found), len(text)]
        stretches = self._encode([text[begin:end] for begin, end in zip(begins, ends, strict=True)])
        ids: list[int] = []
        places: list[tuple[int, int]] = []
        special: list[bool] = []
        for index, (stretch, offsets) in enumerate(stretches):
            ids += stretch
            places += [(begins[index] + start, begins[index] + end) for start, end in offsets]
            special += [False] * len(stretch)
            if index < len(found):
                start, end, token = found[index]
                ids.append(token)
                places.append((start, end))
                special.append(True)
        edges = np.array(places, np.int64).reshape(-1, 2)
        return MarkedIds(
            ids=np.array(ids, np.uint32),
            starts=edges[:, 0],
            ends=edges[:, 1],
            special=np.array(special, np.bool_),
        )

    def _find(
        self, text: str, template: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        """(start, end, id) of the special tokens that the template names."""
        if self._names is None:
            return
        last = 0
        for first, past in template:
            for match in self._names.finditer(text, max(first, last), past):
                token = self._specials[match[0]]
                start, end = match.span()
                if token.takes_spaces_before:
                    start -= len(text[last:start]) - len(text[last:start].rstrip())
                if token.takes_spaces_after:
                    end += len(text[end:]) - len(text[end:].lstrip())
                yield start, end, token.id
                last = end


def encoder_of(parsed: tokenizers.Tokenizer, special: dict[str, int]) -> MarkedEncoder:
    """The encoder of a tokenizer.json, with the ids of its special tokens by their names."""
    specials = {name: Special(number) for name, number in special.items()}
    for number, token in parsed.get_added_tokens_decoder().items():
        if token.content in specials:
            specials[token.content] = Special(number, token.lstrip, token.rstrip)
    definition = json.loads(parsed.to_str())
    definition["post_processor"] = None  # it would trim blanks from the tokens' places
    beginning = later = _parsed(definition)
    if '"first"' in json.dumps(definition["pre_tokenizer"]):  # only a text's beginning gets a blank
        definition["pre_tokenizer"] = _without_first(definition["pre_tokenizer"])
        later = _parsed(definition)

    def encode(stretches: list[str]) -> list[Piece]:
        found = [
            *beginning.encode_batch(stretches[:1], add_special_tokens=False),
            *later.encode_batch(stretches[1:], add_special_tokens=False),
        ]
        return [(each.ids, each.offsets) for each in found]

    return MarkedEncoder(specials, encode)


def _parsed(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    import tokenizers

    parsed = tokenizers.Tokenizer.from_str(json.dumps(definition))
    parsed.encode_special_tokens = True
    parsed.no_padding()
    parsed.no_truncation()
    return parsed


def _without_first(definition: Any) -> Any:
    """A pre-tokenizer, or a sequence of them, that puts a blank before no text."""
    if isinstance(definition, dict):
        return {
            name: "never" if (name, value) == ("prepend_scheme", "first") else _without_first(value)
            for name, value in definition.items()
        }
    return (
        [_without_first(each) for each in definition]
        if isinstance(definition, list)
        else definition
    )
