"""Node locks: who holds them, for how long, and whether anybody still needs them (protocol.md §7).

The rules by which a lock is stale are the scheduler's (decision 29), so what is called stale here is what the
next pod on that node takes over by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from hami.answers.collect import flags_of
from hami.answers.errors import AnswerError
from hami.answers.lists import list_plain
from hami.answers.ours import SCHEDULERS, scheduler_containers, words_of
from hami.kube.client import JSON_PATCH, Client
from hami.kube.errors import Forbidden, Invalid, NotFound
from hami.kube.operations import Selection
from hami.kube.resources import DEPLOYMENTS, NODES, PODS
from hami.protocol import dsmlu_lock
from hami.protocol.durations import format_duration, parse_duration
from hami.protocol.errors import DurationError, LockFormatError, TimestampError
from hami.protocol.keys import (
    BIND_FAILED,
    BIND_PHASE,
    BIND_SUCCESS,
    CAMBRICON_LOCK,
    ENV_NODELOCK_EXPIRE,
    NODE_LOCK,
)
from hami.protocol.lock import LockOwner, LockValue, parse_lock
from hami.protocol.members import map_of, objects_of
from hami.protocol.timestamps import format_rfc3339, is_skewed, parse_rfc3339
from hami.protocol.views import Pod
from hami.scheduler.edge.settings import lock_timeout

KEYS: Final = (NODE_LOCK, CAMBRICON_LOCK)
_AT_ONCE: Final = 16

State = Literal["held", "stale", "unknown"]


class NodeLock(msgspec.Struct, frozen=True):
    """One lock of one node. ``text`` is its value, ``since`` RFC 3339 and ``age_s`` seconds (None: not
    readable), ``holder`` namespace/name ("": it names none)."""

    node: str
    key: str
    text: str
    state: State
    why: str
    holder: str = ""
    since: str = ""
    age_s: float | None = None


class Locks(msgspec.Struct, frozen=True):
    """All locks, and what could not be read."""

    locks: list[NodeLock]
    timeout_s: float
    notes: list[str] = []


class Unreadable(msgspec.Struct, frozen=True):
    """The holder could not be looked at."""

    why: str


Holder = Pod | Unreadable | None
"""The pod that a lock names; None: there is no such pod."""


# --- judging, pure ----------------------------------------------------------------------------------------


def judge(node: str, key: str, text: str, holder: Holder, now: float, timeout_s: float) -> NodeLock:
    """A lock as it is at ``now`` (Unix seconds); ``holder`` is looked at only where the lock names one."""
    try:
        value = read_lock(key, text)
    except (LockFormatError, TimestampError) as error:
        stale = key == NODE_LOCK  # Cambricon's is taken over two minutes after somebody saw it first
        return NodeLock(node, key, text, "stale" if stale else "unknown", f"unreadable: {error}")
    limit = timeout_s if key == NODE_LOCK else dsmlu_lock.TIMEOUT
    state, why = _state(node, value, holder, now, limit)
    name = f"{value.owner.namespace}/{value.owner.name}" if value.owner else ""
    since = format_rfc3339(value.time)
    return NodeLock(node, key, text, state, why, name, since, max(0.0, now - value.time))


def read_lock(key: str, text: str) -> LockValue:
    """Time and owner of a lock's value. Raises `LockFormatError` or `TimestampError`."""
    return parse_lock(text) if key == NODE_LOCK else LockValue(parse_rfc3339(text), None)


def _state(node: str, value: LockValue, holder: Holder, now: float, limit_s: float) -> tuple[State, str]:
    if is_skewed(value.time, now):
        return "unknown", "dated ahead of this machine's clock: whose is wrong?"
    left = value.time + limit_s - now
    if left < 0:
        return "stale", f"older than {format_duration(limit_s)}"
    if value.owner is None:
        return "held", f"names no pod; stale in {format_duration(round(left))}"
    match holder:
        case None:
            return "stale", "the pod does not exist"
        case Unreadable():
            return "unknown", f"the pod cannot be read: {holder.why}"
    if holder.is_finished:
        return "stale", f"the pod has ended ({holder.phase})"
    if holder.node_name not in ("", node):
        return "stale", f"the pod is on node {holder.node_name}"
    phase = holder.annotations.get(BIND_PHASE, "")
    if phase in (BIND_SUCCESS, BIND_FAILED):
        return "stale", f"the pod's allocation has ended (bind-phase {phase})"
    doing = "waits for its devices" if holder.node_name else "is about to be bound"
    return "held", f"the pod {doing}; stale in {format_duration(round(left))}"


