"""Templates, tokenizers and conversations for tests of chat data, and oracles written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from armillary.data.chat.bundled import CHATML, LLAMA3
from armillary.data.config import Bpe, Bytes
from armillary.data.tokenizer import Tokenizer

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|begin_of_text|>", "</s>"),
)
_LEARNED = ["<|im_start|>user\nhello there, kind person<|im_end|>\nassistant\n  Bonjour à tous"] * 9
SUBWORDS: Tokenizer = Bpe(vocab_size=420, special=SPECIAL).build(_LEARNED)
BYTES: Tokenizer = Bytes().build()

PLAIN = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As chatml, but it does not say what the model writes."""

INSTRUCTIONS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{ ' ' ~ message.content | trim ~ ' </s>' }}
    {%- elif message.role == 'system' %}{{ message.content ~ '\\n\\n' }}
    {%- else %}{{ '[INST] ' ~ message.content ~ ' [/INST]' }}
    {%- endif %}
{%- endfor %}"""
"""Markers that are no special tokens, and no prompt of its own for an answer."""

FORGETFUL = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and loop.last %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes a last turn in another way than the same turn once more has been said."""

Piece = tuple[str, bool, bool]
"""Text; whether the model writes it; whether it names a special token."""


def _chatml(messages: list[dict[str, Any]]) -> list[list[Piece]]:
    return [
        [
            ("<|im_start|>", False, True),
            (message["role"] + "\n", False, False),
            (message["content"], True, False),
            ("<|im_end|>", True, True),
            ("\n", False, False),
        ]
        for message in messages
    ]


def _plain(messages: list[dict[str, Any]]) -> list[list[Piece]]:
    """Without blocks, and where <|im_end|> is mere text, the new line is part of the end too."""
    return [[*turn[:-1], ("\n", True, False)] for turn in _chatml(messages)]


def _llama3(messages: list[dict[str, Any]]) -> list[list[Piece]]:
    turns: list[list[Piece]] = [
        [
            ("<|start_header_id|>", False, True),
            (message["role"], False, False),
            ("<|end_header_id|>", False, True),
            ("\n\n", False, False),
            (message["content"].strip(), True, False),
            ("<|eot_id|>", True, True),
        ]
        for message in messages
    ]
    return [[("<|bos|>", False, True)], *turns]


def _instructions(messages: list[dict[str, Any]]) -> list[list[Piece]]:
    turns: list[list[Piece]] = []
    for message in messages:
        text = message["content"]
        if message["role"] == "assistant":
            turns.append([(f" {text.strip()} ", True, False), ("</s>", True, True)])
        else:
            said = f"{text}\n\n" if message["role"] == "system" else f"[INST] {text} [/INST]"
            turns.append([(said, False, False)])
    return [[("<|bos|>", False, True)], *turns]


@dataclass(frozen=True)
class Example:
    """A template, and by hand what it writes: for each turn its pieces, perhaps after a BOS."""

    text: str
    turns: Callable[[list[dict[str, Any]]], list[list[Piece]]]

    def pieces(self, messages: list[dict[str, Any]], learned: set[int]) -> list[Piece]:
        """The whole text; of turns that are not learned nothing counts."""
        turns = self.turns(messages)
        before = len(turns) - len(messages)
        return [
            (text, written and index - before in learned, special)
            for index, turn in enumerate(turns)
            for text, written, special in turn
        ]


EXAMPLES = {
    "chatml": Example(CHATML, _chatml),
    "llama3": Example(LLAMA3, _llama3),
    "plain": Example(PLAIN, _chatml),
    "plain-without-tokens": Example(PLAIN, _plain),
    "instructions": Example(INSTRUCTIONS, _instructions),
}

_FRAGMENTS = st.sampled_from(
    [
        *("hello", " there", "assistant\n", "\n", "  ", "à", "星", "🙂", "x", "Bonjour à tous"),
        *("<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<|im_", "end|>", "<", "</s>"),
        *("{{ 7 * 7 }}", "{% generation %}", "[/INST]", "<|bos|>", "\u00a0", "\r\n"),
    ]
)
CONTENTS = st.lists(_FRAGMENTS, max_size=6).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns of any length in any order, a system's turn before them at times, some unweighted."""
    messages = [{"role": "system", "content": draw(CONTENTS)}] if draw(st.booleans()) else []
    roles = draw(st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=7))
    for role in roles:
        message = {"role": role, "content": draw(CONTENTS)}
        if draw(st.integers(0, 3)) == 0:
            message["weight"] = draw(st.integers(0, 1))
        messages.append(message)
    return messages
