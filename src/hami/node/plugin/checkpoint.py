"""The first answer of each container, kept over restarts of the plugin (decisions 7 and 40). Pure codec
and table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

import msgspec

from hami.node.errors import NodeError
from hami.protocol.allocation import Slot

VERSION: Final = 1
MAX_BYTES: Final = 32 << 20
MAX_ENTRIES: Final = 20_000


class CheckpointError(NodeError):
    """The checkpoint cannot be read; it is left as it is."""


class Device(msgspec.Struct, frozen=True, gc=False):
    """One device of an answer: memory in MiB, cores in percent."""

    uuid: str
    memory_mib: int
    cores_percent: int


class Entry(msgspec.Struct, frozen=True):
    """The first answer of one container; ``limits`` is the content of its limits file."""

    pod_uid: str
    namespace: str
    pod: str
    container: str
    devices: tuple[Device, ...]
    limits: dict[str, str]
    answered_at: int = 0
    """Unix seconds of the last answer in mode ``exact``, 0 in mode ``lock``."""

    @property
    def key(self) -> tuple[str, str]:
        return (self.pod_uid, self.container)


class _File(msgspec.Struct):
    version: int
    entries: list[Entry]


_decoder = msgspec.json.Decoder(_File)
_encoder = msgspec.json.Encoder(order="deterministic")


class Checkpoint:
    """All entries by pod UID and container name; the first answer stays until its pod is gone."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = {entry.key: entry for entry in entries}

    def add(self, entry: Entry) -> Entry:
        """Keep ``entry`` unless the container has one already; the result is the one that is kept."""
        return self._entries.setdefault(entry.key, entry)

    def renew(self, entry: Entry) -> None:
        """Keep ``entry``, whose devices equal those of the first answer, in its place (mode ``exact``: other
        settings may have changed its limits)."""
        self._entries[entry.key] = entry

    def get(self, pod_uid: str, container: str) -> Entry | None:
        return self._entries.get((pod_uid, container))

    def forget(self, pod_uid: str, container: str) -> None:
        """Remove the entry of an answer that was never given."""
        self._entries.pop((pod_uid, container), None)

    @property
    def pods(self) -> frozenset[str]:
        """UIDs of the pods that have entries."""
        return frozenset(uid for uid, _ in self._entries)

    def drop(self, pod_uids: Collection[str]) -> None:
        """Remove the entries of pods that are gone."""
        self._entries = {key: entry for key, entry in self._entries.items() if key[0] not in pod_uids}

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def encode(self) -> bytes:
        """Content of the checkpoint file."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.key)
        return _encoder.encode(_File(VERSION, entries))


def decode_checkpoint(content: bytes) -> Checkpoint:
    """Raises :class:`CheckpointError` for anything but what :meth:`Checkpoint.encode` writes."""
    try:
        parsed = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"the allocation checkpoint cannot be read: {error}") from error
    if parsed.version != VERSION:
        raise CheckpointError(f"the allocation checkpoint has version {parsed.version}, expected {VERSION}")
    if len(parsed.entries) > MAX_ENTRIES:
        raise CheckpointError(f"the allocation checkpoint has {len(parsed.entries)} entries")
    return Checkpoint(parsed.entries)


def checkpoint_devices(devices: Slot) -> tuple[Device, ...]:
    """The devices of a container's slot as an entry keeps them."""
    return tuple(Device(device.uuid, device.usedmem, device.usedcores) for device in devices)
