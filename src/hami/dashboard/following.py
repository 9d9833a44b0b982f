"""From the API server's objects into the store, and how well that goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from hami.dashboard.objects import NodeEntry, PodParsed
from hami.dashboard.shapes import Source
from hami.dashboard.store import Store
from hami.kube.bugs import BugLog
from hami.kube.client import Client
from hami.kube.errors import KubeError
from hami.kube.informer import Informer
from hami.kube.operations import fresh_version
from hami.kube.resources import NODES, PODS, RESOURCE_QUOTAS
from hami.protocol.views import Metadata, Pod, ResourceQuota, decode

PROBE_EVERY_S: Final = 15.0
TICK_EVERY_S: Final = 1.0
_NO_POD: Final = Pod()


class _Nodes:
    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    def on_add(self, node: NodeEntry, /) -> None:
        self._store.put_node(node, self._clock())

    def on_update(self, _old: NodeEntry, node: NodeEntry, /) -> None:
        self._store.put_node(node, self._clock())

    def on_delete(self, node: NodeEntry, /) -> None:
        self._store.drop_node(node.metadata.name)


class _Pods:
    def __init__(self, store: Store) -> None:
        self._store = store

    def on_add(self, pod: PodParsed, /) -> None:
        self._store.put_pod(pod)

    def on_update(self, _old: PodParsed, pod: PodParsed, /) -> None:
        self._store.put_pod(pod)

    def on_delete(self, pod: PodParsed, /) -> None:
        self._store.drop_pod(pod.metadata.uid)


class _Quotas:
    def __init__(self, store: Store) -> None:
        self._store = store

    def on_add(self, quota: ResourceQuota, /) -> None:
        self._store.put_quota(quota)

    def on_update(self, _old: ResourceQuota, quota: ResourceQuota, /) -> None:
        self._store.put_quota(quota)

    def on_delete(self, quota: ResourceQuota, /) -> None:
        self._store.drop_quota(quota.namespace, quota.name)


class Following:
    """The informers of nodes, pods and quotas."""

    def __init__(self, store: Store, client: Client, clock: Callable[[], float], bugs: BugLog) -> None:
        self._store = store
        self._client = client
        self._clock = clock
        self._heard: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        reader = store.reader
        self.nodes: Informer[NodeEntry] = Informer(
            client, NODES, reader.node, _Nodes(store, clock), identity=_metadata, bugs=bugs
        )
        self.pods: Informer[PodParsed] = Informer(
            client, PODS, reader.pod, _Pods(store), identity=_metadata, keep=_slim, bugs=bugs
        )
        self.quotas: Informer[ResourceQuota] = Informer(
            client, RESOURCE_QUOTAS, lambda raw: decode(raw, ResourceQuota), _Quotas(store), bugs=bugs
        )

    @property
    def all(self) -> Sequence[Informer[Any]]:
        """Every informer."""
        return (self.nodes, self.quotas, self.pods)

    @property
    def synced(self) -> bool:
        """Whether every kind was listed once."""
        return all(one.synced.is_set() for one in self.all)

    async def run(self) -> None:
        """Follow until cancelled; usage needs the cards, so pods come last."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.nodes.run())
            group.create_task(self.quotas.run())
            group.create_task(self._probes())
            group.create_task(self._ticks())
            await self.nodes.synced.wait()
            await self.quotas.synced.wait()
            group.create_task(self.pods.run())

    async def probe(self) -> None:
        """Note for every kind whether the API server answers and its watch holds."""
        for one in self.all:
            await self._probe(one)

    async def _probe(self, informer: Informer[Any]) -> None:
        kind, now = informer.resource.plural, self._clock()
        failed = informer.counters.failures
        broken = failed > self._failures.get(kind, 0)
        self._failures[kind] = failed
        reason = "the watch broke off and is being resumed"
        try:
            await fresh_version(self._client, informer.resource)
        except KubeError as error:
            broken, reason = True, str(error)[:300]
        if informer.synced.is_set() and not broken:
            self._heard[kind] = now
            self._store.report(Source(kind, "ok", f"{len(informer)} known"))
            return
        if not informer.synced.is_set() and not broken:
            reason = "being read for the first time"
        heard = self._heard.get(kind)
        state, age = ("missing", None) if heard is None else ("stale", max(0.0, now - heard))
        self._store.report(Source(kind, state, reason, age))

    async def _probes(self) -> None:
        while True:
            await self.probe()
            told_all = len(self._heard) == len(self.all)
            await asyncio.sleep(PROBE_EVERY_S if told_all else 1.0)

    async def _ticks(self) -> None:
        while True:
            self._store.tick(self._clock())
            await asyncio.sleep(TICK_EVERY_S)


def _metadata(entry: NodeEntry | PodParsed) -> Metadata:
    return entry.metadata


def _slim(pod: PodParsed) -> PodParsed:
    return PodParsed(_NO_POD, pod.entry)
