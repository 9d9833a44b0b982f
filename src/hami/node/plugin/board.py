"""The cards as the plugin knows them now, and who waits for a change. Touched only from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from hami.node.plugin.inventory import Card


class Board:
    """Newest state of all cards; every reader sees the newest one, never a queue of changes."""

    def __init__(self, lasting: Mapping[str, str] = MappingProxyType({})) -> None:
        self._cards: tuple[Card, ...] = ()
        self._lasting = dict(lasting)
        self._faults = dict(lasting)
        self._version = 0
        self._changed = asyncio.Event()

    @property
    def version(self) -> int:
        """Grows by one with every change."""
        return self._version

    @property
    def cards(self) -> tuple[Card, ...]:
        """The cards by index, with the verdicts of the health watcher."""
        return tuple(
            replace(card, healthy=card.healthy and card.uuid not in self._faults) for card in self._cards
        )

    @property
    def faults(self) -> dict[str, str]:
        """Why cards are unhealthy, by UUID."""
        return dict(self._faults)

    @property
    def lasting(self) -> dict[str, str]:
        """Those of the faults that the cards themselves have reported: a restart of the plugin's loops, as
        after an edited configuration, mends none of them.
        """
        return dict(self._lasting)

    def show(self, cards: Iterable[Card]) -> None:
        """Replace the cards by what NVML shows now."""
        new = tuple(cards)
        if new != self._cards:
            self._cards = new
            self._announce()

    def mark_unhealthy(self, uuids: Iterable[str], reason: str) -> None:
        """Keep these cards unhealthy; the first reason stays."""
        fresh = [uuid for uuid in uuids if uuid not in self._faults]
        if fresh:
            self._faults.update(dict.fromkeys(fresh, reason))
            self._announce()

    def mark_faulty(self, uuids: Iterable[str], reason: str) -> None:
        """As :meth:`mark_unhealthy`, and among the :attr:`lasting` faults."""
        named = tuple(uuids)
        self._lasting = {**dict.fromkeys(named, reason), **self._lasting}
        self.mark_unhealthy(named, reason)

    def mark_healthy(self, uuids: Iterable[str]) -> None:
        """These cards have recovered."""
        gone = [uuid for uuid in uuids if uuid in self._faults]
        for uuid in gone:
            del self._faults[uuid]
            self._lasting.pop(uuid, None)
        if gone:
            self._announce()

    async def wait_beyond(self, version: int) -> int:
        """Wait until the version is larger than ``version``; the result is the newest one."""
        while self._version <= version:
            await self._changed.wait()
        return self._version

    def wake(self) -> None:
        """Let everybody who waits look again."""
        self._announce()

    def _announce(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
