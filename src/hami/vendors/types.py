"""The vocabulary of the vendor engine: requests, usage, contexts, profiles, and the errors at its border.

Everything here is data. Memory is MiB, cores are percent of one card unless a vendor says otherwise, slots
are tasks on a card. Objects are read-only; the engine never keeps one beyond a call.
"""

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from hami.protocol.allocation import Allocation, ContainerDevice
from hami.protocol.errors import DevicesAbsent, DevicesMalformed, HamiError
from hami.protocol.inventory import DeviceInfo, Inventory
from hami.vendors.columns import (
    BoolArray,
    CardColumns,
    CodeTables,
    IntArray,
    VectorCheck,
    VectorNeeds,
)
from hami.vendors.reasons import (
    CORDONED,
    EXCLUSIVE,
    EXHAUSTED,
    ID_MISMATCH,
    INSUFFICIENT_CARDS,
    INSUFFICIENT_CORES,
    INSUFFICIENT_MEMORY,
    INTERNAL_ERROR,
    MIG_INFEASIBLE,
    NODE_INSUFFICIENT,
    NOT_HEALTHY,
    NUMA_NOT_FIT,
    OUT_OF_SLOTS,
    QUOTA_NOT_FIT,
    TYPE_MISMATCH,
    VENDOR_RULE,
    reasons_text,
)

__all__ = [
    "ALL_CHECKS",
    "CORDONED",
    "EXCLUSIVE",
    "EXHAUSTED",
    "ID_MISMATCH",
    "INSUFFICIENT_CARDS",
    "INSUFFICIENT_CORES",
    "INSUFFICIENT_MEMORY",
    "INT32_MAX",
    "INTERNAL_ERROR",
    "MIG_INFEASIBLE",
    "NODE_INSUFFICIENT",
    "NOTHING_USED",
    "NOT_HEALTHY",
    "NO_PERCENT",
    "NUMA_NOT_FIT",
    "OUT_OF_SLOTS",
    "QUOTA_NOT_FIT",
    "TYPE_MISMATCH",
    "UNLIMITED",
    "VENDOR_RULE",
    "AdmissionRejected",
    "Allocation",
    "AnnotateContext",
    "BoolArray",
    "Card",
    "CardColumns",
    "CodeTables",
    "ContainerDevice",
    "ContainerRequest",
    "DeviceInfo",
    "DevicesAbsent",
    "DevicesMalformed",
    "FitContext",
    "FitResult",
    "Holder",
    "Hooks",
    "IntArray",
    "Inventory",
    "InventoryView",
    "Need",
    "NodeBonus",
    "NodeRefuses",
    "NodeView",
    "PodInfo",
    "PodShape",
    "QuotaView",
    "RawRequest",
    "Refused",
    "Register",
    "ResourceNames",
    "Rules",
    "ScoreContext",
    "SlotKind",
    "Usage",
    "UsageAlgebra",
    "VectorCheck",
    "VectorNeeds",
    "VendorProfile",
    "keep_allocation",
    "keep_request",
    "reasons_text",
]


INT32_MAX = 2**31 - 1
NO_PERCENT = 101  # mem_percent of a request that names no percentage
EMPTY: Mapping[str, Any] = MappingProxyType({})


class AdmissionRejected(HamiError):  # noqa: N818
    """The pod asks for something invalid or unservable; the text says what, where, and what is accepted."""


class NodeRefuses(HamiError):  # noqa: N818
    """From `resolve`: this node cannot serve the request; `count` cards refuse with reason `code`."""

    def __init__(self, code: str, count: int) -> None:
        super().__init__(f"{code} x {count}")
        self.code = code
        self.count = count


