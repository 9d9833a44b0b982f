"""From the bytes of a region file to one plain object, the same that ``vgpu-region --json`` prints. Pure.

Everything in the file was written by a workload: counts are clamped, texts are checked, nothing is followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

from hami.node.region.format import EXTENSION_READ, V1, Format, choose_format, extension_is_ours
from hami.protocol import region_layout as layout

STATUS: Final = {layout.SLOT_FREE: "free", layout.SLOT_RUNNING: "running", layout.SLOT_SUSPENDED: "suspended"}
HOST_PID_PATHS: Final = ("not asked yet", "same namespace", "broker", "NVML", "none")
SLOT_FLAGS: Final = (
    (layout.SLOT_FLAG_PRIORITY_BLOCKED, "blocked by priority"),
    (layout.SLOT_FLAG_CORE_LIMITED, "waiting for the core limit"),
    (layout.SLOT_FLAG_NO_MARKERS, "without events"),
    (layout.SLOT_FLAG_KEPT_DESCRIPTOR, "lock kept by a descriptor"),
)
EVENTS: Final = (
    "", "refusal", "reclaimed", "throttled", "host PID fell back", "private region", "priority block",
    "limits file read again", "managed fallback", "no OFD locks", "no per-process NVML data", "debt forgiven",
    "region replaced",
)  # fmt: skip

Object: TypeAlias = dict[str, Any]


def view(data: bytes, live: Callable[[int], bool]) -> Object:
    """The region as an object; ``live(k)`` says whether slot k's lock is held.

    Raises :class:`hami.node.region.format.RegionError` for a file that is no region.
    """
    found = choose_format(len(data), data[:12])
    extension = _has_extension(data)
    count = min(found.region.device_count.read(data), layout.MAX_DEVICES)
    slots = min(max(found.region.proc_num.read(data), 0), layout.MAX_SLOTS)
    v1 = found is V1
    return {
        "version": f"v1.{layout.V1.minor.read(data)}" if v1 else "v0",
        "bytes": len(data),
        "extension": extension,
        "priority": found.region.priority.read(data),
        "recent_kernel": found.region.recent_kernel.read(data),
        "utilization_switch": found.region.utilization_switch.read(data),
        "last_kernel_time": layout.V1.last_kernel_time.read(data) if v1 else 0,
        "heartbeat": _ext(data, layout.Extension.heartbeat) if extension else 0,
        "tick": _ext(data, layout.Extension.tick) if extension else 0,
        "slots": slots,
        "devices": [_device(data, found, d, slots, extension) for d in range(count)],
        "processes": [
            _process(data, found, k, count, extension, live)
            for k in range(slots)
            if found.slot.status.read(data, found.region.procs.base(k)) != layout.SLOT_FREE
        ],
        "events": _events(data) if extension else [],
    }


def _has_extension(data: bytes) -> bool:
    base = layout.EXTENSION_OFFSET
    return len(data) >= layout.FILE_LENGTH and extension_is_ours(data[base : base + EXTENSION_READ])


def _ext(data: bytes, field: layout.Number, index: int = 0) -> int:
    return field.read(data, layout.EXTENSION_OFFSET, index)


def _text(raw: bytes) -> str:
    return "".join(chr(byte) if 0x20 < byte < 0x7F and byte not in b'"\\' else "?" for byte in raw)


def _device(data: bytes, found: Format, d: int, slots: int, extension: bool) -> Object:
    used = 0
    for k in range(slots):
        base = found.region.procs.base(k)
        if found.slot.status.read(data, base) != layout.SLOT_FREE:
            used += found.slot.used_total.read(data, base, d)
    shown: Object = {
        "index": d,
        "uuid": _text(found.region.uuid.read(data, 0, d)),
        "limit": found.region.limit.read(data, 0, d),
        "sm_limit": found.region.sm_limit.read(data, 0, d),
        "used": used & 0xFFFFFFFFFFFFFFFF,
    }
    if extension:
        base = layout.Extension.devices.base(d, layout.EXTENSION_OFFSET)
        for name in (
            "memory_limit", "core_limit", "peak", "residual", "oversubscribed", "refusals", "launches",
            "throttled", "forgiven",
        ):  # fmt: skip
            shown[name] = getattr(layout.ExtensionDevice, name).read(data, base)
    return shown


def _process(
    data: bytes, found: Format, k: int, devices: int, extension: bool, live: Callable[[int], bool]
) -> Object:
    base, slot = found.region.procs.base(k), found.slot
    status = slot.status.read(data, base)
    shown: Object = {
        "slot": k,
        "pid": slot.pid.read(data, base),
        "hostpid": slot.hostpid.read(data, base),
        "status": STATUS.get(status, str(status)),
        "live": live(k),
        "devices": [
            {
                "index": d,
                "context": slot.used_context.read(data, base, d),
                "module": slot.used_module.read(data, base, d),
                "data": slot.used_data.read(data, base, d),
                "total": slot.used_total.read(data, base, d),
                "nvml": slot.monitorused.read(data, base, d),
                "sm": slot.util_sm.read(data, base, d),
            }
            for d in range(devices)
            if slot.used_total.read(data, base, d) or slot.monitorused.read(data, base, d)
        ],
    }
    if extension:
        extra, place = layout.ExtensionSlot, layout.Extension.slots.base(k, layout.EXTENSION_OFFSET)
        path, flags = extra.host_pid_path.read(data, place), extra.flags.read(data, place)
        shown["host_pid_path"] = HOST_PID_PATHS[path] if path < len(HOST_PID_PATHS) else str(path)
        shown["broker_error"] = extra.broker_error.read(data, place)
        shown["state"] = [text for flag, text in SLOT_FLAGS if flags & flag]
        shown["throttled"] = extra.throttled.read(data, place)
        shown["refusals"] = extra.refusals.read(data, place)
    return shown


def _events(data: bytes) -> list[Object]:
    """The ring's complete records, oldest first."""
    written, event = _ext(data, layout.Extension.next_event), layout.ExtensionEvent
    found = []
    for number in range(max(0, written - layout.EVENT_RING), written):
        base = layout.Extension.events.base(number % layout.EVENT_RING, layout.EXTENSION_OFFSET)
        kind = event.type.read(data, base)
        if event.sequence.read(data, base) != number + 1:
            continue
        device = event.device.read(data, base)
        found.append(
            {
                "time": event.time.read(data, base),
                "type": EVENTS[kind] if 0 < kind < len(EVENTS) else str(kind),
                "device": -1 if device == 255 else device,
                "pid": event.pid.read(data, base),
                "value": event.value.read(data, base),
            }
        )
    return found
