"""Use of cards: the standard algebra, and the effective use of a pod (scheduler.md §6.5).

Per card: a container's value is the sum of its devices; a pod holds the sum of its apps and sidecars, and
while it starts, for each ordinary init container that one beside the sidecars declared before it. The pod
is charged the largest of these until its init containers are finished, the steady sum afterwards.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from hami.vendors.types import (
    Allocation,
    ContainerDevice,
    PodShape,
    SlotKind,
    Usage,
    UsageAlgebra,
    VendorProfile,
)

_ZERO: Final = Usage()


class StandardAlgebra:
    """Sums of slots, MiB and cores; one after the other takes the largest of each."""

    zero = _ZERO

    def of(self, device: ContainerDevice) -> Usage:
        return Usage(1, device.usedmem, device.usedcores)

    def add(self, a: Usage, b: Usage) -> Usage:
        return Usage(a.slots + b.slots, a.mem + b.mem, a.cores + b.cores)

    def remove(self, total: Usage, b: Usage) -> Usage:
        return Usage(total.slots - b.slots, total.mem - b.mem, total.cores - b.cores)

    def combine(self, a: Usage, b: Usage) -> Usage:
        return Usage(max(a.slots, b.slots), max(a.mem, b.mem), max(a.cores, b.cores))


STANDARD: Final[UsageAlgebra] = StandardAlgebra()


def effective(
    p: VendorProfile, pod: PodShape, allocation: Allocation, inits_finished: bool
) -> dict[str, Usage]:
    """What the pod holds of each card (by id). Slots beyond the shape count as app containers."""
    if SlotKind.INIT not in pod.kinds:
        used: dict[str, Usage] = {}
        for slot in allocation:
            _add_devices(p.algebra, used, slot)
        return used
    held = Held(p, pod, inits_finished)
    for slot in allocation:
        held.append(slot)
    return held.total()


class Held:
    """The effective use of a pod, slot by slot; `total_with` asks what one more slot would make of it."""

    __slots__ = ("_algebra", "_inits_finished", "_kinds", "_peak", "_position", "_steady")

    def __init__(self, p: VendorProfile, pod: PodShape, inits_finished: bool) -> None:
        self._algebra = p.algebra
        self._kinds = pod.kinds
        self._inits_finished = inits_finished
        self._position = 0
        self._steady: dict[str, Usage] = {}  # sidecars so far, and in the end the apps too
        self._peak: dict[str, Usage] = {}  # of the init containers so far

    def append(self, slot: Sequence[ContainerDevice]) -> None:
        """The next container's devices."""
        position = self._position
        self._position += 1
        if not slot:
            return
        if position >= len(self._kinds) or self._kinds[position] is not SlotKind.INIT:
            _add_devices(self._algebra, self._steady, slot)
        elif not self._inits_finished:
            start = dict(self._steady)
            _add_devices(self._algebra, start, slot)
            _combine_into(self._algebra, self._peak, start)

    def total(self) -> dict[str, Usage]:
        """The use of each card (by id)."""
        peak = dict(self._peak)
        _combine_into(self._algebra, peak, self._steady)
        return peak

    def total_with(self, slot: Sequence[ContainerDevice]) -> dict[str, Usage]:
        """`total` as it would be with this slot as the next one."""
        position, steady, peak = self._position, self._steady, self._peak
        self._steady, self._peak = dict(steady), dict(peak)
        try:
            self.append(slot)
            return self.total()
        finally:
            self._position, self._steady, self._peak = position, steady, peak


def container_usage(p: VendorProfile, slot: Iterable[ContainerDevice]) -> dict[str, Usage]:
    """What one container holds of each card (by id)."""
    used: dict[str, Usage] = {}
    _add_devices(p.algebra, used, slot)
    return used


def init_base(p: VendorProfile, pod: PodShape, allocation: Allocation, slot: int) -> dict[str, Usage]:
    """What the pod itself holds of each card while the container in `slot` is fitted, from `allocation` so
    far.

    An ordinary init container runs beside the sidecars declared before it; sidecars and apps beside all
    sidecars and apps before them.
    """
    held: dict[str, Usage] = {}
    for position, devices in enumerate(allocation[:slot]):
        if pod.kinds[position] is not SlotKind.INIT:
            _add_devices(p.algebra, held, devices)
    return held


def quota_use(
    p: VendorProfile, usage: Mapping[str, Usage], total_cores: Mapping[str, int]
) -> tuple[int, int]:
    """(MiB, cores) that uses of cards (by id) charge to a namespace quota; `total_cores` by card id."""
    convert = p.hooks.quota_use
    mem = cores = 0
    for card_id, used in usage.items():
        if convert is None:
            mem += used.mem
            cores += used.cores
        else:
            part = convert(used, total_cores.get(card_id, 0))
            mem += part[0]
            cores += part[1]
    return mem, cores


def _add_devices(algebra: UsageAlgebra, used: dict[str, Usage], devices: Iterable[ContainerDevice]) -> None:
    for device in devices:
        before = used.get(device.uuid)
        value = algebra.of(device)
        used[device.uuid] = value if before is None else algebra.add(before, value)


def _combine_into(algebra: UsageAlgebra, peak: dict[str, Usage], part: Mapping[str, Usage]) -> None:
    for card_id, value in part.items():
        before = peak.get(card_id)
        peak[card_id] = value if before is None else algebra.combine(before, value)
