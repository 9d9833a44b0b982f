"""Watches XID events and marks cards unhealthy (device-plugin.md §10)."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from hami.kube.ratelimit import Backoff
from hami.node.errors import NvmlError
from hami.node.nvml import EventOpener, EventSource, GpuIdentity, XidEvent
from hami.node.plugin.board import Board
from hami.node.plugin.health_rules import XidRules
from hami.node.told import Told

WAIT_S: Final = 0.5
"""Length of one NVML wait: how long a restart of the plugin may have to wait for the watcher."""
_BACKOFF_S: Final = (1.0, 30.0)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Part:
    """A MIG device of a card: the ids of its instances."""

    uuid: str
    parent: str
    gpu_instance: int
    compute_instance: int

    def is_hit(self, event: XidEvent) -> bool:
        """Whether ``event`` is about this part: one that names no instance is about all of its card."""
        return (
            event.uuid == self.parent
            and event.gpu_instance in (None, self.gpu_instance)
            and event.compute_instance in (None, self.compute_instance)
        )


class HealthWatcher:
    """A thread that waits for events and tells the event loop; :meth:`stop` ends it within one wait."""

    def __init__(
        self,
        opener: EventOpener,
        gpus: Sequence[GpuIdentity],
        rules: XidRules,
        board: Board,
        *,
        parts: Sequence[Part] = (),
        wait_s: float = WAIT_S,
        backoff_s: tuple[float, float] = _BACKOFF_S,
    ) -> None:
        self._opener = opener
        self._gpus = tuple(gpus)
        self._parts = tuple(parts)
        self._rules = rules
        self._board = board
        self._wait_s = wait_s
        self._backoff = Backoff(*backoff_s, random.Random())  # noqa: S311 - jitter, not a secret
        self.on_fault: Callable[[Sequence[str], int | None, str], None] = _ignore
        """Called in the event loop with the cards, the XID (None: they cannot be watched) and the reason."""
        self._stop = threading.Event()
        self._anew = threading.Event()
        self._told = Told()
        self._watched: frozenset[str] = frozenset()
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

    @property
    def watched(self) -> frozenset[str]:
        """UUIDs whose events arrive."""
        return self._watched

    def watch_anew(self) -> None:
        """Subscribe to all events again: a card that came back has forgotten us."""
        self._watched = frozenset()
        self._anew.set()

    def judge(self, event: XidEvent) -> tuple[str, ...]:
        """UUIDs of our cards and of their parts that ``event`` makes unhealthy."""
        if self._rules.ignores(event.xid):
            return ()
        if not event.uuid:
            return self._all
        if any(part.parent == event.uuid for part in self._parts):
            return tuple(part.uuid for part in self._parts if part.is_hit(event))
        return (event.uuid,) if any(gpu.uuid == event.uuid for gpu in self._gpus) else ()

    @property
    def _all(self) -> tuple[str, ...]:
        return (*(gpu.uuid for gpu in self._gpus), *(part.uuid for part in self._parts))

    def _run(self) -> None:
        while not self._stop.is_set():
            self._anew.clear()
            try:
                source, unwatched = self._opener.watch(self._gpus)
            except NvmlError as error:
                self._all_unhealthy(str(error))
                continue
            if unwatched:
                self._mark(unwatched, "its events cannot be watched")
            try:
                self._consume(source, frozenset(self._all) - frozenset(unwatched))
            except NvmlError as error:
                self._all_unhealthy(str(error))
            finally:
                source.close()

    def _consume(self, source: EventSource, subscribed: frozenset[str]) -> None:
        while not (self._stop.is_set() or self._anew.is_set()):
            event = source.wait(self._wait_s)
            self._backoff.reset()
            if not self._anew.is_set():
                self._watched = subscribed
            if event is None:
                continue
            hit = self.judge(event)
            # A program can cause as many of those that are ignored as it likes.
            if hit or self._told.is_due(f"{event.xid} of {event.uuid}", "ignored", time.monotonic()):
                log.warning("health.xid", extra={"xid": event.xid, "gpu": event.uuid, "unhealthy": len(hit)})
            if hit:
                self._tell(self._board.mark_faulty, hit, event.xid, f"XID {event.xid}")

    def _all_unhealthy(self, reason: str) -> None:
        log.warning("health.watch_failed", extra={"cause": reason})
        self._watched = frozenset()
        self._mark(self._all, reason)
        self._stop.wait(self._backoff.next())

    def _mark(self, uuids: Sequence[str], reason: str) -> None:
        self._tell(self._board.mark_unhealthy, uuids, None, reason)

    def _tell(
        self,
        mark: Callable[[Sequence[str], str], None],
        uuids: Sequence[str],
        xid: int | None,
        reason: str,
    ) -> None:
        assert self._loop is not None

        def tell() -> None:
            mark(tuple(uuids), reason)
            self.on_fault(tuple(uuids), xid, reason)

        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            self._stop.set()  # the loop has ended


def _ignore(uuids: Sequence[str], xid: int | None, reason: str) -> None:
    del uuids, xid, reason
