"""Keeps the node's registration annotation equal to what NVML shows (device-plugin.md §9)."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from hami.kube.errors import KubeError
from hami.kube.ratelimit import Backoff
from hami.node.cluster import Cluster
from hami.node.config import Settings
from hami.node.errors import NvmlError, TopologyError
from hami.node.plugin.board import Board
from hami.node.plugin.cards import CardReader
from hami.node.plugin.inventory import offered_cards, registered_devices
from hami.node.plugin.scores import PairScores, ScoreKeeper, shows
from hami.protocol.errors import ProtocolError, RegistrationError
from hami.protocol.inventory import DeviceInfo, decode_json, encode_json
from hami.protocol.keys import (
    ALLOCATION_MODE,
    MODE_LOCK,
    NODE_CONFIG_APPLIED,
    NVIDIA,
    NVIDIA_PAIR_SCORES,
    VENDOR_KEYS,
)
from hami.protocol.pair_scores import encode_pair_scores

INTERVAL_S: Final = 30.0
_JITTER: Final = 0.1
_BACKOFF_S: Final = (5.0, 60.0)
REGISTER: Final = VENDOR_KEYS[NVIDIA].register

log = logging.getLogger(__name__)


class Registrar:
    """One registration loop; ``run()`` ends only by cancellation. Annotations are written in one patch.

    ``applied`` gives the digest of the config.json in force, which the node shows; empty: none is.
    """

    def __init__(
        self,
        cluster: Cluster,
        reader: CardReader,
        board: Board,
        settings: Settings,
        *,
        interval_s: float = INTERVAL_S,
        mode: str = MODE_LOCK,
        pair_scores: PairScores = PairScores.OFF,
        applied: Callable[[], str] = str,
        registered: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:
        self._cluster = cluster
        self._reader = reader
        self._board = board
        self._settings = settings
        self._interval_s = interval_s
        self._mode = mode
        self._scores = ScoreKeeper(cluster, reader, pair_scores)
        self._applied = applied
        self._registered = registered
        self._rng = rng or random.Random()  # noqa: S311 - jitter, not a secret
        self._left_out: tuple[str, ...] = ()

    async def run(self) -> None:
        """Every 30 s, at once after a change of the board, with back-off from 5 s after an error."""
        backoff = Backoff(*_BACKOFF_S, self._rng)
        while True:
            delay = self._interval_s * (1 + _JITTER * (2 * self._rng.random() - 1))
            try:
                seen = await self.once()
                backoff.reset()
            except (KubeError, NvmlError, TopologyError, ProtocolError) as error:
                delay, seen = backoff.next(), self._board.version
                log.warning("register.failed", extra={"cause": str(error), "retry_s": round(delay, 1)})
            try:
                async with asyncio.timeout(delay):
                    await self._board.wait_beyond(seen)
            except TimeoutError:
                pass

    async def once(self) -> int:
        """Read NVML, compare with the node, patch if needed; the result is the board's version registered.

        Without the driver the cards that were there are registered as unhealthy, then :class:`NvmlError` is
        raised.
        """
        lost: NvmlError | None = None
        try:
            self._board.show(await asyncio.to_thread(self._reader.read))
        except NvmlError as error:
            if not self._board.cards:
                raise
            lost = error
            self._board.show(replace(card, healthy=False) for card in self._board.cards)
        version = self._board.version
        devices, left_out = registered_devices(
            offered_cards(self._board.cards, self._settings), self._settings
        )
        if left_out != self._left_out:
            self._left_out = left_out
            for line in left_out:
                log.warning("register.left_out", extra={"cause": line})
        scores = None if lost else await self._scores.scores(devices)
        notes = (await self._cluster.node()).annotations
        wanted: dict[str, str | None] = {}
        if not _says(notes.get(REGISTER), devices):
            wanted[REGISTER] = encode_json(devices)
        if scores is not None and not shows(notes.get(NVIDIA_PAIR_SCORES), scores):
            wanted[NVIDIA_PAIR_SCORES] = encode_pair_scores(scores)
        if notes.get(ALLOCATION_MODE) != self._mode:
            # With "exact" the scheduler takes no lock on this node.
            wanted[ALLOCATION_MODE] = self._mode
        if notes.get(NODE_CONFIG_APPLIED, "") != self._applied():
            wanted[NODE_CONFIG_APPLIED] = self._applied() or None
        if wanted:
            await self._cluster.annotate_node(wanted)
            log.info("register.written", extra={"devices": len(devices), "keys": sorted(wanted)})
        if lost is not None:
            raise lost
        self._registered()
        return version


def _says(text: str | None, devices: tuple[DeviceInfo, ...]) -> bool:
    """Whether an annotation holds exactly ``devices``, compared by value."""
    if text is None:
        return False
    if text == encode_json(devices):
        return True
    try:
        found = decode_json(text, NVIDIA)
    except RegistrationError:
        return False
    wanted = decode_json(encode_json(devices), NVIDIA) if devices else None
    return wanted is not None and not found.warnings and found.devices == wanted.devices
