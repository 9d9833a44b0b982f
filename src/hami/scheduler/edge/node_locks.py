"""Running the node lock machines against the API server (protocol.md §7, allocation mode `lock`)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from hami.kube.client import Client
from hami.kube.errors import KubeError, NotFound
from hami.kube.events import EventRecorder, ObjectRef
from hami.kube.operations import patch_metadata
from hami.kube.ratelimit import Backoff
from hami.kube.resources import NODES, PODS
from hami.protocol.durations import format_duration
from hami.protocol.errors import HamiError
from hami.protocol.keys import NODE_LOCK
from hami.protocol.lock import (
    DEFAULT_LOCK_TIMEOUT,
    Acquire,
    Action,
    Contention,
    Done,
    Failed,
    GetNode,
    GetPod,
    LockEvent,
    LockOwner,
    NodeRead,
    Patched,
    PatchFailed,
    PatchNode,
    PodMissing,
    PodRead,
    ReadFailed,
    Release,
    ReportEvent,
    Sight,
    Sleep,
    Slept,
)
from hami.protocol.views import Node, Pod

_CONTENTION_BACKOFF_S = (0.1, 1.0)


class LockContention(HamiError):  # noqa: N818
    """The lock is held by another pod; ``unbound`` is that pod if it is not bound to any node yet."""

    def __init__(self, message: str, unbound: LockOwner | None = None) -> None:
        super().__init__(message)
        self.unbound = unbound


class LockFailed(HamiError):  # noqa: N818
    """The lock could not be taken for another reason; ``written`` is a lock text that may have been
    stored."""

    def __init__(self, message: str, written: str = "") -> None:
        super().__init__(message)
        self.written = written


class NodeLocks:
    """Takes and releases node locks; operations on one node are serialised within the process."""

    def __init__(
        self,
        client: Client,
        recorder: EventRecorder,
        *,
        timeout_s: float = DEFAULT_LOCK_TIMEOUT,
        clock: Callable[[], float] = time.time,
        rng: random.Random | None = None,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 -- jitter, not a secret
        self._sights: dict[str, Sight] = {}
        self._serial: dict[str, asyncio.Lock] = {}
        self._unbound: dict[str, LockOwner] = {}  # holders that the last run on a node saw waiting

    async def acquire(self, node: str, owner: LockOwner) -> str:
        """Take the lock; the lock text this call wrote, empty when the pod held it already.

        Raises ``LockContention`` or ``LockFailed``.
        """
        async with self._of(node):
            self._unbound.pop(node, None)
            machine = Acquire(node, owner, self._timeout_s, self._sights.get(node))
            end = await self._run(node, machine)
        if isinstance(end, Contention):
            raise LockContention(end.message, self._unbound.get(node))
        if isinstance(end, Failed):
            raise LockFailed(end.message, end.written)
        return end.acquired

    async def acquire_within(self, node: str, owner: LockOwner, retry_s: float) -> str:
        """As ``acquire``, repeated on contention for ``retry_s`` seconds (members of a pod group)."""
        backoff = Backoff(*_CONTENTION_BACKOFF_S, self._rng)
        deadline = time.monotonic() + retry_s
        while True:
            try:
                return await self.acquire(node, owner)
            except LockContention as contention:
                wait = backoff.next()
                if time.monotonic() + wait >= deadline:
                    await asyncio.sleep(max(0.0, deadline - time.monotonic()))
                    raise LockContention(
                        f"timed out after {format_duration(retry_s)} waiting for node {node} to be unlocked: "
                        "node lock contention",
                        contention.unbound,
                    ) from contention
                await asyncio.sleep(wait)

    async def release(self, node: str, owner: LockOwner, only: str) -> None:
        """Give back the lock with exactly the text ``only``; raises ``LockFailed`` when that did not
        succeed."""
        async with self._of(node):
            end = await self._run(node, Release(owner, only))
        if isinstance(end, Failed):
            raise LockFailed(end.message)

    def forget(self, node: str) -> None:
        """The node was deleted."""
        self._sights.pop(node, None)
        self._unbound.pop(node, None)
        lock = self._serial.get(node)
        if lock is not None and not lock.locked():
            del self._serial[node]

    def _of(self, node: str) -> asyncio.Lock:
        return self._serial.setdefault(node, asyncio.Lock())

    async def _run(self, node: str, machine: Acquire | Release) -> Done | Contention | Failed:
        state, actions = machine.start(self._clock())
        while True:
            event: LockEvent | None = None
            for action in actions:
                if isinstance(action, Done | Contention | Failed):
                    if state.sight is not None:
                        self._sights[node] = state.sight
                    return action
                event = await self._perform(node, action)
            assert event is not None
            state, actions = machine.step(state, event, self._clock())

    async def _perform(self, node: str, action: Action) -> LockEvent | None:
        match action:
            case GetNode():
                return await self._read_node(node)
            case GetPod():
                return await self._read_holder(node, action.owner)
            case PatchNode():
                return await self._patch(node, action)
            case Sleep():
                await asyncio.sleep(action.seconds * (1 + action.jitter * self._rng.random()))
                return Slept()
            case ReportEvent():
                self._recorder.record(ObjectRef("Node", node), "Warning", action.reason, action.message)
                return None
            case _:
                raise AssertionError(f"{action} ends a run")

    async def _read_node(self, name: str) -> LockEvent:
        try:
            node = await self._client.get(NODES, name, Node)
        except KubeError as error:
            return ReadFailed(str(error))
        return NodeRead(node.annotations.get(NODE_LOCK), node.resource_version)

    async def _read_holder(self, node: str, owner: LockOwner) -> LockEvent:
        try:
            pod = await self._client.get(PODS, owner.name, Pod, namespace=owner.namespace)
            if not pod.node_name:
                self._unbound[node] = owner
            return PodRead(pod)
        except NotFound:
            return PodMissing()
        except (KubeError, ValueError) as error:
            return ReadFailed(str(error))

    async def _patch(self, node: str, action: PatchNode) -> LockEvent:
        try:
            await patch_metadata(
                self._client,
                NODES,
                node,
                annotations={action.key: action.value},
                resource_version=action.resource_version,
            )
        except KubeError as error:
            return PatchFailed(str(error))
        return Patched()
