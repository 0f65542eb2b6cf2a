"""What a model is to go on from: given on the command line, on standard input, or in a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.foundation.errors import Problem, UserError

if TYPE_CHECKING:
    from armillary.inference.load import Trained
    from armillary.inference.served import Served

STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One of them."""

    text: str
    """As it is shown."""
    record: Mapping[str, Any] = field(default_factory=dict)
    """The conversation as it lies in a file, where it is one."""
    where: str = "--prompt"
    """It comes from, for messages."""


def read_prompts(arguments: argparse.Namespace) -> list[Prompt]:
    """All prompts, in order: those of `--prompt`, then those of `--prompts-file`.

    Raises:
        UserError: a file cannot be read, or has none; a text is not UTF-8; or --chat is missing.
    """
    prompts: list[Prompt] = []
    given = arguments.prompt or ([] if arguments.prompts_file else [""])
    for text in given:
        lines = _lines(sys.stdin.read()) if text == STANDARD_INPUT else [text]
        prompts += map(Prompt, lines)
    if arguments.prompt and not prompts:
        raise UserError(Problem("--prompt -: standard input has no lines", "one prompt a line"))
    if arguments.prompts_file:
        prompts += _in_file(arguments.prompts_file)
    for prompt in prompts:
        if any("\ud800" <= character <= "\udfff" for character in prompt.text):
            message = f"{prompt.where}: {prompt.text!r} is not UTF-8 text"
            raise UserError(Problem(message, "text in UTF-8"))
        if prompt.record and not arguments.chat:
            message = f"{prompt.where} is a conversation, and --chat is not given"
            raise UserError(
                Problem(message, "'prompt' or 'text' in each line, or --chat", "--chat")
            )
    return prompts


def write_prompts(prompts: Sequence[Prompt], path: Path) -> None:
    """Writes what `--prompts-file` reads."""
    lines = [prompt.record or {"prompt": prompt.text} for prompt in prompts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def tokens_of(prompt: Prompt, trained: Trained | Served, *, chat: bool, system: str) -> list[int]:
    """What the model reads of it.

    Args:
        prompt: the prompt.
        trained: the model.
        chat: whether the chat template makes a conversation of it.
        system: text that begins each conversation; empty: none.
    """
    if not chat:
        return trained.encode(prompt.text)
    from armillary.inference.chat import chat_prompt

    record = prompt.record or {"messages": [{"role": "user", "content": prompt.text}]}
    return chat_prompt(trained.tokenizer, trained.recipe, record, system=system, where=prompt.where)


def _in_file(file: str) -> list[Prompt]:
    from armillary.evaluation.files import read_items, read_text

    if not file.endswith(".jsonl"):
        lines = _lines(read_text(file))
        if not lines:
            raise UserError(Problem(f"--prompts-file {file} has no lines", "one prompt a line"))
        return [Prompt(line, where=f"{file}:{number}") for number, line in enumerate(lines, 1)]
    return [_in_record(where, fields) for where, fields in read_items([file], limit=0)]


def _lines(text: str) -> list[str]:
    """Without their ends; other characters that end a line for Python may be within."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if not lines[-1] else lines


def _in_record(where: str, fields: dict[str, Any]) -> Prompt:
    from armillary.evaluation.files import text_in

    name = next((each for each in ("messages", "conversations") if each in fields), None)
    if name is None:
        return Prompt(text_in((where, fields), "prompt", "text"), where=where)
    turns = fields[name]
    last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
    said = last.get("content", last.get("value"))
    return Prompt(said if isinstance(said, str) else "", fields, where)
