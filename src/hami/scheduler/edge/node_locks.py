"""Running the node lock machines against the API server (protocol.md §7, allocation mode `lock`)."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from hami.kube.client import Client
from hami.kube.errors import UNPROCESSED, Conflict, KubeError, NotFound
from hami.kube.events import EventRecorder, ObjectRef
from hami.kube.operations import patch_metadata
from hami.kube.ratelimit import Backoff
from hami.kube.resources import NODES, PODS
from hami.protocol.dsmlu_lock import AcquireDsmlu
from hami.protocol.durations import format_duration
from hami.protocol.errors import HamiError, LockFormatError
from hami.protocol.keys import CAMBRICON_LOCK, NODE_LOCK
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
    parse_lock,
)
from hami.protocol.views import Node, Pod
from hami.scheduler.edge.deadline import ANSWER_WITHIN_S, Deadline
from hami.scheduler.edge.leader import NOT_LEADER

LockKind = Literal["hami", "dsmlu"]
"""`hami.io/mutex.lock`, which names its holder, or Cambricon's own lock, which does not."""

_KEYS: Final[dict[LockKind, str]] = {"hami": NODE_LOCK, "dsmlu": CAMBRICON_LOCK}
_CONTENTION_BACKOFF_S = (0.1, 1.0)
WAIT_S: Final = 15.0
"""How long a pod waits for a lock that this process gave to another pod; the answer to kube-scheduler must
come within 30 s."""

SHUTTING_DOWN: Final = "scheduler shutting down while waiting for node lock: node lock contention"
_ASKED_EVERY_S: Final = 2.0
_LEAST_S: Final = 0.01


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


class Given(NamedTuple):
    """A lock that this process took for a pod; ``gone`` once it was released or the node informer shows
    another text, perhaps an older one: then the next in line asks."""

    text: str
    owner: LockOwner
    gone: asyncio.Event


@dataclass(slots=True)
class Attempt:
    """One attempt to take a lock: until when the API server may be asked, whether locks may be written at
    all, and what came of it so far."""

    deadline: Deadline = field(default_factory=lambda: Deadline(ANSWER_WITHIN_S))
    may_write: Callable[[], bool] = lambda: True
    written: str = ""
    """A lock text that this attempt may have stored, however it ended, even when it was cancelled."""


