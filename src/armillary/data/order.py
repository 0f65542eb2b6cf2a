"""The order of samples as arithmetic: a pseudo-random permutation that is never materialised.

`index(seed, epoch, position, n)` is the image of `position` under a permutation of range(n) that
is keyed by (seed, epoch). One lookup costs the same time and memory for every n.

The permutation is a generalised Feistel network with cycle walking (Black & Rogaway 2002,
"Ciphers with arbitrary finite domains", methods 2 and 3; Morris, Rogaway & Stegers 2009 for the
alternating, modular form). A number x < a * b is written as x = left * b + right with left < a
and right < b; rounds add a keyed hash of one half to the other, modulo its size, which can be
undone whatever the hash is. With a = ceil(sqrt n) and b = ceil(n / a) at most a - 1 of the a * b
numbers are outside range(n); walking on from these until the walk re-enters range(n) keeps the
map a bijection, and takes 1 + O(1 / sqrt n) steps on average.

The hash is the finaliser of SplitMix64 (Steele, Lea & Flood 2014, "Fast splittable pseudorandom
number generators", with Stafford's constants "Mix13"). This mixes well; it is no cipher.
"""

from __future__ import annotations

import math
from typing import overload

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
_Words = NDArray[np.uint64]

LARGEST = 2**62
"""The largest n."""

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = 2**64 - 1


@overload
def index(seed: int, epoch: int, position: int, n: int) -> int: ...
@overload
def index(seed: int, epoch: int | Integers, position: Integers, n: int) -> Integers: ...
def index(seed: int, epoch: int | Integers, position: int | Integers, n: int) -> int | Integers:
    """The sample at a position of an epoch: a permutation of range(n) for each (seed, epoch).

    `position` may be an array, and `epoch` then an array of the same shape. Every position must be
    in range(n).
    """
    assert 1 <= n <= LARGEST, f"{n} is not between 1 and 2**62"
    positions, epochs = np.asarray(position, np.int64), np.asarray(epoch, np.int64)
    assert positions.size == 0 or (positions.min() >= 0 and positions.max() < n)
    assert epochs.shape in ((), positions.shape)
    values = positions.reshape(-1).astype(np.uint64)
    keys = _round_keys(seed, epochs.reshape(-1).astype(np.uint64))
    keys = np.broadcast_to(keys, (_ROUNDS, values.size))
    high = math.isqrt(n - 1) + 1  # a = ceil(sqrt n)
    low = -(-n // high)  # b = ceil(n / a)
    values = _feistel(values, keys, high, low)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], keys[:, outside], high, low)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(positions.shape) if positions.ndim else int(values[0])


def _feistel(values: _Words, keys: _Words, high: int, low: int) -> _Words:
    """One pass over the network: a permutation of range(high * low)."""
    rows, columns = np.uint64(high), np.uint64(low)
    left, right = np.divmod(values, columns)
    for round_number in range(_ROUNDS):
        key = keys[round_number]
        if round_number % 2 == 0:
            left = (left + _mix(right + key) % rows) % rows
        else:
            right = (right + _mix(left + key) % columns) % columns
    return left * columns + right


def _round_keys(seed: int, epochs: _Words) -> _Words:
    """One 64-bit key for each round and epoch, [rounds, epochs]."""
    seed_word = np.full(1, seed & _MASK, dtype=np.uint64)
    stream = _mix(_mix(seed_word + _GOLDEN) + epochs * _GOLDEN)
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
    return _mix(stream + rounds * _GOLDEN)


def _mix(words: _Words) -> _Words:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every input bit matters."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
