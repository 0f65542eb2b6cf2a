"""Conversations as they lie in files: `messages`, or `conversations` as ShareGPT has them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from armillary.data.chat.template import RESERVED, Tools
from armillary.data.corpus import clean_text
from armillary.foundation.errors import Problem

_ROLES_OF_SHAREGPT = {
    **{"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"},
    **{"system": "system", "tool": "tool", "observation": "tool", "function_response": "tool"},
}
ASSISTANT = "assistant"
_DEEPEST = 32
"""Objects and arrays in each other."""


class BadConversation(Exception):
    """A record holds no conversation; the problem says why."""

    def __init__(self, message: str, allowed: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.allowed, self.fix = allowed, fix

    def problem(self, where: str) -> Problem:
        """The problem, with the place of the record."""
        return Problem(f"{where}: {self}", self.allowed, self.fix)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, and which of them may be learned from."""

    messages: tuple[dict[str, Any], ...]
    """Each with its `role`, and the rest for the template."""
    learned: tuple[bool, ...]
    """For each message, whether its `weight` allows it to be learned from."""
    tools: Tools | None = None
    """Functions that the model may call."""

    def first(self, count: int) -> Conversation:
        """What had been said after so many messages."""
        return Conversation(self.messages[:count], self.learned[:count], self.tools)

    def assistant_turns(self) -> list[int]:
        """Which messages are the model's own."""
        return [i for i, message in enumerate(self.messages) if message["role"] == ASSISTANT]


def parse_conversation(
    record: Mapping[str, Any], field: str, on_bad_text: str
) -> Conversation | None:
    """The conversation of a record; None where it holds bad text, and that is to be skipped.

    Args:
        record: a JSON object: messages under `field`, and `tools` if there are such.
        field: where the messages are; empty is `messages`, or else `conversations`.
        on_bad_text: `error`, `replace` or `skip`.

    Raises:
        BadConversation: it is not of that form.
    """
    name = field or ("conversations" if "messages" not in record else "messages")
    if name not in record:
        names = ", ".join(sorted(map(str, record))) or "none"
        raise BadConversation(
            f"has no field {field or 'messages'!r}", f"fields: {names}", "--data.corpus.field NAME"
        )
    turns = record[name]
    if not isinstance(turns, list):
        raise BadConversation(f"field {name!r} is no list of messages", "a JSON array of objects")
    if not turns:
        return Conversation((), ())
    try:
        turns, tools = _clean([turns, _tools(record.get("tools"))], on_bad_text)
    except _Skipped:
        return None
    pairs = [_message(turn, index) for index, turn in enumerate(turns)]
    messages, learned = zip(*pairs, strict=True)
    return Conversation(messages, learned, tools)


def _message(turn: object, index: int) -> tuple[dict[str, Any], bool]:
    """The message and whether it may be learned from."""
    if not isinstance(turn, dict):
        raise BadConversation(f"message {index} is no object")
    if "from" in turn and "role" not in turn:
        role = _ROLES_OF_SHAREGPT.get(str(turn["from"]))
        if role is None:
            raise BadConversation(
                f"message {index} is from {turn['from']!r}", ", ".join(_ROLES_OF_SHAREGPT)
            )
        rest = {name: value for name, value in turn.items() if name not in ("from", "value")}
        turn = {"role": role, "content": turn.get("value"), **rest}
    message = {
        name: value
        for name, value in turn.items()
        if name == "content" or (name != "weight" and value is not None)  # tables fill up with null
    }
    if not isinstance(message.get("role"), str) or not message["role"]:
        raise BadConversation(f"message {index} has no role", "such as user or assistant")
    message["content"] = _content(message.get("content"), index)
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise BadConversation(f"message {index} has weight {weight!r}", "0, or 1")
    return message, weight != 0


def _content(value: object, index: int) -> str | None:
    """Text, joined if it comes in parts; None where a message has none, as when it calls a tool."""
    if value is None or isinstance(value, str):
        return value
    parts = value if isinstance(value, list) else [value]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "".join(map(str, texts))
    raise BadConversation(
        f"message {index} holds something other than text", "text, or parts of it"
    )


def _tools(value: object) -> list[Any] | None:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadConversation(f"its tools are not JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise BadConversation("its tools are no list of objects", "a JSON array of objects")
    return value


def _clean(value: Any, on_bad_text: str, depth: int = 0) -> Any:
    """The value with texts that can be written as UTF-8; None where one is to be skipped."""
    if depth > _DEEPEST:
        raise BadConversation(f"is nested more than {_DEEPEST} deep")
    if isinstance(value, bytes):  # tables give text as it lies in the file
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return _clean_text(value, on_bad_text)
    if isinstance(value, dict):
        return {
            _clean(name, on_bad_text, depth): _clean(each, on_bad_text, depth + 1)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_clean(each, on_bad_text, depth + 1) for each in value]
    return value


class _Skipped(Exception):
    pass


def _clean_text(text: str, on_bad_text: str) -> str:
    found = clean_text(text, lambda: "a text", on_bad_text)
    if isinstance(found, str) and RESERVED.search(found) is not None:
        if on_bad_text == "error":
            raise BadConversation(
                "holds U+FDD0, U+FDD1 or U+FDD2, which Unicode has for no text",
                "text",
                "--data.corpus.on-bad-text replace (or skip)",
            )
        found = RESERVED.sub("\ufffd", found) if on_bad_text == "replace" else None
    if isinstance(found, Problem):
        raise BadConversation(found.message, found.allowed, found.fix)
    if found is None:
        raise _Skipped
    return found
