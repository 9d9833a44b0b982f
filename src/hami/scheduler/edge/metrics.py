"""`/metrics`: the families of scheduler.md §13, made piece by piece (decision 35).

The text of a node is cached until its usage changes. An answer is a stream of chunks; between chunks the
loop serves other requests, so a scrape of many series delays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from hami.protocol.keys import AMD, MIG_ALLOCATIONS
from hami.scheduler.core.answers import PodUsage
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.metric_texts import (
    LEGACY_MIG,
    LEGACY_NODE_FAMILIES,
    LEGACY_POD_FAMILIES,
    MIG,
    NODE_FAMILIES,
    POD_FAMILIES,
    build_info,
    in_units,
    mig_lines,
    node_texts,
    number,
    pod_lines,
    quota_text,
)
from hami.scheduler.edge.timing import Timings
from hami.vendors.types import VendorProfile

_NODES_PER_STEP = 8
_PODS_PER_STEP = 100
_CHUNK_BYTES = 1 << 16

Counter = tuple[str, str, Callable[[], float]]


class _Made(NamedTuple):
    """What a text was made from: versions of nodes begin anew with other profiles."""

    profiles: Mapping[str, VendorProfile]
    version: int

    def is_still(self, other: _Made) -> bool:
        return self.profiles is other.profiles and self.version == other.version


class Metrics:
    """Renders the state as Prometheus text; ``counters`` are further gauges of the process (name, help,
    value)."""

    def __init__(
        self, state: ClusterState, timings: Timings, *, legacy: bool, counters: Sequence[Counter] = ()
    ) -> None:
        self._state = state
        self._timings = timings
        self._legacy = legacy
        self._counters = tuple(counters)
        self._nodes: dict[str, tuple[_Made, tuple[str, ...]]] = {}

    def add(self, counter: Counter) -> None:
        """One more gauge of the process."""
        self._counters += (counter,)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The whole text in pieces of about 64 KiB."""
        pending: list[str] = []
        size = 0
        async for piece in self._pieces():
            pending.append(piece)
            size += len(piece)
            if size >= _CHUNK_BYTES:
                yield "".join(pending).encode()
                pending.clear()
                size = 0
                await asyncio.sleep(0)  # the socket may take chunk after chunk without a pause
        yield "".join(pending).encode()

    async def _pieces(self) -> AsyncIterator[str]:
        yield build_info()
        yield self._timings.filter.text()
        yield self._timings.bind.text()
        for name, what, value in self._counters:
            yield f'# HELP {name} {what}\n# TYPE {name} gauge\n{name}{{zone="vGPU"}} {number(value())}\n'
        families = NODE_FAMILIES + (LEGACY_NODE_FAMILIES if self._legacy else ())
        names = sorted(self._state.node_names())
        await self._refresh(names)
        for position, family in enumerate(families):
            yield family.header()
            for name in names:
                cached = self._nodes.get(name)
                if cached is not None:
                    yield cached[1][position]
            await asyncio.sleep(0)
        quotas = sorted(self._state.quota_usage(), key=lambda quota: (quota.namespace, quota.resource))
        yield quota_text(quotas, legacy=self._legacy)
        async for piece in self._pod_pieces():
            yield piece
        async for piece in self._mig_pieces():
            yield piece

    async def _refresh(self, names: Sequence[str]) -> None:
        """Bring the cached texts up to date, some nodes at a time."""
        for position, name in enumerate(names):
            if position % _NODES_PER_STEP == 0:
                await asyncio.sleep(0)
            try:
                usage = self._state.node_usage(name)
            except KeyError:
                self._nodes.pop(name, None)
                continue
            cached = self._nodes.get(name)
            made = _Made(self._state.profiles, usage.version)
            if cached is None or not cached[0].is_still(made):
                self._nodes[name] = (made, node_texts(usage, legacy=self._legacy))
        for name in self._nodes.keys() - set(names):
            del self._nodes[name]

    async def _pod_pieces(self) -> AsyncIterator[str]:
        families = POD_FAMILIES + (LEGACY_POD_FAMILIES if self._legacy else ())
        for position, family in enumerate(families):
            yield family.header()
            pods = self._state.pods()  # a snapshot, made pod by pod
            while some := list(islice(pods, _PODS_PER_STEP)):
                yield "".join(
                    line for pod in some for line in pod_lines(pod, family.name, position, self._units(pod))
                )
                await asyncio.sleep(0)

    async def _mig_pieces(self) -> AsyncIterator[str]:
        for family in (MIG, LEGACY_MIG) if self._legacy else (MIG,):
            yield family.header()
            pods = self._state.pods()
            while some := list(islice(pods, _PODS_PER_STEP)):
                yield "".join(line for pod in some for line in mig_lines(pod, self._card_index(pod), family))
                await asyncio.sleep(0)

    def _units(self, pod: PodUsage) -> Mapping[str, int]:
        """Card id -> compute units, for a pod with cards that count in them."""
        if AMD not in pod.allocations:
            return {}
        try:
            cards = self._state.node_usage(pod.node).cards
        except KeyError:
            return {}
        return {one.info.id: one.info.devcore for one in cards if in_units(one.info.type, one.info.devcore)}

    def _card_index(self, pod: PodUsage) -> Mapping[str, int]:
        """Card id -> index on the pod's node, for a pod with MIG slices only."""
        if not pod.annotations.get(MIG_ALLOCATIONS):
            return {}
        try:
            return {card.info.id: card.info.index for card in self._state.node_usage(pod.node).cards}
        except KeyError:
            return {}
