"""Finds pod and container of a PreStartContainer call: kubelet's lists, the watch, at most a GET."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from hami.kube.errors import KubeError, NotFound
from hami.node.cluster import Cluster
from hami.node.errors import UnsafePathError
from hami.node.exact.decision import device_counts
from hami.node.exact.errors import KubeletStateError, NotYetError
from hami.node.exact.holders import (
    Holding,
    Recorded,
    container_to_start,
    holding_of,
    recorded_of,
    sharing_init_containers,
)
from hami.node.exact.kubelet_state import MAX_BYTES, decode_kubelet_state
from hami.node.exact.pods import PodSource
from hami.node.files import read_regular
from hami.protocol.errors import ProtocolError
from hami.protocol.views import Pod

SEARCH_LIMIT_S: Final = 2.0
_FIRST_DELAY_S: Final = 0.05
_MAX_DELAY_S: Final = 0.4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Owner:
    """The container that kubelet is about to start."""

    pod: Pod
    container: str


class HoldingSource(Protocol):
    """Kubelet's PodResources API."""

    async def holdings(self, resource: str) -> Sequence[Holding]:
        """Who holds devices of ``resource`` now; raises :class:`PodResourcesError`."""
        ...


class Owners:
    """``state_file`` is kubelet's device checkpoint."""

    def __init__(
        self,
        cluster: Cluster,
        kubelet: HoldingSource,
        state_file: str,
        pods: PodSource,
        *,
        limit_s: float = SEARCH_LIMIT_S,
    ) -> None:
        self._cluster = cluster
        self._kubelet = kubelet
        self._state_file = state_file
        self._pods = pods
        self._limit_s = limit_s
        self._state_told = ""

    async def find(
        self, device_ids: Collection[str], resource: str, answered: Callable[[Pod], Mapping[str, int]]
    ) -> Owner:
        """The container that holds exactly ``device_ids`` and starts now; tried for two seconds.

        Raises :class:`NotYetError`. ``answered`` tells which containers of a pod got an answer, and when.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limit_s
        delay = _FIRST_DELAY_S
        fresh = False
        while True:
            try:
                return await self._once(device_ids, resource, answered, fresh=fresh)
            except NotYetError as error:
                if loop.time() + delay > deadline:
                    raise
                log.debug("exact.waits", extra={"cause": str(error)})
            await asyncio.sleep(delay)
            delay = min(2 * delay, _MAX_DELAY_S)
            fresh = True

    async def held(self, resource: str) -> list[frozenset[str]]:
        """The sets of ids that containers hold or will hold: all that kubelet lists, and those of init
        containers of pods that are still starting. Raises :class:`PodResourcesError`.
        """
        holdings = await self._kubelet.holdings(resource)
        records = await self._records(resource)
        starting = {pod.uid for pod in self._pods.all() if pod.phase in ("", "Pending")}
        return [holding.device_ids for holding in holdings] + [
            record.device_ids for record in records or () if record.pod_uid in starting
        ]

    async def _once(
        self,
        device_ids: Collection[str],
        resource: str,
        answered: Callable[[Pod], Mapping[str, int]],
        *,
        fresh: bool,
    ) -> Owner:
        listed = holding_of(await self._kubelet.holdings(resource), device_ids)
        records = await self._records(resource)
        same = None if records is None else recorded_of(records, device_ids)
        if listed is not None:
            # Kubelet lists names; without its record of UIDs the watch may still show the pod before.
            pod = await self._named(listed, same, fresh=fresh or records is None)
        else:
            pod = await self._recorded(same or ())
        inits = (
            _init_containers_with(pod, len(device_ids))
            if same is None
            else sharing_init_containers(pod, same)
        )
        if inits:
            pod = await self._fresh(pod)
        container = container_to_start(pod, inits, listed.container if listed else "", answered(pod))
        return Owner(pod, container)

    async def _named(self, listed: Holding, same: Sequence[Recorded] | None, *, fresh: bool) -> Pod:
        """The pod of a listed container: of several with one name after the other, the one that kubelet has
        on record for these ids. The watch's copy serves unless it is of another pod, or did not do before.
        """
        uids = {record.pod_uid for record in same or () if record.container == listed.container}
        where = f"{listed.namespace}/{listed.pod}"
        seen = self._pods.seen(listed.namespace, listed.pod)
        usable = seen is not None and not seen.is_finished and (not uids or seen.uid in uids)
        if seen is not None and usable and not fresh:
            return seen
        try:
            pod = await self._cluster.pod(listed.namespace, listed.pod)
        except NotFound as error:
            raise NotYetError(f"pod {where}, which kubelet lists, is not known to the API server") from error
        except (KubeError, ProtocolError) as error:
            if seen is not None and usable:
                return seen
            raise NotYetError(f"cannot read pod {where}: {error}") from error
        if uids and pod.uid not in uids:
            raise NotYetError(f"pod {where} is a new one, kubelet still starts the one before")
        return pod

    async def _recorded(self, same: Sequence[Recorded]) -> Pod:
        """The pod of an init container, which only kubelet's checkpoint names, by its UID."""
        uids = {record.pod_uid for record in same}
        if not uids:
            raise NotYetError("kubelet lists no container with these devices")
        for pod in self._pods.all():
            if pod.uid in uids and not pod.is_finished:
                return await self._fresh(pod)
        try:
            listed = await self._cluster.pods()
        except (KubeError, ProtocolError) as error:
            raise NotYetError(f"cannot list the pods of this node: {error}") from error
        for pod in listed:
            if pod.uid in uids and not pod.is_finished:
                return pod
        raise NotYetError("no pod of this node has these devices")

    async def _fresh(self, pod: Pod) -> Pod:
        try:
            read = await self._cluster.pod(pod.namespace, pod.name)
        except (KubeError, ProtocolError):
            return pod
        return read if read.uid == pod.uid else pod

    async def _records(self, resource: str) -> tuple[Recorded, ...] | None:
        """Kubelet's checkpoint; None, logged, where it cannot be read."""
        try:
            content = await asyncio.to_thread(read_regular, self._state_file, MAX_BYTES)
            return decode_kubelet_state(content, resource)
        except (OSError, UnsafePathError, KubeletStateError) as error:
            if str(error) != self._state_told:
                self._state_told = str(error)
                log.warning("kubelet_state.unreadable", extra={"cause": str(error)})
            return None


def _init_containers_with(pod: Pod, count: int) -> tuple[str, ...]:
    """Without kubelet's checkpoint: the ordinary init containers with as many devices."""
    counts = device_counts(pod)
    return tuple(
        item.name for item in pod.init_containers if not item.is_sidecar and counts.get(item.name) == count
    )
