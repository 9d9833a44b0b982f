"""What the API answers, as data. Names on the wire are camel case; units are in the names.

Amounts that nobody measures are null, never 0. Memory is MiB, cores are percent of a card or the vendor's own
unit, ages are seconds, times are Unix seconds.
"""

from __future__ import annotations

import msgspec


class _Shape(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Base of all answers."""


class Amount(_Shape, frozen=True):
    """Granted of a total; a total of 0: this vendor counts none."""

    total: int = 0
    allocated: int = 0
    used: float | None = None


class Source(_Shape, frozen=True):
    """Where numbers come from, and whether they can be relied on."""

    name: str
    state: str  # ok, stale, missing, off
    reason: str = ""
    age_seconds: float | None = None  # since it was last heard of


class Slice(_Shape, frozen=True):
    """The part of a card that one container holds. ``other``: a pod that the reader may not see."""

    namespace: str
    pod: str
    container: str
    memory_mi_b: int = msgspec.field(name="memoryMiB")
    cores: int = 0
    used_memory_mi_b: float | None = msgspec.field(default=None, name="usedMemoryMiB")
    other: bool = False


class MigInstance(_Shape, frozen=True):
    """One slice of a card in mode MIG."""

    profile: str
    start: int
    size: int
    namespace: str = ""
    pod: str = ""
    created: bool = False
    other: bool = False


class Device(_Shape, frozen=True):
    """One card."""

    uuid: str
    vendor: str
    type: str
    node: str
    index: int
    mode: str
    numa: int
    healthy: bool
    cordoned: bool
    slots: Amount
    cores: Amount
    memory_mi_b: Amount = msgspec.field(name="memoryMiB")
    physical_memory_mi_b: int | None = msgspec.field(default=None, name="physicalMemoryMiB")
    overcommit_percent: float | None = None  # granted of the physical memory, where that is more than all
    temperature_celsius: float | None = None
    power_watts: float | None = None
    containers: tuple[Slice, ...] = ()
    mig_instances: tuple[MigInstance, ...] = ()


class Lock(_Shape, frozen=True):
    """Who holds a node's lock."""

    holder: str  # namespace/name; "" where the value does not say or the reader may not see
    age_seconds: float


class Node(_Shape, frozen=True):
    """One node with devices, or one whose registration cannot be read."""

    name: str
    status: str  # ready, notReady, cordoned
    ready: bool
    schedulable: bool
    ip: str
    os_image: str
    kernel_version: str
    kubelet_version: str
    container_runtime_version: str
    architecture: str
    created: float | None
    vendors: tuple[str, ...]
    device_count: int
    healthy_devices: int
    slots: Amount
    cores: Amount
    memory_mi_b: Amount = msgspec.field(name="memoryMiB")
    monitor: Source = Source("monitor", "missing")
    lock: Lock | None = None
    problems: tuple[str, ...] = ()
    conditions: dict[str, str] = {}


class HeldDevice(_Shape, frozen=True):
    """A card of a container: what it was given, and what it uses."""

    uuid: str
    vendor: str
    type: str
    memory_mi_b: int = msgspec.field(name="memoryMiB")
    cores: int = 0
    used_memory_mi_b: float | None = msgspec.field(default=None, name="usedMemoryMiB")
    utilization_percent: float | None = None
    hook_active: bool | None = None
    idle_seconds: float | None = None  # since the last kernel


class Container(_Shape, frozen=True):
    """One container of a workload."""

    name: str
    init: bool
    image: str
    devices: tuple[HeldDevice, ...] = ()
    asks: dict[str, str] = {}  # managed resources of its limits
    blocked: bool | None = None
    limit_enforced: bool | None = None


class Workload(_Shape, frozen=True):
    """One pod that asks for devices or holds some."""

    namespace: str
    pod: str
    uid: str
    node: str
    status: str  # running, pending, failed, completed, unknown
    phase: str
    scheduler: str
    priority: int | None
    bind_phase: str
    created: float | None
    scheduled: float | None
    bound: float | None
    started: float | None
    device_count: int
    cores: int
    memory_mi_b: int = msgspec.field(name="memoryMiB")
    used_memory_mi_b: float | None = msgspec.field(default=None, name="usedMemoryMiB")
    vendors: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    containers: tuple[Container, ...] = ()
    problems: tuple[str, ...] = ()


class PendingPod(_Shape, frozen=True):
    """A pod that waits, in short."""

    namespace: str
    pod: str
    created: float | None
    scheduler: str
    note: str  # "" or why the scheduler of devices never sees it
    last_word: str  # of kube-scheduler
    asks: tuple[str, ...]


class Quota(_Shape, frozen=True):
    """A limit on devices in a namespace; memory in MiB."""

    namespace: str
    resource: str
    used: int
    limit: int | None
    used_percent: float | None


class Alert(_Shape, frozen=True):
    """Something to look at. ``kind`` is a key of the page's texts."""

    kind: str
    subject: str
    detail: str = ""
    namespace: str = ""  # of the pod it is about


class TypeCount(_Shape, frozen=True):
    """Cards of one type."""

    vendor: str
    type: str
    total: int
    healthy: int


class NodeCounts(_Shape, frozen=True):
    """Nodes of the cluster; `total` counts those without devices too."""

    total: int
    ready: int
    schedulable: int
    gpu_nodes: int


class DeviceCounts(_Shape, frozen=True):
    """Cards of the cluster."""

    total: int
    healthy: int
    by_type: tuple[TypeCount, ...]


class WorkloadCounts(_Shape, frozen=True):
    """Pods with devices."""

    running: int = 0
    pending: int = 0
    failed: int = 0
    completed: int = 0
    unknown: int = 0


class Summary(_Shape, frozen=True):
    """The cluster in a few numbers."""

    cluster: str
    generated_at: float
    sources: tuple[Source, ...]
    nodes: NodeCounts
    devices: DeviceCounts
    slots: Amount
    cores: Amount
    memory_mi_b: Amount = msgspec.field(name="memoryMiB")
    workloads: WorkloadCounts = WorkloadCounts()
    alerts: tuple[Alert, ...] = ()
