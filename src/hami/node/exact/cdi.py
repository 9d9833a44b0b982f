"""CDI documents: the name that Allocate answers, and the content that PreStartContainer gives it. Pure."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from hami.node.plugin.answer import Answer, DeviceNode, Mount
from hami.protocol import keys
from hami.protocol.views import Container

KIND: Final = "hami.io/vgpu"
_NAME_DIGITS: Final = 32
_FILE_START: Final = "hami.io-vgpu-"
_FILE_END: Final = ".json"
_VERSION: Final = "0.3.0"  # env, mounts, device nodes
_VERSION_HOST_PATH: Final = "0.5.0"  # device nodes with another path on the host


def device_name(device_ids: Iterable[str]) -> str:
    """``v`` and 32 hex digits, the same for the same set of ids in any order."""
    joined = ",".join(sorted(device_ids))
    return f"v{hashlib.sha256(joined.encode()).hexdigest()[:_NAME_DIGITS]}"


def qualified_name(name: str) -> str:
    """What Allocate answers: ``hami.io/vgpu=<name>``."""
    return f"{KIND}={name}"


def document_file(name: str) -> str:
    """File name of the document of device ``name``."""
    return f"{_FILE_START}{name}{_FILE_END}"


def name_of_file(file: str) -> str:
    """The device name of a document's file name, empty for a file that is not ours."""
    if not (file.startswith(_FILE_START) and file.endswith(_FILE_END)):
        return ""
    return file[len(_FILE_START) : -len(_FILE_END)]


def cache_file(pod_uid: str, container: str) -> str:
    """Name of the region file without ``.cache``: the same at every start of the container."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{pod_uid}/{container}"))


def document_environment(answer: Answer, limits: Mapping[str, str], container: Container) -> dict[str, str]:
    """Environment of a document: the whole closed list and what Allocate would have answered.

    It replaces variables of the same name in the pod's spec. The log level is left to a pod that sets it.
    """
    env = {**limits, **answer.env}
    if any(entry.name == keys.ENV_LOG_LEVEL for entry in container.env or ()):
        env.pop(keys.ENV_LOG_LEVEL, None)
    return env


def build_document(
    name: str, env: Mapping[str, str], mounts: Sequence[Mount], devices: Sequence[DeviceNode]
) -> bytes:
    """The document of one device; equal input gives equal bytes. Mounts keep their order."""
    edits: dict[str, Any] = {
        "env": [f"{key}={env[key]}" for key in sorted(env)],
        "mounts": [_mount(mount) for mount in mounts],
    }
    if devices:
        edits["deviceNodes"] = [_device_node(node) for node in devices]
    moved = any(node.host_path != node.container_path for node in devices)
    document = {
        "cdiVersion": _VERSION_HOST_PATH if moved else _VERSION,
        "kind": KIND,
        "devices": [{"name": name, "containerEdits": edits}],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _mount(mount: Mount) -> dict[str, Any]:
    return {
        "hostPath": mount.host_path,
        "containerPath": mount.container_path,
        "options": ["rbind", "rprivate", "ro" if mount.read_only else "rw"],
    }


def _device_node(node: DeviceNode) -> dict[str, str]:
    made = {"path": node.container_path, "permissions": "rw"}
    if node.host_path != node.container_path:
        made["hostPath"] = node.host_path
    return made
