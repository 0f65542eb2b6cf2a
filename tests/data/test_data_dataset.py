"""Batches are pure functions of positions: right labels, and every sample of an epoch once."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.config import Bytes, Data, Text
from armillary.data.dataset import ID_BITS, PackedDataset, ValidationDataset
from armillary.data.packing import BestFit, Concatenate
from armillary.data.splits import Split
from armillary.data.store import build
from armillary.foundation.errors import UserError
from data_examples import write_texts


def split_of(lengths: list[int], base: int = 0) -> Split:
    """Token t of document d is unlike every other token of the split."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(base + 1, base + offsets[-1] + 1, dtype=np.uint32)
    return Split(tokens, offsets, document_bytes=[3 * n for n in lengths])


LENGTHS = [17, 3, 0, 40, 1, 8, 26, 5, 9]
PACKINGS = pytest.mark.parametrize("packing", [Concatenate(), BestFit()], ids=["cut", "fit"])


@PACKINGS
def test_labels_are_the_next_tokens_of_the_same_document(packing) -> None:
    split = split_of(LENGTHS)
    dataset = PackedDataset(split, packing, seq_len=8, seed=1)
    batch = dataset.batch(0, dataset.samples_per_epoch)
    firsts = {int(o) + 1 for o in split.document_offsets[:-1]}
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    counted = 0
    for row in range(len(batch.sample_ids)):
        lengths = batch.documents.lengths[row]
        assert sum(lengths) == 8
        begin = 0
        for length in lengths:
            tokens = batch.tokens[row, begin : begin + length].tolist()
            labels = batch.labels[row, begin : begin + length].tolist()
            if tokens[0] == 0:  # padding is a document of its own, at the end, and counts nothing
                assert set(tokens) == {0}
                assert set(labels) == {-100}
                assert begin + length == 8
            else:
                assert tokens == list(range(tokens[0], tokens[0] + length))
                assert not firsts & set(tokens[1:])
                for token, label in zip(tokens, labels, strict=True):
                    is_last = token + 1 in firsts or token == split.n_tokens
                    assert label == (-100 if is_last else token + 1)
                    counted += not is_last
            begin += length
    used = split.n_tokens // 8 * 8 if isinstance(packing, Concatenate) else split.n_tokens
    labels_in_reach = set(range(2, min(used + 1, split.n_tokens) + 1)) - firsts
    assert counted == len(labels_in_reach)


@st.composite
def runs(draw):
    """A run in legs: each has its own world size and rows, and stops somewhere."""
    return draw(
        st.lists(
            st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6)),
            min_size=1,
            max_size=5,
        )
    )


