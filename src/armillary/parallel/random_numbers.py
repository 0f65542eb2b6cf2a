"""Normal numbers addressed by (seed, name, index): the same on every mesh, machine and order.

A stream of numbers belongs to one name. It is cut into chunks of fixed size, and a number is always
computed as part of its whole chunk, by numpy on one thread, so that not even the last bit depends
on where a shard begins. Every operation is one that IEEE 754 rounds in one way (sums, products,
square roots, integers), so that it does not depend on the machine either; numpy's logarithm, which
has a version for each instruction set, is not among them.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 15
"""Numbers in a chunk: small enough that all steps stay in a core's cache."""

_NUMBERS_PER_COUNT = 8  # one count of Philox gives four words of 64 bits, so eight of 32

# Coefficients of two polynomials for erfinv(x) / x, highest power first, relative error below 4e-7.
# (Giles 2010, "Approximating the erfinv function", GPU Computing Gems 2, table 5)
_CENTRE = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip

# Polynomial P with log(1 + f) = f - f²/2 + f³ P(f), for sqrt(1/2) <= 1 + f < sqrt(2).
# (Cephes mathematical library 2.2, logf; Moshier 1992)
_LOGARITHM = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_ROOT_OF_HALF = np.float32(math.sqrt(0.5)).view(np.int32)
_MANTISSA_BITS = 23

Floats = NDArray[np.float32]


class NormalStream:
    """The endless sequence of normal numbers that belongs to a seed and a name.

    (Philox: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
    """

    def __init__(self, seed: int, name: str, *, std: float, cut: float = math.inf) -> None:
        """Of standard deviation `std`; numbers beyond `cut` deviations do not occur."""
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        self._key = int.from_bytes(digest[:16], "little")
        self._scale = np.float32(std * math.sqrt(2.0))
        self._limit = np.float32(math.erf(cut / math.sqrt(2.0)))
        self._chunk_index = -1
        self._chunk: Floats = np.empty(0, np.float32)

    def read(self, start: int, out: Floats) -> None:
        """Fills a flat array with the numbers from index `start` on."""
        done = 0
        while done < out.size:
            index, offset = divmod(start + done, CHUNK)
            count = min(CHUNK - offset, out.size - done)
            out[done : done + count] = self._chunk_at(index)[offset : offset + count]
            done += count

    def _chunk_at(self, index: int) -> Floats:
        if index != self._chunk_index:
            counter = index * (CHUNK // _NUMBERS_PER_COUNT)
            words = np.random.Philox(key=self._key, counter=counter).random_raw(CHUNK // 2)
            self._chunk = self._normal(words.astype("<u8", copy=False).view("<u4"))
            self._chunk_index = index
        return self._chunk

    def _normal(self, bits: NDArray[Any]) -> Floats:
        """sqrt(2) * std * erfinv(limit * v) with v uniform in (-1, 1), from 24 of 32 bits."""
        v = (bits >> 8).astype(np.float32)
        v *= np.float32(2.0**-23)
        v += np.float32(2.0**-24 - 1.0)  # odd multiples of 2^-24: exact, symmetric, never -1 or 1
        v *= self._limit
        result = _erfinv(v)
        result *= self._scale
        return result


def _erfinv(x: Floats) -> Floats:
    """x with erf(x) = given, for |given| < 1."""
    w = np.float32(1.0) - x
    w *= np.float32(1.0) + x
    w = _minus_logarithm(w)
    in_tail = np.flatnonzero(w >= np.float32(5.0))
    tail = _polynomial(np.sqrt(w[in_tail]) - np.float32(3.0), _TAIL)
    w -= np.float32(2.5)
    result = _polynomial(w, _CENTRE)
    result[in_tail] = tail
    result *= x
    return result


def _minus_logarithm(x: Floats) -> Floats:
    """-log x, for positive normal numbers."""
    bits = x.view(np.int32)
    exponent = (bits - _ROOT_OF_HALF) >> _MANTISSA_BITS
    f = (bits - (exponent << _MANTISSA_BITS)).view(np.float32)  # x = 2^exponent (1 + f)
    f -= np.float32(1.0)
    square = f * f
    result = _polynomial(f, _LOGARITHM)
    result *= f
    result -= np.float32(0.5)
    result *= square
    result += f
    result += exponent.astype(np.float32) * np.float32(math.log(2.0))
    return np.negative(result, out=result)


def _polynomial(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    """Horner's scheme, highest power first."""
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result *= x
        result += np.float32(coefficient)
    return result
