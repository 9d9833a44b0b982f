"""The node lock ``hami.io/mutex.lock``: value codec, acquire and release machines (protocol.md §7, WIRE).

The machines do no I/O and read no clock: they say what to do (actions) and are told what happened (events),
with time in Unix seconds as an argument. The caller performs the actions of a step in order and answers the
last one, until that is :class:`Done`, :class:`Contention` or :class:`Failed`. Same events and times in, same
actions out::

    state, actions = machine.start(now)
    while not isinstance(actions[-1], Done | Contention | Failed):
        event = ...perform the actions, answer the last...
        state, actions = machine.step(state, event, now)
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from hami.protocol.durations import format_duration
from hami.protocol.errors import LockFormatError, TimestampError
from hami.protocol.keys import BIND_FAILED, BIND_PHASE, BIND_SUCCESS, NODE_LOCK
from hami.protocol.timestamps import age, format_rfc3339, is_skewed, parse_rfc3339
from hami.protocol.views import Pod

DEFAULT_LOCK_TIMEOUT: Final = 300.0
"""Seconds after which a lock is taken over, unless configured."""

ATTEMPTS: Final = 5
"""How often one patch is tried."""

FIRST_SLEEP: Final = 0.1
"""Seconds before the second attempt; doubles with every further one."""

SLEEP_JITTER: Final = 0.5


# --- the value ----------------------------------------------------------------------------------------------


class LockOwner(msgspec.Struct, frozen=True):
    """The pod that holds or wants a lock."""

    namespace: str
    name: str


class LockValue(msgspec.Struct, frozen=True):
    """A parsed lock value: when it was taken, and by whom (None: legacy form, or no complete owner)."""

    time: float
    owner: LockOwner | None


def format_lock(owner: LockOwner, now: float) -> str:
    """``<RFC 3339 time>,<namespace>,<name>``."""
    return f"{format_rfc3339(now)},{owner.namespace},{owner.name}"


def parse_lock(text: str) -> LockValue:
    """A lock value, current or legacy (time only). Raises :class:`LockFormatError`."""
    parts = text.split(",") if len(text) <= 1024 else []
    if len(parts) not in (1, 3):
        found = f"got {len(parts)} from {text[:80]}" if parts else "the value is too long"
        raise LockFormatError(f"malformed lock annotation: expected 3 parts, {found}")
    try:
        time = parse_rfc3339(parts[0])
    except TimestampError as error:
        raise LockFormatError(f"malformed lock annotation: {error.message}") from None
    if len(parts) == 3 and bool(parts[1]) != bool(parts[2]):
        raise LockFormatError("malformed lock annotation: half an owner")
    owner = LockOwner(parts[1], parts[2]) if len(parts) == 3 and parts[1] else None
    return LockValue(time, owner)


class Sight(msgspec.Struct, frozen=True):
    """When we first saw a lock value; the caller keeps it per node between runs."""

    text: str
    time: float


# --- actions: what the caller does --------------------------------------------------------------------------


class GetNode(msgspec.Struct, frozen=True):
    """Read the node live; answer :class:`NodeRead` or :class:`ReadFailed`."""


class GetPod(msgspec.Struct, frozen=True):
    """Read the holder live; answer :class:`PodRead`, :class:`PodMissing` or :class:`ReadFailed`."""

    owner: LockOwner


class PatchNode(msgspec.Struct, frozen=True):
    """Merge-patch annotation ``key`` to ``value`` (None removes it) together with
    ``metadata.resourceVersion``.

    Answer :class:`Patched` or :class:`PatchFailed`.
    """

    key: str
    value: str | None
    resource_version: str


class Sleep(msgspec.Struct, frozen=True):
    """Wait ``seconds`` times a random factor between 1 and ``1 + jitter``; answer :class:`Slept`."""

    seconds: float
    jitter: float


class ReportEvent(msgspec.Struct, frozen=True):
    """Raise a Warning event on the node. Needs no answer and is never the last action of a step."""

    reason: str
    message: str


class Done(msgspec.Struct, frozen=True):
    """Success. ``acquired`` is the lock text that this run wrote, empty when it wrote none."""

    acquired: str = ""


class Contention(msgspec.Struct, frozen=True):
    """Held by somebody else; a member of a pod group may try again."""

    message: str


class Failed(msgspec.Struct, frozen=True):
    """Given up with the last error; ``written`` is a lock text whose patch has an unknown outcome."""

    message: str
    written: str = ""


Action = GetNode | GetPod | PatchNode | Sleep | ReportEvent | Done | Contention | Failed


# --- events: what the caller answers ------------------------------------------------------------------------


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
    """A read failed, other than 404 for a holder."""

    message: str


class Patched(msgspec.Struct, frozen=True):
    """The patch was accepted."""


class PatchFailed(msgspec.Struct, frozen=True):
    """The patch was not carried out, or its outcome is unknown."""

    message: str
    refused: bool = False
    """Nothing was stored: the node has changed meanwhile (409), or the request was not worked on."""


class Slept(msgspec.Struct, frozen=True):
    """The wait is over."""


LockEvent = NodeRead | PodRead | PodMissing | ReadFailed | Patched | PatchFailed | Slept


class Phase(Enum):
    """What a run waits for."""

    READING = "a read"
    REMOVING = "the patch that removes a lock"
    SETTING = "the patch that sets the lock"
    SLEEPING = "the next attempt"


class LockState(msgspec.Struct, frozen=True):
    """Where a run stands. ``sight`` is what the caller should remember about the lock it last saw.

    ``text`` and ``resource_version`` are the last read, ``wanted`` is the text to write, ``unsettled`` that
    text once a patch with it has failed, ``stale`` a text already judged to be nobody's. ``attempt`` counts
    failures, ``removals`` the locks removed so far.
    """

    phase: Phase = Phase.READING
    attempt: int = 0
    text: str = ""
    resource_version: str = ""
    wanted: str = ""
    unsettled: str = ""
    stale: str = ""
    removals: int = 0
    sight: Sight | None = None
    skew_reported: bool = False


Step = tuple[LockState, tuple[Action, ...]]


# --- machines -----------------------------------------------------------------------------------------------


class Acquire(msgspec.Struct, frozen=True):
    """Takes the lock of ``node`` for ``owner``.

    A lock is taken over when it is malformed, older than ``timeout`` seconds, or its holder is gone,
    finished, bound to another node, or done with its allocation (decisions, row 29). A device plugin writes
    that a pod is done just before it releases the lock: it is given a moment for that, once. A lock dated
    more than five minutes ahead of our clock ages from the moment we first saw it: ``known`` is what an
    earlier run remembered.
    """

    node: str
    owner: LockOwner
    timeout: float = DEFAULT_LOCK_TIMEOUT
    known: Sight | None = None

    def start(self, now: float) -> Step:
        """First step of a run."""
        return LockState(wanted=format_lock(self.owner, now), sight=self.known), (GetNode(),)

    def step(self, state: LockState, event: LockEvent, now: float) -> Step:
        """The next step after ``event``, which must answer the last action."""
        match event:
            case NodeRead():
                return self._judge(
                    msgspec.structs.replace(state, resource_version=event.resource_version), event, now
                )
            case PodRead() if not holder_is_done(event.pod, self.node):
                return state, (self.contention(),)
            case PodRead() if _is_answered(event.pod) and not state.stale:
                waiting = msgspec.structs.replace(state, stale=state.text, phase=Phase.SLEEPING)
                return waiting, (Sleep(FIRST_SLEEP, SLEEP_JITTER),)
            case PodRead():
                return self._remove(state)
            case PodMissing():
                return self._remove(state)
            case Patched() if state.phase is Phase.REMOVING:
                return _removed(state), (GetNode(),)
            case Patched():
                return state, (Done(acquired=state.wanted),)
            case Slept():
                return msgspec.structs.replace(state, phase=Phase.READING), (GetNode(),)
            case ReadFailed() if state.attempt == 0:
                return state, (Failed(event.message),)
            case ReadFailed() | PatchFailed():
                return retry_step(state, event.message)

    def _judge(self, state: LockState, read: NodeRead, now: float) -> Step:
        text = read.lock
        if text is None:
            return patch_step(state, Phase.SETTING, state.wanted)
        state = msgspec.structs.replace(state, text=text)
        if text == state.stale:
            return self._remove(state)
        try:
            value = parse_lock(text)
        except LockFormatError:
            return self._remove(state)
        sight = state.sight if state.sight and state.sight.text == text else Sight(text, now)
        state = msgspec.structs.replace(state, sight=sight)
        report: tuple[Action, ...] = ()
        if is_skewed(value.time, now) and not state.skew_reported:
            report = (ReportEvent("ClockSkew", f"lock {text[:80]} is dated ahead of the clock, not trusted"),)
            state = msgspec.structs.replace(state, skew_reported=True)
        following, actions = self._judge_value(state, value, now)
        return following, (*report, *actions)

    def _judge_value(self, state: LockState, value: LockValue, now: float) -> Step:
        expired = state.sight is not None and age(value.time, state.sight.time, now) > self.timeout
        if value.owner == self.owner and not expired:
            return state, (Done(acquired=state.unsettled if state.text == state.unsettled else ""),)
        if expired:
            return self._remove(state)
        if value.owner is None or state.attempt:
            return state, (self.contention(),)
        return state, (GetPod(value.owner),)

    def _remove(self, state: LockState) -> Step:
        if state.removals >= ATTEMPTS:  # somebody writes such locks faster than they can be removed
            return state, (self.contention(),)
        return patch_step(msgspec.structs.replace(state, stale=state.text), Phase.REMOVING, None)

    def contention(self) -> Contention:
        """The end of a run that meets somebody else's lock."""
        limit = format_duration(self.timeout)
        return Contention(f"node {self.node} has been locked within {limit}: node lock contention")


