"""Nodes in the order of preference by their base scores, kept in order by every change.

A decision looks at the best nodes that its mask lets through. Sorting all nodes for it would take longer than
everything else, and between two decisions only a few nodes change.
"""

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hami.vendors.types import BoolArray, IntArray

FloatArray = NDArray[np.float64]

_MOVED_SINGLY: Final = 16  # more changed nodes: all are sorted again
_AT_ONCE: Final = 128  # nodes looked at together from the best one down
_LOW_31: Final = 0x7FFFFFFF
_SINGLE: Final = struct.Struct("=f")
_INT: Final = struct.Struct("=i")


class Ranking:
    """Rows of a node table, best first: by score, then by tie rank.

    Scores are single-precision numbers, as `Sums.base_score` makes them.
    """

    def __init__(self, *, lowest: bool) -> None:
        """`lowest`: low scores are better (node policy spread)."""
        self._lowest = lowest
        self._keys: IntArray = np.zeros(0, np.int64)  # ascending; the lowest key is the best row
        self._rows: IntArray = np.zeros(0, np.int64)  # aligned with `_keys`
        self._key_of: IntArray = np.zeros(0, np.int64)  # by row, as sorted
        self._ties: IntArray | None = None
        self._moved: set[int] = set()

    def note(self, row: int) -> None:
        """The score of a row may have changed."""
        if self._ties is not None:
            self._moved.add(row)

    def refresh(self, scores: FloatArray, ties: IntArray, registered: IntArray) -> None:
        """Bring the order up to date. `scores` and `ties` by row; `ties`: distinct, highest best, another
        array whenever one of them changes; `registered`: the rows to rank, others only with other `ties`."""
        if self._ties is not ties or len(self._moved) > _MOVED_SINGLY:
            self._ties = ties
            self._key_of = self._key(scores[: len(ties)], ties)
            keys = self._key_of[registered]
            order = np.argsort(keys)
            self._keys, self._rows = keys[order], registered[order]
        else:
            for row in self._moved:
                self._move(row, self._key_of_one(float(scores[row]), int(ties[row])))
        self._moved.clear()

    def among(self, rows: BoolArray, most: int) -> list[int]:
        """The best of these rows (a flag per row), best first: `most`, or all there are."""
        found: list[int] = []
        for part in (self._rows[:_AT_ONCE], self._rows[_AT_ONCE:]):
            found += part[rows[part]][: most - len(found)].tolist()
            if len(found) >= most:
                break
        return found

    def _move(self, row: int, key: int) -> None:
        before = int(self._key_of[row])
        if before == key:
            return
        self._key_of[row] = key
        old = int(np.searchsorted(self._keys, before))
        new = int(np.searchsorted(self._keys, key))
        if new > old:
            new -= 1
            between, shifted = slice(old, new), slice(old + 1, new + 1)
        else:
            between, shifted = slice(new + 1, old + 1), slice(new, old)
        for column, value in ((self._keys, key), (self._rows, row)):
            column[between] = column[shifted]
            column[new] = value

    def _key(self, scores: FloatArray, ties: IntArray) -> IntArray:
        """Integers that sort like preference, the best one lowest: bits of floats sort like the floats."""
        bits = (scores.astype(np.float32) + np.float32(0)).view(np.int32).astype(np.int64)
        bits = np.where(bits < 0, bits ^ _LOW_31, bits)
        if not self._lowest:
            bits = ~bits
        keys: IntArray = (bits << 32) | (_LOW_31 - ties)
        return keys

    def _key_of_one(self, score: float, tie: int) -> int:
        (bits,) = _INT.unpack(_SINGLE.pack(score + 0.0))
        if bits < 0:
            bits ^= _LOW_31
        if not self._lowest:
            bits = ~bits
        key: int = (bits << 32) | (_LOW_31 - tie)
        return key
