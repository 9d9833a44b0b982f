"""`/metrics`: the families of scheduler.md §13 by their exact names, made piece by piece (decision 35).

The text of a node is cached until its usage changes. An answer is a stream of chunks; between chunks the
loop serves other requests, so a scrape of many series delays nothing.
"""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from itertools import islice

from hami.scheduler.answers import CardUsage, NodeUsage, PodUsage, QuotaUsage
from hami.scheduler.state import ClusterState
from hami.scheduler.timing import Timings

_MIB = 1 << 20
_NODES_PER_STEP = 8
_PODS_PER_STEP = 100
_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family: its name and what it says."""

    name: str
    what: str

    def header(self) -> str:
        return f"# HELP {self.name} {self.what}\n# TYPE {self.name} gauge\n"


NODE_FAMILIES = (
    Family("hami_gpu_memory_limit_bytes", "Device memory of a card, bytes"),
    Family("hami_gpu_core_limit_ratio", "Cores of a card, percent"),
    Family("hami_gpu_memory_allocated_bytes", "Device memory reserved on a card, bytes"),
    Family("hami_gpu_shared_count", "Containers sharing a card"),
    Family("hami_gpu_core_allocated_ratio", "Cores reserved on a card, percent"),
    Family(
        "hami_node_gpu_overview", "Device memory reserved on a card, bytes, with the card's size as labels"
    ),
    Family("hami_node_gpu_memory_allocated_ratio", "Reserved share of a card's memory, 0 to 1"),
)
LEGACY_NODE_FAMILIES = (
    Family("GPUDeviceMemoryLimit", "Device memory of a card, bytes"),
    Family("GPUDeviceCoreLimit", "Cores of a card"),
    Family("GPUDeviceMemoryAllocated", "Device memory reserved on a card, bytes"),
    Family("GPUDeviceSharedNum", "Containers sharing a card"),
    Family("GPUDeviceCoreAllocated", "Cores reserved on a card"),
    Family("nodeGPUOverview", "Device memory reserved on a card, bytes"),
    Family("nodeGPUMemoryPercentage", "Reserved share of a card's memory, 0 to 1"),
)
POD_FAMILIES = (
    Family("hami_vgpu_memory_allocated_bytes", "Device memory of a container on a card, bytes"),
    Family("hami_vgpu_core_allocated_ratio", "Cores of a container on a card, percent"),
)
LEGACY_POD_FAMILIES = (
    Family("vGPUMemoryAllocated", "Device memory of a container on a card, bytes"),
    Family("vGPUCoreAllocated", "Cores of a container on a card"),
)
QUOTA_USED = Family("hami_resource_quota_used", "Use of a namespace's device quota")
QUOTA_LIMIT = Family("hami_resource_quota_limit", "Limit of a namespace's device quota")
LEGACY_QUOTA_USED = Family("QuotaUsed", "Use of a namespace's device quota")

Counter = tuple[str, str, Callable[[], float]]


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
        self._nodes: dict[str, tuple[int, tuple[str, ...]]] = {}

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
        yield "".join(pending).encode()

    async def _pieces(self) -> AsyncIterator[str]:
        yield _build_info()
        yield self._timings.filter.text()
        yield self._timings.bind.text()
        for name, what, value in self._counters:
            yield f'# HELP {name} {what}\n# TYPE {name} gauge\n{name}{{zone="vGPU"}} {_number(value())}\n'
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
        yield _quota_text(quotas, legacy=self._legacy)
        async for piece in self._pod_pieces():
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
            if cached is None or cached[0] != usage.version:
                self._nodes[name] = (usage.version, _node_texts(usage, legacy=self._legacy))
        for name in self._nodes.keys() - set(names):
            del self._nodes[name]

    async def _pod_pieces(self) -> AsyncIterator[str]:
        families = POD_FAMILIES + (LEGACY_POD_FAMILIES if self._legacy else ())
        for position, family in enumerate(families):
            yield family.header()
            pods = self._state.pods()  # a snapshot, made pod by pod
            while some := list(islice(pods, _PODS_PER_STEP)):
                yield "".join(line for pod in some for line in _pod_lines(pod, family.name, position))
                await asyncio.sleep(0)


@lru_cache(maxsize=65536)
def escape(text: str) -> str:
    """A label value in Prometheus' text format."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _build_info() -> str:
    version = metadata.version("hami")
    labels = (
        f'version="{escape(version)}",revision="",build_date="",go_version="python{platform.python_version()}",'
        f'compiler="{escape(sys.implementation.name)}",platform="{sys.platform}/{platform.machine()}"'
    )
    family = Family("hami_build_info", "Version of this process")
    return f"{family.header()}{family.name}{{{labels}}} 1\n"


def _node_texts(node: NodeUsage, *, legacy: bool) -> tuple[str, ...]:
    """One text per family, in the order of the families."""
    rows = [_card_values(card) for card in node.cards if card.info.id]
    texts = ["".join(part) for part in zip(*(_card_lines(node.name, row) for row in rows), strict=True)]
    texts = texts or [""] * len(NODE_FAMILIES)
    if legacy:
        old = [
            "".join(part) for part in zip(*(_legacy_card_lines(node.name, row) for row in rows), strict=True)
        ]
        texts += old or [""] * len(LEGACY_NODE_FAMILIES)
    return tuple(texts)


@dataclass(frozen=True, slots=True)
class _CardValues:
    uuid: str
    index: int
    type: str
    memory_mib: int
    cores: int
    used_mib: int
    used_cores: int
    slots: int


