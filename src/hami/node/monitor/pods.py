"""What the monitor keeps of a pod. Pure."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from hami.protocol.allocation import Slot, decode_allocation
from hami.protocol.errors import AllocationError, MigReservationError
from hami.protocol.keys import MIG_ALLOCATIONS, NVIDIA, VENDOR_KEYS
from hami.protocol.mig import MigReservation, decode_mig_reservations
from hami.protocol.views import Pod, decode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PodInfo:
    """A pod of this node: its containers in slot order with the devices that the scheduler gave them."""

    uid: str
    namespace: str
    name: str
    finished: bool
    containers: tuple[tuple[str, Slot], ...]
    mig: tuple[tuple[str, MigReservation], ...] = ()
    """MIG instances that exist, with the container that has each."""

    def devices(self, container: str) -> Slot | None:
        """The devices of a container by name, None where the pod has no such container."""
        return next((slot for name, slot in self.containers if name == container), None)


def pod_info(raw: msgspec.Raw) -> PodInfo:
    """Reduce one pod; an unreadable allocation counts as none. Raises ``ObjectError``."""
    pod = decode(raw, Pod)
    names = [container.name for container in pod.slots]
    try:
        slots = decode_allocation(pod.annotations.get(VENDOR_KEYS[NVIDIA].allocated, ""))
    except AllocationError:
        slots = ()
    padded = (*slots, *((),) * len(names))
    containers = tuple(zip(names, padded, strict=False))
    return PodInfo(pod.uid, pod.namespace, pod.name, pod.is_finished, containers, _instances(pod, names))


def _instances(pod: Pod, names: list[str]) -> tuple[tuple[str, MigReservation], ...]:
    """Init containers count first; what has no instance yet or names no container is left out."""
    where = f"{pod.namespace}/{pod.name}"
    try:
        reservations = decode_mig_reservations(pod.annotations.get(MIG_ALLOCATIONS, ""))
    except MigReservationError as error:
        log.warning("mig.unreadable", extra={"pod": where, "cause": str(error)})
        return ()
    found = []
    for item in reservations:
        if item.container_index >= len(names):
            log.warning("mig.no_container", extra={"pod": where, "index": item.container_index})
        elif item.realised:
            found.append((names[item.container_index], item))
    return tuple(found)
