"""What curated recipes share: a published run, put on so many GPUs, with a source for each value.

A family's module says how its sizes were published to be trained; `published` and `placed` make
recipes of that, and `register` gives each a name, its hardware and its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import Data
from armillary.data.corpus_tables import HuggingFace
from armillary.data.tokenizer_subword import File
from armillary.models.dense import DenseDecoder
from armillary.models.moe import MoEDecoder
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Cosine, ScheduleConfig
from armillary.parallel.config import ActivationCheckpointConfig, Compile, Full, Parallel
from armillary.recipe.budget import Budget, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe
from armillary.recipe.stages import Stage
from armillary.recipe.tree import leaves

TITAN = "TorchTitan (arXiv 2410.06511; its benchmarks/llama3_h100_202412_torchtitan.md"
CHINCHILLA = "Hoffmann et al. 2022, arXiv 2203.15556"
GPT3 = "Brown et al. 2020, arXiv 2005.14165"

EVERYWHERE = {
    "data.corpus": "ours: C4 (Raffel et al. 2020, arXiv 1910.10683), open and streamed; the "
    "family's own data are not published",
    "data.tokenizer": "ours: the family's own, a tokenizer.json beside the model card",
    "compile.enabled": f"ours: 16 % faster in {TITAN}, table 1)",
    "activation_checkpoint": "ours: as much is kept as the estimate of memory "
    "(recipe/memory.py) leaves room for",
    "validation.every": "ours: as often as a checkpoint",
    "validation.final_sequences": "ours: enough for three digits of the loss",
    "checkpoint.every": "TorchTitan's configurations of Llama 3: checkpoint.interval = 500",
}
"""Sources of what all curated recipes for GPUs have in common."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """How a size was trained, or is here."""

    model: DenseDecoder
    tokens: float
    batch_tokens: int
    seq_len: int
    rate: float
    schedule: ScheduleConfig
    sources: Mapping[str, str]
    """Of all of these."""
    what: str = "as published"
    """What run it is, in the recipe's line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A number of GPUs and how a run uses them."""

    gpus: int
    rows: int
    """Sequences that a rank computes at once."""
    parallel: Parallel = field(default_factory=Parallel)
    keeps: ActivationCheckpointConfig = field(default_factory=Full)
    compiled: bool = True
    why: str = ""
    """Source of the mesh."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Those of values that need one of their own."""

    def all_sources(self) -> dict[str, str]:
        """Those of all that it sets."""
        rows = "ours: as many as the estimate of memory leaves room for"
        mesh = {} if self.parallel == Parallel() else {"parallel": self.why}
        return {"budget.microbatch_sequences": rows} | mesh | dict(self.sources)


_NOT_ARCHITECTURE = ("attention", "init_std", "init_depth", "router.z_loss")


def architecture(model: DenseDecoder, source: str) -> dict[str, str]:
    """The source of all that a model's publication says, be it the default here or not."""
    names = [leaf.name for leaf in leaves(model)]
    return {"model": source} | {
        f"model.{name}": source for name in names if name not in _NOT_ARCHITECTURE
    }


def published(run: Run) -> Recipe:
    """A run as published, on any number of GPUs: all data parallel. It needs a tokenizer.json."""
    return Recipe(
        model=run.model,
        data=Data(corpus=HuggingFace(name="allenai/c4", config="en"), tokenizer=File()),
        budget=Budget(tokens=run.tokens, batch_tokens=run.batch_tokens, seq_len=run.seq_len),
        optimizer=AdamW(lr=run.rate, betas=(0.9, 0.95), weight_decay=0.1),
        schedule=run.schedule,
        activation_checkpoint=Full(),
        compile=Compile(enabled=True),
        validation=Validation(every=500, final_sequences=4096),
        checkpoint=Checkpoint(every=500),
    )


def placed(run: Run, place: Place) -> Recipe:
    """The run on so many GPUs."""
    whole = published(run)
    return replace(
        whole,
        budget=replace(whole.budget, microbatch_sequences=place.rows),
        parallel=place.parallel,
        activation_checkpoint=place.keeps,
        compile=Compile(enabled=place.compiled),
    )


def staged(whole: Recipe, *stages: Stage) -> Recipe:
    """The recipe with stages, which say how long it is."""
    return replace(whole, budget=replace(whole.budget, tokens=None), stages=stages)


def sources_of(run: Run, place: Place, stages: Mapping[str, str]) -> dict[str, str]:
    """Sources of a run on a place by stages, which say how long it is."""
    every = EVERYWHERE | dict(run.sources) | place.all_sources() | dict(stages)
    return {name: source for name, source in every.items() if name != "budget.tokens"}


def shortened(run: Run, gpus: int) -> Run:
    """The run at the length that pays best for its size, for one machine of `gpus` GPUs."""
    model = run.model
    counted = model.active_parameter_count() if isinstance(model, MoEDecoder) else None
    tokens = 20.0 * (counted or model.parameter_count())
    batch = 2**19 if gpus == 1 else 2**20
    kind = "active parameter" if counted else "parameter"
    like = "half a million tokens, as the models up to 760M"
    if gpus > 1:
        like = "a million tokens, as the models of 1.3B and 2.7B"
    changed = {
        "budget.tokens": f"20 tokens a parameter: {CHINCHILLA}, table 3; ours: each {kind} counts",
        "budget.batch_tokens": f"{like} of {GPT3}, table 2.1; ours: for this size too",
        "schedule": f"a cosine to a tenth: {CHINCHILLA}, section 3.1 and appendix B",
        "schedule.warmup_steps": "2,000 steps: DeepSeek-V3, arXiv 2412.19437, section 4.2; ours: "
        "for a shorter run of another family too",
    }
    kept = {name: text for name, text in run.sources.items() if not name.startswith("schedule")}
    return replace(
        run,
        tokens=tokens,
        batch_tokens=batch,
        schedule=Cosine(warmup_steps=2000, floor=0.1),
        sources=kept | changed,
        what=f"on 20 tokens a{'n' if counted else ''} {kind}",
    )


def register(
    name: str,
    what: str,
    make: Callable[[], Recipe],
    *,
    family: str,
    gpus: int | None,
    sources: Mapping[str, str],
) -> None:
    """Registers a recipe of a family's table, where a function for each would say it all twice."""

    def made() -> Recipe:
        return make()

    made.__doc__ = what
    made.__module__, made.__qualname__ = make.__module__, name
    recipe(name, family=family, gpus=gpus, sources=sources)(made)


def register_run(family: str, size: str, title: str, run: Run, places: list[Place]) -> None:
    """Registers a size as published, on any number of GPUs, and on each of its places.

    Places of up to eight GPUs get a run of a length that they can be expected to finish.
    """
    register(
        f"{family}-{size.lower()}",
        f"{title} {run.what}.",
        lambda: published(run),
        family=family,
        gpus=None,
        sources=EVERYWHERE | dict(run.sources),
    )
    for place in places:
        own = shortened(run, place.gpus) if place.gpus <= 8 else run
        register(
            f"{family}-{size.lower()}-{place.gpus}gpu",
            f"{title} {own.what}.",
            lambda own=own, place=place: placed(own, place),  # type: ignore[misc]  # loop values
            family=family,
            gpus=place.gpus,
            sources=EVERYWHERE | dict(own.sources) | place.all_sources(),
        )
