"""What a pod object says about devices: its assignment, its container slots, and the usage that follows
(D4)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hami.protocol import keys, views
from hami.protocol.errors import AllocationError, ProtocolError
from hami.scheduler.core.answers import Notice
from hami.vendors.annotate import placed_annotations, read_allocation
from hami.vendors.types import Allocation, Holder, PodInfo, PodShape, SlotKind, Usage, VendorProfile
from hami.vendors.usage import effective


@dataclass(frozen=True, slots=True)
class Charge:
    """Use of devices by one pod, as it is booked on a node and on its namespace's quota."""

    uid: str
    namespace: str
    name: str
    node: str
    allocations: Mapping[str, Allocation]  # vendor -> allocation, one entry per slot
    effective: Mapping[str, Mapping[str, Usage]]  # vendor -> card id -> usage
    annotations: Mapping[str, str]  # the vendors' `placed_annotations` only

    def same_use(self, other: "Charge") -> bool:
        """Whether both book the same; the rest (positions, indices) is for display."""
        return (self.node, self.namespace, self.effective, self.annotations) == (
            other.node,
            other.namespace,
            other.effective,
            other.annotations,
        )

    def holder(self) -> Holder:
        """The pod as a holder of cards; the usage is filled in per card."""
        return Holder(self.uid, self.namespace, self.name, self.annotations, Usage())


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What the core keeps of a pod with an assignment."""

    charge: Charge
    bound: bool  # spec.nodeName is set
    decision: tuple[str, str]  # node and time annotation: which decision this is


@dataclass(frozen=True, slots=True)
class PodReading:
    """A pod object, read: the facts (None: nothing to count), and what is odd about it."""

    facts: PodFacts | None
    notices: tuple[Notice, ...] = ()


def inits_finished(pod: views.Pod) -> bool:
    """Whether every ordinary init container has ended with exit code 0 (sidecars do not count)."""
    done = {
        status.name
        for status in pod.status.init_container_statuses or ()
        if status.state is not None
        and status.state.terminated is not None
        and status.state.terminated.exit_code == 0
    }
    return all(one.is_sidecar or one.name in done for one in pod.init_containers)


def read_pod(pod: views.Pod, profiles: Mapping[str, VendorProfile]) -> PodReading:
    """The assignment of a pod (scheduler.md §4.1): ended pods and pods without one count as nothing.

    A pod bound elsewhere than annotated counts where it is bound; an allocation nobody can read is not
    counted.
    """
    assigned = pod.annotations.get(keys.ASSIGNED_NODE)
    if assigned is None or pod.is_finished:
        return PodReading(None)
    notices = []
    node = pod.node_name or assigned
    if node != assigned:
        text = (
            f"annotation {keys.ASSIGNED_NODE} names node {assigned}, counted on {node} where the pod is bound"
        )
        notices.append(_notice(pod, "AssignedNodeMismatch", text))
    info = info_of(pod)
    shape = info.shape
    try:
        allocations = {word: found for word in profiles if (found := _allocation(info, profiles[word]))}
    except ProtocolError as error:
        text = f"its device allocation cannot be read, so it is counted as using nothing: {error}"
        return PodReading(None, (*notices, _notice(pod, "AllocationUnreadable", text)))
    if not any(profile.rules.allocated in info.annotations for profile in profiles.values()):
        text = f"assigned to node {node} without any device allocation; counted as using nothing"
        notices.append(_notice(pod, "AllocationMissing", text))
    for profile in profiles.values():
        if profile.hooks.doubts is not None:
            notices.extend(_notice(pod, reason, text) for reason, text in profile.hooks.doubts(info, profile))
    finished = inits_finished(pod)
    charge = Charge(
        pod.uid,
        pod.namespace,
        pod.name,
        node,
        allocations,
        {word: effective(profiles[word], shape, found, finished) for word, found in allocations.items()},
        placed(info, profiles),
    )
    decision = (assigned, info.annotations.get(keys.ASSIGNED_TIME, ""))
    return PodReading(PodFacts(charge, bool(pod.node_name), decision), tuple(notices))


def info_of(pod: views.Pod) -> PodInfo:
    """What vendors may know of a pod."""
    kinds = [SlotKind.SIDECAR if one.is_sidecar else SlotKind.INIT for one in pod.init_containers]
    kinds.extend(SlotKind.APP for _ in pod.containers)
    shape = PodShape(tuple(kinds), tuple(one.name for one in pod.slots))
    return PodInfo(pod.uid, pod.namespace, pod.name, pod.annotations, shape)


def placed(info: PodInfo, profiles: Mapping[str, VendorProfile]) -> dict[str, str]:
    """The annotations of a placed pod that some vendor needs."""
    kept: dict[str, str] = {}
    for profile in profiles.values():
        kept.update(placed_annotations(profile, info))
    return kept


def _allocation(info: PodInfo, profile: VendorProfile) -> Allocation:
    """One vendor's allocation, () for none. Raises `ProtocolError` for what cannot be counted.

    HAMi leaves out empty slots of some vendors, so a short text does not say which slots it means. With
    ordinary init containers its devices are taken for the last slots: that may count too much, never too
    little.
    """
    allocation = read_allocation(profile, info)
    if any(device.usedmem < 0 or device.usedcores < 0 for slot in allocation for device in slot):
        raise AllocationError("a device with negative memory or cores", profile.rules.allocated)
    slots = len(info.shape.kinds)
    written = info.annotations.get(profile.rules.allocated, "").count(";")
    if len(allocation) == slots and 0 < written < slots and SlotKind.INIT in info.shape.kinds:
        return ((),) * (slots - written) + allocation[:written]
    return allocation


def _notice(pod: views.Pod, reason: str, text: str) -> Notice:
    return Notice("Pod", pod.namespace, pod.name, pod.uid, reason, text)
