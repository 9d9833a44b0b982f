"""What the monitor keeps of a pod. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from hami.protocol.allocation import Slot, decode_allocation
from hami.protocol.errors import AllocationError
from hami.protocol.keys import NVIDIA, VENDOR_KEYS
from hami.protocol.views import Pod, decode


@dataclass(frozen=True, slots=True)
class PodInfo:
    """A pod of this node: its containers in slot order with the devices that the scheduler gave them."""

    uid: str
    namespace: str
    name: str
    finished: bool
    containers: tuple[tuple[str, Slot], ...]

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
    return PodInfo(pod.uid, pod.namespace, pod.name, pod.is_finished, tuple(zip(names, padded, strict=False)))
