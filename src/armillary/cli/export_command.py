"""Write a run's weights as a folder that other tools load: safetensors, config and tokenizer."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path

from armillary.foundation.errors import EXIT_FINISHED, Problem, RunError, UserError
from armillary.foundation.run_folder import TOKENIZER_FOLDER, named_run

_SHARD_BYTES, _LARGEST = 5e9, 1e15
_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    add = parser.add_argument
    add(
        "path",
        metavar="RUN|CHECKPOINT",
        help="a run folder, its name below runs, or a checkpoint in one",
    )
    add("--to", metavar="DIR", required=True, help="the folder to write; not there, or empty")
    add("--step", type=int, metavar="N", help="checkpoint of this step (the newest that verifies)")
    add("--format", default="hf", choices=("hf",), help="Hugging Face format, the one there is")
    add("--dtype", default="", choices=_DTYPES, help="of the weights (as the checkpoint has them)")
    add(
        "--shard-bytes", type=float, default=_SHARD_BYTES, metavar="N",
        help=f"of weights in one file, at most ({_SHARD_BYTES:.0e})",
    )  # fmt: skip
    add(
        "--vocab-size", type=int, metavar="N",
        help="rows of embedding and head (the model's): cuts off padding, or adds it",
    )  # fmt: skip
    add(
        "--extra-layer", action="store_true",
        help="write DeepSeek-V3's extra layer where transformers warns of it: not with 61 layers",
    )  # fmt: skip
    add("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Writes the folder and says what is in it."""
    target = Path(arguments.to).expanduser()
    found = [
        Problem(f"--{name} {value} is out of range", f"numbers from 1 to {_LARGEST:.0e}")
        for name, value in (
            ("shard-bytes", arguments.shard_bytes),
            ("vocab-size", arguments.vocab_size),
        )
        if value is not None and not 1 <= value <= _LARGEST
    ]
    if found:
        raise UserError(found)
    from armillary.checkpoint.hugging_face.exporting import require_free, write_export
    from armillary.inference.load import find_saved, recipe_at
    from armillary.recipe import Recipe, read_toml
    from armillary.recipe.overrides import apply
    from armillary.telemetry.console import open_console
    from armillary.telemetry.format import byte_count
    from armillary.training.exporting import plan_of_run

    require_free(target)
    with closing(open_console()) as console:
        folder, checkpoint = find_saved(named_run(Path(arguments.path)), arguments.step, console)
        recipe = recipe_at(apply(Recipe(), [read_toml(folder / "recipe.toml")]), checkpoint.step)
        tokenizer = folder / TOKENIZER_FOLDER
        plan = plan_of_run(
            recipe,
            checkpoint,
            dtype=arguments.dtype,
            vocab_size=arguments.vocab_size,
            tokenizer=tokenizer,
            extra_layer=arguments.extra_layer,
        )
        try:
            with console.task("writing weights", plan.bytes, "bytes") as advance:
                made = write_export(
                    plan,
                    target,
                    tokenizer=tokenizer,
                    shard_bytes=int(arguments.shard_bytes),
                    advance=advance,
                )
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            message = f"cannot write {target}: {error.strerror or error}{where}"
            raise RunError(Problem(message, fix="make room, or another --to DIR")) from error
    facts = {
        "checkpoint": checkpoint.path,
        "step": checkpoint.step,
        "folder": str(target),
        "family": plan.family.model_type,
        "dtype": plan.config["dtype"],
        "tensors": made.tensors,
        "bytes": made.bytes,
        "files": list(made.files),
        "tokenizer": made.has_tokenizer,
        "left_out": list(plan.left_out),
    }
    if arguments.json:
        print(json.dumps(facts, indent=1))
    else:
        print(
            f"{target}: {facts['family']} of {checkpoint.path}, {made.tensors} tensors,"
            f" {byte_count(made.bytes)} in {facts['dtype']}, {len(made.files)} files"
        )
        if made.left_out:
            print(made.left_out)
        if not made.has_tokenizer:
            print("the run has no tokenizer, so there is none in it")
    return EXIT_FINISHED
