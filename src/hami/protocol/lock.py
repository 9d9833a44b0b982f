"""Node locks: value codec and the acquire and release machines, without I/O (protocol.md §7, vendors/README.md R9).

A machine says what to do (actions) and is told what happened (events); time is an argument in Unix seconds. The caller
performs the last action of each tuple and feeds its outcome back until the action is :class:`Done`,
:class:`Contention` or :class:`Failed`::

    state, actions = machine.start(now)
    while True:
        for action in actions: ...perform...
        state, actions = machine.step(state, event, now)
"""

from __future__ import annotations

from typing import Final

import msgspec

from hami.protocol.views import Pod

DEFAULT_LOCK_TIMEOUT: Final = 300.0
"""Seconds after which a lock is taken over, unless configured."""


class LockOwner(msgspec.Struct, frozen=True):
    """The pod that holds or wants a lock."""

    namespace: str
    name: str


class LockValue(msgspec.Struct, frozen=True):
    """A parsed lock value. ``owner`` is None for the legacy form (time only) and for an empty owner."""

    time: float
    owner: LockOwner | None


def format_lock(owner: LockOwner, now: float) -> str:
    """``<RFC 3339 time>,<namespace>,<name>``."""
    ...


def parse_lock(text: str) -> LockValue:
    """A lock value. Raises :class:`LockFormatError`."""
    ...


class Sight(msgspec.Struct, frozen=True):
    """When a lock value was first seen by us; the caller keeps it per node between attempts."""

    text: str
    time: float


# actions


class GetNode(msgspec.Struct, frozen=True):
    """Read the node live; answer :class:`NodeRead` or :class:`ReadFailed`."""


class GetPod(msgspec.Struct, frozen=True):
    """Read the holder live; answer :class:`PodRead`, :class:`PodMissing` or :class:`ReadFailed`."""

    owner: LockOwner


class PatchNode(msgspec.Struct, frozen=True):
    """Merge-patch the annotation ``key`` to ``value`` (None removes it) with this resource version;
    answer :class:`Patched` or :class:`PatchFailed`."""

    key: str
    value: str | None
    resource_version: str


class Sleep(msgspec.Struct, frozen=True):
    """Wait ``seconds`` times a random factor between 1 and ``1 + jitter``; answer :class:`Slept`."""

    seconds: float
    jitter: float


class ReportEvent(msgspec.Struct, frozen=True):
    """Raise a Warning event on the node; no answer."""

    reason: str
    message: str


class Done(msgspec.Struct, frozen=True):
    """Success. ``acquired`` is the lock text that *this* run wrote, or empty when it wrote none."""

    acquired: str = ""


class Contention(msgspec.Struct, frozen=True):
    """Held by somebody else; a pod-group member may try again."""

    message: str


class Failed(msgspec.Struct, frozen=True):
    """Cannot be decided; ``message`` is the last error."""

    message: str


Action = GetNode | GetPod | PatchNode | Sleep | ReportEvent | Done | Contention | Failed

# events


class NodeRead(msgspec.Struct, frozen=True):
    """The node's lock annotation (None: absent) and resource version."""

    lock: str | None
    resource_version: str


class PodRead(msgspec.Struct, frozen=True):
    """The holder as it is."""

    pod: Pod


class PodMissing(msgspec.Struct, frozen=True):
    """The API server answered 404 for the holder."""


class ReadFailed(msgspec.Struct, frozen=True):
    """A read failed with anything but 404 for a pod."""

    message: str


class Patched(msgspec.Struct, frozen=True):
    """The patch was accepted."""


class PatchFailed(msgspec.Struct, frozen=True):
    """The patch was refused (409) or its outcome is unknown."""

    message: str


class Slept(msgspec.Struct, frozen=True):
    """The wait is over."""


LockEvent = NodeRead | PodRead | PodMissing | ReadFailed | Patched | PatchFailed | Slept
