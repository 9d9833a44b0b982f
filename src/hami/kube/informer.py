"""List and watch without end: a local view of one kind that follows the API server.

Every object is decoded by one msgspec decoder and reduced at once; what is kept is the reduced value.
Callbacks run in the event loop, in the order of the changes of each object. A watch that breaks is resumed
at the last version seen; an expired version (410) leads to a new list, whose differences are reported like
events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from sys import intern
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from hami.kube.bugs import BugLog
from hami.kube.client import Client
from hami.kube.errors import UNDECODABLE, ApiError, Gone, KubeError, Status, TransportError, error_from_status
from hami.kube.operations import PAGE_SIZE, Page, Selection, fresh_version, list_pages, read_ahead
from hami.kube.ratelimit import Backoff
from hami.kube.resources import Resource
from hami.protocol.errors import HamiError

_WATCH_S = (300, 600)
_IDLE_MARGIN_S = 30.0
_BACKOFF_S = (0.5, 30.0)
_OBJECTS_PER_STEP = 10  # a node takes a third of a millisecond
_GRACE_S = 1.0
_SHORT_WATCH_S = 0.1  # pause after a watch that ended within _GRACE_S, events or not

log = logging.getLogger(__name__)
T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Handler(Protocol[T_contra]):
    """What happens on a change. Exceptions are logged and counted; they never stop the informer."""

    def on_add(self, obj: T_contra, /) -> None: ...

    def on_update(self, old: T_contra, new: T_contra, /) -> None: ...

    def on_delete(self, obj: T_contra, /) -> None: ...


class Unheard:
    """A `Handler` of changes that nobody acts on: the values are looked up."""

    def on_add(self, obj: object, /) -> None: ...

    def on_update(self, old: object, new: object, /) -> None: ...

    def on_delete(self, obj: object, /) -> None: ...


@dataclass(slots=True)
class Counters:
    """What has happened so far, for metrics."""

    lists: int = 0
    watches: int = 0
    events: int = 0
    undecodable: int = 0
    handler_errors: int = 0
    failures: int = 0


class Identity(Protocol):
    """What tells an object and its version from others; as in ``metadata``."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def resource_version(self) -> str: ...


class _Meta(msgspec.Struct, gc=False):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = msgspec.field(default="", name="resourceVersion")


class _Head(msgspec.Struct, gc=False):
    metadata: _Meta


class _Event(msgspec.Struct, gc=False):
    type: str
    object: msgspec.Raw


_head_decoder = msgspec.json.Decoder(_Head)
_event_decoder = msgspec.json.Decoder(_Event)
_status_decoder = msgspec.json.Decoder(Status, strict=False)

_Key = tuple[str, str]


class _Entry(msgspec.Struct, Generic[T], frozen=True, gc=False):
    uid: str
    resource_version: str
    value: T


