"""The pair scores that belong to a registration, computed when it changes (device-plugin.md §9 step 9)."""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from hami.node.cluster import Cluster
from hami.node.errors import NvmlError, SettingsError, TopologyError
from hami.node.plugin.cards import CardReader
from hami.node.plugin.topology import Scores, asymmetry_text, pair_scores
from hami.protocol.errors import PairScoreError
from hami.protocol.inventory import DeviceInfo, encode_json
from hami.protocol.keys import ENV_TOPOLOGY_SCORE
from hami.protocol.pair_scores import decode_pair_scores

ASYMMETRIC: Final = "AsymmetricGPUP2PLink"
"""Reason of the event about pairs whose ends disagree on their links."""
_TOLD_AGAIN_S: Final = 3600.0

log = logging.getLogger(__name__)


class PairScores(enum.Enum):
    """Whether a node shows pair scores."""

    OFF = "off"
    IF_POSSIBLE = "if possible"
    """Where NVML fails, the cards are registered without."""
    REQUIRED = "required"
    """Where NVML fails, nothing is written until it answers."""


def parse_switch(text: str) -> PairScores:
    """Meaning of ``$ENABLE_TOPOLOGY_SCORE``; raises :class:`SettingsError`."""
    meanings = {"": PairScores.IF_POSSIBLE, "true": PairScores.REQUIRED, "false": PairScores.OFF}
    if text not in meanings:
        raise SettingsError(f"{ENV_TOPOLOGY_SCORE} must be true or false, not {text[:40]!r}")
    return meanings[text]


class ScoreKeeper:
    """Computes scores once for each state of the registered cards, and tells the node of links that only one
    end knows.
    """

    def __init__(
        self,
        cluster: Cluster,
        reader: CardReader,
        demand: PairScores,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._reader = reader
        self._demand = demand
        self._clock = clock
        self._computed_for = ""
        self._scores: Scores = {}
        self._failure = ""
        self._told: tuple[str, float] | None = None

    async def scores(self, devices: Sequence[DeviceInfo]) -> Scores | None:
        """Scores of the registered cards; None where the node's annotation is to stay as it is.

        Raises :class:`NvmlError` or :class:`TopologyError` where scores are required and cannot be had.
        """
        if self._demand is PairScores.OFF:
            return None
        registration = encode_json(devices)
        if registration == self._computed_for:
            return self._scores
        uuids = [device.id for device in devices]
        sick = {device.id for device in devices if not device.health}
        try:
            links = await asyncio.to_thread(self._reader.links, set(uuids), sick)
            scores, disagreeing = pair_scores(uuids, links)
        except (NvmlError, TopologyError) as error:
            if self._demand is PairScores.REQUIRED:
                raise
            if str(error) != self._failure:
                self._failure = str(error)
                log.warning("topology.no_scores", extra={"cause": str(error)})
            return None
        self._computed_for, self._scores, self._failure = registration, scores, ""
        if disagreeing:
            self._tell(asymmetry_text(disagreeing))
        return scores

    def _tell(self, text: str) -> None:
        """One event an hour for the same pairs."""
        now = self._clock()
        if self._told is not None and self._told[0] == text and now - self._told[1] < _TOLD_AGAIN_S:
            return
        self._told = text, now
        log.warning("topology.asymmetric", extra={"cause": text})
        self._cluster.node_event("Warning", ASYMMETRIC, text)


def shows(text: str | None, scores: Scores) -> bool:
    """Whether an annotation holds exactly ``scores``, compared by value."""
    try:
        return text is not None and decode_pair_scores(text) == scores
    except PairScoreError:
        return False
