"""Nodes and pods as the dashboard keeps them: typed for the scheduler's state, small for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from hami.answers.redact import Redaction
from hami.protocol import views
from hami.protocol.errors import LockFormatError, TimestampError
from hami.protocol.keys import BIND_PHASE, BIND_TIME, NODE_LOCK
from hami.protocol.lock import parse_lock
from hami.protocol.quantity import Quantity
from hami.protocol.timestamps import parse_rfc3339


class _Address(views.View, frozen=True):
    type: str = ""
    address: str = ""


class _Info(views.View, frozen=True):
    os_image: str = msgspec.field(default="", name="osImage")
    kernel_version: str = ""
    architecture: str = ""


class _NodeStatus(views.View, frozen=True):
    addresses: list[_Address] | None = None
    node_info: _Info | None = None


class _NodeMore(views.View, frozen=True):
    status: _NodeStatus = _NodeStatus()


class _Condition(views.View, frozen=True):
    type: str = ""
    status: str = ""
    message: str | None = None
    last_transition_time: str | None = None


class _PodStatus(views.View, frozen=True):
    conditions: list[_Condition] | None = None
    start_time: str | None = None


class _PodMore(views.View, frozen=True):
    status: _PodStatus = _PodStatus()


_LONGEST_WORD = 4096  # characters kept of what kube-scheduler says


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """A node."""

    view: views.Node
    plain: bytes  # what `explain` replays, as JSON
    ip: str
    os_image: str
    kernel_version: str
    architecture: str
    lock: tuple[str, float] | None  # holder and Unix time

    @property
    def metadata(self) -> views.Metadata:
        return self.view.metadata


@dataclass(frozen=True, slots=True)
class ContainerEntry:
    """One container in the order of an allocation."""

    name: str
    init: bool
    image: str
    asks: Mapping[str, str]  # managed resources of its limits


@dataclass(frozen=True, slots=True)
class PodEntry:
    """A pod; `containers` is empty for one that neither asks for devices nor was given any."""

    metadata: views.Metadata
    plain: bytes
    phase: str
    node: str
    scheduler: str
    priority: int | None
    bind_phase: str
    created: float | None
    scheduled: float | None
    bound: float | None
    started: float | None
    last_word: str
    containers: tuple[ContainerEntry, ...] = ()


class PodParsed(msgspec.Struct, frozen=True, gc=False):
    """A pod as the state takes it, and as it is kept."""

    view: views.Pod
    entry: PodEntry

    @property
    def metadata(self) -> views.Metadata:
        return self.entry.metadata


class Reader:
    """Decodes objects for a cluster with these vendors. Raises `ObjectError`."""

    def __init__(self, redaction: Redaction, resources: frozenset[str], keys: frozenset[str]) -> None:
        self._redaction = redaction
        self._resources = resources
        self._keys = keys  # annotations that say what a pod was given

    def node(self, raw: msgspec.Raw) -> NodeEntry:
        """A node."""
        view = views.decode(raw, views.Node)
        more = views.decode(raw, _NodeMore).status
        info = more.node_info or _Info()
        addresses = more.addresses or []
        ip = next((one.address for one in addresses if one.type == "InternalIP"), "")
        plain = self._redaction.node(views.decode(raw, dict))
        return NodeEntry(
            view,
            msgspec.json.encode(plain),
            ip,
            info.os_image,
            info.kernel_version,
            info.architecture,
            lock_of(view.annotations.get(NODE_LOCK)),
        )

    def pod(self, raw: msgspec.Raw) -> PodParsed:
        """A pod."""
        view = views.decode(raw, views.Pod)
        more = views.decode(raw, _PodMore).status
        plain = msgspec.json.encode(self._redaction.pod(views.decode(raw, dict)))
        placed = next((one for one in more.conditions or [] if one.type == "PodScheduled"), _Condition())
        metadata, annotations = view.metadata, view.annotations
        containers: tuple[ContainerEntry, ...] = ()
        if self._concerns(view):
            inits = len(view.init_containers)
            containers = tuple(
                ContainerEntry(one.name, at < inits, one.image or "", self._asks(one.limits))
                for at, one in enumerate(view.slots)
            )
        entry = PodEntry(
            views.Metadata(
                name=metadata.name,
                namespace=metadata.namespace,
                uid=metadata.uid,
                resource_version=metadata.resource_version,
                labels=metadata.labels if containers else None,
            ),
            plain,
            view.phase,
            view.node_name,
            view.spec.scheduler_name or "",
            view.spec.priority,
            annotations.get(BIND_PHASE, "")[:32],
            seconds(metadata.creation_timestamp),
            seconds(placed.last_transition_time) if placed.status == "True" else None,
            _unix(annotations.get(BIND_TIME, "")),
            seconds(more.start_time),
            (placed.message or "")[:_LONGEST_WORD] if placed.status == "False" else "",
            containers,
        )
        return PodParsed(view, entry)

    def _concerns(self, pod: views.Pod) -> bool:
        if not self._keys.isdisjoint(pod.annotations):
            return True
        return any(not self._resources.isdisjoint(one.limits) for one in pod.slots)

    def _asks(self, limits: Mapping[str, Quantity]) -> dict[str, str]:
        return {name: str(limits[name])[:64] for name in sorted(self._resources & limits.keys())}


def seconds(text: str | None) -> float | None:
    """Unix seconds of a time of Kubernetes, None where it is not one."""
    if not text:
        return None
    try:
        return parse_rfc3339(text)
    except TimestampError:
        return None


def lock_of(text: str | None) -> tuple[str, float] | None:
    """Holder and time of a node lock; a value nobody can read counts as none."""
    if not text:
        return None
    try:
        lock = parse_lock(text)
    except LockFormatError:
        return None
    return ("" if lock.owner is None else f"{lock.owner.namespace}/{lock.owner.name}"), lock.time


def _unix(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdigit() and len(text) <= 12 else None
