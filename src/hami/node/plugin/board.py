"""The cards as the plugin knows them now, and who waits for a change. Touched only from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace

from hami.node.plugin.inventory import Card


class Board:
    """Newest state of all cards; every reader sees the newest one, never a queue of changes."""

    def __init__(self) -> None:
        self._cards: tuple[Card, ...] = ()
        self._faults: dict[str, str] = {}
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

    async def wait_beyond(self, version: int) -> int:
        """Wait until the version is larger than ``version``; the result is the newest one."""
        while self._version <= version:
            await self._changed.wait()
        return self._version

    def _announce(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()