def _card_values(card: CardUsage) -> _CardValues:
    info, used = card.info, card.used
    return _CardValues(
        escape(info.id),
        info.index,
        escape(info.type),
        info.devmem,
        info.devcore,
        used.mem,
        used.cores,
        used.slots,
    )


def _card_lines(node: str, card: _CardValues) -> Iterator[str]:
    base = f'device_index="{card.index}"'
    tail = f'device_type="{card.type}",device_uuid="{card.uuid}",node="{escape(node)}",zone="vGPU"'
    cores = f'device_cores="{card.cores}",'
    limit, used_cores = card.cores, card.used_cores
    if card.type.upper().startswith("AMD") and card.cores > 0:
        limit, used_cores = 100, -(-card.used_cores * 100 // card.cores)
    used_bytes = card.used_mib * _MIB
    yield f"hami_gpu_memory_limit_bytes{{{base},{tail}}} {card.memory_mib * _MIB}\n"
    yield f"hami_gpu_core_limit_ratio{{{base},{tail}}} {limit}\n"
    yield f"hami_gpu_memory_allocated_bytes{{{cores}{base},{tail}}} {used_bytes}\n"
    yield f"hami_gpu_shared_count{{{base},{tail}}} {card.slots}\n"
    yield f"hami_gpu_core_allocated_ratio{{{base},{tail}}} {used_cores}\n"
    overview = f'{cores}{base},device_memory_limit="{card.memory_mib}",{tail}'
    yield f"hami_node_gpu_overview{{{overview}}} {used_bytes}\n"
    ratio = f"hami_node_gpu_memory_allocated_ratio{{{base},{tail}}} {_share(card)}\n"
    yield ratio if card.memory_mib > 0 else ""


def _legacy_card_lines(node: str, card: _CardValues) -> Iterator[str]:
    ids = f'deviceidx="{card.index}"'
    where = f'deviceuuid="{card.uuid}",nodeid="{escape(node)}",zone="vGPU"'
    typed = f'devicetype="{card.type}",{where}'
    cores = f'devicecores="{card.cores}",'
    used_bytes = card.used_mib * _MIB
    yield f"GPUDeviceMemoryLimit{{{ids},{typed}}} {card.memory_mib * _MIB}\n"
    yield f"GPUDeviceCoreLimit{{{ids},{typed}}} {card.cores}\n"
    yield f"GPUDeviceMemoryAllocated{{{cores}{ids},{typed}}} {used_bytes}\n"
    yield f"GPUDeviceSharedNum{{{ids},{typed}}} {card.slots}\n"
    yield f"GPUDeviceCoreAllocated{{{ids},{typed}}} {card.used_cores}\n"
    yield f'nodeGPUOverview{{{cores}{ids},devicememorylimit="{card.memory_mib}",{typed}}} {used_bytes}\n'
    yield f"nodeGPUMemoryPercentage{{{ids},{where}}} {_share(card)}\n" if card.memory_mib > 0 else ""


def _share(card: _CardValues) -> str:
    return _number(card.used_mib / card.memory_mib) if card.memory_mib > 0 else "0"


def _pod_lines(pod: PodUsage, name: str, position: int) -> Iterator[str]:
    """One line per container slot and card."""
    legacy = position >= len(POD_FAMILIES)
    memory = position % len(POD_FAMILIES) == 0
    for allocation in pod.allocations.values():
        for slot, devices in enumerate(allocation):
            sums: dict[str, int] = {}
            for device in devices:
                amount = device.usedmem * _MIB if memory else device.usedcores
                sums[device.uuid] = sums.get(device.uuid, 0) + amount
            for uuid, value in sums.items():
                if uuid:
                    yield f"{name}{{{_pod_labels(pod, slot, uuid, legacy=legacy)}}} {value}\n"


def _pod_labels(pod: PodUsage, slot: int, uuid: str, *, legacy: bool) -> str:
    namespace, node, name, uuid = escape(pod.namespace), escape(pod.node), escape(pod.name), escape(uuid)
    if legacy:
        return (
            f'containeridx="{slot}",deviceuuid="{uuid}",nodename="{node}",podname="{name}",'
            f'podnamespace="{namespace}",zone="vGPU"'
        )
    return (
        f'container_index="{slot}",device_uuid="{uuid}",namespace="{namespace}",node="{node}",'
        f'pod="{name}",zone="vGPU"'
    )


def _quota_text(quotas: Sequence[QuotaUsage], *, legacy: bool) -> str:
    lines = [QUOTA_USED.header()]
    for quota in quotas:
        limit = 0 if quota.limit is None else quota.limit
        labels = (
            f'limit="{limit}",namespace="{escape(quota.namespace)}",quota_name="{escape(quota.resource)}"'
        )
        lines.append(f'{QUOTA_USED.name}{{{labels},zone="vGPU"}} {quota.used}\n')
    lines.append(QUOTA_LIMIT.header())
    for quota in quotas:
        if quota.limit is not None:
            labels = f'namespace="{escape(quota.namespace)}",quota_name="{escape(quota.resource)}"'
            lines.append(f'{QUOTA_LIMIT.name}{{{labels},zone="vGPU"}} {quota.limit}\n')
    if legacy:
        lines.append(LEGACY_QUOTA_USED.header())
        for quota in quotas:
            limit = 0 if quota.limit is None else quota.limit
            names = f'quotaName="{escape(quota.resource)}",quotanamespace="{escape(quota.namespace)}"'
            labels = f'limit="{limit}",{names}'
            lines.append(f'{LEGACY_QUOTA_USED.name}{{{labels},zone="vGPU"}} {quota.used}\n')
    return "".join(lines)


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)
