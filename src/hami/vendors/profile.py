"""One vendor as data: its resource names, its rules, its hooks, and the profile that holds them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from hami.protocol.allocation import Allocation, ContainerDevice
from hami.protocol.inventory import DeviceInfo, Inventory
from hami.vendors.columns import CardColumns, VectorCheck, VectorNeeds
from hami.vendors.reasons import NOT_HEALTHY
from hami.vendors.terms import (
    AnnotateContext,
    BestBonus,
    BonusAsk,
    Card,
    ContainerRequest,
    FitContext,
    FitResult,
    InventoryView,
    Need,
    NodeBonus,
    NodeView,
    PodInfo,
    RawRequest,
    Refused,
    ScoreContext,
    Usage,
    UsageAlgebra,
)


class SharesSection(Protocol):
    """A section of the device config of a vendor whose cards are shared by memory and cores."""

    @property
    def resource_count_name(self) -> str: ...

    @property
    def resource_memory_name(self) -> str: ...

    @property
    def resource_core_name(self) -> str: ...

    @property
    def memory_factor(self) -> int: ...


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
    also_counted: tuple[str, ...] = ()  # further names of the count resource; a node reports one of them
    bytes_with_suffix: bool = False  # a quota on memory that is written with Ki, Mi, Gi... is bytes

    @classmethod
    def of(
        cls, section: SharesSection, memory_unit: int = 1, extra: Mapping[str, str] | None = None
    ) -> "ResourceNames":
        """The names in a section of the device config; ``memory_unit`` is the factor where it gives none."""
        return cls(
            section.resource_count_name,
            section.resource_memory_name,
            section.resource_core_name,
            section.memory_factor if section.memory_factor > 0 else memory_unit,
            extra or {},
        )

    def all(self) -> tuple[str, ...]:
        """Every non-empty name, count first."""
        names = (self.count, self.memory, self.cores, *self.extra.values(), *self.also_counted)
        return tuple(n for n in names if n)

    def served(self, allocatable: Mapping[str, int]) -> list[str]:
        """The names under which a node gives out cards now."""
        return [name for name in (self.count, *self.also_counted) if allocatable.get(name, 0) > 0]

    def reported_count(self, amounts: Mapping[str, int]) -> int | None:
        """What a node reports of the count resource, under whichever name; None: under none of them."""
        if not self.also_counted:
            return amounts.get(self.count)
        found = [amounts[name] for name in (self.count, *self.also_counted) if name in amounts]
        return max(found, default=None)


@dataclass(frozen=True, slots=True)
class Hooks:
    """Everything about a vendor that is not data; each is optional and pure."""

    # (container, pod, profile, inventory) -> whether the container uses the vendor; replaces the standard
    # rule May change container resources and env, pod annotations and runtimeClassName; raises
    # AdmissionRejected.
    admit: Callable[[dict[str, Any], dict[str, Any], "VendorProfile", InventoryView], bool] | None = None
    # (container, its request, pod, profile): raises AdmissionRejected for what `parse` lets pass and the node
    # side cannot serve. Called at admission after `admit`, and at filter time; also without a request
    check: (
        Callable[[Mapping[str, Any], ContainerRequest | None, Mapping[str, Any], "VendorProfile"], None]
        | None
    ) = None
    # (raw, pod annotations, profile) -> request or None; raises AdmissionRejected
    parse: Callable[[RawRequest, Mapping[str, str], "VendorProfile"], ContainerRequest | None] | None = None
    # (node, profile) -> devices and warnings; raises DevicesAbsent, DevicesMalformed
    discover: Callable[[NodeView, "VendorProfile"], Inventory] | None = None
    # before the loop: a refusal of the node, or None to go on
    prefit: Callable[[FitContext], FitResult | None] | None = None
    # health beyond DeviceInfo.health, from what is used on the card (MIG: fail closed)
    healthy: Callable[[DeviceInfo, Usage], bool] | None = None
    # why one pod's use of a card makes it unhealthy in that sense, in words; "": it does not
    why_closed: Callable[[DeviceInfo, Usage], str] | None = None
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
    # (placed pod with a key of the vendor, profile) -> what is odd about what it holds: reasons and texts of
    # events on the pod
    doubts: Callable[[PodInfo, "VendorProfile"], Sequence[tuple[str, str]]] | None = None
    node_bonus: Callable[[ScoreContext], NodeBonus] | None = None
    # (what a pod asks) -> (a node, its cards as they are) -> the best bonus of all allocations of it there,
    # or a better one. Without it every node must be judged
    best_bonus: Callable[[BonusAsk], BestBonus] | None = None
    # (use of one card, its total cores) -> (MiB, cores) charged to a namespace quota; default: as recorded
    quota_use: Callable[[Usage, int], tuple[int, int]] | None = None
    # (card, its use or a part of it) -> cores shown to people, of how many; 0 of 0: none are counted
    shown_cores: Callable[[DeviceInfo, Usage], tuple[int, int]] | None = None
    # (request, as parsed) -> what it asks, for people; default: its numbers
    in_words: Callable[[ContainerRequest], str] | None = None
    # (ctx, card, need) -> what a quota counts for the card; default: the need as it is
    charge: Callable[[FitContext, Card, Need], ContainerDevice] | None = None
    # (request, inventory) -> (MiB, cores) per container at admission; default: memreq x nums, cores x nums
    admission_use: Callable[[ContainerRequest, InventoryView], tuple[int, int]] | None = None
    # (admitted container, its request, profile) -> what the user should know: warnings of the admission
    advise: Callable[[Mapping[str, Any], ContainerRequest, "VendorProfile"], Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class CapacityCards:
    """The cards that a node's capacity stands for: alike, healthy, ids `<node>-<suffix>-<index>`.

    With `cores_per_card` their number is the amount of the cores resource by it, and the memory resource
    (times the memory factor) is theirs in proportion; amounts are the smaller of capacity and allocatable,
    and nothing allocatable means that all are unhealthy. Else the count resource says how many.
    """

    suffix: str
    slots: int
    cores: int  # devcore of each
    mem: int = 0  # devmem of each where the count resource decides, MiB
    cores_per_card: int | None = None
    part_is_a_card: bool = True  # a last card with fewer cores counts; else it is left out with a warning
    numa_halves: bool = False  # the second half is on NUMA node 1


@dataclass(frozen=True, slots=True)
class Register:
    """Where a node's devices come from."""

    kind: Literal["json", "csv", "capacity", "vendor"]
    key: str = ""  # node annotation for json, csv and vendor
    # for capacity, unless the vendor has a `discover` hook; with an annotation kind: where there is none
    cards: CapacityCards | None = None
    devcore: int | None = None  # total cores put in place of the registered ones
    watched: tuple[str, ...] = ()  # further node annotations whose change means "read the devices again"
    labels: str = ""  # prefix of node labels whose change means the same
    keeps_last: bool = True  # when nobody can read it any more: the last good devices stay, else none


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
    lock_covers: Literal["pod", "container"] = "pod"  # container: the plugin releases it after the first one
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
    shows_memory: bool = True  # memory of cards and pods is counted, in MiB: people are shown it
    shows_cores: bool = True  # cores of cards and pods are counted
    unused_only: bool = False  # a card serves one container: used must be 0
    unhealthy_reason: str = NOT_HEALTHY
    rebuild: Literal["allocated", "longer_of_both_keys"] = "allocated"
    # What the node side cannot serve is denied at admission unless `allow_unsupported` (D13):
    slices_one_card: bool = False  # several cards of one container only as whole ones
    containers: Literal["any", "one", "one_regular"] = "any"  # containers of a pod that may ask
    allow_unsupported: bool = False


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
    # further annotations of nodes and pods that its hooks read, those of its resources' domains aside
    read_annotations: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()  # common words of vendors that hold the same silicon (Kunlun)
