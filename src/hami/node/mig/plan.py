"""Which MIG instances there must be, which may go and whose they are. Pure (device-plugin.md §11).

An instance belongs to the pod it was made for, by UID. It may be destroyed only when it cannot use it any
more; that two pods reserve the same place one after the other never makes it change hands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from hami.node.errors import AllocateError, SliceBusyError
from hami.protocol.allocation import Slot, decode_allocation
from hami.protocol.errors import AllocationError, MigReservationError
from hami.protocol.keys import MIG_ALLOCATIONS, NVIDIA, VENDOR_KEYS
from hami.protocol.mig import (
    MigReservation,
    decode_mig_reservations,
    encode_mig_reservations,
    profile_word,
)
from hami.protocol.views import ContainerStatus, Pod

_ALLOCATED = VENDOR_KEYS[NVIDIA].allocated
RESOLVE = "resolve allocated NVIDIA devices"
"""How errors about reservations begin (WIRE: users search for it)."""


At = tuple[int, int]
"""Container index (init containers first) and device index of a reservation."""


@dataclass(frozen=True, slots=True, order=True)
class SliceKey:
    """One place on one card: profile (its slices, such as ``1g``), first memory slice, size."""

    gpu: str
    word: str
    start: int
    size: int

    def __str__(self) -> str:
        return f"{self.word} at {self.start}+{self.size} of {self.gpu}"

    def overlaps(self, other: SliceKey) -> bool:
        """Whether both take the same part of the same card."""
        return (
            self.gpu == other.gpu
            and self.start < other.start + other.size
            and other.start < self.start + self.size
        )


@dataclass(frozen=True, slots=True)
class Managed:
    """An instance on a card that is ours: made by this plugin, or named by a pod's reservation.

    Without a compute instance (None, ``uuid`` empty) it is unfinished: no container can have it.
    """

    key: SliceKey
    gpu_instance: int
    compute_instance: int | None = None
    uuid: str = ""
    owners: frozenset[str] = frozenset()

    @property
    def is_finished(self) -> bool:
        """Whether containers can use it."""
        return self.compute_instance is not None


@dataclass(frozen=True, slots=True)
class Realised:
    """The instances of one call: all by reservation, and those that were made for it, in order."""

    at: Mapping[At, Managed]
    made: tuple[Managed, ...]

    def of(self, position: int) -> tuple[Managed, ...]:
        """The instances of the container at ``position``, in device order."""
        return tuple(self.at[key] for key in sorted(self.at) if key[0] == position)


@dataclass(frozen=True, slots=True)
class Seen:
    """An instance as the driver shows it; ``devices``: MIG UUIDs by compute instance."""

    key: SliceKey
    gpu_instance: int
    compute: tuple[int, ...]
    devices: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Record:
    """What the journal says of one instance: ``gpu_instance`` None: it was about to be made."""

    key: SliceKey
    owners: frozenset[str]
    gpu_instance: int | None = None
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Journalled:
    """The journal: what was made, and the ``cards`` of which that is all. Of others nothing is known: it was
    lost, or is of another boot.
    """

    records: tuple[Record, ...] = ()
    cards: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PodSlices:
    """One pod that may use cards: its reservations, and every card that its annotations name."""

    uid: str
    name: str
    reservations: tuple[MigReservation, ...]
    cards: frozenset[str]


@dataclass(frozen=True, slots=True)
class Survey:
    """The pods of the node: those that live, and UIDs of those that are being deleted while their containers
    may still run. ``problem``: why the pods do not tell everything; then nothing may be destroyed.
    """

    pods: tuple[PodSlices, ...]
    ending: frozenset[str] = frozenset()
    problem: str = ""

    @property
    def uids(self) -> frozenset[str]:
        """Pods whose containers may run, or will."""
        return self.ending | {pod.uid for pod in self.pods}

    @property
    def cards(self) -> frozenset[str]:
        """Cards that pods use or will use."""
        return frozenset().union(*(pod.cards for pod in self.pods))

    @property
    def undivided_cards(self) -> frozenset[str]:
        """Cards of which pods have a share and no slice: they must stay undivided."""
        return frozenset().union(
            *(pod.cards - {item.gpu_uuid for item in pod.reservations} for pod in self.pods)
        )


@dataclass(frozen=True, slots=True)
class Adoption:
    """The instances of a card sorted: ours, nobody's that we know, and why the card must not be touched."""

    managed: tuple[Managed, ...]
    foreign: tuple[Seen, ...]
    problems: tuple[str, ...]


