"""Bin packing of many pieces into rows of one length: best-fit decreasing, by groups of equals.

Pieces are whole numbers of tokens, so rows are kept in one bucket for each remaining room, and all
pieces of one length are placed together: the fullest rows with room for them take as many as fit
before the next bucket is looked at, which is what best fit does piece by piece. The work is
O(n log n) for the sort plus O(distinct lengths x buckets visited), in numpy.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def place_best_fit(lengths: Integers, capacity: int) -> tuple[Integers, int]:
    """(row of each piece, number of rows). Deterministic: ties go by the pieces' order.

    Every length must be in [1, capacity].
    """
    assert lengths.size == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    decreasing = np.argsort(-lengths, kind="stable")
    row_of_piece = np.empty(len(lengths), dtype=np.int64)
    rooms = _Rooms(capacity)
    values, counts = np.unique(lengths, return_counts=True)
    done = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = done + count
        while done < end:
            rows, each = rooms.take(length, end - done)
            placed = min(len(rows) * each, end - done)
            row_of_piece[decreasing[done : done + placed]] = np.repeat(rows, each)[:placed]
            rooms.put_back(rows, each, placed, length)
            done += placed
    return row_of_piece, rooms.n_rows


class _Rooms:
    """Rows by the room that is left in them."""

    def __init__(self, capacity: int) -> None:
        self.n_rows = 0
        self._capacity = capacity
        self._buckets: dict[int, list[Integers]] = {}
        self._filled = np.zeros(capacity + 1, dtype=np.bool_)  # [room] whether there is such a row
        self._room = 0

    def take(self, length: int, count: int) -> tuple[Integers, int]:
        """Rows of the least sufficient room for `count` pieces, and how many fit in each."""
        room = length + int(np.argmax(self._filled[length:]))
        if self._filled[room]:
            each = room // length
            bucket = self._buckets.pop(room)
            rows = bucket[0] if len(bucket) == 1 else np.concatenate(bucket)
            needed = -(-count // each)
            self._filled[room] = False
            if len(rows) > needed:
                self._add(room, rows[needed:])
                rows = rows[:needed]
        else:
            room = self._capacity
            each = room // length
            rows = np.arange(self.n_rows, self.n_rows + -(-count // each))
            self.n_rows += len(rows)
        self._room = room
        return rows, each

    def put_back(self, rows: Integers, each: int, placed: int, length: int) -> None:
        """Returns rows just taken, now with `placed` more pieces among them, in order."""
        full, partial = divmod(placed, each)
        self._add(self._room - each * length, rows[:full])
        if partial:
            self._add(self._room - partial * length, rows[full : full + 1])

    def _add(self, room: int, rows: Integers) -> None:
        if rows.size and room > 0:
            self._buckets.setdefault(room, []).append(rows)
            self._filled[room] = True
