"""What goes into every answer of one start of the plugin, found on the host (device-plugin.md §8)."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

from hami.node.cdi.directory import CdiDirectory
from hami.node.cdi.driver import CONTROL_NODES, DriverRoots
from hami.node.cdi.edits import CdiError
from hami.node.cdi.specs import OUR_FILES, CardDevice, Specs, make_specs
from hami.node.errors import UnsafePathError
from hami.node.mig.answer import with_nodes
from hami.node.mig.static import StaticDevice
from hami.node.nvml import GpuIdentity
from hami.node.plugin import imex
from hami.node.plugin.answer import IMEX, CdiDelivery, Delivery, DeviceNode
from hami.node.plugin.options import PluginOptions
from hami.node.plugin.platform import Platform, refuse_cdi

log = logging.getLogger(__name__)


def build_delivery(
    options: PluginOptions,
    cards: Sequence[GpuIdentity],
    platform: Platform = Platform.NVML,
    parts: Sequence[StaticDevice] = (),
) -> Delivery:
    """The delivery for these cards and MIG devices; blocking. With a CDI strategy the CDI documents are
    written.

    Raises :class:`hami.node.errors.SettingsError` for an IMEX channel that is required and not there,
    :class:`CdiError` where CDI documents cannot be made.
    """
    delivery = replace(options.delivery, dev_root=options.dev_root)
    if options.by_index:
        indexes = {card.uuid: str(card.index) for card in cards} | {part.uuid: part.index for part in parts}
        delivery = replace(delivery, indexes=indexes)
    roots = (options.paths.host(options.driver_root), options.paths.host(""))
    channels = imex.available(options.imex_channels, roots, options.imex_required)
    delivery = replace(delivery, imex=channels)
    if delivery.cdi is not None:
        refuse_cdi(platform)
        delivery = replace(delivery, cdi=_with_documents(delivery.cdi, options, cards, channels, parts))
    if options.pass_device_specs:
        delivery = replace(delivery, device_nodes=_device_nodes(options, cards, channels, platform))
        delivery = with_nodes(delivery, {part.uuid: part.paths for part in parts})
    return delivery


def card_paths(card: GpuIdentity, platform: Platform = Platform.NVML) -> tuple[str, ...]:
    """Paths of a card's device nodes."""
    return ("/dev/dxg",) if platform is Platform.WSL else (f"/dev/nvidia{card.minor}",)


def driver_roots(options: PluginOptions) -> DriverRoots:
    """Where the driver is. Device nodes are below its own root if that has a ``dev``, else in ``/dev``."""
    here = options.paths.host(options.driver_root).rstrip("/")
    has_dev = os.path.isdir(f"{here}/dev")  # noqa: PTH112
    return DriverRoots(
        here,
        options.driver_host_root.rstrip("/"),
        here if has_dev else options.paths.host(""),
        options.dev_root.rstrip("/"),
        options.cdi_hook,
    )


def _with_documents(
    cdi: CdiDelivery,
    options: PluginOptions,
    cards: Sequence[GpuIdentity],
    channels: Sequence[str],
    parts: Sequence[StaticDevice],
) -> CdiDelivery:
    """Write the documents; the result names what they hold."""
    by_index = options.by_index
    specs = make_specs(
        [
            *(
                CardDevice(str(card.index) if by_index else card.uuid, card_paths(card), card.bus_id)
                for card in cards
            ),
            *(CardDevice(part.index if by_index else part.uuid, part.paths, part.bus_id) for part in parts),
        ],
        {channel: imex.NODE.format(channel) for channel in channels},
        cdi.extras,
        driver_roots(options),
    )
    _publish(options, specs)
    return replace(cdi, extras=specs.extras, edits=specs.edits)


def _publish(options: PluginOptions, specs: Specs) -> None:
    directory = CdiDirectory(options.paths)
    try:
        removed = directory.publish(specs.files, OUR_FILES)
    except UnsafePathError as error:
        raise CdiError(f"cannot write CDI documents: {error}") from error
    except OSError as error:
        words = error.strerror or error
        raise CdiError(f"cannot write CDI documents into {directory.path}: {words}") from error
    log.info(
        "cdi.written",
        extra={"documents": sorted(specs.files), "removed": list(removed), "devices": len(specs.edits)},
    )


def _device_nodes(
    options: PluginOptions, cards: Sequence[GpuIdentity], channels: Sequence[str], platform: Platform
) -> dict[str, tuple[DeviceNode, ...]]:
    """Nodes by the UUID of a card, control nodes that are there under ``""``, and those of IMEX channels."""
    nodes = {card.uuid: tuple(_node(options, path) for path in card_paths(card, platform)) for card in cards}
    nodes[""] = tuple(
        _node(options, path)
        for path in CONTROL_NODES
        if os.path.exists(options.paths.host(path))  # noqa: PTH110
    )
    nodes[IMEX] = tuple(_node(options, imex.NODE.format(channel)) for channel in channels)
    return nodes


def _node(options: PluginOptions, path: str) -> DeviceNode:
    return DeviceNode(path, f"{options.dev_root.rstrip('/')}{path}")
