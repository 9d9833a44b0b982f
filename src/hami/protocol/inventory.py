"""A node's device inventory as annotation text: the JSON form and both CSV forms (WIRE, protocol.md §3)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hami.protocol.allocation import NO_CUSTOM


class MigPlacement(msgspec.Struct, frozen=True, gc=False):
    """Where a slice may lie on a card, in memory slices. ``start`` 0 is written."""

    start: int
    size: int


class MigProfile(msgspec.Struct, frozen=True, rename={"memory_mib": "memoryMB", "slice_count": "sliceCount"}):
    """One NVIDIA MIG profile a card offers. ``core`` is percent of the largest profile, rounded up."""

    name: str = ""
    memory_mib: int = 0
    core: int = 0
    slice_count: int = 0
    placements: tuple[MigPlacement, ...] = ()


class DeviceInfo(msgspec.Struct, frozen=True):
    """One card as its node registered it.

    ``count`` slots, ``devmem`` MiB, ``devcore`` percent (AMD: compute units, Mthreads: sixteenths), ``numa`` 0 when
    unknown. ``mode`` is ``hami-core``, ``mig`` or ``mps`` (NVIDIA). ``vendor`` is the common word of the vendor
    under which the card is stored.
    """

    id: str
    index: int = 0
    count: int = 0
    devmem: int = 0
    devcore: int = 0
    type: str = ""
    numa: int = 0
    health: bool = False
    mode: str = ""
    vendor: str = ""
    custom: Mapping[str, Any] = NO_CUSTOM
    mig_profiles: tuple[MigProfile, ...] = ()


class Inventory(msgspec.Struct, frozen=True):
    """The good devices of one registration text in written order, and one line per dropped or odd piece."""

    devices: tuple[DeviceInfo, ...]
    warnings: tuple[str, ...] = ()


def decode_json(text: str, vendor: str) -> Inventory:
    """Devices of a JSON registration text. Raises :class:`DevicesAbsent` or :class:`DevicesMalformed`."""
    ...


def decode_csv(text: str, vendor: str) -> Inventory:
    """Devices of a comma/colon registration text. Raises :class:`DevicesAbsent` or :class:`DevicesMalformed`."""
    ...


def encode_json(devices: Iterable[DeviceInfo]) -> str:
    """Compact JSON registration text, sorted by index then id, zero values omitted."""
    ...


def encode_csv(devices: Iterable[DeviceInfo]) -> str:
    """Comma/colon registration text, nine fields per device, sorted by index then id."""
    ...


def decode_pair_scores(text: str) -> dict[str, dict[str, int]]:
    """Pair scores ``uuid -> uuid -> score``. Raises :class:`PairScoreError`."""
    ...


def encode_pair_scores(scores: Mapping[str, Mapping[str, int]]) -> str:
    """Pair score annotation text, sorted by uuid."""
    ...
