"""What the plugin asks of NVML about MIG, and what it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from hami.node.nvml import GpuIdentity
from hami.protocol.inventory import MigPlacement


@dataclass(frozen=True, slots=True)
class MigMode:
    """Whether a card is divided by MIG now, and after its next reset."""

    current: bool
    pending: bool


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """One GPU instance profile of a card.

    ``number`` is NVML's number of the profile (the same on all cards), ``id`` its id on this card, ``name``
    such as ``1g.5gb`` (empty: an old driver). ``count``: how many instances of it an empty card holds.
    """

    number: int
    id: int
    name: str
    slices: int
    count: int
    multiprocessors: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class LiveInstance:
    """One GPU instance of a card: its id, the id of its profile on the card, its place, and the ids of the
    compute instances in it.
    """

    id: int
    profile_id: int
    placement: MigPlacement
    compute: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MigDevice:
    """One MIG device: a compute instance with its GPU instance, as containers use it.

    ``index`` is its number on the card; ``slices`` and ``compute_slices`` are those of the two instances.
    """

    index: int
    uuid: str
    gpu_instance: int
    compute_instance: int
    slices: int = 0
    compute_slices: int = 0
    memory_mib: int = 0
    multiprocessors: int = 0


class MigDriver(Protocol):
    """MIG of the cards. Every method blocks and raises :class:`hami.node.errors.NvmlError`, which is
    :class:`hami.node.errors.NvmlUnsupportedError` where the card has no MIG.
    """

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """All cards, by index."""
        ...

    def mode(self, gpu: GpuIdentity) -> MigMode:
        """Whether the card is divided."""
        ...

    def enable(self, gpu: GpuIdentity) -> None:
        """Ask for MIG mode; an error where the driver could not activate it."""
        ...

    def profiles(self, gpu: GpuIdentity) -> tuple[GpuProfile, ...]:
        """All profiles that the driver knows for the card, divided or not."""
        ...

    def placements(self, gpu: GpuIdentity, profile: GpuProfile) -> tuple[MigPlacement, ...]:
        """Every place that instances of ``profile`` may have on the (empty) card; while it is divided."""
        ...

    def instances(self, gpu: GpuIdentity) -> tuple[LiveInstance, ...]:
        """The GPU instances on the card, of all profiles."""
        ...

    def devices(self, gpu: GpuIdentity) -> tuple[MigDevice, ...]:
        """The MIG devices on the card."""
        ...

    def create(self, gpu: GpuIdentity, profile: GpuProfile, placement: MigPlacement) -> int:
        """Make a GPU instance at exactly that place; its id."""
        ...

    def create_compute(self, gpu: GpuIdentity, instance: int, profile: GpuProfile) -> int:
        """Make the compute instance that fills a GPU instance of ``profile``; its id."""
        ...

    def destroy_compute(self, gpu: GpuIdentity, instance: int, compute: int) -> None:
        """Destroy a compute instance; one that is not there counts as destroyed."""
        ...

    def destroy(self, gpu: GpuIdentity, instance: int) -> None:
        """Destroy a GPU instance; one that is not there counts as destroyed."""
        ...

    def is_busy(self, gpu: GpuIdentity, instance: int | None = None) -> bool:
        """Whether processes run on the card, or on one GPU instance of it. A list of processes that cannot be
        read counts as a process.
        """
        ...


def overlapping(placement: MigPlacement, instances: tuple[LiveInstance, ...]) -> Iterator[LiveInstance]:
    """The instances that take a part of ``placement``."""
    for each in instances:
        other = each.placement
        if placement.start < other.start + other.size and other.start < placement.start + placement.size:
            yield each
