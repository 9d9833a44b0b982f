"""MIG reservations of a pod, annotation ``hami.io/vgpu-mig-allocations`` (WIRE, protocol.md §9)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from hami.protocol import _json
from hami.protocol.allocation import INT32_MAX
from hami.protocol.errors import MigReservationError
from hami.protocol.inventory import MigPlacement

_Position = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]
_Uint32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class MigReservation(
    msgspec.Struct,
    frozen=True,
    gc=False,
    omit_defaults=True,
    rename={
        "container_index": "containerIndex",
        "device_index": "deviceIndex",
        "gpu_uuid": "gpuUUID",
        "mig_uuid": "migUUID",
        "gpu_instance_id": "gpuInstanceID",
        "compute_instance_id": "computeInstanceID",
    },
):
    """One reserved MIG slice: slot position, position inside the slot, parent card, profile and placement.

    The last three members are set by the plugin, all together, when the instance exists; 0 is a legal
    instance id.
    """

    container_index: _Position
    device_index: _Position
    gpu_uuid: str
    profile: str
    placement: MigPlacement
    mig_uuid: str = ""
    gpu_instance_id: _Uint32 | None = None
    compute_instance_id: _Uint32 | None = None

    @property
    def realised(self) -> bool:
        """Whether the plugin has created the instance."""
        return bool(self.mig_uuid)


_NAMES: Final = _json.known_names(MigReservation)
_PLACEMENT_NAMES: Final = _json.known_names(MigPlacement)
_ABSENT: Final[dict[str, Any]] = {
    "containerIndex": 0,
    "deviceIndex": 0,
    "gpuUUID": "",
    "profile": "",
    "placement": {},
}


def decode_mig_reservations(text: str) -> tuple[MigReservation, ...]:
    """Reservations of an annotation value; ``""``, ``[]`` and ``null`` mean none.

    Raises :class:`MigReservationError`, which rejects the whole value: an element is incomplete, has only
    some of the three runtime members, or shares container and device index with another.
    """
    if not text:
        return ()
    plain = _json.load(text, MigReservationError, "MIG reservation annotation")
    if plain is None:
        return ()
    if not isinstance(plain, list):
        raise MigReservationError("MIG reservation annotation is no JSON array")
    reservations = tuple(_element(position, element) for position, element in enumerate(plain))
    _check(reservations)
    return reservations


def encode_mig_reservations(reservations: Sequence[MigReservation]) -> str:
    """Annotation value of ``reservations``; ``[]`` for none. Raises :class:`MigReservationError` as the
    decoder.
    """
    _check(reservations)
    return msgspec.json.encode(reservations).decode()


def profile_problem(name: str) -> str:
    """Why ``name`` cannot stand in the allow list of profiles, as the end of a sentence; "" if it can.

    Only the slices before the dot select a profile, so what a suffix would mean cannot be expressed.
    """
    slices, dot, memory = name.partition(".")
    if not (dot and slices.endswith("g") and slices[:-1].isascii() and slices[:-1].isdigit()):
        return "it must look like 1g.10gb"
    if not memory or "+" in memory or "." in memory:
        return "it must not have +me or .gfx, which cannot be selected"
    return ""


def profile_word(name: str) -> str:
    """What selects NVML's profile: ``1g`` of ``1g.10gb``; the rest is a label."""
    return name.partition(".")[0]


def overlap(a: MigPlacement, b: MigPlacement) -> bool:
    """Whether two placements on one card share a memory slice."""
    return a.start < b.start + b.size and b.start < a.start + a.size


def _element(position: int, element: Any) -> MigReservation:
    if not isinstance(element, dict):
        raise MigReservationError("not an object", f"$[{position}]")
    members = _ABSENT | _json.in_known_case(element, _NAMES)
    if isinstance(members["placement"], dict):
        members["placement"] = _json.in_known_case(members["placement"], _PLACEMENT_NAMES)
    try:
        return msgspec.convert(members, MigReservation)
    except msgspec.ValidationError as error:
        message, path = _json.explain(error)
        raise MigReservationError(message, f"$[{position}]{path[1:]}") from None


def _check(reservations: Sequence[MigReservation]) -> None:
    seen = set()
    for position, each in enumerate(reservations):
        if not each.gpu_uuid or not each.profile or each.placement.size <= 0:
            raise MigReservationError(f"MIG allocation {position} is incomplete")
        if min(each.container_index, each.device_index, each.placement.start) < 0:
            raise MigReservationError(f"MIG allocation {position} has a negative index")
        runtime = (
            bool(each.mig_uuid),
            each.gpu_instance_id is not None,
            each.compute_instance_id is not None,
        )
        if any(runtime) and not all(runtime):
            raise MigReservationError(f"MIG allocation {position} has partial runtime identity")
        key = (each.container_index, each.device_index)
        if key in seen:
            raise MigReservationError(f"duplicate MIG allocation for container {key[0]} device {key[1]}")
        seen.add(key)
