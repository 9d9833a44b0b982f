"""Whose request goes next, under a client-side rate and a number of requests at once.

A caller that stops waiting costs the others nothing: a turn is given when it is due, never in advance. So an
overload, or an API server that has become slow, delays and refuses, but what is done stays what can be done.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from hami.kube.ratelimit import TokenBucket

_URGENT_IN_A_ROW: Final = 3
_LEAST_S: Final = 0.001


class Turns:
    """``rate`` turns per second (0: any number) after a ``burst``, of which ``at_once`` last at any time.

    Urgent callers go first, but every fourth turn is another's; among equals in the order of their calls.
    """

    def __init__(
        self, rate: float, burst: int, at_once: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = TokenBucket(rate, burst)
        self._left = at_once
        self._clock = clock
        self._urgent: deque[asyncio.Future[None]] = deque()
        self._others: deque[asyncio.Future[None]] = deque()
        self._in_a_row = 0
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, most_s: float, *, urgent: bool = False) -> None:
        """Wait for a turn, which lasts until ``give_back``; raises ``TimeoutError`` after ``most_s`` seconds
        without one."""
        given = asyncio.get_running_loop().create_future()
        (self._urgent if urgent else self._others).append(given)
        self._give()
        if given.done():
            return
        try:
            async with asyncio.timeout(most_s):
                await given
        except BaseException:
            if not given.cancelled():  # the turn came in the moment of the cancellation
                self.give_back()
            raise

    def give_back(self) -> None:
        """The caller's turn is over."""
        self._left += 1
        self._give()

    def _give(self) -> None:
        """Give the turns that are due."""
        if self._timer is not None:
            return
        while self._left and (queue := self._next()) is not None:
            now = self._clock()
            wait = self._bucket.wait(now)
            if wait > 0:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(wait, _LEAST_S), self._on_time)
                return
            self._bucket.reserve(now)
            self._left -= 1
            self._in_a_row = self._in_a_row + 1 if queue is self._urgent else 0
            queue.popleft().set_result(None)

    def _on_time(self) -> None:
        self._timer = None
        self._give()

    def _next(self) -> deque[asyncio.Future[None]] | None:
        """The queue whose first caller is next; who does not wait any more is left out."""
        for queue in (self._urgent, self._others):
            while queue and queue[0].done():
                queue.popleft()
        if self._urgent and not (self._others and self._in_a_row >= _URGENT_IN_A_ROW):
            return self._urgent
        return self._others or None
