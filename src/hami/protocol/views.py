"""Typed views of the Kubernetes objects we read, with only the members we use.

Views are for reading. Objects that must come back whole stay as they came: pods in the webhook are plain
dicts, nodes of a dry run are :class:`msgspec.Raw` (decisions, row 41). Members may be absent or null in what
the API server sends; the properties hide that: ``pod.annotations`` is always a mapping.

Every decoder takes bytes up to a stated size and raises :class:`~hami.protocol.errors.ObjectError`, whose
``path`` names the offending member, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec

from hami.protocol.errors import ObjectError
from hami.protocol.quantity import Quantity

MAX_OBJECT_BYTES: Final = 32 * 1024 * 1024
"""Largest single object or body; the API server itself stops at 3 MiB per object."""

_EMPTY: Final[Mapping[str, str]] = MappingProxyType({})
_NO_QUANTITIES: Final[Mapping[str, Quantity]] = MappingProxyType({})

_T = TypeVar("_T")


class View(msgspec.Struct, frozen=True, gc=False, rename="camel"):
    """Base of all views: immutable, camel case on the wire, outside the cyclic garbage collector."""


# --- metadata -----------------------------------------------------------------------------------------------


class Metadata(View, frozen=True):
    """The part of ``metadata`` that we read."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class ObjectView(View, frozen=True):
    """An object with metadata."""

    metadata: Metadata = Metadata()

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def namespace(self) -> str:
        return self.metadata.namespace

    @property
    def uid(self) -> str:
        return self.metadata.uid

    @property
    def resource_version(self) -> str:
        return self.metadata.resource_version

    @property
    def annotations(self) -> Mapping[str, str]:
        return self.metadata.annotations or _EMPTY

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.labels or _EMPTY


# --- pods ---------------------------------------------------------------------------------------------------


class ResourceRequirements(View, frozen=True):
    """Limits and requests of one container, as written."""

    limits: dict[str, Quantity] | None = None
    requests: dict[str, Quantity] | None = None


class EnvVar(View, frozen=True):
    """One environment entry with a literal value; ``value`` is empty for ``valueFrom``."""

    name: str = ""
    value: str | None = None


class SecurityContext(View, frozen=True):
    """The part of a container's security context that we read."""

    privileged: bool | None = None


class Container(View, frozen=True):
    """One init or regular container."""

    name: str = ""
    image: str | None = None
    resources: ResourceRequirements | None = None
    env: list[EnvVar] | None = None
    restart_policy: str | None = None
    security_context: SecurityContext | None = None

    @property
    def limits(self) -> Mapping[str, Quantity]:
        return (self.resources and self.resources.limits) or _NO_QUANTITIES

    @property
    def requests(self) -> Mapping[str, Quantity]:
        return (self.resources and self.resources.requests) or _NO_QUANTITIES

    @property
    def is_sidecar(self) -> bool:
        """Whether an *init* container is a native sidecar (it runs beside the regular containers)."""
        return self.restart_policy == "Always"


class SchedulingGroup(View, frozen=True):
    """``spec.schedulingGroup``."""

    pod_group_name: str | None = None


class PodSpec(View, frozen=True):
    """The part of a pod's spec that we read."""

    node_name: str | None = None
    scheduler_name: str | None = None
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    scheduling_group: SchedulingGroup | None = None
    priority: int | None = None
    restart_policy: str | None = None
    runtime_class_name: str | None = None


class Terminated(View, frozen=True):
    """How a container ended."""

    exit_code: int = 0
    reason: str | None = None
    finished_at: str | None = None


class ContainerState(View, frozen=True):
    """State of a container; only one member is set."""

    terminated: Terminated | None = None
    running: dict[str, str | None] | None = None
    waiting: dict[str, str | None] | None = None


class ContainerStatus(View, frozen=True):
    """Status of one container. ``container_id`` is ``<runtime>://<id>`` or empty."""

    name: str = ""
    container_id: str | None = msgspec.field(default=None, name="containerID")
    state: ContainerState | None = None


