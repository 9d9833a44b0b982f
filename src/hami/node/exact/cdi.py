"""CDI documents: the name that Allocate answers, and the content that PreStartContainer gives it. Pure."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from hami.node.cdi.edits import BindMount, Edits, Node, build_spec, merged
from hami.node.plugin.answer import Answer, DeviceNode, Mount
from hami.protocol import keys
from hami.protocol.views import Container

KIND: Final = "hami.io/vgpu"
_NAME_DIGITS: Final = 32
_FILE_START: Final = "hami.io-vgpu-"
_FILE_END: Final = ".json"


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
    name: str,
    env: Mapping[str, str],
    mounts: Sequence[Mount],
    devices: Sequence[DeviceNode],
    cards: Edits | None = None,
) -> bytes:
    """The document of one device; equal input gives equal bytes. Mounts keep their order.

    ``cards`` is what CDI documents add for the container's cards: its mounts come first, its variables last,
    as a runtime would have added them.
    """
    own = Edits(
        env,
        tuple(Node(node.container_path, node.host_path) for node in devices),
        tuple(_mount(mount) for mount in mounts),
    )
    from_cards = cards or Edits()
    edits = replace(merged((from_cards, own)), env={**env, **from_cards.env})
    return build_spec(KIND, {name: edits})


def _mount(mount: Mount) -> BindMount:
    access = "ro" if mount.read_only else "rw"
    return BindMount(mount.container_path, mount.host_path, ("rbind", "rprivate", access))
