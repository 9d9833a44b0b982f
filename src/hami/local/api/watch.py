"""Watch streams: one JSON object per line, from a revision on, with bookmarks and 410."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from hami.local.api import tables
from hami.local.api.errors import ApiError, bad_request, invalid
from hami.local.api.objects import Object, meta
from hami.local.api.resources import Resource
from hami.local.api.selectors import Predicate
from hami.local.api.store import Event, Store

_DEFAULT_TIMEOUT_S = (1800.0, 3600.0)
_BATCH_BYTES = 256 * 1024


class Watches:
    """All watch streams of one server."""

    def __init__(self, store: Store, clock: Callable[[], float], bookmark_interval_s: float) -> None:
        self._store = store
        self._clock = clock
        self._bookmark_interval_s = bookmark_interval_s
        self._wake: dict[object, tuple[str, asyncio.Event]] = {}
        self._ended: set[object] = set()
        self._closed = False
        store.subscribe(self._changed)

    def open(self) -> None:
        self._closed = False

    def close(self) -> None:
        """End all streams and refuse new ones."""
        self._closed = True
        self.drop()

    def drop(self) -> None:
        """End all streams that are open now."""
        self._ended.update(self._wake)
        for _, event in self._wake.values():
            event.set()

    def _changed(self, key: str, _event: Event) -> None:
        for watched, wake in self._wake.values():
            if watched == key:
                wake.set()

    async def stream(
        self,
        request: web.Request,
        resource: Resource,
        namespace: str | None,
        matches: Predicate | None,
        view: tuple[str, str],
    ) -> web.StreamResponse:
        """Serve one watch until its time-out, the client or the server ends it."""
        if "sendInitialEvents" in request.query:
            raise invalid(
                "ListOptions", "meta.k8s.io", "",
                [("sendInitialEvents", "Forbidden: sendInitialEvents is forbidden for watch unless the "
                                       "WatchList feature gate is enabled")],
            )  # fmt: skip
        revision = _revision(request)
        timeout = _timeout(request)
        bookmarks = request.query.get("allowWatchBookmarks", "") in ("1", "true")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        writer = _Writer(response, resource, view, self._clock)
        key = object()
        wake = asyncio.Event()
        self._wake[key] = (resource.storage_key, wake)
        try:
            await self._run(key, wake, writer, resource, namespace, matches, revision, timeout, bookmarks)
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client has gone; there is nobody to tell
        finally:
            del self._wake[key]
            self._ended.discard(key)
        return response

    async def _run(
        self,
        key: object,
        wake: asyncio.Event,
        writer: _Writer,
        resource: Resource,
        namespace: str | None,
        matches: Predicate | None,
        revision: int | None,
        lifetime_s: float,
        bookmarks: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + lifetime_s
        next_bookmark = loop.time() + self._bookmark_interval_s
        if revision is None:
            revision = self._store.revision
            for obj in self._store.list(resource, namespace):
                if matches is None or matches(obj):
                    await writer.send("ADDED", obj)
            await writer.flush()
        while not self._closed and key not in self._ended:
            wake.clear()
            try:
                events = list(self._store.events_since(resource, revision))
            except ApiError as error:
                await writer.raw({"type": "ERROR", "object": error.status()})
                break
            for event in events:
                revision = event.revision
                if namespace is not None and (meta(event.obj).get("namespace") or "") != namespace:
                    continue
                shown = _as_seen(event, matches)
                if shown is not None:
                    await writer.send(shown, event.obj)
            await writer.flush()
            now = loop.time()
            if now >= deadline:
                if bookmarks:
                    await writer.bookmark(max(revision, self._store.revision if not wake.is_set() else 0))
                break
            if bookmarks and now >= next_bookmark:
                next_bookmark = now + self._bookmark_interval_s
                if not wake.is_set():
                    revision = max(revision, self._store.revision)
                await writer.bookmark(revision)
            pause = min(deadline, next_bookmark if bookmarks else deadline) - now
            try:
                async with asyncio.timeout(max(pause, 0.001)):
                    await wake.wait()
            except TimeoutError:
                continue
        await writer.end()


class _Writer:
    """Encodes and sends, in the view that the client asked for."""

    def __init__(
        self,
        response: web.StreamResponse,
        resource: Resource,
        view: tuple[str, str],
        clock: Callable[[], float],
    ) -> None:
        self._response = response
        self._resource = resource
        self._view = view
        self._clock = clock
        self._pending = bytearray()

    async def send(self, change: str, obj: Object) -> None:
        kind, include = self._view
        shown: Object = obj
        if kind == "Table":
            metadata = {"resourceVersion": meta(obj).get("resourceVersion", "")}
            shown = tables.table(self._resource, [obj], self._clock(), include=include, metadata=metadata)
        elif kind == "Metadata":
            shown = tables.partial(obj)
        await self.raw({"type": change, "object": shown}, flush=False)

    async def bookmark(self, revision: int) -> None:
        obj: Object = {
            "kind": self._resource.kind,
            "apiVersion": self._resource.api_version,
            "metadata": {"resourceVersion": str(revision), "creationTimestamp": None},
        }
        await self.raw({"type": "BOOKMARK", "object": obj})

    async def raw(self, event: Any, *, flush: bool = True) -> None:
        self._pending += msgspec.json.encode(event) + b"\n"
        if flush or len(self._pending) >= _BATCH_BYTES:
            await self.flush()

    async def flush(self) -> None:
        if self._pending:
            data = bytes(self._pending)
            self._pending.clear()
            await self._response.write(data)

    async def end(self) -> None:
        await self.flush()
        await self._response.write_eof()


def _as_seen(event: Event, matches: Predicate | None) -> str | None:
    """The change as a watch with a selector sees it; None where it sees nothing."""
    if matches is None:
        return event.change
    was = event.previous is not None and matches(event.previous)
    if event.change == "DELETED":
        return "DELETED" if was else None
    is_now = matches(event.obj)
    if is_now:
        return "MODIFIED" if was else "ADDED"
    return "DELETED" if was else None


def _revision(request: web.Request) -> int | None:
    """Where to start; None means with the present state."""
    text = request.query.get("resourceVersion", "")
    if text in ("", "0"):
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise bad_request(f"Invalid value: {text!r}: resourceVersion is not a number")
    return int(text)


def _timeout(request: web.Request) -> float:
    text = request.query.get("timeoutSeconds", "")
    if not text or text == "0":
        return random.uniform(*_DEFAULT_TIMEOUT_S)  # noqa: S311 - jitter, not a secret
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise bad_request(f"Invalid value: timeoutSeconds={text!r} is not a number")
    return float(text)
