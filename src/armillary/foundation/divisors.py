"""The divisors of a number, whatever number a recipe may hold."""

from __future__ import annotations

import math
from collections.abc import Iterable

_MOST_TRIED = 1 << 20
"""Numbers tried: a tenth of a second. A recipe with a number of thirty digits is to be refused with
words, not to be thought about for ever."""


def divisors(number: int) -> list[int]:
    """All divisors of a number from 1 to 2**40, ascending; of a larger one, those below 2**20 and
    their counterparts."""
    most = min(math.isqrt(number), _MOST_TRIED)
    small = [divisor for divisor in range(1, most + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def listed(numbers: Iterable[int]) -> str:
    """Numbers as they are shown to people."""
    return ", ".join(map(str, numbers))
