"""The text of every metric family of scheduler.md §13 by its exact name (WIRE), as pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata

from hami.protocol.build import build_labels
from hami.protocol.errors import MigReservationError
from hami.protocol.keys import MIG_ALLOCATIONS
from hami.protocol.mig import decode_mig_reservations
from hami.scheduler.core.answers import CardUsage, NodeUsage, PodUsage, QuotaUsage

_MIB = 1 << 20


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
    Family("hami_gpu_unhealthy", "1 for a card that is out of service; healthy cards have no series"),
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

MIG = Family("hami_node_gpu_mig_instance_info", "A MIG instance that serves a container")
LEGACY_MIG = Family("nodeGPUMigInstance", "A MIG instance that serves a container")


@lru_cache(maxsize=65536)
def escape(text: str) -> str:
    """A label value in Prometheus' text format."""
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def build_info() -> str:
    values = build_labels(metadata.version("hami"))
    labels = ",".join(f'{name}="{escape(value)}"' for name, value in values.items())
    family = Family("hami_build_info", "Version of this process")
    return f"{family.header()}{family.name}{{{labels}}} 1\n"


def node_texts(node: NodeUsage, *, legacy: bool) -> tuple[str, ...]:
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
    healthy: bool


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
        card.healthy,
    )


def _card_lines(node: str, card: _CardValues) -> Iterator[str]:
    base = f'device_index="{card.index}"'
    tail = f'device_type="{card.type}",device_uuid="{card.uuid}",node="{escape(node)}",zone="vGPU"'
    cores = f'device_cores="{card.cores}",'
    limit, used_cores = card.cores, card.used_cores
    if in_units(card.type, card.cores):
        limit, used_cores = 100, _percent(card.used_cores, card.cores)
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
    yield "" if card.healthy else f"hami_gpu_unhealthy{{{base},{tail}}} 1\n"


def in_units(card_type: str, cores: int) -> bool:
    """Whether a card's cores are compute units, which the new families show as percent."""
    return card_type.upper().startswith("AMD") and cores > 0


def _percent(used: int, total: int) -> int:
    return -(-used * 100 // total)


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
    return number(card.used_mib / card.memory_mib) if card.memory_mib > 0 else "0"


def pod_lines(pod: PodUsage, name: str, position: int, units: Mapping[str, int]) -> Iterator[str]:
    """One line per container slot and card; `units`: compute units of cards that count in them, by id."""
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
                    if uuid in units and not memory and not legacy:
                        value = _percent(value, units[uuid])
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


def quota_text(quotas: Sequence[QuotaUsage], *, legacy: bool) -> str:
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


def number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def mig_lines(pod: PodUsage, card_index: Mapping[str, int], family: Family) -> Iterator[str]:
    """One line per realised MIG slice of the pod."""
    text = pod.annotations.get(MIG_ALLOCATIONS)
    if not text:
        return
    try:
        reservations = decode_mig_reservations(text)
    except MigReservationError:
        return
    for one in reservations:
        if not one.realised:
            continue
        index = card_index.get(one.gpu_uuid, 0)
        node, uuid, profile = escape(pod.node), escape(one.gpu_uuid), escape(one.profile)
        if family is LEGACY_MIG:
            name = f"{profile}-{one.gpu_instance_id}"
            labels = f'deviceidx="{index}",deviceuuid="{uuid}",migname="{name}",nodeid="{node}"'
        else:
            labels = (
                f'compute_instance_id="{one.compute_instance_id}",device_index="{index}",device_uuid="{uuid}",'
                f'gpu_instance_id="{one.gpu_instance_id}",mig_uuid="{escape(one.mig_uuid)}",node="{node}",'
                f'placement_size="{one.placement.size}",placement_start="{one.placement.start}",profile="{profile}"'
            )
        yield f'{family.name}{{{labels},zone="vGPU"}} 1\n'
