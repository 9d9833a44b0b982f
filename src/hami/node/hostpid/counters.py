"""What the broker counts, in memory that the broker's process writes and the device plugin's process reads.

64-bit words, each written by one aligned store; the reader sees every word whole, and never waits.
"""

from __future__ import annotations

import enum
import mmap
import os
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Upper bounds of the latency histogram in seconds; one more bucket is without bound."""


class Result(enum.IntEnum):
    """How a connection ended; the value is its word in the table."""

    OK = 0
    INVALID = 1
    DROPPED = 2
    SATURATED = 3


_ACTIVE: Final = 4
_ACCEPT_FAILURES: Final = 5
_SUM_NS: Final = 6
_FIRST_BUCKET: Final = 8
_WORDS: Final = _FIRST_BUCKET + len(BUCKETS_S) + 1
_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Totals:
    """One reading: connections by result, transactions under way, failed ``accept`` calls, and for the
    transactions that ended the count by bucket (not cumulated) and their seconds.
    """

    results: dict[Result, int]
    active: int
    accept_failures: int
    buckets: tuple[int, ...]
    seconds: float


class Counters:
    """The table; ``descriptor`` is a shared memory file, None for a process of its own."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, _BYTES)
        self._words = memoryview(self._memory)[: 8 * _WORDS].cast("Q")

    def started(self) -> None:
        """A transaction begins."""
        self._words[_ACTIVE] += 1

    def ended(self, result: Result, seconds: float) -> None:
        """A transaction that was :meth:`started` is over."""
        words = self._words
        words[_ACTIVE] -= 1
        words[result] += 1
        words[_SUM_NS] += int(seconds * 1e9)
        words[_FIRST_BUCKET + bisect_left(BUCKETS_S, seconds)] += 1

    def turned_away(self) -> None:
        """A connection over the limit was closed."""
        self._words[Result.SATURATED] += 1

    def accept_failed(self) -> None:
        """``accept`` found no descriptor or memory."""
        self._words[_ACCEPT_FAILURES] += 1

    def totals(self) -> Totals:
        """What stands in the table now."""
        words = self._words
        return Totals(
            {result: words[result] for result in Result},
            words[_ACTIVE],
            words[_ACCEPT_FAILURES],
            tuple(words[_FIRST_BUCKET:_WORDS]),
            words[_SUM_NS] / 1e9,
        )


def shared_memory() -> int:
    """A descriptor for :class:`Counters` of two processes; closed on exec unless it is passed on."""
    descriptor = os.memfd_create("hami-hostpid-counters", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, _BYTES)
    return descriptor
