"""Kubelet's device checkpoint ``kubelet_internal_checkpoint``, read only for init containers. Pure codec.

Kubelet writes it at the end of every allocation, before it starts the container.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hami.node.exact.errors import KubeletStateError
from hami.node.exact.holders import Recorded

FILE_NAME: Final = "kubelet_internal_checkpoint"
MAX_BYTES: Final = 32 << 20


class _Entry(msgspec.Struct, rename="pascal"):
    container_name: str
    resource_name: str
    pod_uid: str = msgspec.field(name="PodUID")
    device_ids: dict[str, list[str]] | None = msgspec.field(name="DeviceIDs", default=None)


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None = None


class _File(msgspec.Struct, rename="pascal"):
    data: _Data


_decoder = msgspec.json.Decoder(_File)


def decode_kubelet_state(content: bytes, resource: str) -> tuple[Recorded, ...]:
    """Who holds which devices of ``resource``. Raises :class:`KubeletStateError`."""
    try:
        parsed = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KubeletStateError(f"kubelet's device checkpoint cannot be read: {error}") from error
    return tuple(
        Recorded(
            entry.pod_uid,
            entry.container_name,
            frozenset(device for ids in (entry.device_ids or {}).values() for device in ids),
        )
        for entry in parsed.data.pod_device_entries or ()
        if entry.resource_name == resource
    )
