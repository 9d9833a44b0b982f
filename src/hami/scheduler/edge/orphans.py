"""Reservations of pods that went before the watch ever showed them.

A deletion drops a pod's reservation, but only a pod that the informer knows can be reported as deleted. One
that was created, reserved for and deleted while the watch was interrupted is in no event and in no new list.
So reservations of pods that the informer does not know are asked about.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from hami.kube.client import Client
from hami.kube.errors import NotFound
from hami.kube.resources import PODS
from hami.protocol.errors import HamiError
from hami.protocol.views import Pod
from hami.scheduler.core.answers import Reservation, ReservationPhase
from hami.scheduler.core.state import ClusterState

_PERIOD_S = 5.0
_READS_PER_PASS = 50
_SETTLED = (ReservationPhase.RESERVED, ReservationPhase.BOUND)

log = logging.getLogger(__name__)


class KnownPods(Protocol):
    """What the watch has shown."""

    def get(self, name: str, namespace: str = "") -> Pod | None:
        """The pod of that name."""
        ...


class Orphans:
    """Drops reservations whose pod is gone. A pod the watch has not shown in two passes is read live.

    Bindings under way or of unknown outcome are left to whoever sends them.
    """

    def __init__(self, client: Client, state: ClusterState, pods: KnownPods) -> None:
        self._client = client
        self._state = state
        self._pods = pods
        self._unseen: frozenset[str] = frozenset()

    async def run(self) -> None:
        """A pass every five seconds; until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self.sweep()

    async def sweep(self) -> int:
        """One pass; the number of reservations dropped. At most 50 pods are read."""
        unseen = [one for one in self._state.reservations() if one.phase in _SETTLED and not self._shown(one)]
        again = [one for one in unseen if one.uid in self._unseen]
        self._unseen = frozenset(one.uid for one in unseen)
        dropped = 0
        for reservation in again[:_READS_PER_PASS]:
            try:
                gone = await self._is_gone(reservation)
            except HamiError as error:
                log.info("reservation.not_checked", extra={"pod": _name(reservation), "reason": str(error)})
                continue
            current = self._state.reservation(reservation.uid)
            if gone and current is not None and current.phase in _SETTLED:
                self._state.delete_pod(reservation.uid)
                dropped += 1
                log.info("reservation.orphaned", extra={"pod": _name(reservation), "node": reservation.node})
        return dropped

    def _shown(self, reservation: Reservation) -> bool:
        pod = self._pods.get(reservation.name, reservation.namespace)
        return pod is not None and pod.uid == reservation.uid

    async def _is_gone(self, reservation: Reservation) -> bool:
        """Raises ``KubeError`` or the decoder's error when that cannot be said."""
        try:
            pod = await self._client.get(PODS, reservation.name, Pod, namespace=reservation.namespace)
        except NotFound:
            return True
        return pod.uid != reservation.uid or pod.is_finished


def _name(reservation: Reservation) -> str:
    return f"{reservation.namespace}/{reservation.name}"
