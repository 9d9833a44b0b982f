"""Brings cards back that are healthy again: looks at unhealthy ones, tells the board, node and metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from hami.node.cluster import Cluster
from hami.node.plugin.board import Board
from hami.node.plugin.checker import CardChecker
from hami.node.plugin.recovery_rules import Recovery, Sight, Step

LOOK_EVERY_S: Final = 5.0
RECOVERED: Final = "HAMiDeviceRecovered"
"""Reason of the event about a card that is healthy again."""

log = logging.getLogger(__name__)


class Watching(Protocol):
    """The watcher of events, as recovery needs it."""

    @property
    def watched(self) -> frozenset[str]:
        """UUIDs whose events arrive."""
        ...

    def watch_anew(self) -> None:
        """Subscribe to all events again."""
        ...


class Recoverer:
    """One loop over the unhealthy cards; ``run()`` ends only by cancellation.

    ``recovery`` outlives it; ``bus_ids`` are those of the cards by UUID; ``forget_driver`` closes what this
    process holds of the driver, so that a card that came back is found.
    """

    def __init__(
        self,
        recovery: Recovery,
        board: Board,
        watching: Watching,
        checker: CardChecker,
        cluster: Cluster,
        bus_ids: Mapping[str, str],
        forget_driver: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recovery = recovery
        self._board = board
        self._watching = watching
        self._checker = checker
        self._cluster = cluster
        self._bus_ids = bus_ids
        self._forget_driver = forget_driver
        self._clock = clock
        self._told: dict[str, str] = {}
        recovery.keep(board.faults)

    def fault(self, uuids: Sequence[str], xid: int | None, reason: str) -> None:
        """A fault of these cards, from the watcher of events; called in the event loop."""
        for uuid in uuids:
            self._recovery.fault(uuid, xid, reason, self._generation(uuid), self._clock())

    async def run(self) -> None:
        """Look at every unhealthy card each five seconds, and soon after a change of the board."""
        while True:
            version = self._board.version
            for uuid in tuple(self._recovery.unhealthy):
                await self._look(uuid)
            if self._recovery.unhealthy:
                await asyncio.sleep(LOOK_EVERY_S)
            else:
                await self._board.wait_beyond(version)

    async def _look(self, uuid: str) -> None:
        found = await self._checker.look(uuid)
        sight = Sight(
            answers=not found.problem,
            suspect=found.suspect,
            generation=self._generation(uuid),
            watched=uuid in self._watching.watched,
        )
        self._tell(uuid, found.problem or found.suspect)
        step = self._recovery.sighted(uuid, sight, self._clock())
        how = "it was reset or enumerated anew"
        if step is Step.WATCH_ANEW:
            await asyncio.to_thread(self._forget_driver)
            self._watching.watch_anew()
        if step is Step.PROBE:
            probe = await self._checker.probe(uuid)
            self._tell(uuid, probe.problem)
            step = self._recovery.probed(uuid, not probe.problem, self._clock())
            how = "no further fault, and its memory works"
        if step is Step.HEALTHY:
            self._bring_back(uuid, how)

    def _bring_back(self, uuid: str, how: str) -> None:
        reason = self._board.faults.get(uuid, "")
        self._told.pop(uuid, None)
        self._board.mark_healthy([uuid])
        log.warning("health.recovered", extra={"gpu": uuid, "fault": reason, "cause": how})
        self._cluster.node_event("Normal", RECOVERED, f"{uuid}: healthy again after {reason}: {how}")

    def _tell(self, uuid: str, problem: str) -> None:
        """One line when what keeps a card out changes."""
        if problem != self._told.get(uuid, ""):
            self._told[uuid] = problem
            log.info("recovery.look", extra={"gpu": uuid, "cause": problem or "it answers"})

    def _generation(self, uuid: str) -> str:
        return self._checker.generation(self._bus_ids.get(uuid, ""))
