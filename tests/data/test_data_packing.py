"""Packing: every token counted once, never across documents, from offsets alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.packing import BestFit, Concatenate, Packing, PieceRows, WholeDocuments
from armillary.data.placement import place_best_fit
from armillary.foundation.component import choices_of
from armillary.foundation.errors import UserError

DOCUMENTS = st.lists(st.integers(0, 40), min_size=1, max_size=30)
SEQ_LEN = st.integers(1, 24)


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def positions_of(sample) -> np.ndarray:
    if isinstance(sample.inputs, slice):
        return np.arange(sample.inputs.start, sample.inputs.stop)
    return sample.inputs


def scored_labels(packing: Packing) -> list[int]:
    """Stream positions of all labels that count, over an epoch."""
    return [
        int(position) + 1
        for i in range(packing.n_samples)
        for position in positions_of(packing.sample(i))[packing.sample(i).scored]
    ]


def check_rows(packing: Packing, offsets: np.ndarray, seq_len: int) -> None:
    """Rows fit; each document of a row is a run of one document of the stream."""
    document_of = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    for i in range(packing.n_samples):
        sample = packing.sample(i)
        positions = positions_of(sample)
        assert len(positions) == len(sample.scored) == sum(sample.lengths) <= seq_len
        assert min(sample.lengths) >= 1
        for piece in np.split(positions, np.cumsum(sample.lengths)[:-1]):
            assert (np.diff(piece) == 1).all()
            assert len(set(document_of[piece])) == 1


@given(lengths=DOCUMENTS, seq_len=SEQ_LEN)
@settings(max_examples=60, deadline=None)
def test_concatenate_scores_every_next_token_of_the_cuts_once(lengths, seq_len) -> None:
    offsets = offsets_of(lengths)
    total = int(offsets[-1])
    if total < seq_len:
        with pytest.raises(UserError):
            Concatenate().build(offsets, seq_len)
        return
    packing = Concatenate().build(offsets, seq_len)
    check_rows(packing, offsets, seq_len)
    used = total // seq_len * seq_len
    expected = [t for t in range(1, min(used + 1, total)) if t not in set(offsets.tolist())]
    assert scored_labels(packing) == expected
    assert total - used < seq_len
    # The row's documents are as few as the boundaries allow: none is cut without a reason.
    joined = [n for i in range(packing.n_samples) for n in packing.sample(i).lengths]
    begins = {o for o in offsets[:-1].tolist() if o < used} | set(range(0, used, seq_len))
    assert len(joined) == len(begins & set(range(used)))


@given(lengths=DOCUMENTS, seq_len=SEQ_LEN, data=st.data())
@settings(max_examples=100, deadline=None)
def test_pieces_score_every_token_but_first_ones_once_for_any_stride(
    lengths, seq_len, data
) -> None:
    offsets = offsets_of(lengths)
    stride = data.draw(st.integers(1, seq_len))
    rows = PieceRows(offsets, seq_len, stride=stride)
    check_rows(rows, offsets, seq_len)
    expected = sorted(set(range(int(offsets[-1]))) - set(offsets.tolist()))
    labels = scored_labels(rows)
    assert sorted(labels) == expected
    assert rows.n_scored == len(expected)
    # What is scored beyond a document's first seq_len inputs has its context.
    begin_of = np.repeat(offsets[:-1], np.diff(offsets)).tolist()
    for i in range(rows.n_samples):
        sample = rows.sample(i)
        positions = positions_of(sample)
        firsts = np.repeat(positions[np.cumsum(sample.lengths) - sample.lengths], sample.lengths)
        for position, first in zip(
            positions[sample.scored].tolist(), firsts[sample.scored].tolist(), strict=True
        ):
            assert first == begin_of[position] or position - first >= seq_len - stride


def test_best_fit_keeps_documents_whole_where_they_fit() -> None:
    offsets = offsets_of([9, 3, 6, 21, 5, 2, 1, 0, 4])  # inputs: 8 2 5 | 8 8 4 | 4 1 - - 3
    packing = BestFit().build(offsets, 8)
    rows = sorted(packing.sample(i).lengths for i in range(packing.n_samples))
    assert rows == [(2, 1), (4, 4), (5, 3), (8,), (8,), (8,)]


@given(lengths=st.lists(st.integers(1, 20), max_size=80), capacity=st.integers(20, 30))
@settings(max_examples=100, deadline=None)
def test_placement_by_groups_is_best_fit_decreasing(lengths, capacity) -> None:
    pieces = np.array(lengths, dtype=np.int64)
    rows, n_rows = place_best_fit(pieces, capacity)
    loads = np.bincount(rows, weights=pieces, minlength=n_rows).astype(int)
    reference: list[int] = []  # room left of each row, one piece at a time
    for length in sorted(lengths, reverse=True):
        fits = [room for room in reference if room >= length]
        if fits:
            reference.remove(min(fits))
        reference.append((min(fits) if fits else capacity) - length)
    assert sorted(capacity - loads) == sorted(reference)


@pytest.mark.parametrize("config", [Concatenate(), BestFit()], ids=["concatenate", "best-fit"])
def test_the_plan_is_deterministic_and_its_fingerprint_sees_every_change(config) -> None:
    offsets = offsets_of([12, 30, 7, 7, 7, 25])
    first, again = config.build(offsets, 8), config.build(offsets.copy(), 8)
    assert first.fingerprint == again.fingerprint
    moved = offsets.copy()
    moved[2] += 1
    others = {config.build(moved, 8).fingerprint, config.build(offsets, 9).fingerprint}
    assert len(others | {first.fingerprint}) == 3


@pytest.mark.parametrize("config", [Concatenate(), BestFit()], ids=["concatenate", "best-fit"])
def test_a_corpus_without_one_sample_is_refused_with_its_numbers(config) -> None:
    for lengths in ([1, 0, 1], [0], []):
        with pytest.raises(UserError, match=rf"{sum(lengths)} tokens .* budget.seq_len = 64"):
            config.build(offsets_of(lengths), 64)


def test_packings_can_be_chosen_by_name() -> None:
    from armillary.data.packing import PackingConfig

    assert choices_of(PackingConfig) == {
        "concatenate": Concatenate,
        "best-fit": BestFit,
        "whole-documents": WholeDocuments,
    }
