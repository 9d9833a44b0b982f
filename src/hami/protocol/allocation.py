"""Device assignments of a pod as annotation text (WIRE, protocol.md §8).

A pod is ``{ <container> ";" }``, a container ``{ <device> ":" }``, a device ``uuid,type,memory MiB,core``.
Containers are slots: all init containers in spec order, then all regular ones. An empty slot is kept:
positions matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from sys import intern
from types import MappingProxyType
from typing import Any, Final

import msgspec

from hami.protocol._json import MAX_TEXT
from hami.protocol.errors import AllocationError

INT32_MIN: Final = -(2**31)
INT32_MAX: Final = 2**31 - 1

MAX_PIECES: Final = 8192
"""More devices or containers than this in one pod are not believed."""

NO_CUSTOM: Final[Mapping[str, Any]] = MappingProxyType({})


class ContainerDevice(msgspec.Struct, frozen=True, gc=False):
    """One allocated device of one container.

    ``usedmem`` is MiB, ``usedcores`` percent (AMD: compute units, AWS: a bit mask). ``index``, ``custom`` and
    ``payload`` are not on the wire: ``index`` is the card's index on the node, ``custom`` its registered
    extras, ``payload`` the vendor's own part of the allocation (a MIG slice).
    """

    uuid: str
    type: str
    usedmem: int
    usedcores: int
    index: int = 0
    custom: Mapping[str, Any] = NO_CUSTOM
    payload: Hashable = None


Slot = tuple[ContainerDevice, ...]
"""The devices of one container, in allocation order."""

Allocation = tuple[Slot, ...]
"""One slot per container, init containers first; empty slots are ``()``."""


def encode_allocation(allocation: Sequence[Sequence[ContainerDevice]]) -> str:
    """Text of ``allocation``; every slot ends with ``;``, so the number of ``;`` is the number of slots.

    Raises :class:`AllocationError` for ids or types that hold ``,``, ``:`` or ``;`` or an empty id, and for
    numbers outside int32.
    """
    return "".join(_encode_slot(position, slot) for position, slot in enumerate(allocation))


def decode_allocation(text: str) -> Allocation:
    """Slots of an allocation text, without the empty tail behind the last ``;``.

    Empty slots are kept in place; pieces without ``,`` and pieces with an empty id are dropped; fields beyond
    the fourth are ignored. A value may hold fewer slots than the pod has containers (plugins that rewrite the
    to-allocate key drop empty ones) or more (HAMi's plugin adds one per write); see :func:`fit_slots`. Raises
    :class:`AllocationError` when a piece has fewer than four fields, memory or core is not an int32, or there
    are more than :data:`MAX_PIECES` slots or devices.
    """
    if len(text) > MAX_TEXT:
        raise AllocationError(f"allocation text of {len(text)} characters is over the limit of {MAX_TEXT}")
    if not text:
        return ()
    if text.count(";") > MAX_PIECES or text.count(":") > MAX_PIECES:
        raise AllocationError(f"allocation text has more than {MAX_PIECES} slots or devices")
    segments = text.split(";")
    if not segments[-1]:
        segments.pop()
    return tuple(
        [_decode_slot(position, segment) if segment else () for position, segment in enumerate(segments)]
    )


def decode_container(text: str) -> Slot:
    """Devices of one container's text (what stands before a ``;``); errors as :func:`decode_allocation`."""
    return _decode_slot(0, text)


def fit_slots(allocation: Allocation, containers: int) -> Allocation:
    """``allocation`` with exactly ``containers`` slots: padded at the end, empty surplus slots removed.

    Raises :class:`AllocationError` when a slot beyond the container count holds a device.
    """
    if any(allocation[containers:]):
        raise AllocationError(f"allocation has devices beyond the pod's {containers} containers")
    return allocation[:containers] + ((),) * (containers - len(allocation))


def is_consumed(allocation: Allocation) -> bool:
    """Whether nothing is left to allocate (every slot is empty)."""
    return not any(allocation)


def pop_first(allocation: Allocation) -> tuple[int, Slot, Allocation]:
    """Position and devices of the first non-empty slot, and the allocation with that slot emptied in place.

    Raises :class:`AllocationError` when every slot is empty.
    """
    for position, slot in enumerate(allocation):
        if slot:
            return position, slot, (*allocation[:position], (), *allocation[position + 1 :])
    raise AllocationError("no device left to allocate")


def _encode_slot(position: int, slot: Sequence[ContainerDevice]) -> str:
    pieces = []
    for device in slot:
        for name, word in (("uuid", device.uuid), ("type", device.type)):
            if any(sign in word for sign in ",:;"):
                raise AllocationError(
                    f"{word!r} must not contain ',', ':' or ';'", f"slot {position}, {name}"
                )
        if not device.uuid:
            raise AllocationError("a device needs an id", f"slot {position}, uuid")
        for name, number in (("memory", device.usedmem), ("core", device.usedcores)):
            if not INT32_MIN <= number <= INT32_MAX:
                raise AllocationError(f"{number} is outside int32", f"slot {position}, {name}")
        pieces.append(f"{device.uuid},{device.type},{device.usedmem},{device.usedcores}:")
    return "".join(pieces) + ";"


def _decode_slot(position: int, segment: str) -> Slot:
    devices = []
    for piece in segment.split(":"):
        fields = piece.split(",")
        if len(fields) < 4:
            if len(fields) == 1:
                continue
            raise AllocationError(
                f"{len(fields)} fields where uuid,type,memory,core are needed", f"slot {position}"
            )
        memory = _int32(fields[2], position, "memory")
        core = _int32(fields[3], position, "core")
        if fields[0]:
            # many pods name the same cards: one text of each is kept
            devices.append(ContainerDevice(intern(fields[0]), intern(fields[1]), memory, core))
    return tuple(devices)


def _int32(text: str, position: int, name: str) -> int:
    # int() alone would also take blanks, underscores and non-ASCII digits.
    digits = text[1:] if text[:1] in ("+", "-") else text
    if digits.isascii() and digits.isdigit() and len(digits) <= 4096:
        number = int(text)
        if INT32_MIN <= number <= INT32_MAX:
            return number
        raise AllocationError(f"{text[:40]} is outside int32", f"slot {position}, {name}")
    raise AllocationError(f"{text[:40]!r} is not an integer", f"slot {position}, {name}")
