"""What the scheduling core hands out: requests, reservations, answers, views. Plain read-only data."""

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from hami.protocol import keys
from hami.protocol.errors import HamiError
from hami.scheduler.core.hosts import NOTHING, HostAmount
from hami.scheduler.core.texts import failure_messages
from hami.vendors.types import Allocation, ContainerRequest, DeviceInfo, PodInfo, Usage

SlotRequests = tuple[Mapping[str, ContainerRequest], ...]
"""Per container slot (init containers first): vendor common word -> request; vendors in ascending order."""


class PlacementError(HamiError):
    """The pod cannot be judged at all (bad scoring weights): the text goes into the extender answer's
    `Error`."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the card score, from `hami.io/device-scoring-weights`; each >= 0, one at least positive."""

    slot: int = 1
    core: int = 1
    memory: int = 1


@dataclass(frozen=True, slots=True)
class PodRequest:
    """A pod that wants managed devices, parsed once per `/filter`."""

    info: PodInfo
    slots: SlotRequests
    node_policy: str
    card_policy: str
    weights: Weights
    invalid: str  # "" or why no node can serve it: every candidate fails with this text
    stale_mig: bool  # the pod still carries MIG reservations of an earlier decision
    signature: Hashable  # equal signatures have equal answers on equal state
    host: HostAmount = NOTHING  # CPU and memory of the whole pod
    vendors: tuple[str, ...] = field(init=False)  # common words of the vendors asked, ascending

    def __post_init__(self) -> None:
        words = tuple(sorted({word for slot in self.slots for word in slot}))
        object.__setattr__(self, "vendors", words)


class ReservationPhase(enum.Enum):
    """Where an open reservation stands; a closed one is gone."""

    RESERVED = "reserved"  # decided by /filter; expires
    BINDING = "binding"  # a Binding is on its way; does not expire
    UNKNOWN = "unknown"  # the Binding's outcome is unknown; does not expire until settled
    BOUND = "bound"  # the API server has it; held until the watch shows the bound pod


@dataclass(frozen=True, slots=True)
class Reservation:
    """A decision that only this process knows until the Binding carries it into the cluster."""

    uid: str
    namespace: str
    name: str
    node: str
    allocations: Mapping[
        str, Allocation
    ]  # vendor common word -> allocation with one entry per container slot
    annotations: Mapping[str, str]  # all of protocol.md §6 but the two bind- keys
    labels: Mapping[str, str]
    locks: tuple[
        tuple[str, str], ...
    ]  # (vendor, "hami" or "dsmlu") a pod of these vendors needs in mode lock
    reserved_at: float  # Unix seconds
    phase: ReservationPhase = ReservationPhase.RESERVED
    host: HostAmount = NOTHING  # CPU and memory of the pod

    def binding_annotations(self, now: float) -> dict[str, str]:
        """Annotations of the one Binding, `bind-phase` and `bind-time` (Unix seconds) included."""
        return {**self.annotations, keys.BIND_PHASE: keys.BIND_ALLOCATING, keys.BIND_TIME: str(int(now))}


@dataclass(frozen=True, slots=True)
class Placement:
    """The pod fits: what was reserved, and how the nodes compared."""

    reservation: Reservation
    message: str  # text of the `FilteringSucceed` event
    not_fit: int  # candidates that do not fit (at least, when not exact)
    fits: int  # candidates that fit (at most, when not exact)
    scores: tuple[tuple[str, float], ...]  # worst first, best last; at most 20 when not exact
    exact: bool  # every candidate was judged exactly

    @property
    def node(self) -> str:
        """The chosen node."""
        return self.reservation.node


@dataclass(frozen=True, slots=True)
class NoFit:
    """The pod fits nowhere. The two maps (node -> reason) are disjoint and cover every candidate."""

    failed: Mapping[str, str]
    unresolvable: Mapping[str, str]  # preemption cannot help: `FailedAndUnresolvableNodes`
    version: int  # state version of the answer

    def messages(self) -> tuple[str, ...]:
        """Texts of the `FilteringFailed` events, the summary last (made on demand: 2 ms for 5,000 nodes)."""
        return failure_messages({**self.failed, **self.unresolvable})


@dataclass(frozen=True, slots=True)
class Simulated:
    """Outcome of a dry run: fitting nodes in the request's order, and the others with their reasons."""

    fits: tuple[str, ...]
    failed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Notice:
    """Something to say on an object (a Warning event) that never stops the work."""

    kind: str  # "Pod" or "Node"
    namespace: str  # "" for nodes
    name: str
    uid: str  # "" when unknown
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """What a node event asks of the caller: handshake writes (the leader only) and notices."""

    patches: tuple[
        tuple[str, Mapping[str, str | None]], ...
    ] = ()  # (node, annotations to merge; None removes)
    notices: tuple[Notice, ...] = ()


@dataclass(frozen=True, slots=True)
class PodOutcome:
    """What a pod event changed beyond the state itself."""

    notices: tuple[Notice, ...] = ()
    closed: bool = False  # the pod's reservation ended with this event (bound, or the pod is gone)
    # the API server dropped labels of the Binding: patch them
    missing_labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CardUsage:
    """One card of a node as registered, and what is reserved on it."""

    vendor: str
    info: DeviceInfo
    used: Usage
    healthy: bool  # registered healthy, and its use is understood (MIG)


@dataclass(frozen=True, slots=True)
class NodeUsage:
    """One node for metrics; unchanged while `version` is."""

    name: str
    version: int
    cards: tuple[CardUsage, ...]  # vendors in order, inventory order within


@dataclass(frozen=True, slots=True)
class PodUsage:
    """One counted pod for metrics: placed (`reserved` false) or only reserved."""

    uid: str
    namespace: str
    name: str
    node: str
    allocations: Mapping[str, Allocation]
    effective: Mapping[str, Mapping[str, Usage]]  # vendor -> card id -> usage charged now
    annotations: Mapping[str, str]  # the vendors' `placed_annotations` only
    reserved: bool


@dataclass(frozen=True, slots=True)
class QuotaUsage:
    """Use and limit of one resource in one namespace, in recorded units (memory: MiB)."""

    namespace: str
    resource: str
    used: int
    limit: int | None  # as written in the quota object; None: unlimited