class PodCondition(View, frozen=True):
    """One condition of a pod."""

    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class PodStatus(View, frozen=True):
    """The part of a pod's status that we read."""

    phase: str | None = None
    reason: str | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    container_statuses: list[ContainerStatus] | None = None
    conditions: list[PodCondition] | None = None


class Pod(ObjectView, frozen=True):
    """A pod."""

    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def node_name(self) -> str:
        """The node the pod is bound to, or empty."""
        return self.spec.node_name or ""

    @property
    def phase(self) -> str:
        return self.status.phase or ""

    @property
    def is_finished(self) -> bool:
        """Whether the pod has ended (its devices are free)."""
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def is_terminating(self) -> bool:
        """Whether deletion has begun; containers may still run."""
        return self.metadata.deletion_timestamp is not None

    @property
    def init_containers(self) -> list[Container]:
        return self.spec.init_containers or []

    @property
    def containers(self) -> list[Container]:
        return self.spec.containers or []

    @property
    def slots(self) -> list[Container]:
        """Containers in the order of an allocation: init containers first."""
        return [*self.init_containers, *self.containers]


# --- nodes --------------------------------------------------------------------------------------------------


class NodeCondition(View, frozen=True):
    """One condition of a node."""

    type: str = ""
    status: str = ""


class NodeSpec(View, frozen=True):
    """The part of a node's spec that we read."""

    unschedulable: bool | None = None


class NodeSystemInfo(View, frozen=True):
    """Versions of a node: ``v1.36.0`` and ``containerd://2.4.0``."""

    kubelet_version: str = ""
    container_runtime_version: str = ""


class NodeStatus(View, frozen=True):
    """The part of a node's status that we read."""

    node_info: NodeSystemInfo | None = None
    capacity: dict[str, Quantity] | None = None
    allocatable: dict[str, Quantity] | None = None
    conditions: list[NodeCondition] | None = None


class Node(ObjectView, frozen=True):
    """A node."""

    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    @property
    def system(self) -> NodeSystemInfo:
        """Versions as kubelet reports them; empty where it has not reported yet."""
        return self.status.node_info or NodeSystemInfo()

    @property
    def capacity(self) -> Mapping[str, Quantity]:
        return self.status.capacity or _NO_QUANTITIES

    @property
    def allocatable(self) -> Mapping[str, Quantity]:
        return self.status.allocatable or _NO_QUANTITIES


# --- other kinds --------------------------------------------------------------------------------------------


class ResourceQuotaSpec(View, frozen=True):
    """Hard limits of a quota."""

    hard: dict[str, Quantity] | None = None


class ResourceQuota(ObjectView, frozen=True):
    """A resource quota."""

    spec: ResourceQuotaSpec = ResourceQuotaSpec()

    @property
    def hard(self) -> Mapping[str, Quantity]:
        return self.spec.hard or _NO_QUANTITIES


class LeaseSpec(View, frozen=True):
    """A lease's holder and times (RFC 3339 with microseconds)."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(ObjectView, frozen=True):
    """A coordination lease."""

    spec: LeaseSpec = LeaseSpec()


class Event(ObjectView, frozen=True):
    """The part of a core/v1 event that we read."""

    reason: str | None = None
    message: str | None = None
    type: str | None = None
    count: int | None = None
    last_timestamp: str | None = None


# --- decoding -----------------------------------------------------------------------------------------------


def decode(
    data: bytes | bytearray | memoryview | str | msgspec.Raw,
    kind: type[_T],
    max_bytes: int = MAX_OBJECT_BYTES,
) -> _T:
    """``data`` as a view of type ``kind``. Raises :class:`ObjectError`; ``max_bytes`` bounds the input."""
    size = len(memoryview(data)) if isinstance(data, msgspec.Raw) else len(data)
    if size > max_bytes:
        raise ObjectError(f"{kind.__name__} of {size} bytes is over the limit of {max_bytes}")
    try:
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `")
        raise ObjectError(f"invalid {kind.__name__}: {message}", path.rstrip("`")) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ObjectError(f"invalid {kind.__name__}: {error}") from None


_decoders: dict[type, msgspec.json.Decoder[object]] = {}


def _decoder(kind: type[_T]) -> msgspec.json.Decoder[_T]:
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found  # type: ignore[return-value]
