"""From the API server's objects into `ClusterState`: the informers and what their events cause beside it."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable

from hami.kube.bugs import BugLog
from hami.kube.client import Client
from hami.kube.errors import KubeError
from hami.kube.informer import Informer
from hami.kube.operations import Selection, list_pages, pods_of_node
from hami.kube.resources import LEASES, NODES, PODS, RESOURCE_QUOTAS
from hami.protocol.keys import NODE_LOCK
from hami.protocol.views import Lease, Metadata, Node, ObjectView, Pod, ResourceQuota, decode
from hami.scheduler.core.answers import NodeOutcome, PodOutcome
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.handshakes import MetadataWriter
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.node_locks import NodeLocks
from hami.scheduler.edge.pending import PendingPods

_TIMER_CAP_S = 1.0
_NODES_PER_STEP = 10

log = logging.getLogger(__name__)


class PodEvents:
    """Pods into the state."""

    def __init__(
        self,
        state: ClusterState,
        leadership: Leadership,
        events: SchedulerEvents,
        writer: MetadataWriter,
        pending: PendingPods,
    ) -> None:
        self._state = state
        self._leadership = leadership
        self._events = events
        self._writer = writer
        self._pending = pending

    def on_add(self, pod: Pod) -> None:
        self._take(pod, self._state.upsert_pod(pod))
        if pod.node_name or pod.is_finished:
            self._pending.forget(pod.uid)

    def on_update(self, _old: Pod, pod: Pod) -> None:
        self.on_add(pod)

    def on_delete(self, pod: Pod) -> None:
        self._pending.forget(pod.uid)
        self._take(pod, self._state.delete_pod(pod.uid))

    def _take(self, pod: Pod, outcome: PodOutcome) -> None:
        if not (outcome.notices or outcome.missing_labels) or not self._leadership.is_leader():
            return
        for notice in outcome.notices:
            self._events.notice(notice)
        if outcome.missing_labels:
            self._writer.want(
                PODS, pod.name, namespace=pod.namespace, uid=pod.uid, labels=outcome.missing_labels
            )


class NodeEvents:
    """Nodes into the state, and the handshakes that follow."""

    def __init__(
        self,
        state: ClusterState,
        leadership: Leadership,
        events: SchedulerEvents,
        writer: MetadataWriter,
        locks: NodeLocks,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._leadership = leadership
        self._events = events
        self._writer = writer
        self._locks = locks
        self._clock = clock

    def on_add(self, node: Node) -> None:
        self._locks.saw(node.name, node.annotations.get(NODE_LOCK))
        self.take(self._state.upsert_node(node, self._clock()))

    def on_update(self, _old: Node, node: Node) -> None:
        self.on_add(node)

    def on_delete(self, node: Node) -> None:
        self._locks.forget(node.name)
        for reservation in self._state.delete_node(node.name):
            log.info("reservation.node_gone", extra={"pod": f"{reservation.namespace}/{reservation.name}"})

    def take(self, outcome: NodeOutcome) -> None:
        """Write the handshakes and raise the events of an outcome, as the leader."""
        for notice in outcome.notices:
            log.warning(
                "node.notice", extra={"node": notice.name, "reason": notice.reason, "text": notice.message}
            )
        if not self._leadership.is_leader():
            return
        for name, wanted in outcome.patches:
            self._writer.want(NODES, name, annotations=wanted)
        for notice in outcome.notices:
            self._events.notice(notice)

    async def leading(self) -> None:
        """This replica has just become the leader: write what the one before may have left open."""
        for position, name in enumerate(self._state.seen_names(), 1):
            self.take(self._state.handshake_writes(name, self._clock()))
            if position % _NODES_PER_STEP == 0:
                await asyncio.sleep(0)


class QuotaEvents:
    """Quotas into the state."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state

    def on_add(self, quota: ResourceQuota) -> None:
        self._state.upsert_quota(quota)

    def on_update(self, _old: ResourceQuota, quota: ResourceQuota) -> None:
        self._state.upsert_quota(quota)

    def on_delete(self, quota: ResourceQuota) -> None:
        self._state.delete_quota(quota.namespace, quota.name)


