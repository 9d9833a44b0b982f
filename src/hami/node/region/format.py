"""Which of the layouts a region file has, before anything else of it is believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hami.node.errors import NodeError
from hami.protocol import region_layout as layout

MAX_FILE_BYTES: Final = 16 << 20
EXTENSION_READ: Final = layout.Extension.slots.offset
"""Bytes of the extension block that are read: its head and the table of devices."""

_MIN_BYTES: Final = 12
_MAX_MINOR: Final = 9


class RegionError(NodeError):
    """A region cannot be read; ``reason`` is the label of ``hami_monitor_cache_errors_total``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Format:
    """One of the two layouts."""

    name: str
    region: type[layout.V0] | type[layout.V1]
    slot: type[layout.V0Slot] | type[layout.V1Slot]

    @property
    def head_bytes(self) -> int:
        """Bytes before the first process slot."""
        return self.region.procs.offset

    @property
    def tail_offset(self) -> int:
        """Offset of the first byte behind the process slots."""
        return self.region.proc_num.offset

    @property
    def tail_bytes(self) -> int:
        return self.region.SIZE - self.tail_offset

    @property
    def stride(self) -> int:
        return self.region.procs.stride


V0: Final = Format("v0", layout.V0, layout.V0Slot)
V1: Final = Format("v1", layout.V1, layout.V1Slot)


def choose_format(size: int, start: bytes) -> Format:
    """The layout of a file of ``size`` bytes that begins with ``start`` (at least 12 bytes if it has them).

    Raises :class:`RegionError` with reason ``too_small``, ``bad_magic``, ``short_read`` (a truncated v1 file)
    or ``unknown_version``.
    """
    if size < _MIN_BYTES or len(start) < _MIN_BYTES:
        raise RegionError("too_small", f"{size} bytes are too small for a region")
    if layout.V1.magic.read(start) != layout.MAGIC:
        raise RegionError("bad_magic", "magic flag not matched")
    major, minor = layout.V1.major.read(start), layout.V1.minor.read(start)
    if layout.V0_MIN_LENGTH <= size < layout.V1_MIN_LENGTH:
        if major == layout.MAJOR and minor <= _MAX_MINOR:
            raise RegionError("short_read", f"a v{major}.{minor} region of only {size} bytes is truncated")
        return V0
    if size >= layout.V1_MIN_LENGTH and major == layout.MAJOR:
        return V1
    raise RegionError("unknown_version", f"no known region has {size} bytes and version {major}.{minor}")


def extension_is_ours(extension: bytes) -> bool:
    """Whether the bytes behind a region are the extension block of our library, as far as it is read."""
    block = layout.Extension
    return (
        len(extension) >= EXTENSION_READ
        and extension[: len(layout.EXTENSION_MAGIC)] == layout.EXTENSION_MAGIC
        and block.version.read(extension) == layout.EXTENSION_VERSION
        and block.length.read(extension) == layout.EXTENSION_LENGTH
    )
