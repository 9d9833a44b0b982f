"""A node's devices of one vendor, from its annotations or capacity (README R4)."""

from collections.abc import Callable, Hashable, Iterable, Sized
from typing import Final, TypeVar

import msgspec

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.inventory import MAX_DEVICES, Inventory, decode_csv, decode_json
from hami.vendors.types import INT32_MAX, CapacityCards, DeviceInfo, NodeView, VendorProfile

T = TypeVar("T")
_SHOWN: Final = 60  # characters of an id


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
    """The devices of the register annotation or the capacity, by the profile. Errors as `node_devices`."""
    register = p.rules.register
    text = node.annotations.get(register.key) if register.key else None
    if text is None:
        if register.cards is not None:
            return _of_capacity(p, node, register.cards)
        raise DevicesAbsent(f"node {node.name} has no annotation {register.key}")
    if register.kind == "csv":
        inventory = decode_csv(text, p.common_word)
    else:
        inventory = decode_json(text, p.common_word)
    if register.devcore is None:
        return inventory
    cores = register.devcore
    devices = tuple(msgspec.structs.replace(device, devcore=cores) for device in inventory.devices)
    return Inventory(devices, inventory.warnings)


def register_source(p: VendorProfile, node: NodeView) -> Hashable:
    """What the devices were read from, to notice changes; None when the node has no source of this vendor."""
    register = p.rules.register
    text = node.annotations.get(register.key) if register.key else None
    if text is not None:
        if not register.watched and not p.names.also_counted:
            return text
        watched = (node.annotations.get(key, "") for key in register.watched)
        return (text, *watched, *(p.names.served(node.allocatable) if p.names.also_counted else ()))
    if register.kind != "capacity" and register.cards is None:
        return None
    names = p.names.all()
    if not any(node.capacity.get(name, 0) for name in names):
        return None
    amounts = tuple((node.capacity.get(name, 0), node.allocatable.get(name)) for name in names)
    if not register.labels:
        return amounts
    labels = [pair for pair in node.labels.items() if pair[0].startswith(register.labels)]
    return (amounts, *sorted(labels))


def _of_capacity(p: VendorProfile, node: NodeView, cards: CapacityCards) -> Inventory:
    per_card, mem, health = cards.cores_per_card, cards.mem, True
    source = p.names.count if per_card is None else p.names.cores
    total = node.capacity.get(source, 0)
    if total <= 0:
        raise DevicesAbsent(f"node {node.name} has no capacity of {source}")
    number, warnings = total, tuple[str, ...]()
    if per_card is not None:
        usable = min(total, node.allocatable.get(source, total))
        health = usable > 0
        total = usable if health else total
        amount = node.capacity.get(p.names.memory, 0)
        amount = min(amount, node.allocatable.get(p.names.memory, amount)) if health else amount
        mem = amount * p.names.memory_factor * per_card // total
        number = -(-total // per_card)
        if total % per_card and not cards.part_is_a_card:
            number = total // per_card
            warnings = (f"{source} {total} is no multiple of {per_card}, the rest is left out",)
    if not number or number > MAX_DEVICES or not 0 <= mem <= INT32_MAX:
        raise DevicesMalformed(f"node {node.name}: {source} {total} stands for {number} cards of {mem} MiB")
    devices = tuple(
        DeviceInfo(
            id=f"{node.name}-{cards.suffix}-{index}",
            index=index,
            count=cards.slots,
            devmem=mem,
            devcore=cards.cores,
            type=p.common_word,
            numa=1 if cards.numa_halves and index >= number // 2 else 0,
            health=health,
            vendor=p.common_word,
        )
        for index in range(number)
    )
    return Inventory(devices, warnings)


# --- lists that a vendor's plugin registers in a form of its own ------------------------------------------


def register_text(p: VendorProfile, node: NodeView, longest: int) -> str:
    """The register annotation, of at most `longest` characters. Errors as `node_devices`."""
    key = p.rules.register.key
    text = node.annotations.get(key)
    if text is None:
        raise DevicesAbsent(f"node {node.name} has no annotation {key}")
    if len(text) > longest:
        raise DevicesMalformed(f"node {node.name}: {len(text)} characters, at most {longest} are read")
    return text


def check_number(node: NodeView, entries: Sized, what: str) -> None:
    """Raises `DevicesAbsent` for no entry, `DevicesMalformed` for too many."""
    if not entries:
        raise DevicesAbsent(f"node {node.name}: the list of {what}s is empty")
    if len(entries) > MAX_DEVICES:
        raise DevicesMalformed(f"node {node.name}: {len(entries)} {what}s, at most {MAX_DEVICES}")


def read_each(
    node: NodeView, entries: Iterable[T], read: Callable[[T, int], DeviceInfo], what: str
) -> Inventory:
    """What `read` makes of each entry and its position; a warning for each that it refuses by `ValueError`,
    or whose id stands before. Raises `DevicesMalformed` when nothing is left.
    """
    devices: dict[str, DeviceInfo] = {}
    warnings = []
    for position, entry in enumerate(entries):
        try:
            device = read(entry, position)
        except (ValueError, RecursionError) as error:
            warnings.append(f"{what} {position}: {error}")
            continue
        if device.id in devices:
            warnings.append(f"{what} {position}: its id {device.id[:_SHOWN]!r} stands twice")
        devices.setdefault(device.id, device)
    if not devices:
        raise DevicesMalformed(f"node {node.name}: {'; '.join(warnings)}")
    return Inventory(tuple(devices.values()), tuple(warnings))
