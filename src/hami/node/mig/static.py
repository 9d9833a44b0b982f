"""MIG devices that an administrator made, as resources of kubelet (device-plugin.md §5.2, §7.3). Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hami.node.config import TimeSlicing
from hami.node.errors import AllocateError, MigError

RESOURCE_PREFIX: Final = "nvidia.com/mig-"
REPLICA: Final = "::"
_MIB_PER_GIB: Final = 1024


@dataclass(frozen=True, slots=True)
class StaticDevice:
    """One MIG device. ``index`` is ``<card>:<number>``; ``profile`` such as ``1g.5gb``; ``attributes``:
    slices, compute slices, memory in MiB, multiprocessors. ``paths`` are its device nodes.
    """

    uuid: str
    parent: str
    index: str
    gpu_instance: int
    compute_instance: int
    profile: str
    attributes: tuple[int, int, int, int]
    bus_id: str = ""
    numa: int = 0
    paths: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether it has all compute slices of its GPU instance."""
        return self.attributes[0] == self.attributes[1]


@dataclass(frozen=True, slots=True)
class StaticCard:
    """One card and, where it is divided, its MIG devices."""

    uuid: str
    index: int
    divided: bool
    devices: tuple[StaticDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """What a node offers besides whole cards: devices by resource; ``divided`` cards are none of those."""

    resources: Mapping[str, tuple[StaticDevice, ...]]
    divided: frozenset[str]
    warnings: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[StaticDevice, ...]:
        """All devices."""
        return tuple(device for devices in self.resources.values() for device in devices)


NOTHING: Final = Layout({}, frozenset())


def layout(strategy: str, cards: Sequence[StaticCard], resource: str) -> Layout:
    """The resources of ``strategy``; ``resource`` is the name for ``single``.

    ``single``: as soon as one card is divided all must be, with devices that are all alike; else
    :class:`MigError`. ``mixed``: one resource for each profile.
    """
    divided = [card for card in cards if card.divided]
    if strategy == "none" or not divided:
        return NOTHING
    names = frozenset(card.uuid for card in divided)
    empty = [card for card in divided if not card.devices]
    if strategy == "single":
        _check_single(cards, divided, empty)
        return Layout({resource: tuple(device for card in divided for device in card.devices)}, names)
    resources: dict[str, list[StaticDevice]] = {}
    parts = []
    for device in (device for card in divided for device in card.devices):
        if device.is_whole:
            resources.setdefault(resource_of(device.profile), []).append(device)
        else:
            parts.append(device)
    warnings = [f"GPU {card.index} ({card.uuid}) is divided by MIG and has no devices" for card in empty]
    warnings += [
        f"MIG device {device.index} ({device.uuid}) has {device.attributes[1]} of the {device.attributes[0]} "
        "compute slices of its GPU instance: there is no resource for it"
        for device in parts
    ]
    return Layout({name: tuple(found) for name, found in sorted(resources.items())}, names, tuple(warnings))


def resource_of(profile: str) -> str:
    """``nvidia.com/mig-1g.5gb`` for ``1g.5gb``, ``…mig-1g.5gb.me`` for ``1g.5gb+me``."""
    return RESOURCE_PREFIX + profile.replace("+", ".")


def profile_name(slices: int, memory_mib: int, card_mib: int) -> str:
    """The name of a profile where the driver does not tell it: memory in eighths of the card's, as NVIDIA's
    tools name it.
    """
    eighths = round(8 * memory_mib / card_mib) if card_mib > 0 else 0
    return f"{slices}g.{round(eighths * -(-card_mib // _MIB_PER_GIB) / 8)}gb"


def kubelet_ids(uuids: Sequence[str], replicas: int) -> tuple[str, ...]:
    """The ids under which devices are offered: the UUIDs, or ``<uuid>::<replica>`` for shared ones."""
    if not replicas:
        return tuple(uuids)
    return tuple(f"{uuid}{REPLICA}{number}" for uuid in uuids for number in range(replicas))


def requested(ids: Sequence[str], known: Collection[str], sharing: TimeSlicing) -> tuple[str, ...]:
    """The devices behind the ids of one container, each once. Raises :class:`AllocateError`."""
    if not ids:
        raise AllocateError("an Allocate call needs at least one device id per container")
    shared = any(REPLICA in each for each in ids)
    if sharing.fail_requests_greater_than_one and shared and len(ids) > 1:
        raise AllocateError(
            f"maximum request size for shared resources is 1; found {len(ids)}: a second share of a device "
            "gives no more of it"
        )
    uuids = tuple(dict.fromkeys(each.partition(REPLICA)[0] for each in ids))
    unknown = [uuid for uuid in uuids if uuid not in known]
    if unknown:
        raise AllocateError(f"unknown device {', '.join(unknown)}")
    return uuids


def _check_single(
    cards: Sequence[StaticCard], divided: Sequence[StaticCard], empty: Sequence[StaticCard]
) -> None:
    whole = [card for card in cards if not card.divided]
    if whole:
        raise MigError(
            f"--mig-strategy=single: GPU {divided[0].index} is divided by MIG and GPU {whole[0].index} not: "
            "divide all or none, leave cards out with filterdevices, or use mixed"
        )
    if empty:
        raise MigError(
            f"--mig-strategy=single: GPU {empty[0].index} is divided by MIG and has no devices: make some "
            f"with nvidia-smi mig -i {empty[0].index} -cgi PROFILE -C, or use mixed"
        )
    kinds = {device.attributes: device for card in divided for device in card.devices}
    if len(kinds) > 1:
        one, other = tuple(kinds.values())[:2]
        raise MigError(
            f"--mig-strategy=single: MIG devices {one.index} ({one.profile}) and {other.index} "
            f"({other.profile}) differ: make all alike, or use mixed"
        )
