"""Every value of a curated recipe that is not a default has a source, and every source a value."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from armillary.data.config import Data, Mixture, Part, Text
from armillary.models.deepseek import DeepSeek
from armillary.models.llama import Llama
from armillary.models.rope_scaling import Llama31RopeScaling
from armillary.optim.muon import Muon
from armillary.recipe import Recipe, get, names
from armillary.recipe.explain import changed_leaves, explain, source_of
from armillary.recipe.registry import card

NAMES = names()
PUBLISHED = re.compile(
    r"arXiv \d{4}\.\d{5}|config\.json|TorchTitan|docs/decisions/|^ours: |; ours: |section \d"
)
"""A source says where something was published, or that it is ours and why."""


@pytest.mark.parametrize("name", NAMES)
def test_every_value_that_is_no_default_has_a_source(name: str) -> None:
    made, sources = get(name), card(name).sources
    assert [leaf for leaf in changed_leaves(made) if not source_of(leaf, sources)] == []
    told = explain(made, sources, made)
    assert [leaf.name for leaf in told if leaf.origin in ("recipe", "set")] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_source_is_that_of_a_value_and_says_where_or_why(name: str) -> None:
    made, sources = get(name), card(name).sources
    told = [leaf for leaf in explain(made, sources, made) if leaf.origin == "source"]
    for key, text in sources.items():
        assert any(leaf.name == key or leaf.name.startswith(f"{key}.") for leaf in told), key
        assert PUBLISHED.search(text), f"{key}: {text}"


def test_defaults_are_those_of_the_component_that_stands_in_a_slot() -> None:
    assert changed_leaves(Recipe()) == []
    assert changed_leaves(Recipe(optimizer=Muon())) == ["optimizer"]
    assert changed_leaves(Recipe(optimizer=Muon(momentum=0.9))) == [
        "optimizer", "optimizer.momentum",
    ]  # fmt: skip
    assert changed_leaves(Recipe(model=Llama(dim=512))) == ["model.dim"]
    # A class may give a group within it other defaults than the group's own.
    assert changed_leaves(Recipe(model=DeepSeek())) == ["model"]
    scaled = replace(DeepSeek().router, scale=1.0)
    assert changed_leaves(Recipe(model=DeepSeek(router=scaled))) == ["model", "model.router.scale"]


def test_what_stands_where_by_default_nothing_does_is_changed_in_all_its_leaves() -> None:
    scaling = Llama31RopeScaling()
    assert changed_leaves(Recipe(model=Llama(rope_scaling=scaling))) == [
        f"model.rope_scaling.{leaf}"
        for leaf in ("factor", "low_frequency_factor", "high_frequency_factor",
                     "original_max_seq_len")
    ]  # fmt: skip
    mixture = Mixture(parts=(Part(corpus=Text(files=("a.txt",))),))
    assert changed_leaves(Recipe(data=Data(corpus=mixture))) == [
        "data.corpus",
        "data.corpus.parts.0.corpus",
        "data.corpus.parts.0.corpus.files",
        "data.corpus.parts.0.weight",
    ]


def test_the_longest_name_that_holds_a_leaf_gives_its_source() -> None:
    sources = {"model": "a", "model.router": "b", "model.router.scale": "c"}
    assert source_of("model.router.scale", sources) == "c"
    assert source_of("model.router.score", sources) == "b"
    assert source_of("model.routers", sources) == "a"
    assert source_of("optimizer.lr", sources) == ""


def test_each_value_says_which_of_four_origins_it_has() -> None:
    written = Recipe(seed=3, model=Llama(dim=512), max_gradient_norm=2.0)
    used = replace(written, max_gradient_norm=0.5, optimizer=Muon())
    sources = {"model": "ours: wide", "gradient_norm_order": "ours: Euclid's"}
    told = {leaf.name: leaf for leaf in explain(used, sources, written)}
    assert (told["seed"].origin, told["seed"].reason) == ("recipe", "Of initial weights, order of "
            "samples and everything random; 0 or more.")  # fmt: skip
    assert (told["model.dim"].origin, told["model.dim"].reason) == ("source", "ours: wide")
    assert told["model.n_layers"].origin == "default"
    assert told["gradient_norm_order"].origin == "source"  # named itself, though it is the default
    assert told["max_gradient_norm"].origin == "set"
    assert told["max_gradient_norm"].reason == "2.0 in the recipe"
    assert told["optimizer"].origin == "set"
    assert told["optimizer.momentum"].reason == "the recipe has no such value"
