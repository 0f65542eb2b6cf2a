"""Runs small enough for tests: a corpus of some lines, a model of a few thousand weights."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import BestFit, Bytes, Data, JsonLines
from armillary.models.llama import Llama
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import WarmupStableDecay
from armillary.parallel.config import Parallel
from armillary.precision.config import Precision
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.telemetry.config import Telemetry

WORDS = ("ring", "turns", "and", "sky", "above", "it", "shows", "where", "every", "star", "stands")


def write_corpus(folder: Path, documents: int = 120, seed: int = 0) -> Path:
    """A JSONL corpus of documents of very unequal lengths."""
    draw = random.Random(seed)
    path = folder / "corpus.jsonl"
    with path.open("w") as file:
        for number in range(documents):
            words = draw.choices(WORDS, k=draw.choice([1, 3, 9, 27, 81]))
            file.write(json.dumps({"id": f"document-{number}", "text": " ".join(words)}) + "\n")
    return path


def tiny_recipe(folder: Path, *, steps: int, parallel: Parallel | None = None) -> Recipe:
    """float32, ragged masks (best-fit rows end in padding), sixteen sequences of 32 a step."""
    return Recipe(
        seed=3,
        model=Llama(
            vocab_size=260, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=64, max_seq_len=64
        ),
        data=Data(
            corpus=JsonLines(files=(str(folder / "corpus.jsonl"),)),
            tokenizer=Bytes(),
            packing=BestFit(),
            cache=str(folder / "cache"),
            workers=1,
            validation_fraction=0.1,
        ),
        budget=Budget(steps=steps, batch_tokens=512, seq_len=32),
        optimizer=AdamW(lr=1e-3),
        schedule=WarmupStableDecay(warmup_steps=3, decay_fraction=0.3),
        parallel=parallel or Parallel(device="cpu"),
        precision=Precision(compute="float32"),
        validation=Validation(every=7, sequences=4),
        checkpoint=Checkpoint(every=0),
        telemetry=Telemetry(console="off", samples=True),
    )


def accumulating(recipe: Recipe, microbatch_sequences: int) -> Recipe:
    """The recipe with smaller microbatches."""
    return replace(recipe, budget=replace(recipe.budget, microbatch_sequences=microbatch_sequences))


def events_of(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The events of a run, of one kind if given."""
    lines = (run / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return [event for event in events if kind is None or event["kind"] == kind]


MEASURED = (
    "loss",
    "gradient_norm",
    "learning_rate",
    "tokens",
    "tokens_total",
    "samples",
    "sample_ids",
)
"""Fields of a `step` event that no mesh, split or interruption may change."""


def steps_of(run: Path) -> list[dict[str, Any]]:
    """What each step measured, in the order of the log; times are left out."""
    return [
        {"step": event["step"], **{name: event[name] for name in MEASURED}}
        for event in events_of(run, "step")
    ]