# --- reading and releasing --------------------------------------------------------------------------------


async def find_locks(
    client: Client, now: float, timeout_s: float | None = None, only_node: str = ""
) -> Locks:
    """The locks of all nodes, or of ``only_node``; ``timeout_s`` in place of the scheduler's.

    Raises ``KubeError``, :class:`AnswerError` where there is no such node.
    """
    notes: list[str] = []
    limit = timeout_s or await _timeout(client, notes)
    if only_node:
        try:
            nodes = [await client.get(NODES, only_node, dict)]
        except (NotFound, ValueError) as error:
            raise AnswerError(f"no node {only_node}: {error}") from error
    else:
        nodes = await list_plain(client, NODES)
    found = [lock for node in nodes for lock in _texts(node)]
    return Locks(await _judged(client, found, now, limit), limit, notes)


async def release(client: Client, lock: NodeLock) -> bool:
    """Remove exactly this lock; whether it was still there. Raises ``KubeError``."""
    path = f"/metadata/annotations/{lock.key.replace('/', '~1')}"
    patch = [{"op": "test", "path": path, "value": lock.text}, {"op": "remove", "path": path}]
    try:
        await client.patch(NODES, lock.node, patch, msgspec.Raw, content_type=JSON_PATCH)
    except (Invalid, NotFound):  # the test failed: another lock is there by now, or none
        return False
    return True


def _texts(node: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Node, key and text of each lock of a node."""
    metadata = map_of(node, "metadata")
    annotations = map_of(metadata, "annotations")
    return [(str(metadata.get("name", "")), key, str(annotations[key])) for key in KEYS if key in annotations]


async def _judged(
    client: Client, found: Sequence[tuple[str, str, str]], now: float, timeout_s: float
) -> list[NodeLock]:
    gate = asyncio.Semaphore(_AT_ONCE)

    async def one(node: str, key: str, text: str) -> NodeLock:
        async with gate:
            holder = await _holder(client, key, text)
        return judge(node, key, text, holder, now, timeout_s)

    return list(await asyncio.gather(*(one(*lock) for lock in found)))


async def _holder(client: Client, key: str, text: str) -> Holder:
    try:
        owner = read_lock(key, text).owner
    except (LockFormatError, TimestampError):
        return None
    return await _pod(client, owner) if owner else None


async def _pod(client: Client, owner: LockOwner) -> Holder:
    try:
        return await client.get(PODS, owner.name, Pod, namespace=owner.namespace)
    except NotFound:
        return None
    except Forbidden as error:
        return Unreadable(str(error))
    except ValueError as error:  # a name that no pod can have
        return Unreadable(str(error))


async def _timeout(client: Client, notes: list[str]) -> float:
    """Seconds until a lock is stale, as the scheduler's Deployment has it."""
    try:
        deployments = await list_plain(client, DEPLOYMENTS, Selection(label_selector=SCHEDULERS))
    except Forbidden as error:
        notes.append(f"the scheduler's Deployment cannot be read, 5m is assumed: {error}")
        deployments = []
    for one in deployments:
        for container in scheduler_containers(one):
            return lock_timeout(_flag(flags_of(words_of(container))), _environment(container))
    return lock_timeout(None, "")


def _flag(flags: Mapping[str, str]) -> float | None:
    try:
        return parse_duration(flags["node-lock-timeout"])
    except (KeyError, DurationError):
        return None


def _environment(container: Mapping[str, Any]) -> str:
    for one in objects_of(container, "env"):
        if one.get("name") == ENV_NODELOCK_EXPIRE and isinstance(one.get("value"), str):
            return str(one["value"])
    return ""