@dataclass(frozen=True, slots=True)
class ResourceNames:
    """Kubernetes resource names of one vendor; "" where it has none."""

    count: str
    memory: str = ""
    cores: str = ""
    memory_factor: int = 1  # user unit -> MiB, also used by quota; >= 1
    extra: Mapping[str, str] = field(
        default_factory=dict
    )  # e.g. {"percentage": "nvidia.com/gpumem-percentage"}

    def all(self) -> tuple[str, ...]:
        """Every non-empty name, count first."""
        return tuple(n for n in (self.count, self.memory, self.cores, *self.extra.values()) if n)


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of one card: its total, a pod's share, or a container's."""

    slots: int = 0
    mem: int = 0
    cores: int = 0
    payload: Hashable = None  # the algebra's own part (MIG placements, holders per core)


NOTHING_USED = Usage()


@dataclass(frozen=True, slots=True)
class Holder:
    """A placed or reserved pod on a card."""

    uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]  # only the keys in profile.placed_annotations
    usage: Usage


@dataclass(frozen=True, slots=True)
class Card:
    """One candidate of a fit."""

    info: DeviceInfo
    used: Usage = NOTHING_USED
    holders: Sequence[Holder] = ()  # () when profile.placed_annotations is empty


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """What one container asks from one vendor."""

    nums: int  # > 0
    type: str  # vendor common word
    memreq: int  # MiB, 0 = use mem_percent
    mem_percent: int  # 0..100; NO_PERCENT (101) = not given (NVIDIA only)
    cores: int  # vendor core unit, >= 0
    mode: str = ""  # vendor sub-mode, e.g. "direct", "spec"
    slots: int = 1  # slots taken on each card
    detail: Hashable = None  # the vendor's own typed part, opaque to the engine


class SlotKind(enum.Enum):
    """Kind of a container slot. Slots: init containers in order (sidecars among them), then regular ones."""

    INIT = "init"
    SIDECAR = "sidecar"
    APP = "app"


@dataclass(frozen=True, slots=True)
class PodShape:
    """The container slots of a pod, in allocation order."""

    kinds: tuple[SlotKind, ...]
    names: tuple[str, ...]  # container names, same length


@dataclass(frozen=True, slots=True)
class PodInfo:
    """What fit, vector needs and annotations may know about the pod being placed."""

    uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]
    shape: PodShape


class NodeView(Protocol):
    """A node, read-only; capacities are integers (`quantity.value`)."""

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    @property
    def annotations(self) -> Mapping[str, str]: ...
    @property
    def capacity(self) -> Mapping[str, int]: ...
    @property
    def allocatable(self) -> Mapping[str, int]: ...


class InventoryView(Protocol):
    """What is registered in the cluster (never what is used), for admission."""

    def kinds(self, common_word: str) -> Sequence[DeviceInfo]:
        """One device of each distinct (type, count, devmem, devcore, mode, custom)."""
        ...


@dataclass(frozen=True, slots=True)
class QuotaView:
    """What the pod's namespace may still use of one vendor, without the pod itself; None = no limit.

    `mem_left` = limit x memory factor - used, MiB; `cores_left` = limit - used. Negative when already over.
    """

    mem_left: int | None = None
    cores_left: int | None = None


UNLIMITED = QuotaView()


@dataclass(frozen=True, slots=True)
class FitResult:
    """Outcome of a fit: the devices, or how many cards refused for which reason."""

    devices: tuple[ContainerDevice, ...] | None
    reasons: Mapping[str, int]
    total: int  # denominator: cards considered
    detail: str = ""  # for logs: what went wrong when the reason is InternalError

    def text(self) -> str:
        """Text of the reasons (`reasons.reasons_text`); "" on success."""
        return "" if self.devices is not None else reasons_text(self.reasons, self.total)


@dataclass(frozen=True, slots=True)
class FitContext:
    """One request on one node. The slot being fitted is `len(allocated)`."""

    candidates: Sequence[Card]  # this vendor's cards, ascending by preference: the last one is tried first
    request: ContainerRequest  # resolved
    pod: PodInfo
    node: NodeView
    allocated: Allocation = ()  # this vendor, this pod, earlier slots (padded)
    policy: frozenset[str] = frozenset()  # words of the card policy, trimmed
    quota: QuotaView = UNLIMITED


@dataclass(frozen=True, slots=True)
class ScoreContext:
    """A complete allocation of this vendor on a node."""

    node: NodeView
    allocation: Allocation
    before: Sequence[Card]  # the vendor's cards before this pod
    policy: Literal["binpack", "spread"]


@dataclass(frozen=True, slots=True)
class AnnotateContext:
    """A decision about to be written."""

    pod: PodInfo
    allocation: Allocation  # padded to every slot
    node: NodeView
    now: datetime  # UTC
    requests: tuple[ContainerRequest | None, ...] = ()  # this vendor's, by slot, as resolved for the node


@dataclass(frozen=True, slots=True)
class NodeBonus:
    """Topology bonus: the engine adds `value x weight`, negated under spread when `higher_is_better`."""

    value: float
    weight: float = 1.0
    higher_is_better: bool = True


class UsageAlgebra(Protocol):
    """How the usage of one card is put together."""

    @property
    def zero(self) -> Usage: ...

    def of(self, device: ContainerDevice) -> Usage:
        """Use of one allocated device."""
        ...

    def add(self, a: Usage, b: Usage) -> Usage:
        """Held at the same time."""
        ...

    def remove(self, total: Usage, b: Usage) -> Usage:
        """Exact inverse of `add`."""
        ...

    def combine(self, a: Usage, b: Usage) -> Usage:
        """Held one after the other."""
        ...


@dataclass(frozen=True, slots=True)
class RawRequest:
    """The quantity texts a container names, read in the profile's lookup order; None where absent."""

    count: str | None
    memory: str | None
    cores: str | None
    extra: Mapping[str, str]  # by the keys of ResourceNames.extra, present ones only
    container: str  # its name, for messages