class NodeLocks:
    """Takes and releases node locks; those who want one lock of one node stand in line within the process.

    In a burst most pods meet a lock that was given to one of them a moment ago. They wait for it in their
    line, since kube-scheduler would come back for a refused one only seconds after the lock was released, and
    a question for each would fill the client's rate limit.
    """

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
        self._sights: dict[tuple[str, str], Sight] = {}  # by node and key
        self._serial: dict[tuple[str, str], asyncio.Lock] = {}  # by node and key: a pod may want both locks
        self._unbound: dict[str, LockOwner] = {}  # holders that the last run on a node saw waiting
        self._given: dict[str, Given] = {}  # by node; kind hami
        self._there: dict[str, str] = {}  # by node; kind hami: as the informer has it
        self._ending = False

    @property
    def timeout_s(self) -> float:
        """Seconds after which anybody takes a lock over."""
        return self._timeout_s

    def end(self) -> None:
        """The process ends: whoever waits for a lock is told so, and so is everyone who comes."""
        self._ending = True
        for given in self._given.values():
            given.gone.set()

    async def acquire(
        self,
        node: str,
        owner: LockOwner,
        kind: LockKind = "hami",
        wait_s: float = WAIT_S,
        attempt: Attempt | None = None,
    ) -> str:
        """Take the lock; the lock text this call wrote, empty when the pod held it already.

        Waits ``wait_s`` at most for its turn, and is over at the deadline of ``attempt``. Raises
        ``LockContention`` or ``LockFailed``.
        """
        attempt = attempt or Attempt()
        deadline = time.monotonic() + wait_s
        turn = self._serial.setdefault((node, _KEYS[kind]), asyncio.Lock())
        try:
            async with asyncio.timeout(wait_s):
                await turn.acquire()
        except TimeoutError:
            contention = Acquire(node, owner, self._timeout_s).contention()
            raise LockContention(contention.message) from None
        try:
            end = await self._acquire_in_turn(node, owner, kind, deadline, attempt)
        finally:
            turn.release()
        if isinstance(end, Contention):
            raise LockContention(end.message, self._unbound.get(node) if kind == "hami" else None)
        if isinstance(end, Failed):
            raise LockFailed(end.message, end.written)
        return end.acquired

    async def _acquire_in_turn(
        self, node: str, owner: LockOwner, kind: LockKind, deadline: float, attempt: Attempt
    ) -> Done | Contention | Failed:
        if self._ending:
            return Contention(SHUTTING_DOWN)
        key = _KEYS[kind]
        if kind == "dsmlu":
            return await self._run(node, AcquireDsmlu(node, self._sights.get((node, key))), key, attempt)
        given = self._given.get(node)
        if given is not None and given.owner == owner:
            given = None
        while True:
            if given is not None and not await _is_held(given, deadline):
                if self._ending:
                    return Contention(SHUTTING_DOWN)
                # The informer may have shown what was there before the lock; its next word counts again.
                self._given[node] = given = given._replace(gone=asyncio.Event())
            self._unbound.pop(node, None)
            known = self._sights.get((node, key))
            end = await self._run(node, Acquire(node, owner, self._timeout_s, known), key, attempt)
            if given is not None:
                sight = self._sights.get((node, key))
                if isinstance(end, Contention) and sight is not None and sight.text == given.text:
                    if time.monotonic() < deadline:
                        continue
                else:
                    self._given.pop(node, None)
            if isinstance(end, Done) and end.acquired:
                self._given[node] = Given(end.acquired, owner, asyncio.Event())
            return end

    async def acquire_within(
        self,
        node: str,
        owner: LockOwner,
        retry_s: float,
        kind: LockKind = "hami",
        attempt: Attempt | None = None,
    ) -> str:
        """As ``acquire``, repeated on contention for ``retry_s`` seconds (members of a pod group)."""
        backoff = Backoff(*_CONTENTION_BACKOFF_S, self._rng)
        deadline = time.monotonic() + retry_s
        while True:
            try:
                wait_s = min(WAIT_S, deadline - time.monotonic())
                return await self.acquire(node, owner, kind, wait_s, attempt)
            except LockContention as contention:
                if self._ending:
                    raise
                wait = backoff.next()
                if time.monotonic() + wait >= deadline:
                    await asyncio.sleep(max(0.0, deadline - time.monotonic()))
                    raise LockContention(
                        f"timed out after {format_duration(retry_s)} waiting for node {node} to be unlocked: "
                        "node lock contention",
                        contention.unbound,
                    ) from contention
                await asyncio.sleep(wait)

    async def release(self, node: str, owner: LockOwner, only: str, kind: LockKind = "hami") -> None:
        """Give back the lock with exactly the text ``only``; raises ``LockFailed`` when that did not
        succeed."""
        end = await self._run(node, Release(owner, only, _KEYS[kind]), _KEYS[kind], Attempt())
        given = self._given.get(node)
        if given is not None and given.text == only:  # else somebody in line has the lock by now
            given.gone.set()
        if isinstance(end, Failed):
            raise LockFailed(end.message)

    def saw(self, node: str, text: str | None) -> None:
        """The node informer has this lock text, None for no lock."""
        if text is None:
            self._there.pop(node, None)
        else:
            self._there[node] = text
        given = self._given.get(node)
        if given is not None and given.text != text:
            given.gone.set()

    def oldest_s(self) -> float:
        """Age of the oldest readable lock of any node, seconds; 0 without one."""
        now = self._clock()
        return max((max(0.0, now - written) for written in map(_written, self._there.values())), default=0.0)

    def forget(self, node: str) -> None:
        """The node was deleted."""
        self._there.pop(node, None)
        given = self._given.pop(node, None)
        if given is not None:
            given.gone.set()
        for key in _KEYS.values():
            self._sights.pop((node, key), None)
            lock = self._serial.get((node, key))
            if lock is not None and not lock.locked():
                del self._serial[node, key]
        self._unbound.pop(node, None)

    async def _run(
        self, node: str, machine: Acquire | AcquireDsmlu | Release, key: str, attempt: Attempt
    ) -> Done | Contention | Failed:
        state, actions = machine.start(self._clock())
        last = ""
        while True:
            event: LockEvent | None = None
            for action in actions:
                if isinstance(action, Done | Contention | Failed):
                    if state.sight is not None:
                        self._sights[node, key] = state.sight
                    return action
                if attempt.deadline.has_passed:
                    limit = format_duration(attempt.deadline.total_s)
                    why = f"no success with the lock of node {node} within {limit}{last}"
                    return Failed(why, attempt.written)
                if isinstance(action, PatchNode) and not attempt.may_write():
                    return Failed(NOT_LEADER, attempt.written)
                event = await self._perform(node, action, key, attempt)
            assert event is not None
            last = f": {event.message}" if isinstance(event, ReadFailed | PatchFailed) else last
            state, actions = machine.step(state, event, self._clock())

    async def _perform(self, node: str, action: Action, key: str, attempt: Attempt) -> LockEvent | None:
        timeout_s = max(_LEAST_S, min(self._client.limits.timeout_s, attempt.deadline.left()))
        match action:
            case GetNode():
                return await self._read_node(node, key, timeout_s)
            case GetPod():
                return await self._read_holder(node, action.owner, timeout_s)
            case PatchNode():
                return await self._patch(node, action, timeout_s, attempt)
            case Sleep():
                wait = action.seconds * (1 + action.jitter * self._rng.random())
                await asyncio.sleep(min(wait, attempt.deadline.left()))
                return Slept()
            case ReportEvent():
                self._recorder.record(ObjectRef("Node", node), "Warning", action.reason, action.message)
                return None
            case _:
                raise AssertionError(f"{action} ends a run")

    async def _read_node(self, name: str, key: str, timeout_s: float) -> LockEvent:
        try:
            node = await self._client.get(NODES, name, Node, timeout_s=timeout_s)
        except KubeError as error:
            return ReadFailed(str(error))
        return NodeRead(node.annotations.get(key), node.resource_version)

    async def _read_holder(self, node: str, owner: LockOwner, timeout_s: float) -> LockEvent:
        try:
            pod = await self._client.get(
                PODS, owner.name, Pod, namespace=owner.namespace, timeout_s=timeout_s
            )
            if not pod.node_name:
                self._unbound[node] = owner
            return PodRead(pod)
        except NotFound:
            return PodMissing()
        except (KubeError, ValueError) as error:
            return ReadFailed(str(error))

    async def _patch(self, node: str, action: PatchNode, timeout_s: float, attempt: Attempt) -> LockEvent:
        before = attempt.written
        attempt.written = action.value or before
        try:
            await patch_metadata(
                self._client,
                NODES,
                node,
                annotations={action.key: action.value},
                resource_version=action.resource_version,
                timeout_s=timeout_s,
            )
        except KubeError as error:
            refused = isinstance(error, (Conflict, *UNPROCESSED))
            if refused:
                attempt.written = before
            return PatchFailed(str(error), refused=refused)
        return Patched()


def _written(text: str) -> float:
    """When a lock was taken, Unix seconds; the end of time for an unreadable one."""
    try:
        return parse_lock(text).time
    except LockFormatError:
        return math.inf


async def _is_held(given: Given, deadline: float) -> bool:
    """Whether the lock is still where it was given to; waits a while until it is not."""
    try:
        async with asyncio.timeout(min(_ASKED_EVERY_S, deadline - time.monotonic())):
            await given.gone.wait()
    except TimeoutError:
        return True
    return False
