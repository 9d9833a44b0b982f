"""Which pod and which containers an Allocate call is about, and what is left afterwards. Pure (protocol.md
§8.1).

The caller reads the node's lock annotation and the pods bound to the node; every decision is made here:
:func:`find_pod`, then :func:`take` with the numbers of device ids that kubelet sent, then the texts to
write back.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hami.node.errors import AllocateError, NoBindingPodError
from hami.protocol.allocation import (
    Allocation,
    ContainerDevice,
    Slot,
    decode_allocation,
    encode_allocation,
    fit_slots,
    is_consumed,
    pop_first,
)
from hami.protocol.errors import AllocationError, LockFormatError
from hami.protocol.keys import (
    ALLOCATE_ERROR,
    ASSIGNED_NODE,
    BIND_ALLOCATING,
    BIND_FAILED,
    BIND_PHASE,
    BIND_SUCCESS,
    BIND_TIME,
    NVIDIA,
    VENDOR_KEYS,
)
from hami.protocol.lock import DEFAULT_LOCK_TIMEOUT, LockOwner, holder_is_done, parse_lock
from hami.protocol.timestamps import CLOCK_SKEW_SECONDS, is_skewed
from hami.protocol.views import Container, Pod

TO_ALLOCATE: Final = VENDOR_KEYS[NVIDIA].to_allocate
MAX_ERROR_CHARS: Final = 256
MAX_CORES_PERCENT: Final = 10_000
"""100 times the largest core scaling."""
_CARD: Final = re.compile(r"[\w./\[\]-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Popped:
    """One container's part of an allocation: its position among the pod's slots, itself, and its devices."""

    position: int
    container: Container
    devices: Slot


@dataclass(frozen=True, slots=True)
class Taken:
    """What one Allocate call consumes: the containers in call order, and the allocation that is left."""

    containers: tuple[Popped, ...]
    left: Allocation

    @property
    def annotations(self) -> dict[str, str]:
        """What to set on the pod, in one write: the emptied slots, and success once nothing is left."""
        written = {TO_ALLOCATE: encode_allocation(self.left)}
        return written | {BIND_PHASE: BIND_SUCCESS} if self.is_last else written

    @property
    def is_last(self) -> bool:
        """Whether nothing is left, so that the node lock is to be released."""
        return is_consumed(self.left)


def find_pod(
    node_name: str,
    lock: str | None,
    pods: Iterable[Pod],
    now: float,
    wanted: Sequence[int] = (),
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT,
) -> Pod:
    """The pod that kubelet is asking for.

    ``pods`` are those bound to the node, ``lock`` is the node's lock annotation (None: absent), ``now``
    Unix seconds, ``wanted`` the numbers of device ids in the call (empty: not known). A good lock names
    the pod. Otherwise the pod with the oldest bind time whose next containers match ``wanted``. Raises
    :class:`NoBindingPodError`.
    """
    here = [pod for pod in pods if pod.node_name == node_name]
    owner = _lock_owner(lock, now, lock_timeout_s)
    holder = next(
        (
            pod
            for pod in here
            if owner is not None and (pod.namespace, pod.name) == (owner.namespace, owner.name)
        ),
        None,
    )
    if holder is not None and not holder_is_done(holder, node_name):
        return holder
    candidates = [pod for pod in here if _waits(pod, node_name)]
    waiting = [pod for pod in candidates if _matches(pod, wanted)]
    if not waiting:
        named = next((pod for pod in (holder, *candidates) if pod is not None and _is_exhausted(pod)), None)
        raise NoBindingPodError(
            f"no binding pod found on node {node_name}", f"{named.namespace}/{named.name}" if named else ""
        )
    return min(waiting, key=lambda pod: (_bind_time(pod, now), pod.namespace, pod.name))


def lock_is_ahead(lock: str | None, now: float) -> bool:
    """Whether a node lock is dated more than 5 min ahead of our clock; it is then treated as taken now."""
    try:
        return lock is not None and is_skewed(parse_lock(lock).time, now)
    except LockFormatError:
        return False


def take(pod: Pod, id_counts: Sequence[int]) -> Taken:
    """Pop one non-empty slot of ``pod`` per container request; ``id_counts`` are the requests' numbers of
    ids.

    Raises :class:`AllocateError` with the text users search for; nothing is half taken.
    """
    left = remaining(pod)
    slots = pod.slots
    popped: list[Popped] = []
    for count in id_counts:
        if count <= 0:
            raise AllocateError("a container request without device ids cannot be allocated")
        try:
            position, devices, left = pop_first(left)
        except AllocationError as error:
            raise AllocateError("no pending device allocation found") from error
        if position >= len(slots):
            raise AllocateError(f"container index {position} out of range [0, {len(slots)})")
        if len(devices) != count:
            raise AllocateError(
                f"device number not matched: the allocation of container {slots[position].name} "
                f"has {len(devices)}, kubelet asks for {count}"
            )
        for device in devices:
            _check_device(device, slots[position].name)
        popped.append(Popped(position, slots[position], devices))
    return Taken(tuple(popped), _one_slot_per_container(left, len(slots)))


def remaining(pod: Pod) -> Allocation:
    """What is left to allocate for ``pod``; :class:`AllocateError` if the annotation is absent or broken."""
    text = pod.annotations.get(TO_ALLOCATE)
    if text is None:
        raise AllocateError(f"device request not found: the pod has no annotation {TO_ALLOCATE}")
    try:
        return decode_allocation(text)
    except AllocationError as error:
        raise AllocateError(f"device request not found: {TO_ALLOCATE}: {error}") from error


def next_count(pod: Pod) -> int:
    """Number of devices of the next container, 0 when nothing is left; errors as :func:`remaining`."""
    return next((len(slot) for slot in remaining(pod) if slot), 0)


def failure(reason: str) -> dict[str, str]:
    """Annotations to set on the pod of a failed call."""
    return {BIND_PHASE: BIND_FAILED, ALLOCATE_ERROR: reason[:MAX_ERROR_CHARS]}


def _check_device(device: ContainerDevice, container: str) -> None:
    """What goes into files and variables that have no place for anything else."""
    is_sound = device.usedmem >= 0 and 0 <= device.usedcores <= MAX_CORES_PERCENT
    if not is_sound or not _CARD.fullmatch(device.uuid):
        raise AllocateError(
            f"the allocation of container {container} names card {device.uuid[:64]!r} with "
            f"{device.usedmem} MiB and {device.usedcores} % of its cores: no scheduler writes that"
        )


def _one_slot_per_container(left: Allocation, containers: int) -> Allocation:
    try:
        return fit_slots(left, containers)
    except AllocationError as error:
        raise AllocateError(
            f"container index {len(left) - 1} out of range [0, {containers}): {error}"
        ) from error


def _lock_owner(lock: str | None, now: float, timeout_s: float) -> LockOwner | None:
    if lock is None:
        return None
    try:
        value = parse_lock(lock)
    except LockFormatError:
        return None
    taken = now if value.time > now + CLOCK_SKEW_SECONDS else value.time
    return value.owner if now - taken <= timeout_s else None


def _waits(pod: Pod, node_name: str) -> bool:
    notes = pod.annotations
    return (
        pod.phase == "Pending"
        and BIND_TIME in notes
        and notes.get(BIND_PHASE) in (BIND_ALLOCATING, BIND_SUCCESS)
        and notes.get(ASSIGNED_NODE) == node_name
    )


def _is_exhausted(pod: Pod) -> bool:
    try:
        return is_consumed(remaining(pod))
    except AllocateError:
        return False


def _matches(pod: Pod, wanted: Sequence[int]) -> bool:
    try:
        entries = [len(slot) for slot in remaining(pod) if slot]
    except AllocateError:
        return False
    if not entries:
        return False
    return entries[: len(wanted)] == list(wanted)


def _bind_time(pod: Pod, now: float) -> float:
    text = pod.annotations.get(BIND_TIME, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 19):
        return now
    seconds = float(text)
    return now if seconds > now + CLOCK_SKEW_SECONDS else seconds