class Need(NamedTuple):
    """What checks 9 to 12 compare on one card."""

    mem: int  # MiB the request takes
    cores: int  # cores the request takes
    total_cores: int
    used_cores: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A `choose` hook's "does not fit": the complete reasons and their denominator."""

    reasons: Mapping[str, int]
    total: int


@dataclass(frozen=True, slots=True)
class Hooks:
    """Everything about a vendor that is not data; each is optional and pure."""

    # (container, pod, profile, inventory) -> whether the container uses the vendor; replaces the standard
    # rule May change container resources and env, pod annotations and runtimeClassName; raises
    # AdmissionRejected.
    admit: Callable[[dict[str, Any], dict[str, Any], "VendorProfile", InventoryView], bool] | None = None
    # (raw, pod annotations, profile) -> request or None; raises AdmissionRejected
    parse: Callable[[RawRequest, Mapping[str, str], "VendorProfile"], ContainerRequest | None] | None = None
    # (node, profile) -> devices and warnings; raises DevicesAbsent, DevicesMalformed
    discover: Callable[[NodeView, "VendorProfile"], Inventory] | None = None
    # before the loop: a refusal of the node, or None to go on
    prefit: Callable[[FitContext], FitResult | None] | None = None
    # health beyond DeviceInfo.health, from what is used on the card (MIG: fail closed)
    healthy: Callable[[DeviceInfo, Usage], bool] | None = None
    # check between type and id: a reason, or None
    card_rule: Callable[[FitContext, Card], str | None] | None = None
    # (ctx, card) -> what checks 9 to 12 compare; default: from the request and the card
    needs: Callable[[FitContext, Card], Need] | None = None
    # last check of a card, given its need and what this container took so far: a reason, or None
    device_rule: Callable[[FitContext, Card, Need, Sequence[ContainerDevice]], str | None] | None = None
    # from all eligible cards in try order and the reasons so far: positions to take in turn until the
    # request is served (repeated where a card may serve several devices), or a refusal
    choose: Callable[[FitContext, Sequence[Card], Mapping[str, int]], Sequence[int] | Refused] | None = None
    # whether `choose` decides this fit; default: whenever it is declared
    choose_when: Callable[[FitContext], bool] | None = None
    # (ctx, card, need, taken by this container so far) -> what is written down for the card
    record: Callable[[FitContext, Card, Need, Sequence[ContainerDevice]], ContainerDevice] | None = None
    # (device) -> whether one container may take the card more than once (MIG); default: no
    repeatable: Callable[[DeviceInfo], bool] | None = None
    extra_annotations: Callable[[AnnotateContext], dict[str, str]] | None = None
    # (placed pod, profile) -> what is odd about what it holds: reasons and texts of events on the pod
    doubts: Callable[[PodInfo, "VendorProfile"], Sequence[tuple[str, str]]] | None = None
    node_bonus: Callable[[ScoreContext], NodeBonus] | None = None
    # (use of one card, its total cores) -> (MiB, cores) charged to a namespace quota; default: as recorded
    quota_use: Callable[[Usage, int], tuple[int, int]] | None = None
    # (request, inventory) -> (MiB, cores) per container at admission; default: memreq x nums, cores x nums
    admission_use: Callable[[ContainerRequest, InventoryView], tuple[int, int]] | None = None