class Release(msgspec.Struct, frozen=True):
    """Gives the lock back if ``owner`` holds it; somebody else's lock stays, without an error.

    A legacy lock (no owner) is anybody's, unless ``only`` is given: then only a lock with exactly that text
    is removed (what a failed bind acquired itself).
    """

    owner: LockOwner
    only: str | None = None
    key: str = NODE_LOCK

    def start(self, now: float) -> Step:  # noqa: ARG002 - every machine is given the time
        """First step of a run."""
        return LockState(), (GetNode(),)

    def step(self, state: LockState, event: LockEvent, now: float) -> Step:  # noqa: ARG002
        """The next step after ``event``, which must answer the last action."""
        match event:
            case NodeRead() if event.lock is not None and self._releasable(state, event.lock):
                version = event.resource_version
                seen = msgspec.structs.replace(state, text=event.lock, resource_version=version)
                return patch_step(seen, Phase.REMOVING, None, self.key)
            case Slept():
                return msgspec.structs.replace(state, phase=Phase.READING), (GetNode(),)
            case ReadFailed() | PatchFailed():
                return retry_step(state, event.message)
            case _:
                return state, (Done(),)

    def _releasable(self, state: LockState, text: str) -> bool:
        if self.only is not None:
            return text == self.only
        try:
            owner = parse_lock(text).owner
        except LockFormatError:
            return False
        if owner is None:
            return not state.text or state.text == text
        return owner == self.owner


