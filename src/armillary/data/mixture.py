"""Mixtures by weight: which corpus, and which of its samples, stands at a global position.

A schedule of one window of W samples is repeated for ever. W is the common denominator of the
weights where that is at most 10,000, so weights of up to four decimals are exact over each window;
otherwise the window has 10,000 samples and the largest remainders round up. Within the window the
corpora are interleaved by the chairman assignment of Tijdeman (1980, "The chairman assignment
problem", Discrete Mathematics 32): in any prefix, of any length, the number of samples of a corpus
differs from its share by less than 1.

Local positions of a corpus count up without gaps, so each corpus runs through its own epochs,
independently of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from armillary.foundation.errors import Problem, UserError

Integers = NDArray[np.int64]

LARGEST_WINDOW = 10_000
"""Samples in the longest window; also one over the smallest possible share."""


class Interleaving:
    """Position -> (corpus, local position), a pure function in O(1).

    Args:
        weights: one positive number for each corpus; only their ratios matter.

    Raises:
        UserError: a weight is not positive and finite, or below 1 / 10,000 of their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = window_counts(weights)
        """Samples of each corpus in one window."""
        self.window = sum(self.counts)
        """Samples in one window."""
        self._corpus = _interleave(self.counts)  # [W]
        self._rank = np.zeros(self.window, dtype=np.int64)  # [W] of the corpus' samples before
        for corpus, count in enumerate(self.counts):
            self._rank[self._corpus == corpus] = np.arange(count)
        self._counts = np.array(self.counts, dtype=np.int64)

    def locate(self, positions: Integers) -> tuple[Integers, Integers]:
        """(corpus, local position in that corpus) of each global position."""
        windows, within = np.divmod(positions, self.window)
        corpora = self._corpus[within]
        return corpora, windows * self._counts[corpora] + self._rank[within]

    def count_before(self, position: int, corpus: int) -> int:
        """How many samples of a corpus stand at the positions before `position`."""
        windows, within = divmod(position, self.window)
        return windows * self.counts[corpus] + int((self._corpus[:within] == corpus).sum())


def window_counts(weights: Sequence[float]) -> tuple[int, ...]:
    """How many samples of each corpus one window holds."""
    problems = [
        Problem(f"data.corpus.parts.{part}.weight = {weight}", "a finite number above 0")
        for part, weight in enumerate(weights)
        if not (math.isfinite(weight) and weight > 0)
    ]
    if not weights:
        problems.append(Problem("data.corpus.parts is empty", "one part or more"))
    if problems:
        raise UserError(problems)
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    window = math.lcm(*(share.denominator for share in shares))
    counts = _largest_remainder(shares, min(window, LARGEST_WINDOW))
    lost = [
        Problem(
            f"data.corpus.parts.{part}.weight = {weights[part]} is {float(shares[part]):.2g} of "
            f"the sum, so the part would never be sampled",
            f"at least {1 / LARGEST_WINDOW} of the sum of the weights",
            "raise this weight, or remove the part",
        )
        for part, count in enumerate(counts)
        if count == 0
    ]
    if lost:
        raise UserError(lost)
    return counts


def _largest_remainder(shares: Sequence[Fraction], window: int) -> tuple[int, ...]:
    """Whole numbers that sum to `window`, each within 1 of its share of it (Hamilton's method)."""
    quotas = [share * window for share in shares]
    counts = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (counts[i] - quotas[i], i))
    for part in by_remainder[: window - sum(counts)]:
        counts[part] += 1
    return tuple(counts)


def _interleave(counts: Sequence[int]) -> Integers:
    """One window's corpora in order, by Tijdeman's rule with exact (integer) arithmetic.

    With k corpora of shares s, after t - 1 picks in which corpus i was picked x_i times, those
    with s_i t - x_i >= 1 / (2k - 2) are eligible; the one picked is that whose surplus reaches
    1 - 1 / (2k - 2) first, i.e. with the least (1 - 1/(2k-2) - (s_i t - x_i)) / s_i.
    """
    k, window = len(counts), sum(counts)
    if k == 1:
        return np.zeros(window, dtype=np.int64)
    scale = 2 * k - 2  # everything below is multiplied by scale * window
    shares = np.array(counts, dtype=np.int64)
    surplus = np.zeros(k, dtype=np.int64)
    order = np.empty(window, dtype=np.int64)
    for step in range(window):
        surplus += shares * scale
        lateness = np.where(
            surplus >= window, ((scale - 1) * window - surplus) / shares, np.float64(np.inf)
        )
        chosen = int(np.argmin(lateness))
        order[step] = chosen
        surplus[chosen] -= scale * window
    return order
