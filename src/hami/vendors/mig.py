"""MIG on the scheduler's side: which slice a request gets, and what is occupied (nvidia-scheduling.md §12).

A card's slices travel in `Usage.payload`. A card in mode `mig` with a device that has no slice, or a card
in another mode with slices, is not understood and takes no new containers.
"""

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from hami.protocol import keys
from hami.protocol.errors import MigReservationError
from hami.protocol.inventory import MigPlacement, MigProfile
from hami.protocol.mig import MigReservation, decode_mig_reservations, encode_mig_reservations
from hami.vendors.reasons import MIG_INFEASIBLE
from hami.vendors.types import (
    Allocation,
    AnnotateContext,
    Card,
    ContainerDevice,
    DeviceInfo,
    FitContext,
    Need,
    PodInfo,
    Usage,
    VendorProfile,
)

MIG_MODE: Final = "mig"
_LEGACY_ID: Final = re.compile(r"\[\d+-\d+\]$")
_LEGACY_DEVICE: Final = re.compile(r"\[\d+-\d+\],")
_MAX_RESERVATIONS: Final = 64 * 1024  # characters

Interval = tuple[int, int]  # start, end (exclusive), in memory slices


@dataclass(frozen=True, slots=True, order=True)
class MigSlice:
    """A reserved slice: `[start, start + size)` of the card in `profile`.

    `others` are further slices of the card that the pod's annotation reserves beyond its devices. A slice
    that is not `held` belongs to no device at all: it occupies its place on the card and nothing else.
    """

    profile: str
    start: int
    size: int
    others: tuple["MigSlice", ...] = ()
    held: bool = True

    @property
    def interval(self) -> Interval:
        """The memory slices it covers."""
        return self.start, self.start + self.size


@dataclass(frozen=True, slots=True)
class MigUse:
    """Payload of a card's usage once it has a slice: a multiset, sorted, and the devices without one.

    A usage whose payload is None has no slice, so all its slots are unreserved.
    """

    slices: tuple[tuple[MigSlice, int], ...]
    unreserved: int


class MigAlgebra:
    """The standard algebra, plus a multiset of slices per card."""

    zero = Usage()

    def of(self, device: ContainerDevice) -> Usage:
        payload = device.payload
        if not isinstance(payload, MigSlice):
            return Usage(1, device.usedmem, device.usedcores)
        counts: dict[MigSlice, int] = {}
        for part in (MigSlice(payload.profile, payload.start, payload.size), *payload.others):
            counts[part] = counts.get(part, 0) + 1
        return Usage(1 if payload.held else 0, device.usedmem, device.usedcores, _use(counts, 0))

    def add(self, a: Usage, b: Usage) -> Usage:
        slots, mem, cores = a.slots + b.slots, a.mem + b.mem, a.cores + b.cores
        if a.payload is None and b.payload is None:
            return Usage(slots, mem, cores)
        counts = _counts(a)
        for part, count in _counts(b).items():
            counts[part] = counts.get(part, 0) + count
        return Usage(slots, mem, cores, _use(counts, unreserved(a) + unreserved(b)))

    def remove(self, total: Usage, b: Usage) -> Usage:
        slots, mem, cores = total.slots - b.slots, total.mem - b.mem, total.cores - b.cores
        if total.payload is None and b.payload is None:
            return Usage(slots, mem, cores)
        counts = _counts(total)
        for part, count in _counts(b).items():
            counts[part] = counts.get(part, 0) - count
        return Usage(slots, mem, cores, _use(counts, unreserved(total) - unreserved(b)))

    def combine(self, a: Usage, b: Usage) -> Usage:
        slots, mem, cores = max(a.slots, b.slots), max(a.mem, b.mem), max(a.cores, b.cores)
        if a.payload is None and b.payload is None:
            return Usage(slots, mem, cores)
        counts = _counts(a)
        for part, count in _counts(b).items():
            counts[part] = max(counts.get(part, 0), count)
        return Usage(slots, mem, cores, _use(counts, max(unreserved(a), unreserved(b))))


def unreserved(used: Usage) -> int:
    """Devices on the card that have no slice."""
    return used.payload.unreserved if isinstance(used.payload, MigUse) else used.slots


def understood(info: DeviceInfo, used: Usage) -> bool:
    """Whether the use of the card agrees with its mode (hook `healthy`)."""
    if info.mode == MIG_MODE:
        return unreserved(used) == 0
    return used.payload is None


def why_closed(info: DeviceInfo, used: Usage) -> str:
    """Why a pod with this use of the card closes it for others; "" when it does not."""
    if understood(info, used):
        return ""
    if info.mode == MIG_MODE:
        return f"the card is divided by MIG and {keys.MIG_ALLOCATIONS} of the pod names no slice of it"
    return f"{keys.MIG_ALLOCATIONS} of the pod names slices of it, but the card is not divided by MIG"


