"""Continue prompts with a trained model."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError
from armillary.foundation.run_folder import named_run

if TYPE_CHECKING:
    from armillary.data.tokenizer import Tokenizer
    from armillary.inference.load import Trained


_PROMPT_HELP = (
    "beginning of a text; once a text; - reads one from each line of standard input; none: from"
    " nothing"
)
_SAMPLING: tuple[tuple[str, type, float, str], ...] = (
    ("max-new-tokens", int, 128, "most tokens a text gets"),
    ("temperature", float, 0.8, "divides the logits; 0 always takes the likeliest token"),
    ("top-k", int, 0, "choose among this many likeliest tokens; 0: all"),
    ("top-p", float, 1.0, "choose among the likeliest tokens that hold this share"),
    ("seed", int, 0, "the same seed and prompt give the same text"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add(
        "path",
        metavar="RUN|CHECKPOINT",
        help="a run folder, its name below runs, or a checkpoint in one",
    )
    add("--prompt", action="append", default=[], metavar="TEXT", help=_PROMPT_HELP)
    for name, kind, default, meaning in _SAMPLING:
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{meaning} ({default})")
    add("--step", type=int, metavar="N", help="checkpoint of this step (the newest that verifies)")
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the texts, each after its prompt."""
    texts = _prompts(arguments.prompt)
    sampling = {
        "max_new_tokens": arguments.max_new_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
    }
    from armillary.inference.generate import generation_problems
    from armillary.inference.load import load_trained
    from armillary.parallel.process import choose_device
    from armillary.telemetry.console import open_console

    with closing(open_console()) as console:
        trained = load_trained(
            named_run(Path(arguments.path)),
            step=arguments.step,
            device=choose_device(),
            progress=console,
        )
    for reason in trained.checkpoint.reasons[:-1]:  # the last is why this one was taken
        print(f"note: {reason}", file=sys.stderr)
    prompts = [trained.encode(text) for text in texts]
    limit = trained.model.max_seq_len
    if found := generation_problems(prompts, max_seq_len=limit, **sampling):
        raise UserError(found)
    _mention_length(trained, prompts, arguments.max_new_tokens)
    if arguments.json:
        print(json.dumps(_document(trained, texts, prompts, sampling)))
    else:
        _write(trained, texts, prompts, sampling)
    return EXIT_FINISHED


def _prompts(given: list[str]) -> list[str]:
    texts: list[str] = []
    for text in given or [""]:
        texts += sys.stdin.read().splitlines() if text == "-" else [text]
    if not texts:
        raise UserError(Problem("--prompt -: standard input has no lines", "one prompt a line"))
    for text in texts:
        if any("\ud800" <= character <= "\udfff" for character in text):  # bytes that were no text
            raise UserError(Problem(f"--prompt {text!r} is not UTF-8 text", "text in UTF-8"))
    return texts


def _generate(
    trained: Trained, prompts: list[list[int]], sampling: dict[str, Any], **more: Any
) -> list[list[int]]:
    from armillary.inference.generate import generate

    tokenizer = trained.tokenizer
    return generate(
        trained.model,
        prompts,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        **sampling,
        **more,
    )


def _mention_length(trained: Trained, prompts: list[list[int]], new: int) -> None:
    longest, trained_on = max(map(len, prompts)) + new, trained.recipe.budget.seq_len
    if longest > trained_on:
        print(
            f"note: up to {longest} tokens, but the model has only seen {trained_on} at a time",
            file=sys.stderr,
        )


def _document(
    trained: Trained, texts: list[str], prompts: list[list[int]], sampling: dict[str, Any]
) -> dict[str, Any]:
    rows = _generate(trained, prompts, sampling)
    return {
        "checkpoint": trained.checkpoint.path,
        "step": trained.checkpoint.step,
        **sampling,
        "texts": [
            {
                "prompt": text,
                "prompt_tokens": len(prompt),
                "text": trained.tokenizer.decode(row),
                "tokens": row,
                "stopped_by": "end" if len(row) < sampling["max_new_tokens"] else "length",
            }
            for text, prompt, row in zip(texts, prompts, rows, strict=True)
        ],
    }


def _write(
    trained: Trained, texts: list[str], prompts: list[list[int]], sampling: dict[str, Any]
) -> None:
    if len(texts) == 1:
        print(texts[0], end="", flush=True)
        stream = _Stream(trained.tokenizer)
        _generate(trained, prompts, sampling, on_token=stream.add)
        stream.finish()
        return
    rows = _generate(trained, prompts, sampling)
    for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
        print(f"--- {index + 1} of {len(texts)}\n{text}{trained.tokenizer.decode(row)}")


class _Stream:
    """Prints one text while it grows, a character as soon as all its bytes are there."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._printed = ""

    def add(self, row: int, token: int) -> None:
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.startswith(self._printed) and not text.endswith("\ufffd"):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text

    def finish(self) -> None:
        text = self._tokenizer.decode(self._tokens)
        print(text[len(self._printed) :] if text.startswith(self._printed) else "")
