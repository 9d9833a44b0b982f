"""Kubelet's device checkpoint ``kubelet_internal_checkpoint``: init containers, and what plugins answered.
Pure codec.

Kubelet writes it at the end of every allocation, before it starts the container.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    alloc_resp: bytes | None = None

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(device for ids in (self.device_ids or {}).values() for device in ids)


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None = None


class _File(msgspec.Struct, rename="pascal"):
    data: _Data


_decoder = msgspec.json.Decoder(_File)


@dataclass(frozen=True, slots=True)
class Answered:
    """What a device plugin answered for one container: a ``ContainerAllocateResponse``."""

    pod_uid: str
    device_ids: frozenset[str]
    answer: bytes


def decode_kubelet_state(content: bytes, resource: str) -> tuple[Recorded, ...]:
    """Who holds which devices of ``resource``. Raises :class:`KubeletStateError`."""
    return tuple(
        Recorded(entry.pod_uid, entry.container_name, entry.ids)
        for entry in _entries(content)
        if entry.resource_name == resource
    )


def decode_answers(content: bytes) -> tuple[Answered, ...]:
    """What plugins of all resources answered. Raises :class:`KubeletStateError`."""
    return tuple(Answered(entry.pod_uid, entry.ids, entry.alloc_resp or b"") for entry in _entries(content))


def _entries(content: bytes) -> list[_Entry]:
    try:
        parsed = _decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KubeletStateError(f"kubelet's device checkpoint cannot be read: {error}") from error
    return parsed.data.pod_device_entries or []