class Informers:
    """Pods, nodes, quotas, and the Lease when electing."""

    def __init__(
        self,
        client: Client,
        leadership: Leadership,
        pods: PodEvents,
        nodes: NodeEvents,
        quotas: QuotaEvents,
        lease: tuple[str, str] | None,
        bugs: BugLog | None = None,
    ) -> None:
        self._client = client
        self.pods = Informer(
            client, PODS, lambda raw: decode(raw, Pod), pods, keep=_slim_pod, identity=_metadata, bugs=bugs
        )
        self.nodes = Informer(
            client,
            NODES,
            lambda raw: decode(raw, Node),
            nodes,
            keep=_slim_node,
            identity=_metadata,
            bugs=bugs,
        )
        self.quotas = Informer(
            client, RESOURCE_QUOTAS, lambda raw: decode(raw, ResourceQuota), quotas, bugs=bugs
        )
        self.lease: Informer[Lease] | None = None
        if lease is not None:
            namespace, name = lease
            selection = Selection(namespace, field_selector=f"metadata.name={name}")
            self.lease = Informer(
                client, LEASES, lambda raw: decode(raw, Lease), leadership, selection, bugs=bugs
            )

    async def run(self) -> None:
        """Follow all kinds until cancelled. Nodes and quotas are listed before pods: usage needs the
        cards."""
        async with asyncio.TaskGroup() as group:
            if self.lease is not None:
                group.create_task(self.lease.run())
            group.create_task(self.nodes.run())
            group.create_task(self.quotas.run())
            await self.nodes.synced.wait()
            await self.quotas.synced.wait()
            group.create_task(self.pods.run())

    async def synced(self) -> None:
        """Wait until every kind was listed once."""
        for informer in (self.nodes, self.quotas, self.pods):
            await informer.synced.wait()

    async def read_pods_of(self, node: str) -> None:
        """Take over the pods bound to a node as they are now, ahead of the watch; raises ``KubeError``."""
        async for page in list_pages(self._client, PODS, pods_of_node(node)):
            self.pods.absorb(page)

    async def pass_fresh_reads(self) -> None:
        """Return once everything stored before this call has been delivered; raises ``KubeError``."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.nodes.pass_fresh_read())
                group.create_task(self.pods.pass_fresh_read())
                group.create_task(self.quotas.pass_fresh_read())
        except* KubeError as errors:
            raise KubeError(str(errors.exceptions[0])) from errors


async def run_timers(
    state: ClusterState,
    nodes: NodeEvents,
    events: SchedulerEvents,
    leadership: Leadership,
    timeout_text: str,
    clock: Callable[[], float] = time.time,
) -> None:
    """Handshake timers and expiring reservations, at most a second late; until cancelled."""
    while True:
        now = clock()
        nodes.take(state.tick(now))
        for reservation in state.expire(now):
            log.info("reservation.expired", extra={"pod": f"{reservation.namespace}/{reservation.name}"})
            if leadership.is_leader():
                events.reservation_expired(reservation, timeout_text)
        due = state.next_timer()
        wait = _TIMER_CAP_S if due is None else min(_TIMER_CAP_S, max(0.1, due - clock()))
        await asyncio.sleep(wait)


def _metadata(obj: ObjectView) -> Metadata:
    return obj.metadata


def _slim_pod(pod: Pod) -> Pod:
    return Pod(metadata=_slim(pod.metadata))


def _slim_node(node: Node) -> Node:
    return Node(metadata=_slim(node.metadata))


def _slim(metadata: Metadata) -> Metadata:
    return Metadata(name=metadata.name, namespace=sys.intern(metadata.namespace), uid=metadata.uid)


__all__ = ["Informers", "NodeEvents", "PodEvents", "QuotaEvents", "run_timers"]
