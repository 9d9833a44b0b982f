"""Opening a region file without joining it, and the few changes that a tool may make.

A container can cut its file at any moment, and whoever then touches a mapped page that is gone is killed by
SIGBUS. So a reader copies, and a change is made in a child process. It is made through a mapping because
limits have to be stored whole: ``pwrite`` copies byte by byte on many processors [measured: ``rep movsb``],
and programs would see a limit with bytes of the old and of the new one.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

from hami.node.errors import NodeError, UnsafePathError
from hami.node.files import open_regular
from hami.node.region.child import Answer, ChildDiedError, in_child
from hami.node.region.format import MAX_FILE_BYTES
from hami.node.region.view import Object, view
from hami.protocol import region_layout as layout

_FLOCK: Final = "hhqqi4x"


class RegionEditError(NodeError):
    """The change is not possible; unless the text says so, nothing was written."""


class RegionFile:
    """A region file of a container; a context manager. Never claims a slot, waits for nothing."""

    def __init__(self, path: Path, *, write: bool) -> None:
        try:
            self._fd = open_regular(path, os.O_RDWR if write else os.O_RDONLY)
        except OSError as error:
            raise UnsafePathError(f"{path}: {error.strerror}") from error
        found = os.fstat(self._fd)
        if found.st_size > MAX_FILE_BYTES:
            os.close(self._fd)
            raise UnsafePathError(f"{path} is no region: not a regular file of its size")
        self.path, self.length = path, found.st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self) -> bytes:
        return os.pread(self._fd, self.length, 0)

    def view(self) -> Object:
        """See :func:`hami.node.region.view.view`."""
        return view(self.read(), self.live)

    def live(self, slot: int) -> bool:
        """True if the owner of a slot lives (its lock is held; without such locks: always)."""
        wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_SLOT + slot, 1, 0)
        try:
            answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, wanted)
        except OSError:
            return True
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)

    def set_limits(self, memory: Sequence[tuple[int, int]], cores: Sequence[tuple[int, int]]) -> None:
        """Memory limits in bytes, 0 = none, and core limits of 1 to 100 percent, each with its device.

        Nothing is written unless the region has all of these devices.
        """
        if not memory and not cores:
            return

        def work(data: memoryview) -> Answer:
            count = min(layout.V1.device_count.read(data), layout.MAX_DEVICES)
            for device, _ in (*memory, *cores):
                if not 0 <= device < count:
                    raise RegionEditError(f"the region has no device {device}; nothing was changed")
            for field, values in ((layout.V1.limit, memory), (layout.V1.sm_limit, cores)):
                for device, value in values:
                    _store(data, field.offset + device * field.stride, value)
            return {}

        self._change(work)

    def set_status(self, status: int) -> int:
        """Suspend or resume every live process; returns how many."""

        def work(data: memoryview) -> Answer:
            done = 0
            for k in self._used_slots(data):
                base = layout.V1.procs.base(k)
                if layout.V1Slot.status.read(data, base) != layout.SLOT_FREE and self.live(k):
                    layout.V1Slot.status.write(data, status, base)
                    done += 1
            return {"done": done}

        return self._change(work)["done"]

    def repair(self) -> Object:
        """Clear the slots of dead owners, flags that a killed process left, and an absurd number of slots.

        A slot whose lock is held is never touched.
        """
        return dict(self._change(self._repair))

    def _repair(self, data: memoryview) -> Answer:
        if not self._extension(data):
            raise RegionEditError(f"{self.path}: without our block and its locks nobody can tell who is dead")
        cleared, flags = 0, 0
        for k in self._used_slots(data):
            if self._is_empty(data, k) or not self._try_lock(layout.LOCK_SLOT + k):
                continue
            if self._may_clear(data, k):
                self._clear(data, k)
                cleared += 1
            self._unlock(layout.LOCK_SLOT + k)
        for d in range(layout.MAX_DEVICES):
            if layout.Extension.slow.read(data, layout.EXTENSION_OFFSET, d) and self._try_lock(
                layout.LOCK_ADMISSION + d
            ):
                layout.Extension.slow.write(data, 0, layout.EXTENSION_OFFSET, d)
                flags += 1
                self._unlock(layout.LOCK_ADMISSION + d)
        if not 0 <= layout.V1.proc_num.read(data) <= layout.MAX_SLOTS:
            layout.V1.proc_num.write(data, layout.MAX_SLOTS)
        return {"slots_cleared": cleared, "flags_cleared": flags}

    def _change(self, work: Callable[[memoryview], Answer]) -> Answer:
        """Let ``work`` change the mapped file, in a child process (see the module's text)."""

        def mapped() -> Answer:
            with self._mapped() as data:
                return work(data)

        try:
            return in_child(mapped)
        except ChildDiedError as error:
            if error.signal != signal.SIGBUS:
                raise
            raise RegionEditError(
                f"{self.path}: somebody cut it while it was changed, and part of the change may be missing; "
                "look at it, and change it again"
            ) from error
        except NodeError as error:
            raise RegionEditError(str(error)) from error

    @contextmanager
    def _mapped(self) -> Iterator[memoryview]:
        """The file for writing; only our own layout is written."""
        head = os.pread(self._fd, 12, 0)
        if os.fstat(self._fd).st_size != self.length or len(head) != min(12, self.length):
            raise RegionEditError(f"{self.path}: its length changes, somebody else is at work on it")
        if (
            self.length < layout.V1_MIN_LENGTH
            or layout.V1.magic.read(head) != layout.MAGIC
            or layout.V1.major.read(head) != layout.MAJOR
        ):
            raise RegionEditError(f"{self.path} is no region of version 1: it can only be shown")
        try:
            mapping = mmap.mmap(self._fd, self.length)
        except (OSError, ValueError) as error:
            raise RegionEditError(f"{self.path}: cannot be mapped: {error}") from error
        with mapping, memoryview(mapping) as data:
            yield data

    def _used_slots(self, data: memoryview) -> range:
        count = layout.V1.proc_num.read(data)
        return range(count if 0 <= count <= layout.MAX_SLOTS else layout.MAX_SLOTS)

    def _extension(self, data: memoryview) -> bool:
        base = layout.EXTENSION_OFFSET
        return (
            len(data) >= layout.FILE_LENGTH
            and bytes(data[base : base + 8]) == layout.EXTENSION_MAGIC
            and layout.Extension.version.read(data, base) == layout.EXTENSION_VERSION
            and not layout.Extension.flags.read(data, base) & layout.FLAG_NO_OFD_LOCKS
        )

    def _is_empty(self, data: memoryview, k: int) -> bool:
        claimed = layout.Extension.claimed.read(data, layout.EXTENSION_OFFSET, k // 64) >> (k % 64) & 1
        base = layout.V1.procs.base(k)
        return not claimed and layout.V1Slot.status.read(data, base) == layout.SLOT_FREE

    def _may_clear(self, data: memoryview, k: int) -> bool:
        """A slot without a lock is dead; one that keeps it by a descriptor only if its PID is gone."""
        place = layout.Extension.slots.base(k, layout.EXTENSION_OFFSET)
        if not layout.ExtensionSlot.flags.read(data, place) & layout.SLOT_FLAG_KEPT_DESCRIPTOR:
            return True
        if layout.ExtensionSlot.pid_namespace.read(data, place) != Path("/proc/self/ns/pid").stat().st_ino:
            return False
        pid = layout.V1Slot.pid.read(data, layout.V1.procs.base(k))
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return pid > 0
        except OSError:
            return False
        return False

    def _clear(self, data: memoryview, k: int) -> None:
        """In the order that readers and admission rely on: status first, the bit last."""
        base, slot = layout.V1.procs.base(k), layout.V1Slot
        slot.status.write(data, layout.SLOT_FREE, base)
        for d in range(layout.MAX_DEVICES):
            self._take_managed(data, d, slot.used_managed.read(data, base, d))
        data[base + 8 : base + slot.status.offset] = bytes(slot.status.offset - 8)
        place = layout.Extension.slots.base(k, layout.EXTENSION_OFFSET)
        for d in range(layout.MAX_DEVICES):
            layout.Extension.totals.write(data, 0, layout.EXTENSION_OFFSET, d * layout.MAX_SLOTS + k)
        data[place : place + layout.ExtensionSlot.SIZE] = bytes(layout.ExtensionSlot.SIZE)
        slot.hostpid.write(data, 0, base)
        slot.pid.write(data, 0, base)
        word = layout.EXTENSION_OFFSET + layout.Extension.claimed.offset + k // 8
        data[word] &= ~(1 << (k % 8)) & 0xFF

    def _take_managed(self, data: memoryview, device: int, gone: int) -> None:
        """What a process held in managed memory because the card was full is gone with it."""
        place = layout.Extension.devices.base(device, layout.EXTENSION_OFFSET)
        field = layout.ExtensionDevice.oversubscribed
        if gone:
            _store(data, place + field.offset, max(0, field.read(data, place) - gone))

    def _try_lock(self, byte: int) -> bool:
        return self._lock(byte, fcntl.F_WRLCK)

    def _unlock(self, byte: int) -> None:
        self._lock(byte, fcntl.F_UNLCK)

    def _lock(self, byte: int, kind: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise RegionEditError(f"{self.path}: locks do not work here: {error.strerror}") from error
        return True


def _store(data: memoryview, offset: int, value: int) -> None:
    """One aligned 64-bit word by one store: programs that run see the old limit or the new one, and none that
    has bytes of both, which could mean no limit.
    """
    data[offset : offset + 8].cast("Q")[0] = value
