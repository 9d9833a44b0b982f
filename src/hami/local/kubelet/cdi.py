"""Container Device Interface: the edits that a qualified name (``vendor.com/class=name``) stands for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hami.local.kubelet.containers import ContainerStartError, Mount

MAX_DOCUMENT_BYTES = 1 << 20
_DIRECTORIES = ("etc/cdi", "var/run/cdi")


@dataclass(frozen=True, slots=True)
class CdiEdits:
    """Environment (over that of the pod) and mounts, device nodes as mounts among them."""

    env: dict[str, str]
    mounts: tuple[Mount, ...]


def resolve(host_root: Path, names: Sequence[str]) -> CdiEdits:
    """The edits of all ``names`` from the documents below ``host_root``, in order.

    Raises :class:`ContainerStartError` for a name without document and for edits that are not known here.
    """
    env: dict[str, str] = {}
    mounts: list[Mount] = []
    documents = list(_documents(host_root)) if names else []
    for qualified in names:
        kind, _, name = qualified.partition("=")
        edits = _find(documents, kind, name)
        if edits is None:
            raise ContainerStartError(f"unresolvable CDI devices {qualified}")
        for edit in edits:
            _apply(edit, qualified, env, mounts)
    return CdiEdits(env, tuple(mounts))


def _documents(host_root: Path) -> Iterable[Any]:
    for directory in _DIRECTORIES:
        for path in sorted((host_root / directory).glob("*.json")):
            if path.stat().st_size > MAX_DOCUMENT_BYTES:
                raise ContainerStartError(f"CDI document {path} is larger than {MAX_DOCUMENT_BYTES} bytes")
            try:
                document = msgspec.json.decode(path.read_bytes())
            except msgspec.DecodeError as error:
                raise ContainerStartError(f"CDI document {path} is not JSON: {error}") from error
            if isinstance(document, dict):
                yield document


def _find(documents: Iterable[Any], kind: str, name: str) -> list[Any] | None:
    """``containerEdits`` of the document and of the device; None if no document has the device."""
    for document in documents:
        if document.get("kind") != kind:
            continue
        for device in document.get("devices") or []:
            if device.get("name") == name:
                return [document.get("containerEdits") or {}, device.get("containerEdits") or {}]
    return None


def _apply(edit: Any, qualified: str, env: dict[str, str], mounts: list[Mount]) -> None:
    unknown = set(edit) - {"env", "mounts", "deviceNodes"}
    if unknown:
        raise ContainerStartError(
            f"CDI device {qualified} has edits that this kubelet does not make: {unknown}"
        )
    for pair in edit.get("env") or []:
        key, _, value = str(pair).partition("=")
        env[key] = value
    for mount in edit.get("mounts") or []:
        read_only = "ro" in (mount.get("options") or [])
        mounts.append(Mount(str(mount["hostPath"]), str(mount["containerPath"]), read_only))
    for node in edit.get("deviceNodes") or []:
        path = str(node["path"])
        mounts.append(
            Mount(str(node.get("hostPath") or path), path, "w" not in node.get("permissions", "rwm"))
        )