def repeatable(info: DeviceInfo) -> bool:
    """Whether one container may get several devices of the card."""
    return info.mode == MIG_MODE


# --- choosing a slice -----------------------------------------------------------------------------------


def choose_slice(
    profiles: Sequence[MigProfile], mem: int, taken: Iterable[Interval], own: Iterable[MigSlice] = ()
) -> tuple[MigProfile, MigSlice] | None:
    """The first free placement of the smallest profile of at least `mem` MiB, or None.

    Profiles by memory then slice count; placements of `1g.` and `3g.` from the end, others from the start,
    so that large profiles keep room. `taken` is held by others; `own` by containers of the same pod that
    run at another time: kubelet creates all of a pod's slices up front, so those may be shared whole but
    not overlapped.
    """
    busy = list(taken)
    mine = list(own)
    for profile in _by_size(tuple(profiles)):
        if profile.memory_mib < mem:
            continue
        for place in _in_order(profile):
            found = MigSlice(profile.name, place.start, place.size)
            if not any(_overlap(found.interval, other) for other in busy) and not any(
                _overlap(found.interval, other.interval) and found != other for other in mine
            ):
                return profile, found
    return None


def device_rule(ctx: FitContext, card: Card, need: Need, taken: Sequence[ContainerDevice]) -> str | None:
    """A MIG card needs a profile with a free placement."""
    if card.info.mode != MIG_MODE or _slice_for(ctx, card, need, taken) is not None:
        return None
    return MIG_INFEASIBLE


def record(ctx: FitContext, card: Card, need: Need, taken: Sequence[ContainerDevice]) -> ContainerDevice:
    """What is written down: the request's amounts, on a MIG card those of the slice."""
    info = card.info
    found = _slice_for(ctx, card, need, taken) if info.mode == MIG_MODE else None
    if found is None:
        return ContainerDevice(info.id, ctx.request.type, need.mem, need.cores, info.index, info.custom)
    profile, chosen = found
    return ContainerDevice(
        info.id, ctx.request.type, profile.memory_mib, profile.core, info.index, info.custom, chosen
    )


def _slice_for(
    ctx: FitContext, card: Card, need: Need, taken: Sequence[ContainerDevice]
) -> tuple[MigProfile, MigSlice] | None:
    card_id = card.info.id
    busy = [part.interval for part in (*_counts(card.used), *_slices_of(card_id, taken))]
    own = [part for slot in ctx.allocated for part in _slices_of(card_id, slot)]
    return choose_slice(card.info.mig_profiles, need.mem, busy, own)


def _slices_of(card_id: str, devices: Iterable[ContainerDevice]) -> list[MigSlice]:
    return [d.payload for d in devices if d.uuid == card_id and isinstance(d.payload, MigSlice)]


@lru_cache(maxsize=256)
def _by_size(profiles: tuple[MigProfile, ...]) -> tuple[MigProfile, ...]:
    return tuple(sorted(profiles, key=lambda p: (p.memory_mib, p.slice_count)))


@lru_cache(maxsize=256)
def _in_order(profile: MigProfile) -> tuple[MigPlacement, ...]:
    """What no annotation could name is left out: placements of no size, profiles without a name."""
    from_end = profile.name.startswith(("1g.", "3g."))
    places = [place for place in profile.placements if place.size > 0 and profile.name]
    return tuple(sorted(places, key=lambda place: -place.start if from_end else place.start))


def _overlap(a: Interval, b: Interval) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _counts(used: Usage) -> dict[MigSlice, int]:
    return dict(used.payload.slices) if isinstance(used.payload, MigUse) else {}


def _use(counts: Mapping[MigSlice, int], without_slice: int) -> MigUse | None:
    slices = tuple(sorted((part, count) for part, count in counts.items() if count))
    return MigUse(slices, without_slice) if slices else None


# --- annotations ----------------------------------------------------------------------------------------


def reservation_annotations(ctx: AnnotateContext) -> dict[str, str]:
    """The reservations of an allocation; `[]` overwrites those an earlier decision left on the pod."""
    reservations = [
        MigReservation(slot, position, device.uuid, part.profile, MigPlacement(part.start, part.size))
        for slot, devices in enumerate(ctx.allocation)
        for position, device in enumerate(devices)
        if isinstance(part := device.payload, MigSlice)
    ]
    if not reservations and not ctx.pod.annotations.get(keys.MIG_ALLOCATIONS):
        return {}
    return {keys.MIG_ALLOCATIONS: encode_mig_reservations(reservations)}


