"""How much time a request has left: kube-scheduler hangs up after 30 s and forgets what it asked for."""

from __future__ import annotations

import time
from collections.abc import Callable

ANSWER_WITHIN_S = 28.0
"""What a request may take in all: less than the ``httpTimeout`` of kube-scheduler (30 s in the chart)."""


class Deadline:
    """The end of the time for one request; every step of it gets what is left. Monotonic seconds."""

    __slots__ = ("_at", "_clock", "total_s")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s = seconds
        self._clock = clock
        self._at = clock() + seconds

    def left(self, kept_s: float = 0.0) -> float:
        """Seconds left, 0 or more; ``kept_s`` of them are kept for later steps."""
        return max(0.0, self._at - self._clock() - kept_s)

    @property
    def has_passed(self) -> bool:
        return self.left() == 0.0
