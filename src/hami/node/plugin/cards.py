"""Reads the cards from NVML; blocking, called in a thread."""

from __future__ import annotations

import logging

from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.nvml import GpuIdentity, Nvml, numa_node
from hami.node.plugin.inventory import Card

log = logging.getLogger(__name__)


class CardReader:
    """Cards as NVML shows them now. A card that fails a query is unhealthy and keeps the memory last seen."""

    def __init__(self, nvml: Nvml, sysfs: str = "/sys") -> None:
        self._nvml = nvml
        self._sysfs = sysfs
        self._memory: dict[str, int] = {}

    def identities(self) -> tuple[GpuIdentity, ...]:
        """All cards by index. Raises :class:`NvmlError` when NVML is not there."""
        return self._nvml.gpus()

    def read(self) -> tuple[Card, ...]:
        """All cards by index. Raises :class:`NvmlError` when the cards cannot even be listed."""
        return tuple(self._card(gpu) for gpu in self._nvml.gpus())

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
        return Card(
            gpu.index, gpu.uuid, gpu.name, memory, numa_node(gpu.bus_id, self._sysfs), gpu.minor, healthy
        )
