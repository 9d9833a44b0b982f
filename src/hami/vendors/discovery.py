"""A node's devices of one vendor, from its annotations or capacity (README R4)."""

from collections.abc import Hashable

from hami.protocol.errors import DevicesAbsent
from hami.protocol.inventory import Inventory, decode_csv, decode_json
from hami.vendors.types import DeviceInfo, NodeView, VendorProfile


def node_devices(p: VendorProfile, node: NodeView) -> list[DeviceInfo]:
    """At least one device, ids unique, `vendor` the common word; bad single entries are dropped.

    Raises `DevicesAbsent` (drop the vendor from the node) or `DevicesMalformed` (keep the cached devices).
    """
    return list(read_inventory(p, node).devices)


def read_inventory(p: VendorProfile, node: NodeView) -> Inventory:
    """As `node_devices`, with one warning per dropped entry for an event on the node."""
    if p.hooks.discover is not None:
        return p.hooks.discover(node, p)
    return registered(p, node)


def registered(p: VendorProfile, node: NodeView) -> Inventory:
    """The devices of the register annotation, by the profile's encoding. Errors as `node_devices`."""
    register = p.rules.register
    text = node.annotations.get(register.key)
    if text is None:
        raise DevicesAbsent(f"node {node.name} has no annotation {register.key}")
    if register.kind == "csv":
        inventory = decode_csv(text, p.common_word)
    else:
        inventory = decode_json(text, p.common_word)
    if register.devcore is None:
        return inventory
    devices = tuple(_with_cores(device, register.devcore) for device in inventory.devices)
    return Inventory(devices, inventory.warnings)


def register_source(p: VendorProfile, node: NodeView) -> Hashable:
    """What the devices were read from, to notice changes; None when the node has no source of this vendor."""
    register = p.rules.register
    if register.kind == "capacity":
        values = tuple(node.capacity.get(name, 0) for name in p.names.all())
        return values if any(values) else None
    text = node.annotations.get(register.key)
    if text is None:
        return None
    if not register.watched:
        return text
    return (text, *(node.annotations.get(key, "") for key in register.watched))


def _with_cores(device: DeviceInfo, cores: int) -> DeviceInfo:
    return DeviceInfo(
        device.id,
        device.index,
        device.count,
        device.devmem,
        cores,
        device.type,
        device.numa,
        device.health,
        device.mode,
        device.vendor,
        device.custom,
        device.mig_profiles,
    )