@dataclass(frozen=True, slots=True)
class Register:
    """Where a node's devices come from."""

    kind: Literal["json", "csv", "capacity", "vendor"]
    key: str = ""  # node annotation for json, csv and vendor
    devcore: int | None = None  # total cores put in place of the registered ones
    watched: tuple[str, ...] = ()  # further node annotations whose change means "read the devices again"


ALL_CHECKS = frozenset(
    [
        "health",
        "cordon",
        "type",
        "id",
        "slots",
        "mutex",
        "quota",
        "memory",
        "cores",
        "exclusive",
        "exhausted",
    ],
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The data fields of a profile."""

    register: Register
    to_allocate: str | None = None  # pod annotation consumed by the node plugin
    allocated: str = ""  # pod annotation kept as the record
    handshake: str | None = None  # node annotation
    cleanup: str | None = None  # node annotation removed when the plugin is dead
    # handshake: R8; allocatable: reported count decides, else R8 (NVIDIA); capacity: count resource > 0
    health: Literal["handshake", "allocatable", "capacity", "always"] = "handshake"
    lock: Literal["none", "hami", "dsmlu"] = "hami"
    use_uuid: tuple[str, ...] = ()  # pod annotations; several spellings are all honoured
    no_use_uuid: tuple[str, ...] = ()
    use_type: str = ""
    no_use_type: str = ""
    mode: str = ""  # pod annotation with the accepted sharing modes
    numa_bind: str = ""  # pod annotation that binds a container's cards to one NUMA node
    lookup: Literal["limits_then_requests", "limits_only"] = "limits_then_requests"
    default_cores: int = 0
    omitted_percent: int = 100
    real_count: bool = True  # the node reports the count resource, so kubelet counts it (D31)
    checks: frozenset[str] = ALL_CHECKS  # which steps of the standard fit are done
    alloc_type: Literal["request", "device"] = "request"  # what is written as the device's type
    record_mem: int | None = None  # fixed recorded memory
    unused_only: bool = False  # a card serves one container: used must be 0
    unhealthy_reason: str = NOT_HEALTHY
    rebuild: Literal["allocated", "longer_of_both_keys"] = "allocated"
    allow_unsupported: bool = False  # D13


def keep_request(
    request: ContainerRequest, _node: NodeView, _devices: Sequence[DeviceInfo]
) -> ContainerRequest:
    """The standard `resolve`: a request means the same on every node."""
    return request


def keep_allocation(_pod: PodInfo, allocation: Allocation) -> Allocation:
    """The standard `restore`: nothing beyond the allocation text."""
    return allocation


@dataclass(frozen=True, slots=True)
class VendorProfile:
    """One vendor on the engine: data, and at most a few hooks."""

    common_word: str
    names: ResourceNames
    rules: Rules
    vector_checks: tuple[VectorCheck, ...]
    vector_needs: Callable[
        ["VendorProfile", ContainerRequest, PodInfo, frozenset[str], CardColumns], VectorNeeds
    ]  # profile, request, pod, card policy words, columns
    vector_exact: Callable[
        ["VendorProfile", ContainerRequest, PodInfo, frozenset[str]], bool
    ]  # vector reasons equal the exact fit's, but for `inexact` cards
    algebra: UsageAlgebra
    # (request, node, its devices of this vendor) -> request for this node; raises NodeRefuses
    resolve: Callable[[ContainerRequest, NodeView, Sequence[DeviceInfo]], ContainerRequest] = keep_request
    hooks: Hooks = Hooks()
    payload: type | None = None
    # (pod, decoded allocation) -> the allocation with the payloads that the pod's annotations hold
    restore: Callable[[PodInfo, Allocation], Allocation] = keep_allocation
    placed_annotations: tuple[str, ...] = ()
