"""Which instances this plugin makes and has made, kept over its own end (device-plugin.md §11, decision 8).

An instance is written down before it is made, and again with its ids when it exists: one that a killed plugin
left behind is then found and, when nobody can use it, destroyed. Instances do not outlive a reboot, so the
file counts only for the boot in which it was written.
"""

from __future__ import annotations

import logging
import posixpath
from pathlib import Path
from typing import Annotated, Final

import msgspec

from hami.node.errors import UnsafePathError
from hami.node.files import ensure_directory, open_directory, read_regular, replace_file
from hami.node.mig.plan import Journalled, Record, SliceKey
from hami.node.paths import HostPaths

VERSION: Final = 1
MAX_BYTES: Final = 4 << 20
MAX_RECORDS: Final = 4096
FILE_NAME: Final = "mig-instances.json"
BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"

log = logging.getLogger(__name__)

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Record(msgspec.Struct, frozen=True, omit_defaults=True):
    gpu: str
    profile: str
    start: _Number
    size: _Number
    owners: tuple[str, ...]
    gpu_instance: _Number | None = None
    uuid: str = ""


class _File(msgspec.Struct, frozen=True):
    version: int
    boot: str
    instances: Annotated[tuple[_Record, ...], msgspec.Meta(max_length=MAX_RECORDS)]
    cards: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_RECORDS)] = ()


def encode_journal(boot: str, known: Journalled) -> bytes:
    """Content of the file; equal journals give equal bytes."""
    instances = tuple(
        _Record(
            record.key.gpu,
            record.key.word,
            record.key.start,
            record.key.size,
            tuple(sorted(record.owners)),
            record.gpu_instance,
            record.uuid,
        )
        for record in sorted(known.records, key=lambda record: record.key)
    )
    return msgspec.json.encode(_File(VERSION, boot, instances, tuple(sorted(known.cards))))


def decode_journal(content: bytes, boot: str) -> Journalled:
    """What ``content`` says; nothing if it is of another or of an unknown boot. Raises ``ValueError`` for
    anything else than what :func:`encode_journal` gives.
    """
    try:
        parsed = msgspec.json.decode(content, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if parsed.version != VERSION:
        raise ValueError(f"it has version {parsed.version}, expected {VERSION}")
    if not boot or parsed.boot != boot:
        return Journalled()
    records = tuple(
        Record(
            SliceKey(item.gpu, item.profile, item.start, item.size),
            frozenset(item.owners),
            item.gpu_instance,
            item.uuid,
        )
        for item in parsed.instances
    )
    return Journalled(records, frozenset(parsed.cards))


class Journal:
    """The file; methods block and raise ``OSError`` or :class:`UnsafePathError`."""

    def __init__(self, paths: HostPaths, boot_file: str = BOOT_ID) -> None:
        self._directory = paths.host(paths.vgpu)
        self._owner = paths.trusted_uid
        self._boot_file = boot_file
        self._written: bytes | None = None

    def load(self) -> Journalled:
        """What it says; nothing where it is missing or, which is told, unreadable."""
        path = posixpath.join(self._directory, FILE_NAME)
        try:
            return decode_journal(read_regular(path, MAX_BYTES), self._boot())
        except FileNotFoundError:
            log.info("mig.journal_missing", extra={"file": path})
            return Journalled()
        except (OSError, UnsafePathError, ValueError) as error:
            log.warning("mig.journal_unreadable", extra={"file": path, "cause": str(error)})
            return Journalled()

    def save(self, known: Journalled) -> None:
        """Replace the file (0600); nothing is written when nothing has changed."""
        content = encode_journal(self._boot(), known)
        if content == self._written:
            return
        ensure_directory(self._directory, 0o755, self._owner)
        with open_directory(self._directory, self._owner) as directory:
            replace_file(directory, FILE_NAME, content, 0o600)
        self._written = content

    def _boot(self) -> str:
        try:
            return Path(self._boot_file).read_text().strip()
        except OSError:
            return ""