class Informer(Generic[T]):
    """Follows the objects of ``resource`` that ``selection`` matches; ``run()`` until cancelled.

    ``parse`` turns one undecoded object into the value that is kept and handed to ``handler``: usually
    ``msgspec.json.Decoder(View).decode``, or that followed by a reduction. An object it refuses with
    ``msgspec.DecodeError`` or ``HamiError`` is logged and counted; the value known before stays. ``keep``
    makes the value smaller before it is stored: ``on_update`` and ``on_delete`` get that as the old value.
    ``identity`` tells which object a value is, where the value says so itself; else the object is decoded
    once more for that.
    """

    def __init__(
        self,
        client: Client,
        resource: Resource,
        parse: Callable[[msgspec.Raw], T],
        handler: Handler[T],
        selection: Selection | None = None,
        *,
        keep: Callable[[T], T] | None = None,
        identity: Callable[[T], Identity] | None = None,
        page_size: int = PAGE_SIZE,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
        bugs: BugLog | None = None,
    ) -> None:
        self.resource = resource
        self._bugs = bugs or BugLog(log)
        self.counters = Counters()
        self.synced = asyncio.Event()
        self._client = client
        self._parse = parse
        self._handler = handler
        self._keep = keep or _whole
        self._identity = identity
        self._selection = selection or Selection()
        self._page_size = page_size
        self._rng = rng or random.Random()  # noqa: S311 -- jitter, not a secret
        self._backoff = Backoff(*_BACKOFF_S, self._rng)
        self._clock = clock
        self._entries: dict[_Key, _Entry[T]] = {}
        self._version = ""
        self._progress = asyncio.Condition()
        self._relist = asyncio.Event()
        self._lists_started = 0
        self._newest_list_done = 0
        self._also: Handler[T] | None = None

    @property
    def resource_version(self) -> str:
        """The version up to which changes have been delivered, empty before the first list."""
        return self._version

    def get(self, name: str, namespace: str = "") -> T | None:
        """The value kept for an object, None if it is not there."""
        entry = self._entries.get((namespace, name))
        return None if entry is None else entry.value

    def values(self) -> list[T]:
        """All values kept."""
        return [entry.value for entry in self._entries.values()]

    def __len__(self) -> int:
        return len(self._entries)

    async def run(self) -> None:
        """List, watch, repeat; ends only by cancellation."""
        while True:
            try:
                if not self._version or self._relist.is_set():
                    await self._list()
                await self._watch_until_relist()
            except Gone:
                log.info("informer.expired", extra={"kind": self.resource.kind, "version": self._version})
                self._version = ""
                await asyncio.sleep(self._backoff.next())
            except KubeError as error:
                self.counters.failures += 1
                delay = self._backoff.next()
                log.warning(
                    "informer.failed",
                    extra={"kind": self.resource.kind, "reason": str(error), "retry_s": delay},
                )
                await asyncio.sleep(delay)

    async def pass_fresh_read(self) -> None:
        """Return once everything that was stored before this call has been delivered (decision 28).

        A quorum read tells the version to reach. If the watch does not reach it within a second (versions
        are shared by all kinds, so nothing may come), a new list is made, which is a quorum read itself.
        Raises ``KubeError``.
        """
        await self.synced.wait()
        target = _number(await fresh_version(self._client, self.resource, self._selection))
        async with self._progress:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_S):
                    await self._progress.wait_for(lambda: target is not None and self._reached(target))
                    return
            started = self._lists_started
            self._relist.set()
            await self._progress.wait_for(lambda: self._newest_list_done > started)

    async def tell(self, handler: Handler[T]) -> None:
        """Tell another handler of every object there is, and from now on, beside the first, of every change.

        Returns once it knows all of them, from a list made for that; until then an object may be told of
        more than once. On an object that is new to it ``on_update`` may be called. There is one such handler
        at a time; ``tell_no_more`` ends it.
        """
        started = self._lists_started
        self._also = handler
        self._relist.set()
        async with self._progress:
            await self._progress.wait_for(lambda: self._newest_list_done > started)

    def tell_no_more(self) -> None:
        """End what ``tell`` has begun."""
        self._also = None

    def absorb(self, page: Page) -> None:
        """Take over objects that were read by the way, unless what is known is newer.

        For objects of the informer's own selection. What the watch tells later counts as always.
        """
        read, reached = _number(page.resource_version), _number(self._version)
        if read is None or (reached is not None and read <= reached):
            return
        for raw in page.items:
            if self._is_newer(raw):  # a list under way may have been read later than this page
                self._apply(raw)

    def _is_newer(self, raw: msgspec.Raw) -> bool:
        head = self._head(raw)
        if head is None:
            return False
        known = self._entries.get(_key(head.metadata))
        ours = None if known is None else _number(known.resource_version)
        theirs = _number(head.metadata.resource_version)
        return ours is None or theirs is None or theirs > ours

    def _reached(self, target: int) -> bool:
        current = _number(self._version)
        return current is not None and current >= target

    async def _list(self) -> None:
        self._relist.clear()
        self._version = ""
        self._lists_started += 1
        await self._list_all()
        self.counters.lists += 1
        self.synced.set()
        async with self._progress:
            self._newest_list_done = self._lists_started
            self._progress.notify_all()

    async def _list_all(self) -> None:
        seen: set[_Key] = set()
        version = ""
        pages = list_pages(self._client, self.resource, self._selection, page_size=self._page_size)
        async with contextlib.aclosing(read_ahead(pages)) as ahead:
            async for page in ahead:
                version = page.resource_version
                for position, raw in enumerate(page.items, 1):
                    key = self._apply(raw)
                    if key is not None:
                        seen.add(key)
                    if position % _OBJECTS_PER_STEP == 0:
                        await asyncio.sleep(0)
        for key in [key for key in self._entries if key not in seen]:
            self._remove(key)
        self._version = version

    async def _watch_until_relist(self) -> None:
        watch = asyncio.create_task(self._watch())
        relist = asyncio.create_task(self._relist.wait())
        try:
            await asyncio.wait({watch, relist}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            relist.cancel()
            watch.cancel()
            await asyncio.gather(watch, relist, return_exceptions=True)
        if not watch.cancelled():
            watch.result()

    async def _watch(self) -> None:
        seconds = self._rng.randint(*_WATCH_S)
        query = self._selection.query() | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
        }
        self.counters.watches += 1
        events = 0
        lasted = False
        async with self._client.stream(
            self.resource.path(self._selection.namespace),
            query=query,
            idle_timeout_s=seconds + _IDLE_MARGIN_S,
        ) as lines:
            started = self._clock()
            try:
                async for line in lines:
                    await self._on_line(line)
                    events += 1
                    if events % _OBJECTS_PER_STEP == 0:
                        await asyncio.sleep(0)
            finally:
                lasted = self._clock() - started > _GRACE_S
                if lasted:  # all is well; lists alone may succeed for ever before watches that are refused
                    self._backoff.reset()
        if lasted:
            return
        if events:
            await asyncio.sleep(_SHORT_WATCH_S)
        else:
            # a server that closes at once must not be asked in a tight loop
            raise TransportError(f"watch of {self.resource.plural} was closed at once")

    async def _on_line(self, line: bytes) -> None:
        try:
            event = _event_decoder.decode(line)
        except UNDECODABLE as error:
            self._version = ""  # a watch from the same version would meet the same line again
            raise TransportError(f"watch of {self.resource.plural}: not an event: {error}") from error
        self.counters.events += 1
        if event.type == "ERROR":
            raise _watch_error(event.object)
        head = self._head(event.object)
        if head is None:
            return
        if event.type in ("ADDED", "MODIFIED"):
            self._apply(event.object)
        elif event.type == "DELETED":
            self._delete(head.metadata)
        if head.metadata.resource_version:
            self._version = head.metadata.resource_version
            async with self._progress:
                self._progress.notify_all()

    def _head(self, raw: msgspec.Raw) -> _Head | None:
        try:
            return _head_decoder.decode(raw)
        except UNDECODABLE as error:
            self._refused("", str(error))
            return None

    def _apply(self, raw: msgspec.Raw) -> _Key | None:
        meta: Identity
        if self._identity is None:
            head = self._head(raw)
            if head is None:
                return None
            meta = head.metadata
            if self._also is None and self._is_known(meta):
                return _key(meta)
        try:
            value = self._parse(raw)
        except (*UNDECODABLE, HamiError) as error:
            return self._unreadable(raw, str(error))
        if self._identity is not None:
            meta = self._identity(value)
            if not meta.name and self._head(raw) is None:
                return None
        key = _key(meta)
        if self._is_known(meta):
            if self._also is not None:
                self._call(key, self._also.on_add, value)
            return key
        old = self._entries.get(key)
        if old is not None and old.uid != meta.uid:
            self._remove(key)
            old = None
        self._entries[key] = _Entry(meta.uid, meta.resource_version, self._keep(value))
        for handler in self._handlers():
            if old is None:
                self._call(key, handler.on_add, value)
            else:
                self._call(key, handler.on_update, old.value, value)
        return key

    def _is_known(self, meta: Identity) -> bool:
        known = self._entries.get((meta.namespace, meta.name))
        return known is not None and known.uid == meta.uid and known.resource_version == meta.resource_version

    def _unreadable(self, raw: msgspec.Raw, reason: str) -> _Key | None:
        """Log and count an object that cannot be parsed; its key, if it can be told."""
        head = self._head(raw)
        if head is None:
            return None
        self._refused(f"{head.metadata.namespace}/{head.metadata.name}", reason)
        return _key(head.metadata)

    def _delete(self, meta: _Meta) -> None:
        key = (meta.namespace, meta.name)
        known = self._entries.get(key)
        if known is None or (meta.uid and known.uid != meta.uid):
            return
        self._remove(key)

    def _remove(self, key: _Key) -> None:
        entry = self._entries.pop(key)
        for handler in self._handlers():
            self._call(key, handler.on_delete, entry.value)

    def _handlers(self) -> tuple[Handler[T], ...]:
        return (self._handler,) if self._also is None else (self._handler, self._also)

    def _call(self, key: _Key, callback: Callable[..., None], *values: Any) -> None:
        try:
            callback(*values)
        except Exception as error:
            self.counters.handler_errors += 1
            self._bugs.note(
                "informer.handler_error", error, kind=self.resource.kind, object="/".join(filter(None, key))
            )

    def _refused(self, name: str, reason: str) -> None:
        self.counters.undecodable += 1
        log.warning(
            "informer.undecodable", extra={"kind": self.resource.kind, "object": name, "reason": reason}
        )


def _key(meta: Identity) -> _Key:
    return intern(meta.namespace), meta.name


def _whole(value: T) -> T:
    return value


def _watch_error(raw: msgspec.Raw) -> ApiError:
    try:
        status = _status_decoder.decode(raw)
    except UNDECODABLE:
        status = Status(code=500, message="unreadable error event")
    return error_from_status(status.code or 500, status)


def _number(version: str) -> int | None:
    return int(version) if version.isascii() and version.isdigit() and len(version) <= 20 else None
