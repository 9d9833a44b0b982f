"""What a pod object says about devices: its assignment, its container slots, and the usage that follows
(D4)."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec

from hami.protocol import keys, views
from hami.protocol.errors import AllocationError, ProtocolError
from hami.scheduler.core.answers import Notice
from hami.vendors.annotate import allocation_text, placed_annotations, read_allocation
from hami.vendors.types import Allocation, Holder, PodInfo, PodShape, SlotKind, Usage, VendorProfile
from hami.vendors.usage import effective

_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class Charge(msgspec.Struct, frozen=True, gc=False):
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


class PodFacts(msgspec.Struct, frozen=True, gc=False):
    """What the core keeps of a pod with an assignment."""

    charge: Charge
    bound: bool  # spec.nodeName is set
    decision: tuple[str, str]  # node and time annotation: which decision this is


class PodReading(msgspec.Struct, frozen=True, gc=False):
    """A pod object, read: the facts (None: nothing to count), and what is odd about it."""

    facts: PodFacts | None
    notices: tuple[Notice, ...] = ()


_NOTHING_READ: Final = PodReading(None)


class PodReader:
    """Reads pods for one set of vendors, each of which is asked only about pods with a key of its own."""

    def __init__(self, profiles: Mapping[str, VendorProfile]) -> None:
        self._profiles = tuple(profiles.values())
        self._concerned: dict[str, tuple[int, ...]] = {}  # annotation -> positions of the vendors it is for
        for position, profile in enumerate(self._profiles):
            for key in {*_written_keys(profile), *profile.placed_annotations}:
                self._concerned[key] = (*self._concerned.get(key, ()), position)

    def read(self, pod: views.Pod, shape: PodShape) -> PodReading:
        """The assignment of a pod (scheduler.md §4.1): ended pods and pods without one count as nothing.

        A pod bound elsewhere than annotated counts where it is bound; an allocation nobody can read is not
        counted.
        """
        annotations = pod.annotations
        assigned = annotations.get(keys.ASSIGNED_NODE)
        if assigned is None or pod.is_finished:
            return _NOTHING_READ
        assigned = sys.intern(assigned)
        notices = []
        node = sys.intern(pod.node_name) or assigned
        if node != assigned:
            text = (
                f"annotation {keys.ASSIGNED_NODE} names node {assigned}, "
                f"counted on {node} where the pod is bound"
            )
            notices.append(_notice(pod, "AssignedNodeMismatch", text))
        info = PodInfo(pod.uid, pod.namespace, pod.name, annotations, shape)
        vendors = self._vendors_of(annotations)
        allocations = {}
        try:
            for profile in vendors:
                if found := _allocation(info, profile):
                    allocations[profile.common_word] = found
        except ProtocolError as error:
            text = f"its device allocation cannot be read, so it is counted as using nothing: {error}"
            return PodReading(None, (*notices, _notice(pod, "AllocationUnreadable", text)))
        if not any(profile.rules.allocated in annotations for profile in vendors):
            text = f"assigned to node {node} without any device allocation; counted as using nothing"
            notices.append(_notice(pod, "AllocationMissing", text))
        used = {}
        finished = inits_finished(pod)
        for profile in vendors:
            if profile.hooks.doubts is not None:
                notices.extend(
                    _notice(pod, reason, text) for reason, text in profile.hooks.doubts(info, profile)
                )
            word = profile.common_word
            if word in allocations:
                used[word] = effective(profile, shape, allocations[word], finished)
        charge = Charge(
            pod.uid, sys.intern(pod.namespace), pod.name, node, allocations, used, placed(info, vendors)
        )
        decision = (assigned, annotations.get(keys.ASSIGNED_TIME, ""))
        return PodReading(PodFacts(charge, bool(pod.node_name), decision), tuple(notices))

    def _vendors_of(self, annotations: Mapping[str, str]) -> Sequence[VendorProfile]:
        positions: set[int] = set()
        for key in annotations:
            positions.update(self._concerned.get(key, ()))
        return [self._profiles[position] for position in sorted(positions)]


def inits_finished(pod: views.Pod) -> bool:
    """Whether every ordinary init container has ended with exit code 0 (sidecars do not count)."""
    if not pod.init_containers:
        return True
    done = {
        status.name
        for status in pod.status.init_container_statuses or ()
        if status.state is not None
        and status.state.terminated is not None
        and status.state.terminated.exit_code == 0
    }
    return all(one.is_sidecar or one.name in done for one in pod.init_containers)


def shape_of(pod: views.Pod) -> PodShape:
    """The container slots of a pod."""
    kinds = [SlotKind.SIDECAR if one.is_sidecar else SlotKind.INIT for one in pod.init_containers]
    kinds += [SlotKind.APP] * len(pod.containers)
    return PodShape(tuple(kinds), tuple([one.name for one in pod.slots]))


def placed(info: PodInfo, vendors: Iterable[VendorProfile]) -> Mapping[str, str]:
    """The annotations of a placed pod that one of these vendors needs."""
    kept: dict[str, str] = {}
    for profile in vendors:
        kept.update(placed_annotations(profile, info))
    return kept or _NONE


def _written_keys(profile: VendorProfile) -> tuple[str, ...]:
    """The annotations that say what a pod holds of a vendor (see `allocation_text`)."""
    rules = profile.rules
    if rules.rebuild == "longer_of_both_keys" and rules.to_allocate is not None:
        return rules.allocated, rules.to_allocate
    return (rules.allocated,)


def _allocation(info: PodInfo, profile: VendorProfile) -> Allocation:
    """One vendor's allocation, () for none. Raises `ProtocolError` for what cannot be counted.

    HAMi leaves out empty slots of some vendors, so a short text does not say which slots it means. With
    ordinary init containers its devices are taken for the last slots: that may count too much, never too
    little.
    """
    allocation = read_allocation(profile, info)
    if not allocation:
        return ()
    for slot in allocation:
        for device in slot:
            if device.usedmem < 0 or device.usedcores < 0:
                raise AllocationError("a device with negative memory or cores", profile.rules.allocated)
    slots = len(info.shape.kinds)
    if len(allocation) == slots and SlotKind.INIT in info.shape.kinds:
        written = allocation_text(profile, info).count(";")
        if 0 < written < slots:
            return ((),) * (slots - written) + allocation[:written]
    return allocation


def _notice(pod: views.Pod, reason: str, text: str) -> Notice:
    return Notice("Pod", pod.namespace, pod.name, pod.uid, reason, text)
