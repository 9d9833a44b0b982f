"""The Cambricon node lock ``cambricon.com/dsmlu.lock`` (protocol.md §7.6, vendors/cambricon.md §7).

Its value is a time and names no owner, so nobody can be asked whether the holder still needs it: a lock, also
an unreadable one, is taken over two minutes after it was written or first seen. Actions and events are those
of :mod:`hami.protocol.lock`; release is :class:`~hami.protocol.lock.Release` with ``only`` and :data:`KEY`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from hami.protocol.errors import TimestampError
from hami.protocol.keys import CAMBRICON_LOCK
from hami.protocol.lock import (
    ATTEMPTS,
    Contention,
    Done,
    Failed,
    GetNode,
    LockEvent,
    LockState,
    NodeRead,
    Patched,
    PatchFailed,
    Phase,
    ReadFailed,
    Sight,
    Slept,
    Step,
    patch_step,
    retry_step,
)
from hami.protocol.timestamps import age, format_rfc3339, parse_rfc3339

KEY: Final = CAMBRICON_LOCK
TIMEOUT: Final = 120.0
"""Seconds after which the lock is taken over; HAMi schedulers judge the same annotation by this age."""


class AcquireDsmlu(msgspec.Struct, frozen=True):
    """Takes the Cambricon lock of ``node``; ``known`` is what an earlier run remembered of its value.

    The caller remembers ``Done.acquired``: only a lock with that text may be released.
    """

    node: str
    known: Sight | None = None

    def start(self, now: float) -> Step:
        """First step of a run."""
        return LockState(wanted=format_rfc3339(now), sight=self.known), (GetNode(),)

    def step(self, state: LockState, event: LockEvent, now: float) -> Step:
        """The next step after ``event``, which must answer the last action."""
        match event:
            case NodeRead():
                return self._judge(state, event, now)
            case Patched() if state.phase is Phase.REMOVING:
                again = msgspec.structs.replace(state, phase=Phase.READING, removals=state.removals + 1)
                return again, (GetNode(),)
            case Patched():
                return state, (Done(acquired=state.wanted),)
            case Slept():
                return msgspec.structs.replace(state, phase=Phase.READING), (GetNode(),)
            case PatchFailed(refused=True):
                # Another scheduler's lock of the same second has the same text: it must not pass for ours.
                return retry_step(msgspec.structs.replace(state, phase=Phase.READING), event.message)
            case ReadFailed() if state.attempt == 0:
                return state, (Failed(event.message),)
            case ReadFailed() | PatchFailed():
                return retry_step(state, event.message)
            case _:
                return state, (Failed(f"unexpected {type(event).__name__}"),)

    def _judge(self, state: LockState, read: NodeRead, now: float) -> Step:
        state = msgspec.structs.replace(state, text=read.lock or "", resource_version=read.resource_version)
        if read.lock is not None:
            if state.unsettled and read.lock == state.unsettled:
                return state, (Done(acquired=state.unsettled),)
            seen = state.sight if state.sight and state.sight.text == read.lock else Sight(read.lock, now)
            state = msgspec.structs.replace(state, sight=seen)
            if _age(read.lock, seen, now) <= TIMEOUT or state.removals >= ATTEMPTS:
                message = f"node {self.node} has been locked within 2 minutes"
                return state, (Contention(message),)
            return patch_step(state, Phase.REMOVING, None, KEY)
        return patch_step(state, Phase.SETTING, state.wanted, KEY)


def _age(text: str, seen: Sight, now: float) -> float:
    try:
        return age(parse_rfc3339(text), seen.time, now)
    except TimestampError:
        return max(0.0, now - seen.time)
