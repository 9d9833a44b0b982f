"""A node's device inventory as annotation text: the JSON form and both CSV forms (WIRE, protocol.md §3).

Two layers. ``read_json`` and ``read_csv`` give the devices as they are written. ``decode_json`` and
``decode_csv`` give what a vendor may use: ids present and unique, impossible sizes unhealthy, and an error of
its own kind for "no devices" and for "unusable". One bad piece costs that piece only (decisions, rows 46 and
47).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from sys import intern
from typing import Annotated, Any, Final

import msgspec

from hami.protocol import _json
from hami.protocol.allocation import INT32_MAX, INT32_MIN, NO_CUSTOM
from hami.protocol.errors import DevicesAbsent, DevicesMalformed, ProtocolError

DEFAULT_MODE: Final = "hami-core"
"""Mode of a card whose registration does not name one (seven CSV fields)."""

MAX_DEVICES: Final = 4096
"""More devices than this on one node is not believed."""

MAX_MIG_PARTS: Final = 64
"""More MIG profiles of one card, or placements of one profile, than this are not believed."""

_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})

_Int32 = Annotated[int, msgspec.Meta(ge=INT32_MIN, le=INT32_MAX)]
_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=INT32_MAX)]


class MigPlacement(msgspec.Struct, frozen=True, gc=False):
    """Where a slice may lie on a card, in memory slices. ``start`` 0 is written."""

    start: _Unsigned = 0
    size: _Unsigned = 0


class MigProfile(msgspec.Struct, frozen=True, rename={"memory_mib": "memoryMB", "slice_count": "sliceCount"}):
    """One NVIDIA MIG profile a card offers. ``core`` is percent of the largest profile, rounded up."""

    name: str = ""
    memory_mib: _Unsigned = 0
    core: _Unsigned = 0
    slice_count: _Unsigned = 0
    placements: Annotated[tuple[MigPlacement, ...], msgspec.Meta(max_length=MAX_MIG_PARTS)] = ()


class DeviceInfo(msgspec.Struct, frozen=True, gc=False):
    """One card as its node registered it.

    ``count`` slots, ``devmem`` MiB, ``devcore`` percent (AMD: compute units, Mthreads: sixteenths), ``numa``
    0 when unknown. ``mode`` is ``hami-core``, ``mig`` or ``mps`` (NVIDIA). ``vendor`` is the common word of
    the vendor under which the card is stored; ``custom`` is the vendor's own extras, never written to.
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
    """Devices of one registration text in written order, and one line per dropped or odd piece."""

    devices: tuple[DeviceInfo, ...]
    warnings: tuple[str, ...] = ()


