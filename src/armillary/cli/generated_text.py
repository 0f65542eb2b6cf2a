"""How texts that a model writes are shown: while they grow, in full, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary.cli.prompts import Prompt
    from armillary.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
"""What bytes that are no character yet decode to."""
_MOST_BYTES = 4
"""Of a character in UTF-8."""


class Stream:
    """Prints one text while it grows, a character as soon as all its bytes are there.

    Only tokens since the last whole character are decoded anew, together with those of the piece
    before, as some tokenizers write a word differently where nothing stands before it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._piece = 0
        """Where the piece before the one that grows begins."""
        self._printed = 0
        """Where the one that grows begins."""

    def add(self, row: int, token: int) -> None:
        """Takes the next token."""
        self._tokens.append(token)
        self._print(patient=True)

    def finish(self) -> None:
        """Prints what is left, whole or not, and ends the line."""
        self._print(patient=False)
        print(flush=True)

    def _print(self, *, patient: bool) -> None:
        before = self._tokenizer.decode(self._tokens[self._piece : self._printed])
        text = self._tokenizer.decode(self._tokens[self._piece :])
        more = text[len(before) :]
        waits = more.endswith(_UNFINISHED) and len(self._tokens) - self._printed < _MOST_BYTES
        if patient and (waits or not more):
            return
        print(more, end="", flush=True)
        self._piece, self._printed = self._printed, len(self._tokens)


def page(
    first: int, total: int, prompts: Sequence[Prompt], texts: Sequence[str], *, between: str
) -> str:
    """Some of several texts, each after its prompt.

    Args:
        first: number of the first one, from 0.
        total: how many there are in all.
        prompts: of these.
        texts: what follows each.
        between: the two; a text goes on from its prompt, an answer does not.
    """
    return "\n".join(
        f"--- {first + index + 1} of {total}\n{prompt.text}{between}{text}"
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    )


def record(
    prompt: Prompt, tokens: Sequence[int], row: Sequence[int], text: str, most: int
) -> dict[str, Any]:
    """One text as JSON."""
    return {
        "prompt": prompt.text,
        "prompt_tokens": len(tokens),
        "text": text,
        "tokens": list(row),
        "stopped_by": "end" if len(row) < most else "length",
    }