def key_of(reservation: MigReservation) -> SliceKey:
    """The place that a reservation names."""
    place = reservation.placement
    return SliceKey(reservation.gpu_uuid, profile_word(reservation.profile), place.start, place.size)


def survey(pods: Iterable[Pod], known_cards: Collection[str]) -> Survey:
    """What the pods bound to this node say. An annotation that cannot be read, or a reservation on a card
    that is not ``known``, is a ``problem``.
    """
    living: list[PodSlices] = []
    ending: set[str] = set()
    problems: list[str] = []
    for pod in pods:
        if pod.is_finished:
            continue
        if pod.is_terminating and not _may_run(pod):
            continue
        name = f"{pod.namespace}/{pod.name}"
        try:
            slices = _slices(pod, name)
        except (MigReservationError, AllocationError) as error:
            problems.append(f"the allocation of pod {name} cannot be read: {error}")
            continue
        unknown = sorted({item.gpu_uuid for item in slices.reservations} - set(known_cards))
        if unknown:
            problems.append(
                f"pod {name} has a MIG reservation on {unknown[0]}, which this node does not have"
            )
        if pod.is_terminating:
            ending.add(pod.uid)
        living.append(slices)
    return Survey(tuple(living), frozenset(ending), "; ".join(problems))


def adopt(
    gpu: str,
    seen: Sequence[Seen],
    found: Survey,
    records: Iterable[Record],
    given: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> Adoption:
    """Sort the instances that are on a card.

    A record adopts the instance at its place, also with its id and UUID unless it was only about to be made,
    and says whose it is: who may write a pod's annotation could name another's instance in it. So where the
    journal is lost a reservation adopts the instance with its profile, place, ids and UUID only for a pod
    that was ``given`` it: UIDs by MIG UUID, as kubelet knows them.
    """
    reserved = [
        (pod, item)
        for pod in found.pods
        for item in pod.reservations
        if item.gpu_uuid == gpu and item.realised
    ]
    recorded = [record for record in records if record.key.gpu == gpu]
    managed: list[Managed] = []
    foreign: list[Seen] = []
    met: set[int] = set()
    for each in seen:
        named = {
            pod.uid
            for number, (pod, item) in enumerate(reserved)
            if _is(each, item, number, met) and pod.uid in given.get(item.mig_uuid, ())
        }
        mine = [record for record in recorded if _was_made(record, each)]
        owners = named.union(*(record.owners for record in mine))
        if (named or mine) and len(each.compute) <= 1:
            managed.append(_managed(each, frozenset(owners)))
        else:
            foreign.append(each)
    problems = tuple(
        f"MIG device {item.mig_uuid} of pod {pod.name} ({key_of(item)}) is not on the card"
        for number, (pod, item) in enumerate(reserved)
        if number not in met
    )
    return Adoption(tuple(managed), tuple(foreign), problems)


def unwanted(managed: Iterable[Managed], found: Survey) -> tuple[Managed, ...]:
    """The instances that no pod can use any more, sorted by place; none while the pods do not tell
    everything.
    """
    if found.problem:
        return ()
    alive = found.uids
    return tuple(sorted((each for each in managed if not each.owners & alive), key=lambda each: each.key))


def wanted_slices(pod: Pod, position: int, devices: Slot) -> tuple[MigReservation, ...]:
    """The reservations of the container at ``position`` (init containers first), one for each of its devices.

    Raises :class:`AllocateError` unless they agree with ``devices`` in number and cards.
    """
    try:
        reservations = decode_mig_reservations(pod.annotations.get(MIG_ALLOCATIONS, ""))
    except MigReservationError as error:
        raise AllocateError(f"{RESOLVE}: {MIG_ALLOCATIONS}: {error}") from error
    mine = sorted(
        (item for item in reservations if item.container_index == position),
        key=lambda item: item.device_index,
    )
    if len(mine) != len(devices):
        raise AllocateError(
            f"{RESOLVE}: container index {position} has {len(devices)} devices and "
            f"{len(mine)} MIG reservations"
        )
    for item, device in zip(mine, devices, strict=True):
        if item.gpu_uuid != device.uuid:
            raise AllocateError(
                f"{RESOLVE}: device {item.device_index} of container index {position} is on {device.uuid}, "
                f"its MIG reservation on {item.gpu_uuid}"
            )
    keys = [key_of(item) for item in mine]
    for one, key in enumerate(keys):
        clash = next((other for other in keys[one + 1 :] if key.overlaps(other)), None)
        if clash is not None:
            raise AllocateError(f"{RESOLVE}: container index {position} has {key} and {clash}, which overlap")
    return tuple(mine)


def usable(key: SliceKey, pod_uid: str, managed: Iterable[Managed]) -> Managed | None:
    """The instance at ``key`` that the pod may have: one that was made for it. None: one must be made.

    Raises :class:`SliceBusyError` where another pod's instance, one that several pods name, or an unfinished
    one takes a part of it.
    """
    for each in sorted(managed, key=lambda each: each.key):
        if not each.key.overlaps(key):
            continue
        if each.key == key and each.is_finished and each.owners == {pod_uid}:
            return each
        state = "made for another pod" if each.is_finished else "unfinished"
        if each.is_finished and len(each.owners) > 1:
            state = "named by more than one pod"
        raise SliceBusyError(
            f"{RESOLVE}: {key} is not free: MIG instance {each.gpu_instance} ({each.key}) is there, {state}, "
            "and still in use or not yet destroyed"
        )
    return None


def with_identity(text: str, made: Mapping[At, Managed]) -> str:
    """The pod's reservations with the instances of these (container index, device index) in them.

    Raises :class:`AllocateError` when there is nothing to write, or no reservation for one of them.
    """
    try:
        reservations = decode_mig_reservations(text)
    except MigReservationError as error:
        raise AllocateError(f"{RESOLVE}: {MIG_ALLOCATIONS}: {error}") from error
    places = {(item.container_index, item.device_index): key_of(item) for item in reservations}
    wrong = sorted(at for at, each in made.items() if places.get(at) != each.key)
    if not made or wrong:
        raise AllocateError(f"{RESOLVE}: the MIG reservations changed meanwhile: {wrong or 'none is left'}")
    return encode_mig_reservations(
        [_identified(item, made.get((item.container_index, item.device_index))) for item in reservations]
    )


def _identified(item: MigReservation, each: Managed | None) -> MigReservation:
    if each is None:
        return item
    return msgspec.structs.replace(
        item,
        mig_uuid=each.uuid,
        gpu_instance_id=each.gpu_instance,
        compute_instance_id=each.compute_instance,
    )


def _slices(pod: Pod, name: str) -> PodSlices:
    notes = pod.annotations
    reservations = decode_mig_reservations(notes.get(MIG_ALLOCATIONS, ""))
    allocated = notes.get(_ALLOCATED)
    slots = decode_allocation(allocated) if allocated is not None else ()
    cards = {item.gpu_uuid for item in reservations} | {device.uuid for slot in slots for device in slot}
    return PodSlices(pod.uid, name, reservations, frozenset(cards))


def _may_run(pod: Pod) -> bool:
    """Whether a container of a pod that is being deleted may still run: all must be known to have ended."""
    known: list[ContainerStatus] = [
        *(pod.status.init_container_statuses or ()),
        *(pod.status.container_statuses or ()),
    ]
    ended = {item.name for item in known if item.state is not None and item.state.terminated is not None}
    return any(container.name not in ended for container in pod.slots)


def _is(each: Seen, item: MigReservation, number: int, met: set[int]) -> bool:
    """Whether ``item`` names this instance; remembers that it does."""
    compute = item.compute_instance_id
    same = (
        key_of(item) == each.key
        and item.gpu_instance_id == each.gpu_instance
        and compute is not None
        and each.devices.get(compute) == item.mig_uuid
    )
    if same:
        met.add(number)
    return same


def _was_made(record: Record, each: Seen) -> bool:
    if record.key != each.key:
        return False
    if record.gpu_instance is None:
        return True
    same_device = not record.uuid or not each.devices or record.uuid in each.devices.values()
    return record.gpu_instance == each.gpu_instance and same_device


def _managed(each: Seen, owners: frozenset[str]) -> Managed:
    if len(each.compute) == 1 and each.compute[0] in each.devices:
        compute = each.compute[0]
        return Managed(each.key, each.gpu_instance, compute, each.devices[compute], owners)
    return Managed(each.key, each.gpu_instance, None, "", owners)