def holder_is_done(pod: Pod, node: str) -> bool:
    """Whether a lock holder no longer needs the lock of ``node``."""
    return pod.is_finished or pod.node_name not in ("", node) or _is_answered(pod)


def _is_answered(pod: Pod) -> bool:
    """Whether the node's side has written its last word on the pod; it releases the lock next."""
    return pod.annotations.get(BIND_PHASE) in (BIND_SUCCESS, BIND_FAILED)


def patch_step(state: LockState, phase: Phase, value: str | None, key: str = NODE_LOCK) -> Step:
    """Patch the lock on what was read last."""
    following = msgspec.structs.replace(state, phase=phase)
    return following, (PatchNode(key, value, state.resource_version),)


def retry_step(state: LockState, message: str) -> Step:
    """Read again after a growing sleep, or give up with ``message``."""
    failures = state.attempt + 1
    unsettled = state.wanted if state.phase is Phase.SETTING else state.unsettled
    if failures >= ATTEMPTS:
        return state, (Failed(message, written=unsettled),)
    waiting = msgspec.structs.replace(state, attempt=failures, phase=Phase.SLEEPING, unsettled=unsettled)
    return waiting, (Sleep(FIRST_SLEEP * 2 ** (failures - 1), SLEEP_JITTER),)


def _removed(state: LockState) -> LockState:
    return msgspec.structs.replace(
        state, phase=Phase.READING, attempt=0, stale="", removals=state.removals + 1
    )
