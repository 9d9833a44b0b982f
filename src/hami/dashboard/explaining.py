"""Explanations of waiting pods: one at a time, in a thread, remembered for a moment."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import msgspec

from hami.dashboard.errors import ApiError
from hami.dashboard.pending import Explained, PodEvent, explain_pending
from hami.dashboard.store import Store
from hami.kube.client import Client
from hami.kube.errors import KubeError
from hami.kube.resources import EVENTS
from hami.protocol.views import Event

REMEMBERED_S: Final = 15.0
WAITING: Final = 8  # requests that may wait for their turn
_KEPT: Final = 256
_EVENTS: Final = 20
_EVENTS_TIMEOUT_S: Final = 5.0
_LONGEST: Final = 2000


class _Events(msgspec.Struct):
    items: list[Event] | None = None


class Explainer:
    """Answers for one pod; the same question within 15 seconds gets the same answer."""

    def __init__(self, store: Store, client: Client | None, clock: Callable[[], float]) -> None:
        self._store = store
        self._client = client
        self._clock = clock
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[tuple[str, str], tuple[float, Explained]] = OrderedDict()

    async def __call__(self, namespace: str, pod: str) -> Explained:
        """Why the pod waits. Raises `HamiError`; `ApiError` 503 when too many ask at once."""
        if self._waiting >= WAITING:
            raise ApiError(503, "too many explanations are being made; try again")
        self._waiting += 1
        try:
            async with self._turn:
                return await self._explained(namespace, pod)
        finally:
            self._waiting -= 1

    async def _explained(self, namespace: str, pod: str) -> Explained:
        now = self._clock()
        known = self._known.get((namespace, pod))
        if known is not None and 0 <= now - known[0] < REMEMBERED_S:
            return known[1]
        made = await asyncio.to_thread(explain_pending, self._store.frozen(now), namespace, pod)
        made = msgspec.structs.replace(made, events=await self._events(namespace, pod))
        self._known[namespace, pod] = (now, made)
        self._known.move_to_end((namespace, pod))
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return made

    async def _events(self, namespace: str, pod: str) -> tuple[PodEvent, ...]:
        """The last events of the pod; none where they cannot be read."""
        if self._client is None:
            return ()
        query = {"fieldSelector": f"involvedObject.kind=Pod,involvedObject.name={pod}", "limit": "200"}
        options: dict[str, Any] = {"query": query, "timeout_s": _EVENTS_TIMEOUT_S}
        try:
            answer = await self._client.json("GET", EVENTS.path(namespace), _Events, **options)
        except KubeError:
            return ()
        found = sorted(answer.items or [], key=lambda one: one.last_timestamp or "")
        return tuple(
            PodEvent(
                (one.reason or "")[:128],
                (one.message or "")[:_LONGEST],
                one.count or 1,
                one.last_timestamp or "",
            )
            for one in reversed(found[-_EVENTS:])
        )
