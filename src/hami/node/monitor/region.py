"""From the bytes of a shared region to bounded numbers (monitor.md §4, §5). Pure.

Everything here was written by a workload: counts are clamped, sums saturate, texts are checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hami.node.region.format import V1, Format, extension_is_ours
from hami.protocol import region_layout as layout

SATURATED: Final = 2**63 - 1

_LOW: Final = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Extra:
    """What our library adds per device; times in seconds, memory in bytes."""

    throttled_seconds: float
    refusals: int
    peak: int
    residual: int
    charged_ns: int = 0
    """GPU time charged so far, nanoseconds, without the factor."""
    factor: float = 1.0
    """What the library has learned to correct it with, 1/64..4."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of a container. Memory in bytes, ``sm`` and ``core_limit`` in percent, 0 = no limit.

    ``index`` is the position in the region; ``extra`` is None without our extension block.
    """

    index: int
    uuid: str
    memory_limit: int
    core_limit: int
    total: int
    context: int
    module: int
    buffer: int
    sm: int
    extra: Extra | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """One container's region. ``last_kernel`` is Unix seconds, 0 when unknown; ``host_pids`` are claims.

    ``all_uuids`` are the usable UUIDs of all sixteen places, for the feedback rules. ``bad_uuids`` counts
    devices that were skipped because of theirs.
    """

    format: str
    devices: tuple[DeviceUse, ...]
    all_uuids: frozenset[str]
    bad_uuids: int
    processes: int
    host_pids: tuple[int, ...]
    utilization_switch: int
    recent_kernel: int
    priority: int
    last_kernel: int
    has_extension: bool
    events_written: int = 0
    """Events ever written to the ring of the extension block."""
    broker: tuple[int, int] = (0, 0)
    """Processes that asked the host PID broker: those that it answered, and those that fell back."""


@dataclass(frozen=True, slots=True)
class RawRegion:
    """What was read: head, the used slots, tail, and the start of the extension block (may be empty)."""

    format: Format
    head: bytes
    slots: bytes
    tail: bytes
    extension: bytes


def slot_count(found: Format, tail: bytes) -> int:
    """Number of process slots in use, clamped to 0..1024."""
    count = found.region.proc_num.read(tail, -found.tail_offset)
    return min(max(count, 0), layout.MAX_SLOTS)


def parse_region(raw: RawRegion) -> Region:
    """Numbers of a region; the pieces have the sizes that their format demands."""
    base = -raw.format.tail_offset
    region, slot = raw.format.region, raw.format.slot
    active = _active_slots(raw)
    count = min(region.device_count.read(raw.head), layout.MAX_DEVICES)
    has_extension = extension_is_ours(raw.extension)
    columns = {
        "total": _sums(active, slot.used_total),
        "context": _sums(active, slot.used_context),
        "module": _sums(active, slot.used_module),
        "buffer": _sums(active, slot.used_data),
        "sm": _sums(active, slot.util_sm, limit=100),
    }
    texts = [_uuid(region.uuid.read(raw.head, 0, index)) for index in range(layout.MAX_DEVICES)]
    devices = tuple(
        DeviceUse(
            index=index,
            uuid=text,
            memory_limit=min(region.limit.read(raw.head, 0, index), SATURATED),
            core_limit=min(region.sm_limit.read(raw.head, 0, index), SATURATED),
            extra=_extra(raw.extension, index) if has_extension else None,
            **{name: sums[index] for name, sums in columns.items()},
        )
        for index, text in enumerate(texts[:count])
        if text
    )
    pids = _column(active, slot.hostpid, "<i4")[:, 0]
    return Region(
        format=raw.format.name,
        devices=devices,
        all_uuids=frozenset(text for text in texts if text),
        bad_uuids=sum(text is None for text in texts[:count]),
        processes=len(active),
        host_pids=tuple(int(pid) for pid in pids if pid > 0),
        utilization_switch=region.utilization_switch.read(raw.tail, base),
        recent_kernel=region.recent_kernel.read(raw.tail, base),
        priority=region.priority.read(raw.tail, base),
        last_kernel=_last_kernel(raw),
        has_extension=has_extension,
        events_written=layout.Extension.next_event.read(raw.extension) if has_extension else 0,
        broker=_broker(raw.extension) if has_extension else (0, 0),
    )


def _broker(extension: bytes) -> tuple[int, int]:
    block = layout.Extension
    answers, fallbacks = block.broker_answers.read(extension), block.broker_fallbacks.read(extension)
    return min(answers, SATURATED), min(fallbacks, SATURATED)


def odd_slots(raw: RawRegion) -> tuple[int, ...]:
    """Slots whose sequence lock is odd, so that they are worth a second look (v1, minor 2 and later)."""
    if raw.format is not V1 or layout.V1.minor.read(raw.head) < 2 or not raw.slots:
        return ()
    locks = _column(_rows(raw), layout.V1Slot.seqlock, "<u8")[:, 0]
    return tuple(int(index) for index in np.flatnonzero(locks & np.uint64(1)))


def _rows(raw: RawRegion) -> np.ndarray:
    rows = len(raw.slots) // raw.format.stride
    return np.frombuffer(raw.slots, np.uint8, rows * raw.format.stride).reshape(rows, raw.format.stride)


def _active_slots(raw: RawRegion) -> np.ndarray:
    rows = _rows(raw)
    status = _column(rows, raw.format.slot.status, "<i4")[:, 0]
    active: np.ndarray = rows[status != layout.SLOT_FREE]
    return active


def _column(rows: np.ndarray, field: layout.Number, dtype: str) -> np.ndarray:
    """Field values as (slots, field.count)."""
    size = np.dtype(dtype).itemsize
    stride = field.stride if field.count > 1 else size
    places = field.offset + stride * np.arange(field.count)[:, None] + np.arange(size)
    taken = rows[:, places.reshape(-1)]
    return np.ascontiguousarray(taken).view(dtype).reshape(len(rows), field.count)


def _sums(rows: np.ndarray, field: layout.Number, limit: int | None = None) -> list[int]:
    """Sum over slots per device, saturated at 2^63 - 1; each value at most ``limit`` if given."""
    values = _column(rows, field, "<u8")
    if limit is not None:
        values = np.minimum(values, np.uint64(limit))
    high = (values >> np.uint64(32)).sum(axis=0, dtype=np.uint64)
    low = (values & _LOW).sum(axis=0, dtype=np.uint64)
    return [min((int(up) << 32) + int(down), SATURATED) for up, down in zip(high, low, strict=True)]


def _uuid(text: bytes) -> str | None:
    """The UUID, ``""`` for an unused place, None for one that is not printable ASCII."""
    if not text:
        return ""
    if all(0x20 < byte < 0x7F for byte in text):
        return text.decode("ascii")
    return None


def _last_kernel(raw: RawRegion) -> int:
    if raw.format is not V1:
        return 0
    value = layout.V1.last_kernel_time.read(raw.tail, -raw.format.tail_offset)
    return value if value <= SATURATED else 0


def _factor(g: int) -> float:
    return min(max(g / layout.G_ONE, 1 / 64), 4.0) if g else 1.0


def _extra(extension: bytes, index: int) -> Extra:
    base = layout.Extension.devices.base(index)
    device = layout.ExtensionDevice
    return Extra(
        throttled_seconds=device.throttled.read(extension, base) / 1e9,
        refusals=min(device.refusals.read(extension, base), SATURATED),
        peak=min(device.peak.read(extension, base), SATURATED),
        residual=min(device.residual.read(extension, base), SATURATED),
        charged_ns=min(device.charged.read(extension, base), SATURATED),
        factor=_factor(device.g.read(extension, base)),
    )
