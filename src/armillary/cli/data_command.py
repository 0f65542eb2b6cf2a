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
    from armillary.data.batch import Batch
    from armillary.data.splits import Split
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
        help="print what the model sees of one sample",
        description="Prints one training sample as the model gets it: documents, their positions, "
        "and the text with special tokens.",
    )
    inspect.add_argument(
        "--sample", type=int, default=0, metavar="N", help="position in the order of training (0)"
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
    store, _ = _store_of(arguments.recipe_tokens)
    facts = _facts(store)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(_fact_lines(facts)))
    return EXIT_FINISHED


def _store_of(recipe_tokens: list[str]) -> tuple[TokenStore, Recipe]:
    from armillary.cli.recipe_arguments import DEFAULT_RECIPE, resolve
    from armillary.data.store import build
    from armillary.telemetry.console.choose import open_console

    recipe = resolve(recipe_tokens, default=DEFAULT_RECIPE).recipe
    with closing(open_console()) as console:
        return build(recipe.data, console), recipe


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
    if arguments.sample < 0:
        raise UserError(Problem(f"--sample {arguments.sample}", "a position, 0 or more"))
    sample = _sample(*_store_of(arguments.recipe_tokens), arguments.sample)
    if arguments.json:
        print(json.dumps(sample, indent=2))
        return EXIT_FINISHED
    print(
        f"sample at position {sample['position']} (id {sample['sample_id']}): "
        f"{sample['inputs']} inputs, {sample['counted']} labels count"
    )
    for number, piece in enumerate(sample["documents"], 1):
        begin, end = piece["begin"], piece["begin"] + piece["inputs"]
        print(
            f"\n--- document {number} of {len(sample['documents'])}: {piece['id']}"
            f"\n    inputs [{begin}, {end}) at positions {piece['first_position']} to "
            f"{piece['last_position']}; tokens [{piece['first_token']}, "
            f"{piece['first_token'] + piece['inputs']}) of {piece['document_tokens']}; "
            f"{piece['counted']} labels count\n{piece['text']}"
        )
    if sample["padding"]:
        print(f"\n--- {sample['padding']} inputs of padding")
    return EXIT_FINISHED


def _sample(store: TokenStore, recipe: Recipe, position: int) -> dict[str, Any]:
    """One sample in words: its inputs as batched, and the documents that they come from."""
    import numpy as np

    from armillary.data.dataset import ID_BITS, training_set

    seq_len = recipe.budget.seq_len
    dataset = training_set(store, recipe.data, seq_len=seq_len, seed=recipe.seed)
    batch = dataset.batch(position, position + 1)
    (sample_id,) = batch.sample_ids
    split = store.train[sample_id >> ID_BITS]
    plan = recipe.data.packing.build(split.document_offsets, seq_len)
    taken = plan.sample(sample_id & ((1 << ID_BITS) - 1))
    stream = np.arange(split.n_tokens)[taken.inputs]
    documents, begin = [], 0
    for length in taken.lengths:
        place = slice(begin, begin + length)
        documents.append(_piece(store, split, batch, place, int(stream[begin])))
        begin += length
    return {
        "position": position,
        "sample_id": sample_id,
        "inputs": begin,
        "counted": int((batch.labels >= 0).sum()),
        "padding": seq_len - begin,
        "documents": documents,
    }


def _piece(store: TokenStore, split: Split, batch: Batch, place: slice, at: int) -> dict[str, Any]:
    """The part of a document at `place` in the batch's one row; `at` in the split's tokens."""
    import numpy as np

    document = int(np.searchsorted(split.document_offsets, at, side="right")) - 1
    first, end = (int(offset) for offset in split.document_offsets[document : document + 2])
    positions = batch.documents.positions[0, place].tolist()
    tokens = batch.tokens[0, place].tolist()
    return {
        "id": split.ids[document].encode("utf-8", "replace").decode("utf-8"),
        "begin": place.start,
        "inputs": place.stop - place.start,
        "first_position": positions[0],
        "last_position": positions[-1],
        "first_token": at - first,
        "document_tokens": end - first,
        "counted": int((batch.labels[0, place] >= 0).sum()),
        "text": store.tokenizer.decode(tokens, skip_special_tokens=False),
    }


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
