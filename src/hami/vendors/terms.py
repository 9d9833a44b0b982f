"""The words of the vendor engine: requests, usage, cards, and what hooks are told and answer.

Everything here is data. Memory is MiB, cores are percent of one card unless a vendor says otherwise, slots
are tasks on a card. Objects are read-only; the engine never keeps one beyond a call.
"""

import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from hami.protocol.allocation import Allocation, ContainerDevice
from hami.protocol.errors import HamiError
from hami.protocol.inventory import DeviceInfo
from hami.vendors.reasons import reasons_text

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


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Use of one card: its total, a pod's share, or a container's."""

    slots: int = 0
    mem: int = 0
    cores: int = 0
    payload: Hashable = None  # the algebra's own part (MIG placements, holders per core)


NOTHING_USED = Usage()


class Holder(msgspec.Struct, frozen=True, gc=False):
    """A placed or reserved pod on a card."""

    uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]  # only the keys in profile.placed_annotations
    usage: Usage


class Card(msgspec.Struct, frozen=True, gc=False):
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


class PodShape(msgspec.Struct, frozen=True, gc=False):
    """The container slots of a pod, in allocation order."""

    kinds: tuple[SlotKind, ...]
    names: tuple[str, ...]  # container names, same length


class PodInfo(msgspec.Struct, frozen=True, gc=False):
    """What fit, vector needs and annotations may know about the pod being placed."""

    uid: str
    namespace: str
    name: str
    annotations: Mapping[str, str]
    shape: PodShape


NO_POD = PodInfo("", "", "", EMPTY, PodShape((), ()))


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
    # cards of the vendors in `profile.beside` on this node, as used now with this pod's earlier containers
    beside: Mapping[str, Sequence[Card]] = field(default_factory=dict)


NodePolicy = Literal["binpack", "spread", "other"]
"""How nodes are chosen. Other words choose like binpack, but a vendor may know better what they mean."""


@dataclass(frozen=True, slots=True)
class ScoreContext:
    """A complete allocation of this vendor on a node."""

    node: NodeView
    allocation: Allocation
    before: Sequence[Card]  # the vendor's cards before this pod
    policy: NodePolicy
    pod: PodInfo = NO_POD


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


@dataclass(frozen=True, slots=True)
class BonusAsk:
    """What a pod asks of one vendor, before there is a node."""

    pod: PodInfo
    requests: Sequence[ContainerRequest | None]  # by slot, not resolved
    policy: NodePolicy

    @property
    def counts(self) -> list[int]:
        """Cards of the slots that ask for any."""
        return [request.nums for request in self.requests if request is not None]


BestBonus = Callable[[NodeView, Sequence[Card]], NodeBonus]


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
    extra: Mapping[str, str]  # by the keys of ResourceNames.extra and its other counts, present ones only
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
