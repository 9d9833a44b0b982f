"""The MIG part of one start of the plugin: dividing cards for mode ``mig``, finding static devices."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hami.node.config import Settings
from hami.node.mig.documents import InstanceDocuments
from hami.node.mig.driver import MigDriver
from hami.node.mig.manager import MigManager, PodChanges
from hami.node.mig.profiles import allowed
from hami.node.mig.reader import read_cards
from hami.node.mig.static import NOTHING, Layout, layout
from hami.node.nvml import GpuIdentity, Nvml
from hami.node.plugin.cards import CardReader
from hami.node.plugin.delivery import driver_roots
from hami.node.plugin.health import Part
from hami.node.plugin.inventory import MIB, is_offered
from hami.node.plugin.options import PluginOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MigSide:
    """The driver, and for mode ``mig`` who makes instances and who tells that pods change."""

    driver: MigDriver
    manager: MigManager
    changes: Callable[[], PodChanges]

    async def prepare(self, settings: Settings, reader: CardReader, options: PluginOptions) -> None:
        """Mode ``mig``: divide the cards that instances are to be made on; ``reader`` then tells what they
        offer.
        """
        self.manager.documents = (
            InstanceDocuments(options.paths, driver_roots(options)) if options.delivery.cdi else None
        )
        gpus = await asyncio.to_thread(reader.identities)
        await self.manager.prepare(
            [gpu for gpu in _offered(gpus, settings) if allowed(gpu.name, settings.mig_allowlist)]
        )
        reader.offers = lambda gpu: self.manager.offer(gpu, settings.mig_allowlist)

    def static_devices(self, settings: Settings, reader: CardReader, nvml: Nvml) -> Layout:
        """The MIG devices that are there and offered; blocking. Raises :class:`MigError` where the strategy
        cannot offer what is there.
        """
        if not settings.is_static_mig:
            return NOTHING
        gpus = _offered(reader.identities(), settings)
        cards = read_cards(self.driver, gpus, lambda gpu: nvml.memory(gpu).total // MIB)
        found = layout(settings.mig_strategy, cards, settings.resource_name)
        for text in found.warnings:
            log.warning("mig.not_offered", extra={"cause": text})
        return found


def parts_of(found: Layout) -> tuple[Part, ...]:
    """The devices as the health watcher knows them."""
    return tuple(
        Part(device.uuid, device.parent, device.gpu_instance, device.compute_instance)
        for device in found.devices
    )


def _offered(gpus: Sequence[GpuIdentity], settings: Settings) -> list[GpuIdentity]:
    return [gpu for gpu in gpus if is_offered(gpu.uuid, gpu.index, settings)]
