"""Which cards a node registers and which fake devices it offers to kubelet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hami.node.config import Settings
from hami.node.mig.profiles import Offer
from hami.protocol.inventory import DeviceInfo

MIB = 1 << 20
_UUID_DASHES = 5


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as NVML shows it.

    ``memory_bytes`` is None where NVML does not support the question (unified memory). ``numa`` is 0 when
    unknown. ``healthy`` already contains the verdict of the health watcher and of failed NVML queries.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int | None
    numa: int = 0
    minor: int = 0
    healthy: bool = True
    offer: Offer | None = None
    """In mode ``mig``: the profiles that instances can be made of; None: not known."""

    @property
    def takes_instances(self) -> bool:
        """Whether MIG instances can be made on the card."""
        return self.offer is not None and bool(self.offer.profiles)


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """One slot as kubelet sees it; ``numa`` is None when no topology is sent."""

    id: str
    healthy: bool
    numa: int | None


def offered_cards(cards: Iterable[Card], settings: Settings) -> tuple[Card, ...]:
    """The cards that are not filtered out, by index."""
    kept = (card for card in cards if is_offered(card.uuid, card.index, settings))
    return tuple(sorted(kept, key=lambda card: card.index))


def is_offered(uuid: str, index: int, settings: Settings) -> bool:
    """Whether the filter leaves a card to us."""
    return uuid not in settings.excluded_uuids and index not in settings.excluded_indexes


def fake_devices(cards: Sequence[Card], settings: Settings) -> tuple[FakeDevice, ...]:
    """``<uuid>-<i>`` for every card and slot, by card index, then slot (WIRE form towards kubelet).

    In mode ``mig`` a card has at least as many as it can have instances, or none where it can have none.
    """
    return tuple(
        FakeDevice(f"{card.uuid}-{slot}", card.healthy, card.numa if settings.numa_topology else None)
        for card in cards
        for slot in range(_slots(card, settings))
    )


def physical_uuid(device_id: str) -> str:
    """The card behind a kubelet device id: ``U-3`` and ``U::3`` give ``U``, anything else stays."""
    card, replica, _ = device_id.partition("::")
    if replica:
        return card
    head, _, last = device_id.rpartition("-")
    if head.count("-") == _UUID_DASHES and last.isascii() and last.isdigit():
        return head
    return device_id


def registered_devices(
    cards: Sequence[Card], settings: Settings
) -> tuple[tuple[DeviceInfo, ...], tuple[str, ...]]:
    """The node's registration and one line per card that had to be left out.

    Memory is total / 2^20 truncated, times the memory scaling, truncated; cores are 100 times the core
    scaling, rounded to the nearest percent. A card whose memory is unknown takes
    ``preConfiguredDeviceMemory`` or is left out. In mode ``mig`` neither is scaled, and a card that takes no
    instances is left out.
    """
    dynamic = settings.is_dynamic_mig
    devices: list[DeviceInfo] = []
    left_out: list[str] = []
    for card in cards:
        memory_mib = _memory_mib(card, settings)
        if memory_mib is None:
            left_out.append(
                f"GPU {card.index} ({card.uuid}) does not report its memory; "
                "set preConfiguredDeviceMemory to register it"
            )
            continue
        if dynamic and not card.takes_instances:
            why = card.offer.why if card.offer is not None else "its MIG profiles are not known"
            left_out.append(
                f"GPU {card.index} ({card.uuid}) is in operatingmode mig but takes no instances: {why}"
            )
            continue
        offer = card.offer if dynamic else None
        devices.append(
            DeviceInfo(
                id=card.uuid,
                index=card.index,
                count=offer.count if offer else settings.split_count,
                devmem=memory_mib if offer else int(memory_mib * settings.memory_scaling),
                devcore=100 if offer else round(100 * settings.core_scaling),
                type=model_type(card.name),
                numa=max(card.numa, 0),
                mode=settings.mode,
                health=card.healthy,
                mig_profiles=offer.profiles if offer else (),
            )
        )
    return tuple(devices), tuple(left_out)


def model_type(name: str) -> str:
    """NVML's product name as it is registered: prefixed with ``NVIDIA-`` unless it starts with ``NVIDIA``."""
    return name if name.startswith("NVIDIA") else f"NVIDIA-{name}"


def _slots(card: Card, settings: Settings) -> int:
    if not settings.is_dynamic_mig:
        return settings.split_count
    return max(settings.split_count, card.offer.count) if card.offer and card.takes_instances else 0


def _memory_mib(card: Card, settings: Settings) -> int | None:
    if card.memory_bytes is not None:
        return card.memory_bytes // MIB
    return settings.preconfigured_memory_mib or None
