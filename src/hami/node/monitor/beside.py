"""Work of which nobody knows how long it takes: a driver that hangs, an API server that does not answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)


class Beside(Generic[T]):
    """Who wants it waits ``patience_s`` seconds at most. It then goes on alone, and before it has ended no
    second one begins.
    """

    def __init__(self, name: str, patience_s: float) -> None:
        self._name = name
        self._patience_s = patience_s
        self._task: asyncio.Task[T] | None = None
        self._is_late = False

    async def get(self, work: Callable[[], Coroutine[Any, Any, T]], otherwise: T) -> T:
        """What ``work`` gives, with its errors; ``otherwise`` while that takes too long."""
        if self._is_late and self._task is not None and self._task.done():
            self._end_late(self._task)
        if self._task is None:
            self._task = asyncio.create_task(work())
        done, _ = await asyncio.wait({self._task}, timeout=self._patience_s)
        if done:
            task, self._task, self._is_late = self._task, None, False
            return task.result()
        if not self._is_late:
            self._is_late = True
            log.warning("beside.late", extra={"work": self._name, "patience_s": self._patience_s})
        return otherwise

    def cancel(self) -> None:
        """Let nobody wait for it any more."""
        if self._task is not None:
            self._task.cancel()

    def _end_late(self, task: asyncio.Task[T]) -> None:
        """What came too late is of another time."""
        self._task, self._is_late = None, False
        error = None if task.cancelled() else task.exception()
        log.info("beside.ended", extra={"work": self._name, "cause": str(error or "")})
