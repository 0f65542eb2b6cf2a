"""Continue prompts with a trained model: `armillary generate RUN --prompt TEXT`."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli import ranks_wanted
from armillary.cli.generated_text import Stream, page, record
from armillary.cli.parser import Parser
from armillary.cli.prompts import (
    STANDARD_INPUT,
    Prompt,
    read_prompts,
    tokens_of,
    write_prompts,
)
from armillary.cli.served_arguments import run_of, takes_run
from armillary.foundation.errors import EXIT_FINISHED, Problem, UserError
from armillary.foundation.tell import seen_by_every_rank

if TYPE_CHECKING:
    from armillary.cli.ranks_wanted import RanksWanted
    from armillary.inference.load import Trained
    from armillary.inference.served import Served
    from armillary.recipe.overrides import Option

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


def add_arguments(parser: Parser) -> None:
    """Adds this command's arguments."""
    takes_run(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help=_PROMPT_HELP)
    add(
        "--prompts-file",
        metavar="FILE",
        help="a prompt a line, or .jsonl with `prompt` or `messages`",
    )
    add("--batch", type=int, default=16, metavar="N", help="texts written at once (16)")
    add("--chat", action="store_true", help="prompts are turns of a user; uses the chat template")
    add(
        "--system", default="", metavar="TEXT", help="with --chat: what each conversation begins by"
    )
    for name, kind, default, meaning in _SAMPLING:
        add(f"--{name}", type=kind, default=default, metavar="N", help=f"{meaning} ({default})")
    add("--step", type=int, metavar="N", help="checkpoint of this step (the newest that verifies)")
    ranks_wanted.add_arguments(parser)
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Prints the texts, each after its prompt."""
    with seen_by_every_rank():
        path, options = run_of(arguments, "generate")
        ranks = ranks_wanted.ranks_wanted(arguments)
        found = ranks.problems()
        if arguments.batch < 1:
            found.append(Problem(f"--batch {arguments.batch}", "1 or more", "--batch 16"))
        if arguments.system and not arguments.chat:
            found.append(Problem("--system without --chat: there is no conversation", fix="--chat"))
        if STANDARD_INPUT in arguments.prompt and ranks.started and ranks.world_size > 1:
            message = "--prompt - under a launcher: ranks do not share standard input"
            found.append(Problem(message, "a file", "--prompts-file FILE"))
        if found:
            raise UserError(found)
        prompts = read_prompts(arguments)
    if not ranks.started:
        return _launch(arguments, ranks, prompts)
    from armillary.parallel import process

    with ExitStack() as stack:
        trained = _open(stack, arguments, path, options, ranks)
        with seen_by_every_rank():
            writer = _Writer(arguments, trained, prompts)
        if not process.is_main():
            for _ in writer.rows():
                pass
            return EXIT_FINISHED
        for reason in trained.checkpoint.reasons[:-1]:  # the last is why this one was taken
            print(f"note: {reason}", file=sys.stderr)
        writer.mention_length()
        writer.show(as_json=arguments.json)
    return EXIT_FINISHED


def _launch(arguments: argparse.Namespace, ranks: RanksWanted, prompts: Sequence[Prompt]) -> int:
    """Ranks have no standard input: what came there reaches them in a file."""
    from armillary.launch.local import launch

    argv = list(arguments.argv)
    with tempfile.TemporaryDirectory(prefix="armillary-prompts-") as folder:
        if STANDARD_INPUT in arguments.prompt:
            file = Path(folder, "prompts.jsonl")
            write_prompts(prompts, file)
            argv = [*_without_prompts(argv), "--prompts-file", str(file)]
        return launch(argv, ranks.nproc, place=ranks.place)


def _without_prompts(argv: Sequence[str]) -> list[str]:
    """The command line without `--prompt` and `--prompts-file`."""
    left, words = [], iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name in ("--prompt", "--prompts-file"):
            if not equals:
                next(words, None)
        else:
            left.append(word)
    return left


def _open(
    stack: ExitStack,
    arguments: argparse.Namespace,
    path: Path,
    options: list[Option],
    ranks: RanksWanted,
) -> Trained | Served:
    """The model: alone in its run's own format, or spread over ranks."""
    from armillary.parallel import process
    from armillary.telemetry.console import open_console

    with closing(open_console(rank=process.rank())) as console:
        if ranks.world_size == 1 and not options:
            from armillary.inference.load import load_trained

            device = process.choose_device()
            return load_trained(path, step=arguments.step, device=device, progress=console)
        from armillary.inference.served import served

        more_ranks = "--nproc" if arguments.nproc is None and ranks.world_size == 1 else ""
        model = served(
            path,
            options,
            step=arguments.step,
            exact=True,
            more_ranks=more_ranks,
            progress=console,
        )
        return stack.enter_context(model)


