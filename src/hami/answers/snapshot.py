"""A snapshot: all that placement depends on, as plain data in one file."""

from __future__ import annotations

import gzip
import zlib
from typing import Any, Final

import msgspec

from hami.answers.errors import SnapshotError
from hami.protocol.plain import problem_of

FORMAT: Final = "hami-snapshot/1"
MAX_FILE_BYTES: Final = 256 << 20
MAX_TEXT_BYTES: Final = 2 << 30
MAX_VALUES: Final = 50_000_000


class Settings(msgspec.Struct, frozen=True):
    """The scheduler's settings that decide where pods go; the defaults are those of its flags."""

    scheduler_name: str = "hami-scheduler"
    node_policy: str = "binpack"
    card_policy: str = "spread"
    node_selector: dict[str, str] = {}
    enable_ascend: bool = False
    enable_iluvatar: bool = False


class ContainerUse(msgspec.Struct, frozen=True):
    """What a container really uses of one card, as its node's monitor exports it."""

    namespace: str
    pod: str
    container: str
    device: str  # card id
    memory: float = 0.0  # bytes
    utilization: float = 0.0  # percent of the card


class CardUse(msgspec.Struct, frozen=True):
    """What is really in use of one card, by whomever."""

    device: str
    memory: float = 0.0  # bytes
    utilization: float = 0.0  # percent


class Snapshot(msgspec.Struct, frozen=True):
    """Objects as the API server shows them, reduced to what `redact` keeps."""

    taken_at: float  # Unix seconds
    settings: Settings
    device_config: str  # text of device-config.yaml; "": NVIDIA with the usual resource names
    nodes: list[dict[str, Any]]
    pods: list[dict[str, Any]]
    quotas: list[dict[str, Any]]
    containers_use: list[ContainerUse] = []
    cards_use: list[CardUse] = []
    notes: list[str] = []  # what could not be read
    names_hashed: bool = False
    format: str = FORMAT


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """The file's bytes: compressed JSON, the same for the same snapshot."""
    return gzip.compress(msgspec.json.format(msgspec.json.encode(snapshot), indent=1), mtime=0)


def decode_snapshot(data: bytes) -> Snapshot:
    """The snapshot of a file, compressed or not. Raises `SnapshotError`."""
    if len(data) > MAX_FILE_BYTES:
        raise SnapshotError(f"{len(data)} bytes, a snapshot has at most {MAX_FILE_BYTES}")
    if data[:2] == b"\x1f\x8b":
        data = _decompressed(data)
    try:
        snapshot = msgspec.json.decode(data, type=Snapshot)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise SnapshotError(f"no snapshot of `hami snapshot`: {error}") from None
    if snapshot.format != FORMAT:
        raise SnapshotError(f"format {snapshot.format[:40]!r}, this version reads {FORMAT}")
    for member in ("nodes", "pods", "quotas"):
        objects = getattr(snapshot, member)
        for at, obj in enumerate(objects):
            _check_object(obj, f"{member}[{at}]")
        problem = problem_of(objects, MAX_VALUES)
        if problem:
            raise SnapshotError(f"no snapshot of `hami snapshot`: {member} {problem}")
    return snapshot


def _check_object(obj: dict[str, Any], path: str) -> None:
    """Raises `SnapshotError` for what cannot even be named."""
    metadata = obj.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise SnapshotError(f"no snapshot of `hami snapshot`: {path}.metadata.name is missing")


def _decompressed(data: bytes) -> bytes:
    unpacker = zlib.decompressobj(wbits=31)
    try:
        text = unpacker.decompress(data, MAX_TEXT_BYTES)
    except zlib.error as error:
        raise SnapshotError(f"the compressed file is damaged: {error}") from None
    if not unpacker.eof:
        why = f"more than {MAX_TEXT_BYTES} bytes" if unpacker.unconsumed_tail else "its end is missing"
        raise SnapshotError(f"the compressed file cannot be read: {why}")
    return text
