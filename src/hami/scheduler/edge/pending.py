"""Pods that fitted nowhere, tried again when capacity is freed (scheduler.md §15.1; decision 82).

kube-scheduler retries a rejected pod on every cluster event, but some changes are no event for it, and its
retry may come before our watch has seen the change. So the leader touches pods that would fit now.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from hami.kube.client import Client
from hami.kube.errors import KubeError
from hami.kube.operations import patch_metadata
from hami.kube.resources import PODS
from hami.protocol.keys import REQUEUE
from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.leader import Leadership

_PERIOD_S = 1.0
_QUIET_S = 3.0
_TOUCH_EVERY_S = 10.0
_TOUCHES_PER_PASS = 50
_REMEMBERED = 20_000
_SLICE_S = 0.002

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Waiting:
    request: PodRequest
    filtered_at: float
    touched_at: float
    outdated: bool = False  # the request was read under a device config that is no longer in force


class PendingPods:
    """Rejected pods, oldest first. Times are monotonic seconds."""

    def __init__(
        self,
        client: Client,
        state: ClusterState,
        leadership: Leadership,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.touches = 0
        self._client = client
        self._state = state
        self._leadership = leadership
        self._clock = clock
        self._wall_clock = wall_clock
        self._pods: OrderedDict[str, _Waiting] = OrderedDict()
        self._freed_seen = 0
        self._unfinished = False

    def __len__(self) -> int:
        return len(self._pods)

    def rejected(self, request: PodRequest) -> None:
        """`/filter` found no node for the pod."""
        now = self._clock()
        known = self._pods.get(request.info.uid)
        if known is not None:
            known.request = request
            known.filtered_at = now
            known.outdated = False
            return
        self._pods[request.info.uid] = _Waiting(request, now, -_TOUCH_EVERY_S)
        if len(self._pods) > _REMEMBERED:
            self._pods.popitem(last=False)

    def forget(self, uid: str) -> None:
        """The pod was placed, bound, finished or deleted."""
        self._pods.pop(uid, None)

    def config_changed(self) -> None:
        """What these pods ask means something else now: each is touched once, to be read and tried anew."""
        for waiting in self._pods.values():
            waiting.outdated = True
        self._unfinished = True

    async def run(self) -> None:
        """One pass per second while capacity was freed since the last one; until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            if not self._leadership.is_leader():
                self._pods.clear()
            elif self._pods and (self._unfinished or self._state.freed != self._freed_seen):
                await self.touch_fitting()

    async def touch_fitting(self) -> int:
        """One pass; the number of pods touched."""
        self._freed_seen = self._state.freed
        self._unfinished = False
        touched = 0
        trials = _Trials(self._state)
        for uid in list(self._pods):
            waiting = self._pods.get(uid)
            if waiting is None:
                continue
            if touched >= _TOUCHES_PER_PASS:
                self._unfinished = True
                break
            if waiting.outdated or await trials.fit(waiting.request):
                if self._pods.get(uid) is not waiting:
                    continue
                if self._is_due(waiting):
                    await self._touch(waiting)
                    touched += 1
                    if waiting.outdated:
                        self._pods.pop(uid, None)
                else:
                    self._unfinished = True
            await trials.pause()
        return touched

    def _is_due(self, waiting: _Waiting) -> bool:
        now = self._clock()
        return now - waiting.filtered_at >= _QUIET_S and now - waiting.touched_at >= _TOUCH_EVERY_S

    async def _touch(self, waiting: _Waiting) -> None:
        info = waiting.request.info
        waiting.touched_at = self._clock()
        self.touches += 1
        try:
            await patch_metadata(
                self._client,
                PODS,
                info.name,
                namespace=info.namespace,
                annotations={REQUEUE: str(int(self._wall_clock()))},
                uid=info.uid,
            )
        except (KubeError, ValueError) as error:
            log.warning(
                "pending.touch_failed", extra={"pod": f"{info.namespace}/{info.name}", "reason": str(error)}
            )


class _Trials:
    """Trial fits of one pass. A queue of thousands asks for few different things: who asks for the same gets
    the same answer, as long as nothing was freed for a refusal, as nothing has changed at all for a fit."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._refused: dict[Hashable, int] = {}
        self._fitted: dict[Hashable, int] = {}
        self._begun = time.perf_counter()

    async def fit(self, request: PodRequest) -> bool:
        """Whether some node fits, as far as a few trials show."""
        key = (request.signature, request.info.namespace)
        version, freed = self._state.version, self._state.freed
        if self._refused.get(key) == freed:
            return False
        if self._fitted.get(key) == version:
            return True
        for fits in self._state.trials(request):
            if fits:
                self._fitted[key] = version
                return True
            await self.pause()
        self._refused[key] = freed
        return False

    async def pause(self) -> None:
        """Let others go on once the slice of time is used up."""
        if time.perf_counter() - self._begun > _SLICE_S:
            await asyncio.sleep(0)
            self._begun = time.perf_counter()
