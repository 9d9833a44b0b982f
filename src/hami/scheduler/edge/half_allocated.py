"""Pods whose node plugin gives the node's lock back before their last container is allocated (ascend.md §9).

Such a plugin finds the later containers by their pod's phase and node alone, and would take the next pod for
this one. So the next pod with that vendor's cards waits until the to-allocate annotation has no devices left.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from hami.kube.client import Client
from hami.kube.errors import KubeError, NotFound
from hami.kube.resources import PODS
from hami.protocol.allocation import decode_allocation
from hami.protocol.errors import AllocationError
from hami.protocol.views import Pod
from hami.scheduler.core.answers import Reservation
from hami.vendors.types import VendorProfile

WAIT_S: Final = 30.0
"""A pod that is not finished by then no longer keeps others waiting."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """A pod of several containers with devices, and the annotations that still name the open ones."""

    uid: str
    namespace: str
    name: str
    keys: tuple[str, ...]
    until: float


class HalfAllocated:
    """The last such pod of each node; what another replica bound is not known here."""

    def __init__(
        self,
        client: Client,
        profiles: Mapping[str, VendorProfile],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._clock = clock
        self._last: dict[str, _Bound] = {}
        self.use(profiles)

    def use(self, profiles: Mapping[str, VendorProfile]) -> None:
        """Go by these vendors' rules from now on."""
        self._keys = {
            word: profile.rules.to_allocate
            for word, profile in profiles.items()
            if profile.rules.lock_covers == "container" and profile.rules.to_allocate
        }

    def binding(self, reservation: Reservation) -> None:
        """The pod of this reservation is bound to its node, or is about to be: the plugin may begin before we
        hear of it."""
        slots = [
            key for word, key in self._keys.items() for slot in reservation.allocations.get(word, ()) if slot
        ]
        if len(slots) > 1:
            now = self._clock()
            self._last = {node: last for node, last in self._last.items() if now < last.until}
            until = now + WAIT_S
            self._last[reservation.node] = _Bound(
                reservation.uid, reservation.namespace, reservation.name, tuple(dict.fromkeys(slots)), until
            )

    def refused(self, reservation: Reservation) -> None:
        """The pod of this reservation will not be bound."""
        last = self._last.get(reservation.node)
        if last is not None and last.uid == reservation.uid:
            del self._last[reservation.node]

    async def on_node(self, reservation: Reservation, timeout_s: float) -> str:
        """Name of the pod that this one has to wait for on its node, or "". It is read once, for at most
        ``timeout_s`` seconds."""
        last = self._last.get(reservation.node)
        if last is None or last.uid == reservation.uid:
            return ""
        if not any(word in self._keys and any(slots) for word, slots in reservation.allocations.items()):
            return ""
        if self._clock() >= last.until or await self._is_done(last, timeout_s):
            if self._last.get(reservation.node) is last:
                del self._last[reservation.node]
            return ""
        return f"{last.namespace}/{last.name}"

    async def _is_done(self, last: _Bound, timeout_s: float) -> bool:
        try:
            pod = await self._client.get(PODS, last.name, Pod, namespace=last.namespace, timeout_s=timeout_s)
        except NotFound:
            return True
        except KubeError:
            return False
        try:
            left = [decode_allocation(pod.annotations.get(key, "")) for key in last.keys]
        except AllocationError:
            return True
        return pod.uid != last.uid or pod.is_finished or not any(any(slots) for slots in left)
