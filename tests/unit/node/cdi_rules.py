"""The rules of the CNCF Container Device Interface specification for one document, as a small validator."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_VERSIONS = ("0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0")
_VENDOR = r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]"
_CLASS = r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]"
_KIND = re.compile(rf"{_VENDOR}/{_CLASS}")
_DEVICE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_HOOKS = frozenset(
    {"prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"}
)
_EDITS = {"env", "mounts", "deviceNodes", "hooks"}
_FIELDS = {
    "mounts": ({"hostPath", "containerPath"}, {"options"}),
    "deviceNodes": (
        {"path"},
        {"hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"},
    ),
    "hooks": ({"hookName", "path"}, {"args", "env", "timeout"}),
}


def problems(content: bytes) -> list[str]:
    """Everything that a runtime may refuse in a document; empty for a good one."""
    return list(_document(json.loads(content)))


def _document(document: dict[str, Any]) -> Iterator[str]:
    yield from _keys("document", document, {"cdiVersion", "kind", "devices"}, {"containerEdits"})
    if document.get("cdiVersion") not in _VERSIONS:
        yield f"version {document.get('cdiVersion')!r}"
    if not _KIND.fullmatch(document.get("kind", "")):
        yield f"kind {document.get('kind')!r}"
    devices = document.get("devices") or []
    if not devices:
        yield "no devices"
    names = [device.get("name") for device in devices]
    if len(set(names)) != len(names):
        yield "a device twice"
    for device in devices:
        yield from _keys("device", device, {"name", "containerEdits"}, set())
        if not _DEVICE.fullmatch(device.get("name", "")):
            yield f"device name {device.get('name')!r}"
        if not device.get("containerEdits"):
            yield f"device {device.get('name')} is empty"
        yield from _edits(device.get("containerEdits") or {})
    yield from _edits(document.get("containerEdits") or {})
    yield from _version(document)


def _edits(edits: dict[str, Any]) -> Iterator[str]:
    yield from _keys("containerEdits", edits, set(), _EDITS)
    for variable in edits.get("env", []):
        if not re.fullmatch(r"[^=\0]+=[^\0]*", variable):
            yield f"variable {variable!r}"
    for kind, (needed, possible) in _FIELDS.items():
        for item in edits.get(kind, []):
            yield from _keys(kind, item, needed, possible)
            yield from _paths(kind, item)
            if kind == "hooks" and item.get("hookName") not in _HOOKS:
                yield f"hook {item.get('hookName')!r}"
            if kind == "deviceNodes" and not re.fullmatch("[rwm]*", item.get("permissions", "")):
                yield f"permissions {item['permissions']!r}"


def _paths(kind: str, item: dict[str, Any]) -> Iterator[str]:
    for key in ("path", "hostPath", "containerPath"):
        if key in item and not item[key].startswith("/"):
            yield f"{kind}: {key} {item[key]!r} is not absolute"


def _version(document: dict[str, Any]) -> Iterator[str]:
    parts = [document, *document.get("devices", [])]
    nodes = [node for part in parts for node in (part.get("containerEdits") or {}).get("deviceNodes", [])]
    needs = any("hostPath" in node for node in nodes) or any(
        not device.get("name", "a")[:1].isalpha() for device in document.get("devices", [])
    )
    if needs and document.get("cdiVersion", "") < "0.5.0":
        yield "needs version 0.5.0"


def _keys(where: str, found: dict[str, Any], needed: set[str], possible: set[str]) -> Iterator[str]:
    for key in sorted(needed - found.keys()):
        yield f"{where}: {key} is missing"
    for key in sorted(found.keys() - needed - possible):
        yield f"{where}: {key} is unknown"