def restore(pod: PodInfo, allocation: Allocation) -> Allocation:
    """The allocation with the slices that the pod's reservations name.

    A device takes the reservation with its own indexes, else the next unused one of its card in order (HAMi
    2.10 counts containers wrongly). Reservations left over go to the last device of their card, or, on a
    card without one, to an entry of no size. An undecodable annotation counts as none: the devices stay
    without a slice. Ids of fixed-geometry MIG (HAMi <= 2.9) are read as their card.
    """
    if any(device.uuid.endswith("]") for slot in allocation for device in slot):
        allocation = tuple(tuple(_without_legacy_id(device) for device in slot) for slot in allocation)
    reservations = _reservations(pod.annotations.get(keys.MIG_ALLOCATIONS, ""))
    if not reservations:
        return allocation
    unused = _Unused(reservations)
    places = [(s, p, device) for s, slot in enumerate(allocation) for p, device in enumerate(slot)]
    found: dict[tuple[int, int], list[MigSlice]] = {}
    for slot, position, device in places:
        match = unused.take_at(slot, position, device.uuid)
        if match is not None:
            found[slot, position] = [match]
    for slot, position, device in places:
        if (slot, position) not in found:
            match = unused.take_next(device.uuid)
            if match is not None:
                found[slot, position] = [match]
    for slot, position, device in reversed(places):
        slices = found.get((slot, position))
        while slices and (match := unused.take_next(device.uuid)) is not None:
            slices.append(match)
    homeless = unused.by_slot({device.uuid for _, _, device in places}, len(allocation) - 1)
    return tuple(
        (
            *(_with_slices(device, found.get((s, p))) for p, device in enumerate(slot)),
            *(_unheld(each) for each in homeless.get(s, ())),
        )
        for s, slot in enumerate(allocation)
    )


def doubts(pod: PodInfo, p: VendorProfile) -> list[tuple[str, str]]:
    """What is odd about the slices of a placed pod: event reasons and texts (hook `doubts`)."""
    found = []
    if _LEGACY_DEVICE.search(pod.annotations.get(p.rules.allocated, "")):
        found.append(("LegacyMigPod", "legacy MIG pod, drain before upgrade"))
    text = pod.annotations.get(keys.MIG_ALLOCATIONS, "")
    try:
        _decoded(text)
    except MigReservationError as error:
        consequence = "its MIG cards take no new pods until it ends"
        found.append(
            ("MigReservationUnreadable", f"{keys.MIG_ALLOCATIONS} cannot be read, {consequence}: {error}")
        )
    return found


class _Unused:
    """Reservations that no device has taken yet, in their order; every question costs a constant time."""

    def __init__(self, reservations: Sequence[MigReservation]) -> None:
        self._all = dict(enumerate(reservations))
        self._at = {(each.container_index, each.device_index): n for n, each in self._all.items()}
        self._of_card: dict[str, deque[int]] = {}
        for number, each in self._all.items():
            self._of_card.setdefault(each.gpu_uuid, deque()).append(number)

    def take_at(self, slot: int, position: int, uuid: str) -> MigSlice | None:
        """The slice reserved under these indexes, if it is on this card."""
        number = self._at.get((slot, position))
        if number is None or self._all[number].gpu_uuid != uuid:
            return None
        return _slice_of(self._all.pop(number))

    def take_next(self, uuid: str) -> MigSlice | None:
        """The first slice of this card that is left."""
        numbers = self._of_card.get(uuid)
        while numbers:
            each = self._all.pop(numbers.popleft(), None)
            if each is not None:
                return _slice_of(each)
        return None

    def by_slot(self, cards: Set[str], last: int) -> dict[int, list[MigReservation]]:
        """What is left on cards other than these, by container slot, of which `last` is the last one."""
        found: dict[int, list[MigReservation]] = {}
        for each in self._all.values():
            if each.gpu_uuid not in cards:
                found.setdefault(min(each.container_index, last), []).append(each)
        return found


def _slice_of(each: MigReservation) -> MigSlice:
    return MigSlice(each.profile, each.placement.start, each.placement.size)


def _unheld(each: MigReservation) -> ContainerDevice:
    payload = MigSlice(each.profile, each.placement.start, each.placement.size, held=False)
    return ContainerDevice(each.gpu_uuid, keys.NVIDIA, 0, 0, payload=payload)


def _reservations(text: str) -> Sequence[MigReservation]:
    try:
        return _decoded(text)
    except MigReservationError:
        return ()


def _decoded(text: str) -> Sequence[MigReservation]:
    if len(text) > _MAX_RESERVATIONS:
        raise MigReservationError(f"longer than {_MAX_RESERVATIONS} characters")
    return decode_mig_reservations(text)


def _with_slices(device: ContainerDevice, slices: list[MigSlice] | None) -> ContainerDevice:
    if not slices:
        return device
    first, *others = slices
    payload = MigSlice(first.profile, first.start, first.size, tuple(others))
    return msgspec.structs.replace(device, payload=payload)


def _without_legacy_id(device: ContainerDevice) -> ContainerDevice:
    if not device.uuid.endswith("]"):
        return device
    return msgspec.structs.replace(device, uuid=_LEGACY_ID.sub("", device.uuid))
