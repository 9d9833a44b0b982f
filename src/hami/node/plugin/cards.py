"""Reads the cards from NVML; blocking, called in a thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from itertools import permutations

from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.mig.profiles import Offer
from hami.node.nvml import GpuIdentity, NvLink, Nvml, numa_node
from hami.node.plugin.inventory import Card
from hami.node.plugin.topology import Links

log = logging.getLogger(__name__)


class CardReader:
    """Cards as NVML shows them now. A card that fails a query is unhealthy and keeps what was last seen."""

    def __init__(self, nvml: Nvml, sysfs: str = "/sys") -> None:
        self._nvml = nvml
        self._sysfs = sysfs
        self._memory: dict[str, int] = {}
        self._offers: dict[str, Offer] = {}
        self.offers: Callable[[GpuIdentity], Offer] | None = None
        """What cards offer in mode ``mig``; None in other modes."""

    def identities(self) -> tuple[GpuIdentity, ...]:
        """All cards by index. Raises :class:`NvmlError` when NVML is not there."""
        return self._nvml.gpus()

    def read(self) -> tuple[Card, ...]:
        """All cards by index. Raises :class:`NvmlError` when the cards cannot even be listed."""
        return tuple(self._card(gpu) for gpu in self._nvml.gpus())

    def links(self, uuids: AbstractSet[str], sick: AbstractSet[str]) -> Links:
        """What NVML shows between these cards. Raises :class:`NvmlError` where it fails on one that is not
        ``sick``; a sick one that fails is left out.
        """
        gpus = [gpu for gpu in self._nvml.gpus() if gpu.uuid in uuids]
        nvlinks: dict[str, tuple[NvLink, ...]] = {}
        levels: dict[tuple[str, str], int] = {}
        for gpu in gpus:
            try:
                nvlinks[gpu.uuid] = self._nvml.nvlinks(gpu)
            except NvmlError:
                if gpu.uuid not in sick:
                    raise
        for one, other in permutations((gpu for gpu in gpus if gpu.uuid in nvlinks), 2):
            try:
                level = self._nvml.common_ancestor(one, other)
            except NvmlError:
                failed = sick & {one.uuid, other.uuid}
                if not failed:
                    raise
                for uuid in failed:
                    nvlinks.pop(uuid, None)
                continue
            if level is not None:
                levels[one.uuid, other.uuid] = level
        return Links({gpu.uuid: gpu.bus_id for gpu in gpus}, nvlinks, levels)

    def _card(self, gpu: GpuIdentity) -> Card:
        healthy = True
        memory: int | None = None
        try:
            memory = self._nvml.memory(gpu).total
            self._memory[gpu.uuid] = memory
        except NvmlUnsupportedError:
            pass
        except NvmlError as error:
            log.warning("nvml.card_failed", extra={"gpu": gpu.uuid, "cause": str(error)})
            healthy = False
            memory = self._memory.get(gpu.uuid)
        offer = None
        if self.offers is not None:
            try:
                offer = self._offers[gpu.uuid] = self.offers(gpu)
            except NvmlError as error:
                log.warning("nvml.card_failed", extra={"gpu": gpu.uuid, "cause": str(error)})
                healthy = False
                offer = self._offers.get(gpu.uuid)
        numa = numa_node(gpu.bus_id, self._sysfs)
        return Card(gpu.index, gpu.uuid, gpu.name, memory, numa, gpu.minor, healthy, offer)
