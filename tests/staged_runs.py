"""A tiny run of three stages: another mixture at one border, a longer context at the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from armillary.data.config import JsonLines, Mixture, Part
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import Stage
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus

LENGTHS = (8, 7, 6)
"""Steps of the stages."""
MIXED = ("data.corpus.parts.0.weight=1", "data.corpus.parts.1.weight=3")
LONGER = (
    *("budget.seq_len=64", "model.max_seq_len=64", "model.rope_theta=2e6", *MIXED),
    *("optimizer.lr=5e-4", "schedule.warmup_steps=0", "budget.batch_tokens=1024"),
)


def write_corpora(folder: Path) -> None:
    """Two of them, `a` and `b`."""
    for seed, name in enumerate("ab"):
        (folder / name).mkdir()
        write_corpus(folder / name, documents=90, seed=seed)


def staged_recipe(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> Recipe:
    """The run over the corpora there; saves every 3 steps and keeps the newest."""
    recipe = tiny_recipe(folder, steps=1)
    parts = [
        Part(corpus=JsonLines(files=(str(folder / name / "corpus.jsonl"),)), weight=weight)
        for name, weight in (("a", 3.0), ("b", 1.0))
    ]
    short, mixed, longer = lengths
    return replace(
        recipe,
        data=replace(recipe.data, corpus=Mixture(parts=tuple(parts))),
        budget=replace(recipe.budget, steps=None),
        checkpoint=replace(recipe.checkpoint, every=3, keep_last=1),
        validation=replace(recipe.validation, every=4),
        stages=(
            Stage(name="short", steps=short),
            Stage(name="mixed", steps=mixed, set=MIXED),
            Stage(name="longer", steps=longer, set=LONGER),
        ),
    )


def told(run: Path) -> dict[tuple[str, int, str], Any]:
    """What a run has measured, by what and when: the newest of what it has measured again."""
    steps = {("step", step["step"], ""): step for step in steps_of(run)}
    looks = {
        ("validation", event["step"], event["name"]): (event["loss"], event["tokens"])
        for event in events_of(run, "validation")
    }
    return steps | looks
