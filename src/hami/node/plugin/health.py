"""Watches XID events and marks cards unhealthy (device-plugin.md §10); no recovery."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Sequence
from typing import Final, Protocol

from hami.kube.ratelimit import Backoff
from hami.node.errors import NvmlError
from hami.node.nvml import EventSource, GpuIdentity, XidEvent
from hami.node.plugin.board import Board
from hami.node.plugin.health_rules import XidRules

WAIT_S: Final = 0.5
"""Length of one NVML wait: how long a restart of the plugin may have to wait for the watcher."""
_BACKOFF_S: Final = (1.0, 30.0)

log = logging.getLogger(__name__)


class EventOpener(Protocol):
    """Where event sources come from."""

    def watch(self, gpus: Sequence[GpuIdentity]) -> tuple[EventSource, tuple[str, ...]]:
        """A source for ``gpus`` and the UUIDs that cannot be watched; raises :class:`NvmlError`."""
        ...


class HealthWatcher:
    """A thread that waits for events and tells the event loop; :meth:`stop` ends it within one wait."""

    def __init__(
        self,
        opener: EventOpener,
        gpus: Sequence[GpuIdentity],
        rules: XidRules,
        board: Board,
        *,
        wait_s: float = WAIT_S,
        backoff_s: tuple[float, float] = _BACKOFF_S,
    ) -> None:
        self._opener = opener
        self._gpus = tuple(gpus)
        self._rules = rules
        self._board = board
        self._wait_s = wait_s
        self._backoff = Backoff(*backoff_s, random.Random())  # noqa: S311 - jitter, not a secret
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch; does nothing when the rules switch everything off."""
        if not self._rules.watching:
            log.info("health.off")
            return
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; waits for it."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, self._wait_s + 5)

    def judge(self, event: XidEvent) -> tuple[str, ...]:
        """UUIDs of our cards that ``event`` makes unhealthy."""
        ours = tuple(gpu.uuid for gpu in self._gpus)
        if self._rules.ignores(event.xid):
            return ()
        if not event.uuid:
            return ours
        return (event.uuid,) if event.uuid in ours else ()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                source, unwatched = self._opener.watch(self._gpus)
            except NvmlError as error:
                self._all_unhealthy(str(error))
                continue
            if unwatched:
                self._mark(unwatched, "its events cannot be watched")
            try:
                self._consume(source)
            except NvmlError as error:
                self._all_unhealthy(str(error))
            finally:
                source.close()

    def _consume(self, source: EventSource) -> None:
        while not self._stop.is_set():
            event = source.wait(self._wait_s)
            self._backoff.reset()
            if event is None:
                continue
            hit = self.judge(event)
            log.warning("health.xid", extra={"xid": event.xid, "gpu": event.uuid, "unhealthy": len(hit)})
            if hit:
                self._mark(hit, f"XID {event.xid}")

    def _all_unhealthy(self, reason: str) -> None:
        log.warning("health.watch_failed", extra={"cause": reason})
        self._mark([gpu.uuid for gpu in self._gpus], reason)
        self._stop.wait(self._backoff.next())

    def _mark(self, uuids: Sequence[str], reason: str) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._board.mark_unhealthy, tuple(uuids), reason)
        except RuntimeError:
            self._stop.set()  # the loop has ended
