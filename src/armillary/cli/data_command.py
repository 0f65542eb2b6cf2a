"""Build, inspect and verify the tokens that a recipe trains on."""

from __future__ import annotations

import argparse
import json
import shlex
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from armillary.cli.parser import Parser
from armillary.foundation.errors import EXIT_FINISHED, Problem, RunError, UserError

if TYPE_CHECKING:
    from armillary.data.token_store import TokenStore
    from armillary.recipe.recipe import Recipe


def add_arguments(parser: Parser) -> None:
    """Declares the sub-commands and their options."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = commands.add_parser(
        "build",
        help="tokenise the corpus, or find it done",
        description="Tokenises a recipe's corpus ahead of training. A killed build goes on where "
        "it was when it is run again.",
    )
    inspect = commands.add_parser(
        "inspect",
        help="print what the model sees of a step, or of one sample",
        description="Prints what training gets: documents, their positions, the text with special "
        "tokens, and what of it is predicted; of a step also the shares of the mixture and of "
        "padding, and the stage.",
    )
    which = inspect.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="an optimizer step, counting from 1")
    which.add_argument(
        "--sample", type=int, default=0, metavar="N", help="position in the order of training (0)"
    )
    inspect.add_argument(
        "--rows", type=int, default=4, metavar="N", help="of a step, rows put in words (4)"
    )
    verify = commands.add_parser(
        "verify",
        help="compare a token store with its checksums",
        description="Compares every file of a token store with its SHA-256.",
    )
    build.takes_recipe()
    inspect.takes_recipe()
    verify.takes_recipe("[RECIPE|FOLDER]")
    for command in (build, inspect, verify):
        command.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Runs the chosen sub-command; returns the exit code."""
    actions = {"build": _build, "inspect": _inspect, "verify": _verify}
    return actions[arguments.action](arguments)


# build ---------------------------------------------------------------------------------------


def _build(arguments: argparse.Namespace) -> int:
    from armillary.cli.data_inspect import build_stores
    from armillary.telemetry.console.choose import open_console

    with closing(open_console()) as console:
        stores = build_stores(_recipe(arguments), console)
    facts = [_facts(store) for store in {store.folder: store for store in stores}.values()]
    if arguments.json:
        others = {"stages": facts} if len(facts) > 1 else {}
        print(json.dumps({**facts[0], **others}, indent=2))
    else:
        print("\n\n".join("\n".join(_fact_lines(each)) for each in facts))
    return EXIT_FINISHED


def _recipe(arguments: argparse.Namespace) -> Recipe:
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve

    return resolve(arguments.recipe_tokens, default=DEFAULT_RECIPE).recipe


def _facts(store: TokenStore) -> dict[str, Any]:
    manifest = store.manifest
    return {
        "folder": str(store.folder),
        "fingerprint": store.fingerprint,
        "corpus_fingerprint": store.corpus_fingerprint,
        "tokenizer": manifest["tokenizer"],
        "parts": manifest["parts"],
    }


def _fact_lines(facts: dict[str, Any]) -> list[str]:
    tokenizer = facts["tokenizer"]
    lines = [
        f"store       {facts['folder']}",
        f"corpus      {facts['corpus_fingerprint'][:16]}  (fingerprint of its documents)",
        f"tokenizer   {tokenizer['fingerprint'][:16]}  {tokenizer['vocab_size']:,} tokens",
    ]
    for index, part in enumerate(facts["parts"]):
        of_part = f" of part {index} ({part['corpus']})" if len(facts["parts"]) > 1 else ""
        for split in ("train", "validation"):
            counts = part[split]
            lines.append(
                f"{split:<11} {counts['documents']:,} documents, {counts['tokens']:,} tokens, "
                f"{counts['bytes']:,} bytes{of_part}"
            )
        if part["empty_documents"]:
            lines.append(f"left out    {part['empty_documents']:,} empty documents{of_part}")
    return lines


# inspect -------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> int:
    from armillary.cli.data_inspect import inspect_sample, inspect_step, row_lines, step_lines
    from armillary.telemetry.console.choose import open_console

    wrong = [
        Problem(f"--{name} {value}", "0 or more")
        for name, value in (("sample", arguments.sample), ("rows", arguments.rows))
        if value < 0
    ]
    if wrong:
        raise UserError(wrong)
    recipe, step = _recipe(arguments), arguments.step
    with closing(open_console()) as console:
        if step is None:
            found = inspect_sample(recipe, arguments.sample, console)
        else:
            found = inspect_step(recipe, step, arguments.rows, console)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(row_lines(found) if step is None else step_lines(found)))
    return EXIT_FINISHED


# verify --------------------------------------------------------------------------------------


def _verify(arguments: argparse.Namespace) -> int:
    from armillary.data.token_store import read_manifest, verify
    from armillary.telemetry.console.choose import open_console

    folder = _folder_of(arguments.recipe_tokens)
    count = len(read_manifest(folder)["files"])
    with closing(open_console()) as console:
        problems = verify(folder, console)
    if arguments.json:
        found = [problem.message for problem in problems]
        print(json.dumps({"folder": str(folder), "files": count, "problems": found}, indent=2))
    if problems:
        raise RunError(problems)
    if not arguments.json:
        print(f"{folder}: all {count} files are as they were written")
    return EXIT_FINISHED


def _folder_of(tokens: list[str]) -> Path:
    if len(tokens) == 1 and Path(tokens[0]).expanduser().is_dir():
        return Path(tokens[0]).expanduser()
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.data.store import locate

    resolved = resolve(tokens, default=DEFAULT_RECIPE)
    folder = locate(resolved.recipe.data)
    if folder is None:
        raise UserError(
            Problem(
                f"the corpus of {resolved.name} has not been built, or has changed since",
                fix=f"armillary data build {shlex.join(tokens) or DEFAULT_RECIPE}",
            )
        )
    return folder
