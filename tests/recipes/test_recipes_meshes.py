"""Every curated recipe is built on `meta` and cut as its ranks would cut it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from armillary.models.dense import DenseDecoder
from armillary.models.moe import MoEDecoder
from armillary.parallel.config import Scale
from armillary.parallel.layout import local_tensor
from armillary.parallel.mesh import Mesh
from armillary.parallel.parallelize import parallelize
from armillary.parallel.pretended import pretended
from armillary.recipe import Recipe, get, names
from armillary.recipe.build import build_model
from armillary.recipe.memory import memory_of
from armillary.recipe.registry import card
from armillary.recipe.stages import spans_of

NAMES = names()
ANY = 8
"""Ranks that a recipe for any number of GPUs is built on."""

FAMILIES = ("llama3", "qwen3", "deepseek", "gpt-oss")
PUBLISHED = {
    # Parameters to the last one: elements of all tensors in the released safetensors files, a tied
    # table once (those of Qwen3 0.6B and 1.7B hold it twice), GPT-OSS's experts as their 4-bit
    # blocks stand for (20.91 and 116.83 billion in 2508.10925, table 1); DeepSeek-V3's main model
    # without its selection biases, 58 x 256. What a token meets in billions, as printed: Qwen3's
    # cards, of which that of 30B-A3B counts the embedding; arXiv 2405.04434, section 3.1.2 and
    # appendix B; 2412.19437, section 4.2; 2508.10925, table 1.
    "llama3-1b": (1_235_814_400, None),
    "llama3-3b": (3_212_749_824, None),
    "llama3-8b": (8_030_261_248, None),
    "llama3-70b": (70_553_706_496, None),
    "llama3-405b": (405_853_388_800, None),
    "qwen3-0.6b": (596_049_920, None),
    "qwen3-1.7b": (1_720_574_976, None),
    "qwen3-4b": (4_022_468_096, None),
    "qwen3-8b": (8_190_735_360, None),
    "qwen3-14b": (14_768_307_200, None),
    "qwen3-32b": (32_762_123_264, None),
    "qwen3-30b-a3b": (30_532_122_624, 3.3),
    "qwen3-235b-a22b": (235_093_634_560, 22),
    "deepseek-16b": (15_706_484_224, 2.4),
    "deepseek-236b": (235_741_434_880, 21),
    "deepseek-671b-plain": (671_026_419_200 - 58 * 256, 37),
    "gpt-oss-20b": (20_914_757_184, 3.61),
    "gpt-oss-120b": (116_829_156_672, 5.13),
}


def ranks_of(name: str) -> int:
    gpus = card(name).gpus
    return ANY if gpus is None else max(1, gpus)


def distinct(recipe: Recipe) -> list[Recipe]:
    """The stages of a run whose mesh or model differs from that of those before."""
    found: dict[object, Recipe] = {}
    for span in spans_of(recipe):
        found.setdefault((span.recipe.parallel, span.recipe.model), span.recipe)
    return list(found.values())


def cut(recipe: Recipe, ranks: int, rank: int) -> float:
    """Bytes of weights, gradients and moments of a rank, by the real passes, on `meta`."""
    scale = Scale(
        parallel=recipe.parallel,
        precision=recipe.precision,
        activation_checkpoint=recipe.activation_checkpoint,
        compile=recipe.compile,
    )
    with pretended(ranks, rank):
        mesh = Mesh.create(recipe.parallel, torch.device("cpu"))
        with torch.device("meta"):
            model = build_model(recipe)
        parts = parallelize(model, mesh, scale).parts
        parameters = [parameter for part in parts for parameter in part.parameters()]
        return sum(
            (16 if parameter.requires_grad else 4) * local_tensor(parameter).numel()
            for parameter in parameters
        )


def places(recipe: Recipe, ranks: int, *, every: bool) -> Iterator[int]:
    """First ranks of the pipeline's places: all of them, or the first and the last."""
    pp = recipe.parallel.resolve(ranks).pp
    wanted = range(pp) if every else sorted({0, pp - 1})
    return (place * (ranks // pp) for place in wanted)


@pytest.mark.parametrize("name", NAMES)
def test_first_and_last_stage_are_built_on_the_mesh(name: str) -> None:
    """And hold what the estimate of memory says, within the unevenness of stages and shards."""
    ranks, recipe = ranks_of(name), distinct(get(name))[0]
    held = [cut(recipe, ranks, rank) for rank in places(recipe, ranks, every=False)]
    if card(name).gpus:
        assert max(held) == pytest.approx(memory_of(recipe, ranks).state, rel=0.12)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in NAMES if card(name).gpus])
def test_every_place_of_every_mesh_is_built(name: str) -> None:
    ranks = ranks_of(name)
    for recipe in distinct(get(name)):
        held = [cut(recipe, ranks, rank) for rank in places(recipe, ranks, every=True)]
        assert max(held) == pytest.approx(memory_of(recipe, ranks).state, rel=0.12)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_number_of_parameters(name: str) -> None:
    total, active = PUBLISHED[name]
    model = get(name).model
    assert model.parameter_count() == total
    assert isinstance(model, DenseDecoder)
    assert isinstance(model, MoEDecoder) == (active is not None)
    if isinstance(model, MoEDecoder) and active is not None:
        met = model.active_parameter_count()
        if name == "qwen3-30b-a3b":  # its card counts the embedding too
            met += model.vocab_size * model.dim
        digits = len(f"{active:g}".partition(".")[2])
        assert met / 1e9 == pytest.approx(active, abs=0.6 / 10**digits)  # rounded, or cut off


def test_all_sizes_of_a_family_are_counted() -> None:
    anywhere = {name for name in NAMES if card(name).gpus is None}
    pretraining = {name for name in anywhere if card(name).family in FAMILIES}
    assert pretraining - {"deepseek-671b"} == set(PUBLISHED)
