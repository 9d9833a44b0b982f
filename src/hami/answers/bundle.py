"""A support bundle: files with a limit on their sum, packed into one to attach to a report. Pure."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from hami.answers.hashing import digest
from hami.answers.scrub import Renaming, names_in

ROOT: Final = "hami-support"
MAX_BYTES: Final = 64 << 20
README: Final = "README.txt"
PUBLIC_NAMESPACES: Final = frozenset({"default", "kube-system", "kube-public", "kube-node-lease"})
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]|^\.+")
_HEAD: Final = """Support bundle of `hami support-bundle`, made {when} by hami {version}.

Removed before it was written: values of environment variables, annotations that are not HAMi's, private keys,
and what looks like a token or a password. Secrets of Kubernetes were not read.{names}
Logs and events may still hold what your programs wrote into names and messages: look through it before you
hand it on.
"""
_NAMES: Final = (
    " Names of nodes, pods, namespaces and quotas, and\naddresses, were replaced by digests "
    "(HAMi's own names stay)."
)


class Bundle:
    """Files by path, and notes on what is not there."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.notes: list[str] = []
        self.files: dict[str, str | bytes] = {}
        self._max_bytes = max_bytes
        self._size = 0

    def add(self, path: str, content: str | bytes) -> bool:
        """Take a file; whether there was room, else it is noted. Parts of ``path`` that no file can have are
        replaced."""
        safe = "/".join(_UNFIT.sub("_", part) or "_" for part in path.split("/"))
        size = len(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
        if self._size + size > self._max_bytes:
            self.notes.append(
                f"{safe} ({size} bytes) is left out: the bundle has {self._max_bytes} bytes at most"
            )
            return False
        self._size += size
        self.files[safe] = content
        return True

    def add_json(self, path: str, value: object) -> bool:
        """The same with a value as indented JSON."""
        return self.add(path, msgspec.json.format(msgspec.json.encode(value), indent=1).decode())

    def rename(self, salt: bytes, names: Mapping[str, str], kept: frozenset[str]) -> None:
        """Replace names in all texts: those of ``names`` (name -> kind) and whatever the texts themselves
        call a node, pod or namespace; ``kept`` stays, also as holder of a lease (``name_...``)."""
        kinds = dict(names)
        for content in [*self.files.values(), *self.notes]:
            if isinstance(content, str):
                for kind, name in names_in(content):
                    kinds.setdefault(name, kind)
        renaming = Renaming(
            {
                name: digest(kind, name, salt)
                for name, kind in kinds.items()
                if name and name not in PUBLIC_NAMESPACES and name.partition("_")[0] not in kept
            },
            salt,
        )
        for path, content in self.files.items():
            if isinstance(content, str):
                self.files[path] = renaming.text(content)
        self.notes = [renaming.text(note) for note in self.notes]

    def pack(self, now: float, version: str, *, renamed: bool = False) -> bytes:
        """The compressed archive with its README; ``now`` in Unix seconds. The same for the same content."""
        when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        text = _HEAD.format(when=when, version=version, names=_NAMES if renamed else "")
        text += "\nFiles\n" + "".join(f"  {path}\n" for path in sorted(self.files))
        text += "\nNot read, or cut\n" + ("".join(f"  {note}\n" for note in self.notes) or "  nothing\n")
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for path, content in [(README, text), *sorted(self.files.items())]:
                data = content if isinstance(content, bytes) else content.encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{ROOT}/{path}")
                entry.size, entry.mtime, entry.mode = len(data), int(now), 0o644
                archive.addfile(entry, io.BytesIO(data))
        return gzip.compress(packed.getvalue(), compresslevel=6, mtime=0)


def event_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """What matters of an event."""
    involved = event.get("involvedObject")
    source = event.get("source")
    kept = {key: event[key] for key in _EVENT if event.get(key) is not None}
    if isinstance(involved, dict):
        kept["involvedObject"] = {
            key: involved[key] for key in ("kind", "namespace", "name") if key in involved
        }
    if isinstance(source, dict):
        kept["source"] = source
    return kept


_EVENT: Final = (
    "type", "reason", "message", "count", "firstTimestamp", "lastTimestamp", "eventTime",
    "reportingComponent",
)  # fmt: skip
