"""MIG reservations of a pod, annotation ``hami.io/vgpu-mig-allocations`` (WIRE, protocol.md §9)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from hami.protocol.inventory import MigPlacement


class MigReservation(msgspec.Struct, frozen=True, gc=False):
    """One reserved MIG slice. The last three members are set by the plugin, all together, when it is realised."""

    container_index: int
    device_index: int
    gpu_uuid: str
    profile: str
    placement: MigPlacement
    mig_uuid: str = ""
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None

    @property
    def realised(self) -> bool:
        """Whether the plugin has created the instance."""
        return bool(self.mig_uuid)


def decode_mig_reservations(text: str) -> tuple[MigReservation, ...]:
    """Reservations of an annotation value; ``""`` and ``[]`` mean none. Raises :class:`MigReservationError`."""
    ...


def encode_mig_reservations(reservations: Sequence[MigReservation]) -> str:
    """Annotation value of ``reservations``; ``[]`` for none. Raises :class:`MigReservationError`."""
    ...


def overlap(a: MigPlacement, b: MigPlacement) -> bool:
    """Whether two placements on one card share a memory slice."""
    return a.start < b.start + b.size and b.start < a.start + a.size