class _Plain(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A device with nothing but the usual keys, spelled as they are written."""

    id: str = ""
    index: _Unsigned = 0
    count: _Int32 = 0
    devmem: _Int32 = 0
    devcore: _Int32 = 0
    type: str = ""
    numa: _Int32 = 0
    mode: str = ""
    health: bool = False


class _Written(_Plain, frozen=True, gc=True, forbid_unknown_fields=False):
    """A device with all keys of the JSON form."""

    mig_profiles: Annotated[tuple[MigProfile, ...], msgspec.Meta(max_length=MAX_MIG_PARTS)] = msgspec.field(
        default=(), name="migProfiles"
    )
    devicevendor: str = ""
    custominfo: dict[str, Any] = msgspec.field(default_factory=dict)


_plain_decoder: Final = msgspec.json.Decoder(list[_Plain])
_NAMES: Final = _json.known_names(_Written)
_PROFILE_NAMES: Final = _json.known_names(MigProfile)
_PLACEMENT_NAMES: Final = _json.known_names(MigPlacement)


# --- what a vendor may use ----------------------------------------------------------------------------------


def decode_json(text: str, vendor: str) -> Inventory:
    """Usable devices of a JSON registration text, stored under ``vendor``.

    Raises :class:`DevicesAbsent` for ``[]``, :class:`DevicesMalformed` when the text is no JSON array or has
    entries but not one good one.
    """
    written = _read_plain(text)
    if written is None:
        plain = _json.load(text, DevicesMalformed, "device registration")
        if plain is None:
            raise DevicesMalformed("device registration is null")
        written = _from_array(plain)
    return usable(written, vendor)


def decode_csv(text: str, vendor: str) -> Inventory:
    """Usable devices of a comma/colon registration text; errors as :func:`decode_json` (``:`` is the empty
    list).
    """
    return usable(read_csv(text), vendor)


def usable(written: Inventory, vendor: str) -> Inventory:
    """The devices of ``written`` that can be used: with an id of their own, impossible sizes marked
    unhealthy.

    Raises :class:`DevicesAbsent` when nothing was written, :class:`DevicesMalformed` when nothing usable is
    left.
    """
    if not written.devices:
        raise DevicesAbsent("no devices registered")
    warnings = list(written.warnings)
    good: dict[str, DeviceInfo] = {}
    for position, device in enumerate(written.devices):
        if not device.id or "," in device.id or ":" in device.id or ";" in device.id:
            warnings.append(f"device {position}: id {device.id!r} is empty or holds ',', ':' or ';', dropped")
        elif device.id in good:
            warnings.append(f"device {position}: id {device.id} is already registered, dropped")
        else:
            sane = device.count >= 0 and device.devmem >= 0 and device.devcore >= 0
            if not sane:
                warnings.append(f"device {position}: {device.id} has a negative size, treated as unhealthy")
            good[device.id] = msgspec.structs.replace(device, vendor=vendor, health=device.health and sane)
    if not good:
        raise DevicesMalformed("no usable device: " + "; ".join(warnings[:3]))
    return Inventory(tuple(good.values()), tuple(warnings))


# --- as written ---------------------------------------------------------------------------------------------


def read_json(text: str) -> Inventory:
    """Devices of a JSON registration text as written; ``[]`` and ``null`` give none.

    Keys match in any case, the last of equal ones wins; missing and null members are zero; unknown keys and
    ``migtemplate`` are ignored. Raises :class:`DevicesMalformed` as :func:`decode_json`.
    """
    plain = _json.load(text, DevicesMalformed, "device registration")
    return _from_array([] if plain is None else plain)


def read_csv(text: str) -> Inventory:
    """Devices of a comma/colon registration text as written; only separators give none.

    Nothing is trimmed. A piece has seven fields (``id,count,devmem,devcore,type,numa,health``: index is the
    position, dropped pieces counted, mode ``hami-core``) or nine (plus ``index,mode``). Raises
    :class:`DevicesMalformed` when there is no ``:`` at all or no good piece.
    """
    if len(text) > _json.MAX_TEXT:
        raise DevicesMalformed(f"device registration of {len(text)} characters is too long")
    if ":" not in text:
        raise DevicesMalformed("node annotation missing device separator")
    pieces = [piece for piece in text.split(":") if piece]
    devices, warnings = [], []
    for position, piece in enumerate(pieces[:MAX_DEVICES]):
        try:
            devices.append(_from_piece(position, piece))
        except ProtocolError as error:
            warnings.append(f"device {position}: {error}, dropped")
    return _checked(devices, warnings, len(pieces))


def _read_plain(text: str) -> Inventory | None:
    """What `_from_array` makes of a registration as plugins usually write it, in a quarter of the time; None
    for any other text."""
    if len(text) > _json.MAX_TEXT:
        return None
    try:
        devices = _plain_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if len(devices) > MAX_DEVICES:
        return None
    return Inventory(tuple([_device(one) for one in devices]))


def _from_array(plain: Any) -> Inventory:
    if not isinstance(plain, list):
        raise DevicesMalformed("device registration is no JSON array")
    devices, warnings = [], []
    for position, element in enumerate(plain[:MAX_DEVICES]):
        if not isinstance(element, dict):
            warnings.append(f"device {position}: {type(element).__name__} instead of an object, dropped")
            continue
        try:
            devices.append(_from_object(element))
        except msgspec.ValidationError as error:
            message, path = _json.explain(error)
            warnings.append(f"device {position}: {message} at {path}, dropped")
    return _checked(devices, warnings, len(plain))


def _checked(devices: list[DeviceInfo], warnings: list[str], written: int) -> Inventory:
    if written > MAX_DEVICES:
        warnings.append(f"{written} devices registered, those beyond {MAX_DEVICES} dropped")
    if warnings and not devices:
        raise DevicesMalformed("no usable device: " + "; ".join(warnings[:3]))
    return Inventory(tuple(devices), tuple(warnings))


def _from_object(element: dict[str, Any]) -> DeviceInfo:
    members = _json.in_known_case(element, _NAMES)
    profiles = members.get("migProfiles")
    if isinstance(profiles, list):
        members["migProfiles"] = [_profile_members(profile) for profile in profiles]
    raw = msgspec.convert(members, _Written)
    return msgspec.structs.replace(
        _device(raw),
        vendor=intern(raw.devicevendor),
        custom=raw.custominfo or NO_CUSTOM,
        mig_profiles=raw.mig_profiles,
    )


def _device(raw: _Plain) -> DeviceInfo:
    return DeviceInfo(
        intern(raw.id),
        raw.index,
        raw.count,
        raw.devmem,
        raw.devcore,
        intern(raw.type),
        raw.numa,
        raw.health,
        intern(raw.mode),
    )


def _profile_members(profile: Any) -> Any:
    if not isinstance(profile, dict):
        return profile
    members = _json.in_known_case(profile, _PROFILE_NAMES)
    placements = members.get("placements")
    if isinstance(placements, list):
        members["placements"] = [
            _json.in_known_case(place, _PLACEMENT_NAMES) if isinstance(place, dict) else place
            for place in placements
        ]
    return members


def _from_piece(position: int, piece: str) -> DeviceInfo:
    fields = piece.split(",")
    if len(fields) not in (7, 9):
        raise DevicesMalformed(f"unexpected field count {len(fields)} in node annotation")
    count, devmem, devcore = (
        _integer(text, name) for text, name in zip(fields[1:4], ("count", "memory", "core"), strict=True)
    )
    numa = _integer(fields[5], "numa")
    if fields[6] not in _TRUE and fields[6] not in _FALSE:
        raise DevicesMalformed(f"invalid health field {fields[6][:20]!r}")
    index, mode = (position, DEFAULT_MODE) if len(fields) == 7 else (_integer(fields[7], "index"), fields[8])
    if index < 0:
        raise DevicesMalformed(f"index field must not be negative: {index}")
    return DeviceInfo(
        id=intern(fields[0]),
        index=index,
        count=count,
        devmem=devmem,
        devcore=devcore,
        type=fields[4],
        numa=numa,
        health=fields[6] in _TRUE,
        mode=mode,
    )


def _integer(text: str, name: str) -> int:
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 32):
        raise DevicesMalformed(f"invalid {name} field {text[:20]!r}")
    number = int(text)
    if not INT32_MIN <= number <= INT32_MAX:
        raise DevicesMalformed(f"{name} field {text[:20]} is outside int32")
    return number


# --- writing ------------------------------------------------------------------------------------------------


def encode_json(devices: Iterable[DeviceInfo]) -> str:
    """Compact JSON registration text as the NVIDIA plugin writes it: sorted by index then id, zero values
    omitted.

    ``vendor`` and ``custom`` are not written. ``<``, ``>`` and ``&`` are escaped as Go does.
    """
    objects = [_as_object(device) for device in sorted(devices, key=lambda each: (each.index, each.id))]
    text = msgspec.json.encode(objects).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def encode_csv(devices: Iterable[DeviceInfo]) -> str:
    """Comma/colon registration text, nine fields per device, sorted by index then id.

    Raises :class:`DevicesMalformed` for a text field that holds ``,`` or ``:``.
    """
    pieces = []
    for device in sorted(devices, key=lambda each: (each.index, each.id)):
        for name, word in (("id", device.id), ("type", device.type), ("mode", device.mode)):
            if "," in word or ":" in word:
                raise DevicesMalformed(f"{name} {word!r} must not contain ',' or ':'")
        health = "true" if device.health else "false"
        pieces.append(
            f"{device.id},{device.count},{device.devmem},{device.devcore},{device.type},"
            f"{device.numa},{health},{device.index},{device.mode}:"
        )
    return "".join(pieces)


def _as_object(device: DeviceInfo) -> dict[str, Any]:
    members = {
        "id": device.id,
        "index": device.index,
        "count": device.count,
        "devmem": device.devmem,
        "devcore": device.devcore,
        "type": device.type,
        "numa": device.numa,
        "mode": device.mode,
        "migProfiles": device.mig_profiles,
        "health": device.health,
    }
    return {key: value for key, value in members.items() if value}
