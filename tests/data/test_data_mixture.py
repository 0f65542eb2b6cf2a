"""Mixtures: every prefix has each corpus' share, and local positions have no gaps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.mixture import LARGEST_WINDOW, Interleaving, window_counts
from armillary.foundation.errors import UserError


@given(weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=7))
@settings(max_examples=25, deadline=None)
def test_every_prefix_has_less_than_one_sample_too_many_or_too_few(weights) -> None:
    mixture = Interleaving(weights)
    corpora, _ = mixture.locate(np.arange(2 * mixture.window + 17))
    lengths = np.arange(1, len(corpora) + 1)
    for corpus, count in enumerate(mixture.counts):
        error = np.cumsum(corpora == corpus) - lengths * count / mixture.window
        assert np.abs(error).max() < 1
        assert abs(count / mixture.window - weights[corpus] / sum(weights)) < 1 / LARGEST_WINDOW


def test_shares_are_exact_over_a_window() -> None:
    assert window_counts([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert window_counts([3, 1]) == (3, 1)
    assert window_counts([0.3333, 0.6667]) == (3333, 6667)
    assert sum(window_counts([1 / 3, 1 / 3, 1 / 3 + 1e-9])) == LARGEST_WINDOW
    mixture = Interleaving([0.7, 0.2, 0.1])
    corpora, _ = mixture.locate(np.arange(70, 80))
    assert np.bincount(corpora).tolist() == [7, 2, 1]


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.61, 0.38, 0.01], [5, 3, 2, 7]])
def test_local_positions_of_each_corpus_count_up_without_gaps(weights: list[float]) -> None:
    mixture = Interleaving(weights)
    positions = np.arange(3 * mixture.window + 5)
    corpora, local = mixture.locate(positions)
    for corpus in range(len(weights)):
        here = local[corpora == corpus]
        assert here.tolist() == list(range(len(here)))
        for position in (0, 1, mixture.window, len(positions)):
            before = int((corpora[:position] == corpus).sum())
            assert mixture.count_before(position, corpus) == before


def test_lookup_is_the_same_far_out_and_one_by_one() -> None:
    mixture = Interleaving([0.61, 0.38, 0.01])
    positions = np.array([0, 99, 100, 10**15 + 7])
    together = mixture.locate(positions)
    for i in range(len(positions)):
        alone = mixture.locate(positions[i : i + 1])
        assert (alone[0][0], alone[1][0]) == (together[0][i], together[1][i])
    assert mixture.locate(np.array([10**15 + 7]))[0] == mixture.locate(np.array([7]))[0]


def test_impossible_weights_are_refused_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        Interleaving([1.0, 0.0, -1.0, float("nan")])
    assert len(caught.value.problems) == 3
    assert caught.value.problems[0].message == "data.corpus.parts.1.weight = 0.0"
    with pytest.raises(UserError, match=r"parts\.1\.weight = 1e-06 .* never be sampled"):
        Interleaving([1.0, 1e-6])
    with pytest.raises(UserError, match="parts is empty"):
        Interleaving([])