class _Writer:
    """Prompts and a model; every rank makes one and takes its rows alike."""

    def __init__(
        self, arguments: argparse.Namespace, trained: Trained | Served, prompts: Sequence[Prompt]
    ) -> None:
        from armillary.inference.generate import generation_problems

        self._trained, self._prompts, self._batch = trained, prompts, arguments.batch
        self._sampling: dict[str, Any] = {
            name.replace("-", "_"): getattr(arguments, name.replace("-", "_"))
            for name, *_ in _SAMPLING
        }
        self._tokens = [
            tokens_of(prompt, trained, chat=arguments.chat, system=arguments.system)
            for prompt in prompts
        ]
        limit = trained.model.max_seq_len
        if found := generation_problems(self._tokens, max_seq_len=limit, **self._sampling):
            raise UserError(found)
        self._ends: frozenset[int] | int | None = trained.tokenizer.eos_id
        self._between = ""
        if arguments.chat:
            from armillary.inference.chat import turn_ends

            self._ends, self._between = turn_ends(trained.tokenizer), "\n"

    def rows(self, **more: Any) -> Iterator[list[list[int]]]:
        """The tokens that follow, of so many prompts at once."""
        from armillary.inference.generate import generate

        for first in range(0, len(self._tokens), self._batch):
            yield generate(
                self._trained.model,
                self._tokens[first : first + self._batch],
                eos_id=self._ends,
                vocab_size=self._trained.tokenizer.vocab_size,
                **self._sampling,
                **more,
            )

    def mention_length(self) -> None:
        """Says so where texts get longer than what the model was trained on."""
        longest = max(map(len, self._tokens)) + self._sampling["max_new_tokens"]
        trained_on = self._trained.recipe.budget.seq_len
        if longest > trained_on:
            words = f"up to {longest} tokens, but the model has only seen {trained_on} at a time"
            print(f"note: {words}", file=sys.stderr)

    def show(self, *, as_json: bool) -> None:
        """Writes and prints everything."""
        decode = self._trained.tokenizer.decode
        if as_json:
            rows = [row for some in self.rows() for row in some]
            print(json.dumps(self._document(rows)), flush=True)
            return
        if len(self._prompts) == 1:
            print(self._prompts[0].text, end=self._between, flush=True)
            stream = Stream(self._trained.tokenizer)
            for _ in self.rows(on_token=stream.add):
                stream.finish()
            return
        first = 0
        for some in self.rows():
            prompts = self._prompts[first : first + len(some)]
            texts = [decode(row) for row in some]
            shown = page(first, len(self._prompts), prompts, texts, between=self._between)
            print(shown, flush=True)
            first += len(some)

    def _document(self, rows: Sequence[list[int]]) -> dict[str, Any]:
        checkpoint, decode = self._trained.checkpoint, self._trained.tokenizer.decode
        most = self._sampling["max_new_tokens"]
        written = zip(self._prompts, self._tokens, rows, strict=True)
        texts = [record(prompt, ids, row, decode(row), most) for prompt, ids, row in written]
        return {
            "checkpoint": checkpoint.path,
            "step": checkpoint.step,
            **self._sampling,
            "texts": texts,
        }
