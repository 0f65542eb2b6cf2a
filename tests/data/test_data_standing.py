"""Stages count on: what goes on goes on where it was, and everything follows from the positions."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.chat.bundled import TEMPLATES
from armillary.data.chat.corpus import Chat
from armillary.data.config import BestFit, Bytes, Data, Mixture, Part, Text
from armillary.data.dataset import ID_BITS, PackedDataset, training_set
from armillary.data.splits import Split
from armillary.data.standing import Standing, readings
from armillary.data.store import build
from armillary.data.token_store import TokenStore

SEED = 5


def split_of(samples: int, base: int) -> Split:
    """One document of so many samples of 4 tokens, unlike those of any other base."""
    tokens = np.arange(base, base + 4 * samples, dtype=np.uint32)
    return Split(tokens, [0, 4 * samples])


def dataset_of(
    sizes: dict[str, int], weights: list[float], standing: Standing
) -> tuple[PackedDataset, list[str]]:
    """Corpora by name, of so many samples each; the base of the tokens tells them apart."""
    names = list(sizes)
    splits = [split_of(size, base=1000 * ord(name)) for name, size in sizes.items()]
    dataset = PackedDataset(
        splits,
        seq_len=4,
        seed=SEED,
        weights=weights,
        starts=standing.starts(names, SEED),
        begin=standing.position,
    )
    return dataset, names


def read(dataset: PackedDataset, first: int, last: int) -> list[int]:
    """The first token of each sample, which names it across datasets."""
    return [int(token) for token in dataset.batch(first, last).tokens[:, 0]]


@settings(max_examples=60, deadline=None)
@given(
    stages=st.lists(
        st.tuples(
            st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
            st.lists(st.integers(1, 5), min_size=3, max_size=3),
            st.integers(0, 40),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_no_sample_comes_twice_before_its_corpus_is_through(stages) -> None:
    sizes = {"a": 7, "b": 19, "c": 40}
    standing, seen = Standing(), Counter[int]()
    visits: dict[str, int] = dict.fromkeys(sizes, 0)
    for names, weights, count in stages:
        own = {name: sizes[name] for name in names}
        shares = [float(weight) for weight in weights[: len(names)]]
        dataset, _ = dataset_of(own, shares, standing)
        until = standing.position + count
        if count:
            ids = dataset.sample_ids(range(standing.position, until))
            for one, token in zip(ids, read(dataset, standing.position, until), strict=True):
                name = names[one >> ID_BITS]
                epoch, visits[name] = visits[name] // sizes[name], visits[name] + 1
                assert seen[token] == epoch, "each sample once in every epoch of its corpus"
                seen[token] += 1
        expected = tuple(visits[name] / sizes[name] for name in names)
        assert dataset.epochs(until) == pytest.approx(expected)
        standing = standing.after(names, SEED, shares, until)
        assert standing.position == until


def test_a_stage_that_changes_nothing_reads_what_would_have_come_anyway() -> None:
    whole, names = dataset_of({"a": 23}, [1.0], Standing())
    later, _ = dataset_of({"a": 23}, [1.0], Standing().after(names, SEED, [1.0], 10))
    assert read(later, 10, 60) == read(whole, 10, 60)


def test_a_corpus_keeps_its_order_in_another_place_of_the_mixture() -> None:
    first, names = dataset_of({"a": 30}, [1.0], Standing())
    standing = Standing().after(names, SEED, [1.0], 12)
    second, _ = dataset_of({"b": 30, "a": 30}, [1.0, 2.0], standing)
    going_on = [token for token in read(second, 12, 39) if token < 1000 * ord("b")]
    assert read(first, 0, 12) + going_on == read(first, 0, 30)
    assert len(going_on) == 18


def test_what_begins_later_has_an_order_of_its_own() -> None:
    at_first, _ = dataset_of({"b": 30}, [1.0], Standing())
    standing = Standing().after(["a"], SEED, [1.0], 12)
    later, _ = dataset_of({"b": 30}, [1.0], standing)
    order = read(later, 12, 42)
    assert sorted(order) == sorted(read(at_first, 0, 30))
    assert order != read(at_first, 0, 30)
    assert order == read(dataset_of({"b": 30}, [1.0], standing)[0], 12, 42)


def test_the_fingerprint_of_a_stage_knows_how_far_the_run_had_read() -> None:
    def fingerprint(standing: Standing) -> str:
        return dataset_of({"a": 30}, [1.0], standing)[0].fingerprint

    standings = [Standing(), *(Standing().after(["a"], SEED, [1.0], at) for at in (0, 10, 11))]
    standings.append(Standing().after(["z"], SEED, [1.0], 10))
    assert len({fingerprint(standing) for standing in standings[1:]}) == 4
    plain = PackedDataset(split_of(30, 1000 * ord("a")), seq_len=4, seed=SEED, weights=[1.0])
    assert fingerprint(Standing()) == plain.fingerprint, "runs without stages are what they were"


def store_of(tmp_path: Path, corpora: list[str], **changes) -> tuple[TokenStore, Data]:
    for name in set(corpora):
        for number in range(30):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            (folder / f"{number}.txt").write_text(f"{name} {number} " * (number + 3))
    parts = tuple(Part(corpus=Text(files=(f"{tmp_path}/{name}/*.txt",))) for name in corpora)
    data = Data(
        corpus=parts[0].corpus if len(parts) == 1 else Mixture(parts=parts),
        tokenizer=Bytes(),
        validation_fraction=0.2,
        cache=str(tmp_path / "cache"),
        workers=1,
    )
    data = dataclasses.replace(data, **changes)
    return build(data), data


def test_a_corpus_has_one_name_for_as_long_as_its_samples_are_the_same(tmp_path: Path) -> None:
    def names(corpora: list[str], seq_len: int = 32, **changes) -> tuple[str, ...]:
        store, data = store_of(tmp_path, corpora, **changes)
        return readings(store, data, seq_len)

    (a,) = names(["a"])
    assert names(["b", "a"])[1] == a, "alone or in a mixture, in whatever place"
    twice = names(["a", "a"])
    assert a in twice
    assert len({*twice}) == 2
    others = [names(["a"], 64), names(["a"], packing=BestFit()), names(["a"], bos=False)]
    others += [names(["a"], shuffle=False), names(["b"]), (twice[1],)]
    assert len({a, *(name for (name,) in others)}) == 7


def test_text_goes_on_where_conversations_join_it(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Ring?"}, {"role": "assistant", "content": "It turns."}]
    lines = [json.dumps({"id": str(i), "messages": turns}) for i in range(30)]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    store, data = store_of(tmp_path, ["a"])
    talks = [Chat(files=(f"{tmp_path}/talks.jsonl",), template=name) for name in TEMPLATES]
    found = [readings(store, data, 64)]
    for chat in talks:
        mixture = Mixture(parts=(Part(corpus=data.corpus), Part(corpus=chat)))
        mixed = dataclasses.replace(data, corpus=mixture)
        found.append(readings(build(mixed), mixed, 64))
    (text,), (first, one), (second, other) = found
    assert text == first == second
    assert one != other, "conversations in another form are other samples"


def test_a_recipes_stages_go_on_through_the_token_stores(tmp_path: Path) -> None:
    store, data = store_of(tmp_path, ["a", "b"])
    first = training_set(store, data, seq_len=16, seed=SEED)
    names = readings(store, data, 16)
    standing = Standing().after(names, SEED, store.weights, 20)
    other, more = store_of(tmp_path, ["b"])
    later = training_set(other, more, seq_len=16, seed=SEED, standing=standing)
    of_b = [i for i in first.sample_ids(range(20)) if i >> ID_BITS == 1]
    assert len(of_b) == 10
    size = later.samples_per_epoch
    rest = later.sample_ids(range(20, 20 + size - 10))
    assert sorted([*(i % 2**ID_BITS for i in of_b), *rest]) == list(range(size))
