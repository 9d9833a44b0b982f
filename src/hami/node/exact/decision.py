"""What one container is given, and what is refused: device-plugin.md §17.2 and §17.3. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from hami.node.exact.errors import RefusedError
from hami.node.plugin.checkpoint import Device
from hami.node.plugin.inventory import Card
from hami.node.plugin.pending import MAX_CORES_PERCENT
from hami.protocol.allocation import (
    Allocation,
    Slot,
    decode_allocation,
    encode_allocation,
    fit_slots,
    is_consumed,
)
from hami.protocol.errors import AllocationError
from hami.protocol.keys import (
    ALLOCATE_ERROR,
    ASSIGNED_NODE,
    BIND_ALLOCATING,
    BIND_PHASE,
    BIND_SUCCESS,
    NVIDIA,
    VENDOR_KEYS,
)
from hami.protocol.views import Container, Pod

ALLOCATED: Final = VENDOR_KEYS[NVIDIA].allocated
TO_ALLOCATE: Final = VENDOR_KEYS[NVIDIA].to_allocate


@dataclass(frozen=True, slots=True)
class Given:
    """One container and the devices that the scheduler gave it, in allocation order."""

    container: Container
    devices: Slot


def allocation_of(pod: Pod, node_name: str, scheduler_name: str) -> Allocation:
    """One slot per container of ``pod``, init containers first.

    A pod is bound and annotated in one step, so what is missing will not come. Raises
    :class:`RefusedError`.
    """
    text = pod.annotations.get(ALLOCATED)
    if text is None or pod.annotations.get(ASSIGNED_NODE) != node_name:
        raise RefusedError(
            f"pod {pod.namespace}/{pod.name} has no device allocation; "
            f"it must be scheduled by {scheduler_name}"
        )
    try:
        return fit_slots(decode_allocation(text), len(pod.slots))
    except AllocationError as error:
        raise RefusedError(f"device request not found: {ALLOCATED}: {error}", fails_pod=True) from error


def given_to(pod: Pod, allocation: Allocation, container: str, id_count: int) -> Given:
    """What ``container`` gets; kubelet has given it ``id_count`` ids. Raises :class:`RefusedError`."""
    slots = {item.name: Given(item, slot) for item, slot in zip(pod.slots, allocation, strict=True)}
    given = slots.get(container)
    if given is None:
        raise RefusedError(f"pod {pod.namespace}/{pod.name} has no container {container}", marks_pod=False)
    if len(given.devices) != id_count:
        raise RefusedError(
            f"device number not matched: the allocation of container {container} has {len(given.devices)}, "
            f"kubelet gave it {id_count}",
            fails_pod=True,
        )
    return given


def check_cards(given: Given, cards: Mapping[str, Card], offered: Collection[str], *, is_first: bool) -> None:
    """Every device must be a healthy card of this node (``cards``), and at the first answer one of those
    that are ``offered``. Raises :class:`RefusedError` naming it.
    """
    for device in given.devices:
        card = cards.get(device.uuid)
        where = f"the allocation of container {given.container.name} names card {device.uuid}"
        if card is None or (is_first and device.uuid not in offered):
            raise RefusedError(f"{where}, which this node does not have", fails_pod=True)
        if not card.healthy:
            raise RefusedError(f"{where}, which is unhealthy", fails_pod=True)
        if device.usedmem < 0 or not 0 <= device.usedcores <= MAX_CORES_PERCENT:
            raise RefusedError(
                f"{where} with {device.usedmem} MiB and {device.usedcores} % of its cores", fails_pod=True
            )


def check_first(container: str, first: tuple[Device, ...], now: tuple[Device, ...]) -> None:
    """The answer must be the one that was given first. Raises :class:`RefusedError` naming both."""
    if first != now:
        raise RefusedError(
            f"container {container} was given {_words(first)} first, its annotation now says {_words(now)}: "
            "somebody changed the annotation",
            marks_pod=False,
        )


def success_notes(pod: Pod, answered: Collection[str]) -> dict[str, str | None]:
    """Annotations that mark ``pod`` as served, empty if a container with devices was not ``answered`` yet or
    everything is marked already.
    """
    notes = pod.annotations
    try:
        slots = fit_slots(decode_allocation(notes.get(ALLOCATED, "")), len(pod.slots))
        left = decode_allocation(notes.get(TO_ALLOCATE, ""))
    except AllocationError:
        return {}
    wanted = {container.name for container, slot in zip(pod.slots, slots, strict=True) if slot}
    if not wanted or not wanted <= set(answered):
        return {}
    written: dict[str, str | None] = {}
    if notes.get(BIND_PHASE) != BIND_SUCCESS:
        written[BIND_PHASE] = BIND_SUCCESS
    if not is_consumed(left):
        written[TO_ALLOCATE] = encode_allocation(((),) * len(pod.slots))
    if ALLOCATE_ERROR in notes:
        written[ALLOCATE_ERROR] = None
    return written


def is_unmarked(pod: Pod) -> bool:
    """Whether ``pod`` still counts as being allocated."""
    return pod.annotations.get(BIND_PHASE) == BIND_ALLOCATING


def _words(devices: tuple[Device, ...]) -> str:
    return (
        " and ".join(
            f"{device.uuid} with {device.memory_mib} MiB and {device.cores_percent} %" for device in devices
        )
        or "nothing"
    )


def device_counts(pod: Pod) -> dict[str, int]:
    """Devices per container name by the pod's allocation; empty where that cannot be read."""
    try:
        slots = fit_slots(decode_allocation(pod.annotations.get(ALLOCATED, "")), len(pod.slots))
    except AllocationError:
        return {}
    return {container.name: len(slot) for container, slot in zip(pod.slots, slots, strict=True)}
