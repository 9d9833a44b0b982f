"""Recording events (core/v1): best effort, aggregated, and never in the way of requests that matter.

``EventRecorder.record`` only puts the event into a bounded queue; a worker sends them under a rate limit of
its own. The same event of the same object within ten minutes becomes an increased count instead of a new
object.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import msgspec

from hami.kube.client import Client
from hami.kube.errors import KubeError, NotFound
from hami.kube.ratelimit import TokenBucket
from hami.kube.resources import EVENTS

EventType = Literal["Normal", "Warning"]

MAX_MESSAGE_CHARS = 4096
_QUEUE = 2000
_KNOWN = 4096
_AGGREGATE_S = 600.0
_EVENTS_PER_S, _EVENTS_BURST = 20.0, 50
_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """The object an event is about; an empty namespace (Nodes) puts the event into ``default``."""

    kind: str
    name: str
    namespace: str = ""
    uid: str = ""
    api_version: str = "v1"


@dataclass(frozen=True, slots=True)
class _Event:
    ref: ObjectRef
    type: EventType
    reason: str
    message: str
    at: float


@dataclass(slots=True)
class _Sent:
    name: str
    count: int
    last: float


class EventRecorder:
    """Records events in the name of ``component``; ``run()`` sends them until cancelled."""

    def __init__(
        self, client: Client, component: str, host: str = "", *, clock: Callable[[], float] = time.time
    ) -> None:
        self.dropped = 0
        self._client = client
        self._component = component
        self._host = host
        self._clock = clock
        self._queues: OrderedDict[str, deque[_Event]] = OrderedDict()  # by namespace, the next one first
        self._queued = 0
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._known: OrderedDict[tuple[ObjectRef, EventType, str, str], _Sent] = OrderedDict()
        self._bucket = TokenBucket(_EVENTS_PER_S, _EVENTS_BURST)
        self._serial = 0

    def record(self, ref: ObjectRef, type_: EventType, reason: str, message: str) -> None:
        """Queue an event; never blocks, never raises.

        Namespaces take turns. When the queue is full the oldest event of the namespace with most of them is
        dropped.
        """
        if self._queued >= _QUEUE:
            max(self._queues.values(), key=len).popleft()
            self._queued -= 1
            self.dropped += 1
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[: MAX_MESSAGE_CHARS - 1] + "…"
        queue = self._queues.setdefault(ref.namespace, deque())
        queue.append(_Event(ref, type_, reason, message, self._clock()))
        self._queued += 1
        self._ready.set()
        self._idle.clear()

    async def run(self) -> None:
        """Send queued events; failures are logged and the event is lost."""
        while True:
            await self._ready.wait()
            while self._queued:
                await asyncio.sleep(self._bucket.reserve(time.monotonic()))
                event = self._next()
                try:
                    await self._send(event)
                except (
                    KubeError,
                    ValueError,
                ) as error:  # ValueError: no name, no text
                    self.dropped += 1
                    log.warning("event.lost", extra={"reason": event.reason, "cause": str(error)})
            self._ready.clear()
            self._idle.set()

    def _next(self) -> _Event:
        namespace, queue = next((key, queue) for key, queue in self._queues.items() if queue)
        event = queue.popleft()
        self._queued -= 1
        if queue:
            self._queues.move_to_end(namespace)
        else:
            del self._queues[namespace]
        return event

    async def flush(self, timeout_s: float) -> None:
        """Wait until the queue is empty, at most ``timeout_s`` seconds (for an orderly end)."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            pass

    async def _send(self, event: _Event) -> None:
        key = (event.ref, event.type, event.reason, event.message)
        sent = self._known.get(key)
        if sent is not None and event.at - sent.last < _AGGREGATE_S and await self._increase(event, sent):
            self._known.move_to_end(key)
            return
        name = await self._create(event)
        self._known[key] = _Sent(name, 1, event.at)
        self._known.move_to_end(key)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)

    async def _increase(self, event: _Event, sent: _Sent) -> bool:
        patch = {"count": sent.count + 1, "lastTimestamp": _rfc3339(event.at)}
        try:
            await self._client.patch(
                EVENTS,
                sent.name,
                patch,
                msgspec.Raw,
                namespace=event.ref.namespace or "default",
                timeout_s=_TIMEOUT_S,
            )
        except NotFound:
            return False
        sent.count += 1
        sent.last = event.at
        return True

    async def _create(self, event: _Event) -> str:
        self._serial += 1
        ref = event.ref
        namespace = ref.namespace or "default"
        name = f"{ref.name[:200].rstrip('-.')}.{int(event.at * 1e9) + self._serial:x}"
        when = _rfc3339(event.at)
        source = {"component": self._component} | ({"host": self._host} if self._host else {})
        obj = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": ref.api_version,
                "kind": ref.kind,
                "name": ref.name,
                "namespace": ref.namespace,
                "uid": ref.uid,
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message,
            "source": source,
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
            "reportingComponent": self._component,
            "reportingInstance": self._host,
        }
        await self._client.create(EVENTS, obj, msgspec.Raw, namespace=namespace, timeout_s=_TIMEOUT_S)
        return name


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
