"""Bounded, symlink-safe access to the cache directories (monitor.md §2.1, §5). Every method blocks."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import open_regular
from hami.node.monitor.region import RawRegion, Region, odd_slots, parse_region, slot_count
from hami.node.monitor.ring import RING_BYTES, RING_OFFSET
from hami.node.region.format import EXTENSION_READ, MAX_FILE_BYTES, V1, Format, RegionError, choose_format
from hami.protocol import region_layout as layout

MAX_DIRECTORIES: Final = 20_000
MAX_ENTRIES: Final = 10_000
_REREADS: Final = 3
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PLACEHOLDER: Final = "libvgpu.so"
_SUFFIX: Final = ".cache"


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """One container's directory: its name and the two parts of it."""

    name: str
    pod_uid: str
    container: str


@contextlib.contextmanager
def open_containers(path: str) -> Iterator[int]:
    """A descriptor of the directory of all containers; raises ``OSError``."""
    descriptor = os.open(path, _DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def list_directories(containers: int) -> tuple[tuple[CacheDirectory, ...], tuple[str, ...]]:
    """The container directories in name order, and names of directories that are none of ours."""
    good: list[CacheDirectory] = []
    odd: list[str] = []
    with os.scandir(containers) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_DIRECTORIES:
                break
            if not entry.is_dir(follow_symlinks=False):
                continue
            uid, _, container = entry.name.partition("_")
            if uid and container:
                good.append(CacheDirectory(entry.name, uid, container))
            else:
                odd.append(entry.name)
    return tuple(sorted(good, key=lambda item: item.name)), tuple(sorted(odd))


def read_directory(containers: int, name: str) -> Region | None:
    """The region of one container; None while there is none. Raises :class:`RegionError`."""
    with _open_region(containers, name, os.O_RDONLY) as descriptor:
        return None if descriptor is None else _read(descriptor)


def read_ring(containers: int, name: str) -> bytes:
    """The event ring of one container, empty if it has none. Raises :class:`RegionError`."""
    with _open_region(containers, name, os.O_RDONLY) as descriptor:
        if descriptor is None or not _has_extension(descriptor, os.fstat(descriptor).st_size):
            return b""
        return os.pread(descriptor, RING_BYTES, layout.EXTENSION_OFFSET + RING_OFFSET)


@dataclass(frozen=True, slots=True)
class Writes:
    """Fields to change: the two of the feedback loop, and the heartbeat (Unix seconds). None: leave alone."""

    recent_kernel: int | None = None
    utilization_switch: int | None = None
    heartbeat: int | None = None


def write_directory(containers: int, name: str, writes: Writes) -> None:
    """Write single aligned fields of a region, nothing if it is gone. Raises :class:`RegionError`.

    A mapping would end the monitor when the container cuts its file, and ``pwrite`` may copy byte by byte
    [measured: ``rep movsb``], so a program can see any mixture of old and new bytes for a moment. Of the two
    fields of the feedback loop each mixture acts like the old or the new value. The switch is 0 or 1: one
    byte differs. The counter moves between n and n - 1 (one byte, it is small), or between n >= 0 and -1, all
    of whose bytes are 0xFF: a mixture is negative if it has the highest of them, as programs ask, and none of
    0 and 1, which they replace. The heartbeat is a time, where a mixture could be long ago: see
    :func:`_write_time`.
    """
    with _open_region(containers, name, os.O_RDWR) as descriptor:
        if descriptor is None:
            return
        size = os.fstat(descriptor).st_size
        region = choose_format(size, os.pread(descriptor, 16, 0)).region
        for field, value in (
            (region.recent_kernel, writes.recent_kernel),
            (region.utilization_switch, writes.utilization_switch),
        ):
            if value is not None:
                os.pwrite(descriptor, value.to_bytes(4, "little", signed=True), field.offset)
        if writes.heartbeat is not None and region is layout.V1 and _has_extension(descriptor, size):
            _write_time(
                descriptor, layout.EXTENSION_OFFSET + layout.Extension.heartbeat.offset, writes.heartbeat
            )


def _write_time(descriptor: int, offset: int, new: int) -> None:
    """Replace eight bytes so that a program never reads less than the smaller of the old and the new value.

    The bytes that differ are written one by one, and one byte is whole. A time that grows has a greater byte
    at the highest place that differs: written first, it makes all that follows greater than the old time. One
    that falls has a smaller byte there: written last, all before it is greater than the new time.
    """
    old = int.from_bytes(os.pread(descriptor, 8, offset), "little")
    places = [place for place in range(8) if (old ^ new) >> 8 * place & 0xFF]
    for place in reversed(places) if new > old else places:
        os.pwrite(descriptor, bytes([new >> 8 * place & 0xFF]), offset + place)


def directory_bytes(containers: int, name: str) -> int:
    """Bytes allocated to the files directly and indirectly in a directory, at most 10,000 entries of it."""
    device = os.fstat(containers).st_dev
    left = MAX_ENTRIES
    total = 0
    pending = [os.open(name, _DIRECTORY, dir_fd=containers)]
    try:
        while pending and left > 0:
            directory = pending.pop()
            try:
                with os.scandir(directory) as entries:
                    for entry in entries:
                        left -= 1
                        if left < 0:
                            break
                        with contextlib.suppress(OSError):
                            found = entry.stat(follow_symlinks=False)
                            if found.st_dev == device:
                                total += found.st_blocks * 512
                                if stat.S_ISDIR(found.st_mode) and len(pending) < 64:
                                    pending.append(os.open(entry.name, _DIRECTORY, dir_fd=directory))
            finally:
                os.close(directory)
    finally:
        for directory in pending:
            os.close(directory)
    return total


@contextlib.contextmanager
def _open_region(containers: int, name: str, access: int) -> Iterator[int | None]:
    try:
        directory = os.open(name, _DIRECTORY, dir_fd=containers)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise RegionError("open_failed", f"{name}: {error.strerror or error}") from error
    where = name
    try:
        chosen = _choose(directory, name)
        if chosen is None:
            yield None
            return
        where = f"{name}/{chosen}"
        descriptor = _open_file(directory, chosen, access)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RegionError("open_failed", f"{where}: {error.strerror or error}") from error
    finally:
        os.close(directory)


def _choose(directory: int, name: str) -> str | None:
    """The region file in a directory: none yet, the only one, or the newer of two."""
    relevant: list[str] = []
    with os.scandir(directory) as entries:
        for count, entry in enumerate(entries):
            if count >= MAX_ENTRIES:
                raise RegionError("ambiguous", f"{name} has more than {MAX_ENTRIES} entries")
            if _PLACEHOLDER in entry.name or entry.name.endswith(_SUFFIX):
                relevant.append(entry.name)
    candidates = [file for file in relevant if _PLACEHOLDER not in file]
    if len(relevant) > 2:
        raise RegionError("ambiguous", f"cache num not matched: {len(relevant)} files in {name}")
    if not candidates:
        return None

    def age(file: str) -> float:
        try:
            return os.stat(file, dir_fd=directory, follow_symlinks=False).st_mtime
        except OSError:
            return 0.0

    return max(sorted(candidates), key=age)


def _open_file(directory: int, file: str, access: int) -> int:
    try:
        descriptor = open_regular(file, access, dir_fd=directory)
    except UnsafePathError as error:
        raise RegionError("not_regular", str(error)) from error
    except OSError as error:
        raise RegionError("open_failed", f"{file}: {error.strerror or error}") from error
    found = os.fstat(descriptor)
    if found.st_nlink != 1 or found.st_size > MAX_FILE_BYTES:
        os.close(descriptor)
        raise RegionError("not_regular", f"{file} is no regular file with one link and at most 16 MiB")
    return descriptor


def _read(descriptor: int) -> Region:
    size = os.fstat(descriptor).st_size
    found = choose_format(size, os.pread(descriptor, 16, 0))
    head = _exactly(descriptor, 0, found.head_bytes)
    tail = _exactly(descriptor, found.tail_offset, found.tail_bytes)
    used = slot_count(found, tail)
    slots = bytearray(_exactly(descriptor, found.head_bytes, used * found.stride))
    extension = b""
    if found is V1 and size >= layout.EXTENSION_OFFSET + layout.EXTENSION_LENGTH:
        extension = os.pread(descriptor, EXTENSION_READ, layout.EXTENSION_OFFSET)
    raw = RawRegion(found, head, bytes(slots), tail, extension)
    for _ in range(_REREADS):
        torn = odd_slots(raw)
        if not torn:
            break
        for index in torn:
            start = index * found.stride
            slots[start : start + found.stride] = _slot(descriptor, found, index)
        raw = RawRegion(found, head, bytes(slots), tail, extension)
    return parse_region(raw)


def _slot(descriptor: int, found: Format, index: int) -> bytes:
    return _exactly(descriptor, found.head_bytes + index * found.stride, found.stride)


def _exactly(descriptor: int, offset: int, length: int) -> bytes:
    content = os.pread(descriptor, length, offset)
    if len(content) != length:
        raise RegionError("short_read", f"{len(content)} bytes at offset {offset}, expected {length}")
    return content


def _has_extension(descriptor: int, size: int) -> bool:
    if size < layout.EXTENSION_OFFSET + layout.EXTENSION_LENGTH:
        return False
    block = layout.Extension
    head = os.pread(descriptor, 16, layout.EXTENSION_OFFSET)
    return (
        len(head) == 16  # else it was cut meanwhile
        and head[:8] == layout.EXTENSION_MAGIC
        and block.version.read(head) == layout.EXTENSION_VERSION
        and block.length.read(head) == layout.EXTENSION_LENGTH
    )