@PACKINGS
@given(legs=runs(), shuffle=st.booleans(), seed=st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_every_sample_of_an_epoch_is_visited_once_for_any_world_batch_and_stop(
    packing, legs, shuffle, seed
) -> None:
    cursor, seen = 0, []
    for world, rows_per_rank, steps in legs:  # between legs: a stop, and a resume at the cursor
        dataset = PackedDataset(split_of(LENGTHS), packing, seq_len=8, seed=seed, shuffle=shuffle)
        size = world * rows_per_rank
        for _ in range(steps):
            whole = dataset.batch(cursor, cursor + size)
            parts = [
                dataset.batch(
                    cursor, cursor + size, range(rank * rows_per_rank, (rank + 1) * rows_per_rank)
                )
                for rank in range(world)
            ]
            assert whole.sample_ids == sum((part.sample_ids for part in parts), ())
            assert torch.equal(whole.tokens, torch.cat([part.tokens for part in parts]))
            assert torch.equal(whole.labels, torch.cat([part.labels for part in parts]))
            seen += whole.sample_ids
            cursor += size
    epoch = dataset.samples_per_epoch
    for begin in range(0, len(seen), epoch):
        visited = seen[begin : begin + epoch]
        assert len(set(visited)) == len(visited)
        assert set(visited) <= set(range(epoch))
        if not shuffle:
            assert visited == list(range(len(visited)))


def test_rows_past_the_end_of_a_step_hold_nothing_and_take_no_sample() -> None:
    dataset = PackedDataset(split_of([400]), seq_len=4, seed=5)
    padded = dataset.batch(6, 9, rows=range(2, 6))
    assert padded.sample_ids == (*dataset.sample_ids([8]), -1, -1, -1)
    assert torch.equal(padded.tokens[:1], dataset.batch(8, 9).tokens)
    assert set(padded.tokens[1:].flatten().tolist()) == {0}
    assert set(padded.labels[1:].flatten().tolist()) == {-100}
    assert padded.documents.lengths[1:] == ((4,),) * 3


def test_each_epoch_has_its_own_order_and_any_cursor_finds_it() -> None:
    dataset = PackedDataset(split_of([400]), seq_len=4, seed=5)
    n = dataset.samples_per_epoch
    first, second = dataset.sample_ids(range(n)), dataset.sample_ids(range(n, 2 * n))
    assert sorted(first) == sorted(second) == list(range(n))
    assert first != second
    assert dataset.batch(n - 2, n + 2).sample_ids == first[-2:] + second[:2]
    assert dataset.epochs(n + n // 2) == (1.5,)
    assert PackedDataset(split_of([400]), seq_len=4, seed=6).sample_ids(range(n)) != first


def test_a_mixture_runs_each_corpus_through_its_own_epochs() -> None:
    splits = [split_of([40]), split_of([12], base=1000)]
    dataset = PackedDataset(splits, seq_len=4, seed=0, weights=[0.75, 0.25])
    assert dataset.samples_per_epoch == 13
    batch = dataset.batch(0, 48)
    corpora = np.array(batch.sample_ids) >> ID_BITS
    samples = np.array(batch.sample_ids) % 2**ID_BITS
    assert np.bincount(corpora).tolist() == [36, 12]
    for corpus, size in ((0, 10), (1, 3)):
        visits = samples[corpora == corpus]
        for begin in range(0, len(visits) - size, size):
            assert sorted(visits[begin : begin + size]) == list(range(size))
    assert ((batch.tokens[:, 0].numpy() > 1000) == (corpora == 1)).all()
    assert dataset.epochs(48) == (3.6, 4.0)


def test_the_fingerprint_sees_whatever_decides_the_data() -> None:
    def fingerprint(lengths=LENGTHS, packing=None, **options) -> str:
        return PackedDataset(
            split_of(lengths), packing, **{"seq_len": 8, "seed": 0, **options}
        ).fingerprint

    assert fingerprint() == fingerprint()
    others = [
        fingerprint(seed=1),
        fingerprint(seq_len=9),
        fingerprint(shuffle=False),
        fingerprint(packing=BestFit()),
        fingerprint(source="another corpus"),
        fingerprint([17, 3, 0, 40, 1, 8, 26, 6, 8]),
    ]
    assert len({fingerprint(), *others}) == 7


@pytest.mark.parametrize(("stride", "rows"), [(None, 3), (3, 1), (8, 5)])
def test_validation_counts_every_held_out_token_once_on_any_world(stride, rows) -> None:
    split = split_of(LENGTHS)
    held_out = ValidationDataset(split, seq_len=8, stride=stride)
    labels: list[int] = []
    for first in range(0, held_out.n_rows, rows):  # the last call goes past the end
        batch = held_out.batch(first, first + rows)
        assert batch.tokens.shape == (rows, 8)
        labels += batch.labels[batch.labels != -100].tolist()
    firsts = {int(o) + 1 for o in split.document_offsets[:-1]}
    assert sorted(labels) == sorted(set(range(1, split.n_tokens + 1)) - firsts)
    assert held_out.n_tokens == len(labels)
    assert held_out.n_bytes == split.n_bytes - 3  # the document of one token scores nothing
    beyond = held_out.batch(held_out.n_rows, held_out.n_rows + 2)
    assert (beyond.labels == -100).all()
    assert beyond.sample_ids == (-1, -1)


def test_a_limited_validation_is_a_fixed_choice_of_whole_documents() -> None:
    split = split_of([9] * 50 + [30])
    few = ValidationDataset(split, seq_len=16, limit=5)
    assert few.n_tokens <= 5 * 16 < few.n_tokens + 30
    assert few.n_bytes == split.document_bytes[few.documents].sum()
    assert (
        few.documents.tolist() == ValidationDataset(split, seq_len=16, limit=5).documents.tolist()
    )
    assert ValidationDataset(split_of([40, 30]), seq_len=4, limit=1).documents.tolist() == [1]


def test_documents_too_large_for_a_limit_do_not_crowd_out_those_that_fit() -> None:
    for large in range(12):  # wherever the order puts them
        lengths = [9] * 40
        lengths[large : large + 20] = [100] * 20
        few = ValidationDataset(split_of(lengths), seq_len=16, limit=4)
        assert few.n_tokens == 8 * 8
        assert set(np.array(lengths)[few.documents]) == {9}


def test_bits_per_byte_count_the_text_that_is_scored(tmp_path) -> None:
    write_texts(tmp_path / "texts", 40)
    corpus = Text(files=(f"{tmp_path}/texts/**/*.txt",))
    for bos in (True, False):
        data = Data(corpus=corpus, tokenizer=Bytes(), bos=bos, eos=False, cache=f"{tmp_path}/cache")
        split = build(replace(data, validation_fraction=0.3)).splits["validation"]
        held_out = ValidationDataset(split, seq_len=32)
        # With a uniform model every token costs 8 bits, and every token is a byte.
        assert held_out.n_tokens * 8 / held_out.n_bytes == 8
        assert split.n_bytes - held_out.n_bytes == (0 if bos else split.n_documents)


def test_impossible_data_is_refused_with_numbers_and_a_fix() -> None:
    with pytest.raises(UserError, match=r"109 tokens in 9 documents.*seq_len = 4096"):
        PackedDataset(split_of(LENGTHS), seq_len=4096)
    with pytest.raises(UserError, match="nothing to score"):
        ValidationDataset(split_of([1, 0, 1]), seq_len=8)
    for stride in (0, 9):
        with pytest.raises(UserError, match=rf"every {stride} tokens"):
            ValidationDataset(split_of(LENGTHS), seq_len=8, stride=stride)
