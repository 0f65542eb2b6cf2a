"""The order of samples: a bijection for every n, well mixed, with nothing materialised."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data.order import LARGEST, index

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")


@pytest.mark.parametrize("n", [*range(1, 70), 255, 256, 257, 1000, 4099])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (2**63, 12_345)):
        assert sorted(index(seed, epoch, np.arange(n), n).tolist()) == list(range(n))


@given(
    n=st.one_of(st.integers(1, 100), st.integers(1, LARGEST)),
    seed=st.integers(-(2**63), 2**64),
    epoch=st.integers(0, 2**40),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_distinct_positions_have_distinct_images_for_any_n(n, seed, epoch, data) -> None:
    positions = np.array(
        data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    )
    images = index(seed, epoch, positions, n)
    assert len(set(images.tolist())) == len(positions)
    assert images.min() >= 0
    assert images.max() < n
    assert [index(seed, epoch, int(position), n) for position in positions] == images.tolist()


def test_epochs_may_differ_within_one_lookup() -> None:
    positions, epochs = np.array([5, 5, 6, 0]), np.array([0, 1, 1, 9])
    together = index(3, epochs, positions, 1000)
    assert together.tolist() == [
        index(3, int(e), int(p), 1000) for e, p in zip(epochs, positions, strict=True)
    ]


def test_small_permutations_are_equally_likely() -> None:
    # 6 permutations of 3 and 24 of 4; chi-square quantiles at 1 - 1e-6 (df 5 and 23).
    for n, limit in ((3, 35.9), (4, 67.7)):
        seen: dict[tuple[int, ...], int] = {}
        for seed in range(40):
            epochs = np.repeat(np.arange(60), n)
            images = index(seed, epochs, np.tile(np.arange(n), 60), n).reshape(60, n)
            for permutation in images.tolist():
                seen[tuple(permutation)] = seen.get(tuple(permutation), 0) + 1
        expected = 2400 / math.factorial(n)
        assert len(seen) == math.factorial(n)
        assert sum((count - expected) ** 2 / expected for count in seen.values()) < limit


def test_images_are_spread_evenly_and_neighbours_are_strangers() -> None:
    n = 10_007
    for seed in range(5):
        images = index(seed, 0, np.arange(n), n)
        table, _, _ = np.histogram2d(np.arange(n), images, bins=10)
        chi_square = ((table - n / 100) ** 2 / (n / 100)).sum()
        assert chi_square < 162  # 81 degrees of freedom, quantile at 1 - 3e-7
        # Adjacent images: the number of |difference| = 1 is about Poisson(2).
        assert (np.abs(np.diff(images)) == 1).sum() < 15
        # Serial correlation of n uniform numbers has standard deviation 1 / sqrt(n).
        assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 5 / math.sqrt(n)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    n = 10_000
    base = index(0, 0, np.arange(n), n)
    for seed, epoch in ((0, 1), (1, 0), (1, 1), (0, 2**32)):
        assert (index(seed, epoch, np.arange(n), n) == base).sum() < 12  # about Poisson(1)


def test_a_lookup_in_a_huge_epoch_takes_no_memory_to_speak_of() -> None:
    index(0, 0, 1, LARGEST)
    tracemalloc.start()
    index(0, 0, 12_345_678_901, LARGEST)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000


def test_the_order_never_changes_between_versions() -> None:
    # A resumed run counts on it: a change here is a change of every run's data.
    assert index(0, 0, np.arange(8), 1000).tolist() == [110, 539, 471, 661, 943, 774, 53, 843]
    assert index(1, 2, 3, 10**15) == 538_070_674_013_817
