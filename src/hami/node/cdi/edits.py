"""Edits of containers and documents of the Container Device Interface. Pure.

The form is that of the CNCF specification (cdiVersion, kind, devices, containerEdits). Equal input gives
equal bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from hami.node.errors import NodeError

_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_VENDOR: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CLASS: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?")
_ENV_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_MAX_NAME: Final = 253

_VERSION: Final = "0.3.0"  # env, mounts, hooks, device nodes
_VERSION_HOST_PATH: Final = "0.5.0"  # hostPath of device nodes; names that begin with a digit


class CdiError(NodeError):
    """A CDI document cannot be made or written."""


@dataclass(frozen=True, slots=True)
class Node:
    """A device node; ``permissions`` out of ``rwm``."""

    path: str
    host_path: str
    permissions: str = "rw"


@dataclass(frozen=True, slots=True)
class BindMount:
    """A mount with the options of the runtime."""

    container_path: str
    host_path: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Hook:
    """A program of the host that the runtime runs when it has created the container; ``args`` with its own
    name first.
    """

    path: str
    args: tuple[str, ...]
    name: str = "createContainer"


@dataclass(frozen=True, slots=True)
class Edits:
    """What is added to a container."""

    env: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    mounts: tuple[BindMount, ...] = ()
    hooks: tuple[Hook, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.env or self.nodes or self.mounts or self.hooks)

    def document(self) -> dict[str, Any]:
        """The ``containerEdits`` object; parts that are empty are left out. Raises :class:`CdiError`."""
        edits: dict[str, Any] = {}
        if self.env:
            edits["env"] = [f"{_checked_variable(key)}={self.env[key]}" for key in sorted(self.env)]
        if self.mounts:
            edits["mounts"] = [
                {
                    "hostPath": _checked_path(mount.host_path),
                    "containerPath": _checked_path(mount.container_path),
                    "options": list(mount.options),
                }
                for mount in self.mounts
            ]
        if self.nodes:
            edits["deviceNodes"] = [_node(node) for node in self.nodes]
        if self.hooks:
            edits["hooks"] = [
                {"hookName": hook.name, "path": _checked_path(hook.path), "args": list(hook.args)}
                for hook in self.hooks
            ]
        return edits


def merged(parts: Iterable[Edits]) -> Edits:
    """All parts as one, each node, mount and hook once and in order; the later variable wins."""
    env: dict[str, str] = {}
    nodes: list[Node] = []
    mounts: list[BindMount] = []
    hooks: list[Hook] = []
    for part in parts:
        env.update(part.env)
        nodes += part.nodes
        mounts += part.mounts
        hooks += part.hooks
    return Edits(env, tuple(dict.fromkeys(nodes)), tuple(dict.fromkeys(mounts)), tuple(dict.fromkeys(hooks)))


def build_spec(kind: str, devices: Mapping[str, Edits], common: Edits | None = None) -> bytes:
    """A document of ``kind`` (``vendor/class``): devices by name, in their order, and the edits that every
    one of them brings.

    The version is the lowest that the content needs. Raises :class:`CdiError` for a kind, name, path or
    variable that no runtime would take, and where a device brings nothing.
    """
    check_kind(kind)
    if not devices:
        raise CdiError(f"a CDI document of {kind} needs a device")
    shared = common or Edits()
    entries = []
    for name, edits in devices.items():
        check_name(name)
        if not edits:
            raise CdiError(f"the CDI device {kind}={name} brings nothing")
        entries.append({"name": name, "containerEdits": edits.document()})
    document: dict[str, Any] = {
        "cdiVersion": _version(devices, shared),
        "kind": kind,
        "devices": entries,
    }
    if shared:
        document["containerEdits"] = shared.document()
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def check_kind(kind: str) -> None:
    """Refuse a kind that is not ``vendor/class``. Raises :class:`CdiError`."""
    vendor, slash, class_ = kind.partition("/")
    if not (slash and len(kind) <= _MAX_NAME and _VENDOR.fullmatch(vendor) and _CLASS.fullmatch(class_)):
        raise CdiError(f"{kind!r} is no kind of CDI devices (vendor/class)")


def check_name(name: str) -> None:
    """Refuse a device name that runtimes would not take. Raises :class:`CdiError`."""
    if len(name) > _MAX_NAME or not _NAME.fullmatch(name):
        raise CdiError(f"{name!r} is no name of a CDI device")


def _version(devices: Mapping[str, Edits], common: Edits) -> str:
    moved = any(node.host_path != node.path for edits in (*devices.values(), common) for node in edits.nodes)
    return _VERSION_HOST_PATH if moved or any(name[0].isdigit() for name in devices) else _VERSION


def _node(node: Node) -> dict[str, str]:
    made = {"path": _checked_path(node.path), "permissions": node.permissions}
    if node.host_path != node.path:
        made["hostPath"] = _checked_path(node.host_path)
    return made


def _checked_variable(name: str) -> str:
    if not _ENV_NAME.fullmatch(name):
        raise CdiError(f"{name!r} is no name of a variable")
    return name


def _checked_path(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise CdiError(f"{path!r} is no absolute path")
    return path


def qualified(kind: str, name: str) -> str:
    """``vendor/class=name``, what a runtime is asked for. Raises :class:`CdiError`."""
    check_kind(kind)
    check_name(name)
    return f"{kind}={name}"
