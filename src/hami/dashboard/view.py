"""One consistent picture of the cluster, made from the store; what a page shows is always one picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hami.answers.amounts import cores_share, memory_share, unregistered
from hami.dashboard.objects import NodeEntry, PodEntry, seconds
from hami.dashboard.reading import MIB, NOTHING_READ, Reading
from hami.dashboard.shapes import (
    Alert,
    Amount,
    Container,
    Device,
    DeviceCounts,
    HeldDevice,
    Lock,
    MigInstance,
    Node,
    NodeCounts,
    PendingPod,
    Quota,
    Slice,
    Source,
    Summary,
    TypeCount,
    Workload,
    WorkloadCounts,
)
from hami.dashboard.store import MonitorState, Store
from hami.protocol.errors import MigReservationError
from hami.protocol.inventory import DeviceInfo
from hami.protocol.keys import MIG_ALLOCATIONS
from hami.protocol.mig import decode_mig_reservations
from hami.scheduler.core.answers import CardUsage, NodeUsage, PodUsage
from hami.vendors.selection import cordoned_ids

LOCK_OLD_S: Final = 300.0
IDLE_OLD_S: Final = 1800.0
BLOCKED_OLD_S: Final = 600.0
MAX_ALERTS: Final = 200
NOT_OURS: Final = "not handled by the GPU scheduler: webhook did not patch this pod"
_STATUS = {"Running": "running", "Pending": "pending", "Failed": "failed", "Succeeded": "completed"}
_ORDER = {"failed": 0, "unknown": 1, "pending": 2, "running": 3, "completed": 4}

_Key = tuple[str, str]  # node, card


@dataclass(frozen=True, slots=True)
class View:
    """The picture. Devices and nodes by name; workloads failed first."""

    summary: Summary
    nodes: tuple[Node, ...]
    devices: tuple[Device, ...]
    workloads: tuple[Workload, ...]
    pending: tuple[PendingPod, ...]
    quotas: tuple[Quota, ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """A workload, and all that it was made from: the same things give the same row."""

    sources: tuple[object, ...]
    workload: Workload
    slices: tuple[tuple[_Key, Slice], ...]

    def is_of(self, sources: tuple[object, ...]) -> bool:
        return all(mine is other for mine, other in zip(self.sources, sources, strict=True))


class Memory:
    """What is kept from one picture to the next: rows that have not changed, and since when containers are
    blocked, as far as this process has seen."""

    def __init__(self) -> None:
        self.rows: dict[str, _Row] = {}
        self._since: dict[tuple[str, str], float] = {}
        self._infos: dict[str, tuple[DeviceInfo, ...]] = {}

    def registered(self, usage: Iterable[NodeUsage]) -> Mapping[str, tuple[DeviceInfo, ...]]:
        """The cards of every node; the same object while they are the same."""
        found = {}
        for node in usage:
            infos = tuple(one.info for one in node.cards)
            known = self._infos.get(node.name, ())
            found[node.name] = known if known == infos else infos
        self._infos = found
        return found

    def blocked(self, workloads: Iterable[Workload], now: float) -> Mapping[tuple[str, str], float]:
        """(uid, container) -> when its launches began to wait."""
        now_blocked = {(pod.uid, one.name) for pod in workloads for one in pod.containers if one.blocked}
        self._since = {key: self._since.get(key, now) for key in now_blocked}
        return self._since


def build_view(store: Store, memory: Memory, now: float) -> View:
    """The cluster as it is at `now`."""
    readings = {node: monitor.current(now) for node, monitor in store.monitors.items()}
    held = {one.uid: one for one in store.state.pods()}
    nodes_used = list(store.state.usage())
    cards = {(node.name, one.info.id): one for node in nodes_used for one in node.cards}
    rows = _rows(store, memory, held, readings, cards, memory.registered(nodes_used))
    slices: defaultdict[_Key, list[Slice]] = defaultdict(list)
    instances: defaultdict[_Key, list[MigInstance]] = defaultdict(list)
    for uid, row in rows.items():
        for key, part in row.slices:
            slices[key].append(part)
        if uid in held:
            _mig(held[uid], instances)
    workloads = [row.workload for row in rows.values()]
    workloads.sort(key=lambda one: (_ORDER[one.status], one.namespace, one.pod))
    devices = _devices(store, cards, slices, instances, readings)
    nodes = _nodes(store, devices, now)
    alerts = _alerts(nodes, devices, workloads, memory.blocked(workloads, now), now)
    summary = _summary(store, nodes, devices, workloads, alerts, now)
    return View(summary, nodes, devices, tuple(workloads), _pending(store, workloads), _quotas(store))


# --- workloads --------------------------------------------------------------------------------------------


def _rows(
    store: Store,
    memory: Memory,
    held: Mapping[str, PodUsage],
    readings: Mapping[str, Reading],
    cards: Mapping[_Key, CardUsage],
    registered: Mapping[str, tuple[DeviceInfo, ...]],
) -> dict[str, _Row]:
    """A row per pod with devices, by uid; those of before where nothing has changed."""
    made: dict[str, _Row] = {}
    for uid, pod in store.pods.items():
        usage = held.get(uid)
        if not pod.containers and usage is None:
            continue
        node = pod.node if usage is None else usage.node
        reading = readings.get(node, NOTHING_READ)
        charged = (None, None) if usage is None else (usage.allocations, usage.effective)
        sources = (pod, *charged, reading, registered.get(node), store.pod_problems.get(uid))
        row = memory.rows.get(uid)
        if row is None or not row.is_of(sources):
            workload = _workload(store, pod, usage, reading, cards)
            row = _Row(sources, workload, _slices(workload) if usage is not None else ())
        made[uid] = row
    memory.rows = made
    return made


def _slices(pod: Workload) -> tuple[tuple[_Key, Slice], ...]:
    return tuple(
        (
            (pod.node, one.uuid),
            Slice(pod.namespace, pod.pod, part.name, one.memory_mi_b, one.cores, one.used_memory_mi_b),
        )
        for part in pod.containers
        for one in part.devices
    )


def _workload(
    store: Store,
    pod: PodEntry,
    usage: PodUsage | None,
    reading: Reading,
    cards: Mapping[_Key, CardUsage],
) -> Workload:
    namespace, name = pod.metadata.namespace, pod.metadata.name
    made = []
    for at, one in enumerate(pod.containers):
        devices: tuple[HeldDevice, ...] = ()
        if usage is not None:
            devices = _held(store, usage, at, one.name, reading, cards)
        said = reading.containers.get((namespace, name, one.name), {})
        flags = (_flag(said.get("blocked")), _flag(said.get("enforced")))
        made.append(Container(one.name, one.init, one.image, devices, dict(one.asks), *flags))
    granted = _granted(store, usage, cards)
    devices_held = [device for one in made for device in one.devices]
    used = [device.used_memory_mi_b for device in devices_held if device.used_memory_mi_b is not None]
    return Workload(
        namespace,
        name,
        pod.metadata.uid,
        pod.node or ("" if usage is None else usage.node),
        _STATUS.get(pod.phase, "unknown"),
        pod.phase,
        pod.scheduler,
        pod.priority,
        pod.bind_phase,
        pod.created,
        pod.scheduled,
        pod.bound,
        pod.started,
        len({device.uuid for device in devices_held}),
        granted[1],
        granted[0],
        sum(used) if used else None,
        () if usage is None else tuple(sorted(usage.allocations)),
        tuple(sorted({device.type for device in devices_held})),
        tuple(made),
        store.pod_problems.get(pod.metadata.uid, ()),
    )


def _held(
    store: Store,
    usage: PodUsage,
    at: int,
    container: str,
    reading: Reading,
    cards: Mapping[_Key, CardUsage],
) -> tuple[HeldDevice, ...]:
    """What slot `at` of a pod holds."""
    made = []
    for vendor, allocation in usage.allocations.items():
        profile = store.state.profiles.get(vendor)
        for device in allocation[at] if at < len(allocation) else ():
            card = cards.get((usage.node, device.uuid))
            memory, cores = device.usedmem, device.usedcores
            model = device.type
            if profile is not None:
                use = profile.algebra.of(device)
                info = unregistered(device.uuid, use) if card is None else card.info
                memory = memory_share(profile, info, use).granted
                cores = cores_share(profile, info, use).granted
                model = info.type or device.type
            said = reading.shares.get((usage.namespace, usage.name, container, device.uuid), {})
            used = _mib(said.get("used_bytes"))
            made.append(
                HeldDevice(
                    device.uuid,
                    vendor,
                    model,
                    memory,
                    cores,
                    used,
                    said.get("utilization"),
                    _flag(said.get("hook")),
                    said.get("idle"),
                )
            )
    return tuple(made)


def _granted(store: Store, usage: PodUsage | None, cards: Mapping[_Key, CardUsage]) -> tuple[int, int]:
    """MiB and cores that count for a pod now: ended init containers do not."""
    memory = cores = 0
    for vendor, shares in {} if usage is None else usage.effective.items():
        profile = store.state.profiles[vendor]
        for card_id, use in shares.items():
            assert usage is not None
            card = cards.get((usage.node, card_id))
            info = unregistered(card_id, use) if card is None else card.info
            memory += memory_share(profile, info, use).granted
            cores += cores_share(profile, info, use).granted
    return memory, cores


def _mig(usage: PodUsage, instances: defaultdict[_Key, list[MigInstance]]) -> None:
    text = usage.annotations.get(MIG_ALLOCATIONS, "")
    if not text:
        return
    try:
        found = decode_mig_reservations(text)
    except MigReservationError:
        return  # the state has a notice of it
    for one in found:
        place = one.placement
        made = MigInstance(
            one.profile, place.start, place.size, usage.namespace, usage.name, created=one.realised
        )
        instances[usage.node, one.gpu_uuid].append(made)


def _pending(store: Store, workloads: Iterable[Workload]) -> tuple[PendingPod, ...]:
    ours = store.settings.scheduler_name
    made = []
    for one in workloads:
        if one.status != "pending" or one.node:
            continue
        entry = store.pods[one.uid]
        stranger = bool(ours) and one.scheduler != ours
        asks = tuple(
            f"{part.name}: {', '.join(f'{name}={amount}' for name, amount in part.asks.items())}"
            for part in one.containers
            if part.asks
        )
        note = NOT_OURS if stranger else ""
        made.append(
            PendingPod(one.namespace, one.pod, one.created, one.scheduler, note, entry.last_word, asks)
        )
    return tuple(made)


# --- devices and nodes ------------------------------------------------------------------------------------


def _devices(
    store: Store,
    cards: Mapping[_Key, CardUsage],
    slices: Mapping[_Key, list[Slice]],
    instances: Mapping[_Key, list[MigInstance]],
    readings: Mapping[str, Reading],
) -> tuple[Device, ...]:
    made = []
    cordoned: dict[str, frozenset[str]] = {}
    for (node, card_id), one in sorted(cards.items()):
        if node not in cordoned:
            facts = store.state.node(node)
            cordoned[node] = frozenset() if facts is None else cordoned_ids(facts.annotations)
        profile, info = store.state.profiles[one.vendor], one.info
        said = readings[node].cards.get(card_id, {}) if node in readings else {}
        memory = memory_share(profile, info, one.used)
        cores = cores_share(profile, info, one.used)
        physical = _mib(said.get("total_bytes"))
        percent = None if not physical else round(100 * memory.granted / physical, 1)
        made.append(
            Device(
                card_id,
                one.vendor,
                info.type,
                node,
                info.index,
                info.mode,
                info.numa,
                one.healthy,
                card_id in cordoned[node],
                Amount(info.count, one.used.slots),
                Amount(cores.total, cores.granted, said.get("utilization")),
                Amount(memory.total, memory.granted, _mib(said.get("used_bytes"))),
                None if physical is None else int(physical),
                percent if percent is not None and percent > 100 else None,
                said.get("temperature"),
                said.get("power"),
                tuple(slices.get((node, card_id), ())),
                tuple(sorted(instances.get((node, card_id), ()), key=lambda part: part.start)),
            )
        )
    return tuple(made)


def _nodes(store: Store, devices: Iterable[Device], now: float) -> tuple[Node, ...]:
    on_node: defaultdict[str, list[Device]] = defaultdict(list)
    for one in devices:
        on_node[one.node].append(one)
    return tuple(
        _node(store, name, entry, on_node.get(name, []), now)
        for name, entry in sorted(store.nodes.items())
        if name in on_node or store.problems.get(name)
    )


def _node(store: Store, name: str, entry: NodeEntry, devices: list[Device], now: float) -> Node:
    conditions = {one.type: one.status for one in entry.view.status.conditions or []}
    ready = conditions.get("Ready") == "True"
    schedulable = not entry.view.spec.unschedulable
    lock = None if entry.lock is None else Lock(entry.lock[0], max(0.0, now - entry.lock[1]))
    system = entry.view.system
    return Node(
        name,
        "notReady" if not ready else "ready" if schedulable else "cordoned",
        ready,
        schedulable,
        entry.ip,
        entry.os_image,
        entry.kernel_version,
        system.kubelet_version,
        system.container_runtime_version,
        entry.architecture,
        seconds(entry.metadata.creation_timestamp),
        tuple(sorted({one.vendor for one in devices})),
        len(devices),
        sum(one.healthy for one in devices),
        _sum(one.slots for one in devices),
        _sum((one.cores for one in devices), mean=True),
        _sum(one.memory_mi_b for one in devices),
        store.monitors.get(name, MonitorState()).source(now),
        lock,
        store.problems.get(name, ()),
        conditions,
    )


def _sum(amounts: Iterable[Amount], *, mean: bool = False) -> Amount:
    """Totals; what is used is added up too, or (`mean`) averaged, over the cards that are measured."""
    found = list(amounts)
    used = [one.used for one in found if one.used is not None]
    total = sum(used) / (len(used) if mean else 1) if used else None
    return Amount(sum(one.total for one in found), sum(one.allocated for one in found), total)


def _quotas(store: Store) -> tuple[Quota, ...]:
    found = sorted(store.state.quota_usage(), key=lambda one: (one.namespace, one.resource))
    return tuple(
        Quota(
            one.namespace,
            one.resource,
            one.used,
            one.limit,
            None if not one.limit else round(100 * one.used / one.limit, 1),
        )
        for one in found
        if one.limit is not None
    )


# --- overview ---------------------------------------------------------------------------------------------


def _summary(
    store: Store,
    nodes: tuple[Node, ...],
    devices: tuple[Device, ...],
    workloads: list[Workload],
    alerts: tuple[Alert, ...],
    now: float,
) -> Summary:
    kinds: dict[tuple[str, str], list[int]] = {}
    for one in devices:
        counts = kinds.setdefault((one.vendor, one.type), [0, 0])
        counts[0] += 1
        counts[1] += one.healthy
    by_type = tuple(TypeCount(*kind, *counts) for kind, counts in sorted(kinds.items()))
    status = dict.fromkeys(_ORDER, 0)
    for pod in workloads:
        status[pod.status] += 1
    ready = [_ready(entry) for entry in store.nodes.values()]
    schedulable = sum(not entry.view.spec.unschedulable for entry in store.nodes.values())
    return Summary(
        store.cluster,
        now,
        (*store.sources.values(), _monitors(nodes)),
        NodeCounts(len(store.nodes), sum(ready), schedulable, sum(1 for one in nodes if one.device_count)),
        DeviceCounts(len(devices), sum(one.healthy for one in devices), by_type),
        _sum(one.slots for one in devices),
        _sum((one.cores for one in devices), mean=True),
        _sum(one.memory_mi_b for one in devices),
        WorkloadCounts(**status),
        alerts,
    )


def _ready(entry: NodeEntry) -> bool:
    return any(one.type == "Ready" and one.status == "True" for one in entry.view.status.conditions or [])


def _monitors(nodes: Iterable[Node]) -> Source:
    """All monitors as one source."""
    states = [one.monitor.state for one in nodes if one.device_count]
    good = states.count("ok")
    if not states:
        return Source("monitors", "missing", "no node has registered devices")
    if good == len(states):
        return Source("monitors", "ok", f"{good} of {len(states)} answer")
    return Source("monitors", "stale" if good else "missing", f"{good} of {len(states)} answer")


def _alerts(
    nodes: Iterable[Node],
    devices: Iterable[Device],
    workloads: Iterable[Workload],
    blocked: Mapping[tuple[str, str], float],
    now: float,
) -> tuple[Alert, ...]:
    made = [Alert("unhealthyDevice", one.uuid, one.node) for one in devices if not one.healthy]
    for node in nodes:
        made += [Alert("registration", node.name, problem) for problem in node.problems]
        if node.monitor.state == "stale":
            made.append(Alert("staleMonitor", node.name, node.monitor.reason))
        if node.lock is not None and node.lock.age_seconds > LOCK_OLD_S:
            namespace, _, _ = node.lock.holder.partition("/")
            made.append(Alert("oldLock", node.name, node.lock.holder, namespace))
    for pod in workloads:
        name = f"{pod.namespace}/{pod.pod}"
        for part in pod.containers:
            since = blocked.get((pod.uid, part.name))
            if since is not None and now - since > BLOCKED_OLD_S:
                made.append(Alert("blocked", name, part.name, pod.namespace))
            idle = [one.idle_seconds for one in part.devices if one.idle_seconds is not None]
            if idle and min(idle) > IDLE_OLD_S:
                made.append(Alert("idle", name, part.name, pod.namespace))
    return tuple(made[:MAX_ALERTS])


def _mib(amount: float | None) -> float | None:
    return None if amount is None else round(amount / MIB, 1)


def _flag(value: float | None) -> bool | None:
    return None if value is None else value != 0
