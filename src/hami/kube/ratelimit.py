"""Client-side limits and back-off: pure arithmetic, time and randomness are arguments."""

from __future__ import annotations

import random


class TokenBucket:
    """``rate`` requests per second on average, ``burst`` at once.

    ``reserve(now)`` takes a token, in advance if none is left, and returns the seconds to wait before using
    it. Waiters are served in the order of their calls. ``rate`` 0 means no limit.
    """

    __slots__ = ("_burst", "_rate", "_tokens", "_updated")

    def __init__(self, rate: float, burst: int) -> None:
        if rate < 0 or burst < 1:
            raise ValueError("rate must be >= 0 and burst >= 1")
        self._rate = rate
        self._burst = float(burst)
        self._tokens = float(burst)
        self._updated: float | None = None

    def reserve(self, now: float) -> float:
        """Take one token at monotonic time ``now`` (seconds); the result is the wait in seconds, >= 0."""
        if self._rate == 0:
            return 0.0
        self._refill(now)
        self._tokens -= 1.0
        return max(0.0, -self._tokens / self._rate)

    def available(self, now: float) -> float:
        """Tokens left at ``now``; negative while earlier callers still wait."""
        if self._rate == 0:
            return self._burst
        self._refill(now)
        return self._tokens

    def wait(self, now: float) -> float:
        """What ``reserve`` would return, without taking the token."""
        return 0.0 if self._rate == 0 else max(0.0, (1.0 - self.available(now)) / self._rate)

    def _refill(self, now: float) -> None:
        if self._updated is not None and now > self._updated:
            self._tokens = min(self._burst, self._tokens + (now - self._updated) * self._rate)
        if self._updated is None or now > self._updated:
            self._updated = now


class Backoff:
    """Exponential delays with full jitter in the upper half: ``next()`` is in [d/2, d], d doubling up to
    ``cap_s``."""

    __slots__ = ("_base_s", "_cap_s", "_current_s", "_rng")

    def __init__(self, base_s: float, cap_s: float, rng: random.Random) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._current_s = base_s
        self._rng = rng

    def next(self) -> float:
        """The next delay in seconds."""
        delay = self._current_s
        self._current_s = min(self._cap_s, self._current_s * 2)
        return delay * (0.5 + 0.5 * self._rng.random())

    def reset(self) -> None:
        """After a success: the next delay is a first one again."""
        self._current_s = self._base_s
