"""The node locks of pods on their way: taken before the Binding, handed to the node plugin with it, given
back when there will be none (protocol.md §7.5)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from hami.kube.bugs import BugLog
from hami.kube.ratelimit import Backoff
from hami.protocol.lock import LockOwner
from hami.scheduler.core.answers import Reservation
from hami.scheduler.edge.deadline import Deadline
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.node_locks import WAIT_S, Attempt, LockFailed, LockKind, NodeLocks

KEPT_S: Final = 3.0
"""Seconds of a request that are not spent on waiting for a lock, but kept for what follows."""
_BACKOFF_S: Final = (1.0, 15.0)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Return:
    """Locks that are being released; ``enough``: their pod comes again, the attempt under way is the last."""

    texts: dict[LockKind, str]
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class PodLocks:
    """Which lock texts were written for which pod, until the outcome of its Binding is known."""

    def __init__(
        self,
        node_locks: NodeLocks,
        leadership: Leadership,
        bugs: BugLog,
        rng: random.Random | None = None,
    ) -> None:
        self.node_locks = node_locks
        self._leadership = leadership
        self._bugs = bugs
        self._rng = rng or random.Random()  # noqa: S311 -- jitter, not a secret
        self._taken: dict[str, dict[LockKind, str]] = {}  # pod uid -> kind -> text
        self._returns: dict[str, _Return] = {}  # by pod uid

    async def take(
        self, reservation: Reservation, kinds: Iterable[LockKind], retry_s: float, deadline: Deadline
    ) -> None:
        """Take these locks, one after the other. On contention again for ``retry_s`` seconds (0: once).

        Raises ``LockContention`` or ``LockFailed``; what was taken before stays until ``give_back``.
        """
        await self._end_return(reservation, deadline)
        for kind in kinds:
            await self._take_one(reservation, kind, retry_s, deadline)

    async def _take_one(
        self, reservation: Reservation, kind: LockKind, retry_s: float, deadline: Deadline
    ) -> None:
        owner, attempt = _owner(reservation), Attempt(deadline, self._leadership.is_leader)
        wait_s = deadline.left(KEPT_S)
        acquired = ""
        try:
            if retry_s > 0:
                retry_s = min(retry_s, float(math.ceil(wait_s)))  # users read it
                acquired = await self.node_locks.acquire_within(
                    reservation.node, owner, retry_s, kind, attempt
                )
            else:
                acquired = await self.node_locks.acquire(
                    reservation.node, owner, kind, min(WAIT_S, wait_s), attempt
                )
        except LockFailed as error:
            attempt.written = error.written or attempt.written
            raise
        finally:
            if acquired or attempt.written:
                self._taken.setdefault(reservation.uid, {})[kind] = acquired or attempt.written

    def hand_over(self, uid: str) -> None:
        """The pod is bound: its locks are the node plugin's from now on."""
        self._taken.pop(uid, None)

    async def give_back(self, reservation: Reservation, deadline: Deadline) -> None:
        """Release what was taken for this pod; beyond ``deadline`` this goes on by itself."""
        texts = self._taken.pop(reservation.uid, None)
        if not texts:
            return
        one = self._returns[reservation.uid] = _Return(texts)
        one.task = asyncio.create_task(self._give_back(reservation, one))
        one.task.add_done_callback(lambda task: self._forget(reservation, task))
        await asyncio.wait({one.task}, timeout=deadline.left())

    async def close(self, timeout_s: float) -> None:
        """Let releases end, at most ``timeout_s`` seconds (the process ends)."""
        tasks = {one.task for one in self._returns.values() if one.task is not None}
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _end_return(self, reservation: Reservation, deadline: Deadline) -> None:
        """The pod comes again while its lock is being released: it would meet that lock, take it for its own
        and lose it."""
        one = self._returns.get(reservation.uid)
        if one is None or one.task is None:
            return
        one.enough.set()
        _, late = await asyncio.wait({one.task}, timeout=deadline.left(KEPT_S))
        if late:
            raise LockFailed(f"an earlier lock of node {reservation.node} for this pod is being released")
        self._taken[reservation.uid] = one.texts  # the pod may meet it still, and keep it

    async def _give_back(self, reservation: Reservation, one: _Return) -> None:
        """Until it has succeeded, the lock is too old to count, the pod comes again, or another replica
        leads, whose pod this may be by now; but at least once."""
        owner = _owner(reservation)
        backoff = Backoff(*_BACKOFF_S, self._rng)
        until = time.monotonic() + self.node_locks.timeout_s
        left = list(reversed(one.texts.items()))
        while True:
            left = [lock for lock in left if not await self._released(reservation.node, owner, *lock)]
            if not left or one.enough.is_set() or time.monotonic() >= until:
                return
            if not self._leadership.is_leader():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff.next()):
                    await one.enough.wait()

    async def _released(self, node: str, owner: LockOwner, kind: LockKind, text: str) -> bool:
        try:
            await self.node_locks.release(node, owner, text, kind)
        except LockFailed as error:
            log.warning("lock.release_failed", extra={"node": node, "reason": str(error)})
            return False
        return True

    def _forget(self, reservation: Reservation, task: asyncio.Task[None]) -> None:
        one = self._returns.get(reservation.uid)
        if one is not None and one.task is task:
            del self._returns[reservation.uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            pod = f"{reservation.namespace}/{reservation.name}"
            self._bugs.note("lock.release_crashed", error, pod=pod, node=reservation.node)


def _owner(reservation: Reservation) -> LockOwner:
    return LockOwner(reservation.namespace, reservation.name)
