from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hami.kube import informer as informer_module
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.informer import Informer
from hami.kube.ratelimit import Backoff
from hami.kube.resources import PODS

Value = tuple[str, str, str]


class _Meta(msgspec.Struct):
    name: str
    uid: str = ""
    labels: dict[str, str] = {}


class _Object(msgspec.Struct):
    metadata: _Meta


_decoder = msgspec.json.Decoder(_Object)


def parse(raw: msgspec.Raw) -> Value:
    meta = _decoder.decode(raw).metadata
    return meta.name, meta.uid, meta.labels.get("v", "")


def pod(name: str, version: int, *, uid: str = "", v: str = "") -> dict[str, Any]:
    meta: dict[str, Any] = {"name": name, "namespace": "a", "uid": uid or f"u-{name}"}
    meta |= {"resourceVersion": str(version), "labels": {"v": v} if v else {}}
    return {"kind": "Pod", "metadata": meta}


def listing(version: int, *items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": str(version)}, "items": list(items)}


def event(kind: str, obj: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "object": obj}


class Log:
    """Records callbacks; raises on an object called ``boom``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._changed = asyncio.Event()

    def _note(self, text: str) -> None:
        self.calls.append(text)
        self._changed.set()

    def on_add(self, obj: Value) -> None:
        self._note(f"+{obj[0]}")
        if obj[0] == "boom":
            raise RuntimeError("a handler that fails")

    def on_update(self, old: Value, new: Value) -> None:
        self._note(f"{old[0]}:{old[2]}>{new[2]}")

    def on_delete(self, obj: Value) -> None:
        self._note(f"-{obj[0]}/{obj[1]}")

    async def until(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in self.calls:
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def running(client: Client, log: Log, **options: Any) -> AsyncIterator[Informer[Value]]:
    informer = Informer(client, PODS, parse, log, rng=random.Random(0), **options)
    task = asyncio.create_task(informer.run())
    try:
        yield informer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def forever() -> None:
    await asyncio.sleep(3600)


async def test_the_list_is_delivered_before_synced_and_the_watch_follows(api: Any, client: Client) -> None:
    api.answer("GET", "/api/v1/pods", listing(10, pod("p1", 3), pod("p2", 4)))
    api.on(
        "WATCH",
        "/api/v1/pods",
        api.watch(
            event("MODIFIED", pod("p1", 11, v="new")),
            event("DELETED", pod("p2", 12)),
            event("ADDED", pod("p3", 13)),
            then=forever,
        ),
    )
    log = Log()
    async with running(client, log) as informer:
        await asyncio.wait_for(informer.synced.wait(), 60)
        assert log.calls[:2] == ["+p1", "+p2"]
        await log.until("+p3")
        assert log.calls[2:] == ["p1:>new", "-p2/u-p2", "+p3"]
        assert informer.resource_version == "13"
        assert sorted(value[0] for value in informer.values()) == ["p1", "p3"]
        assert informer.get("p1", "a") == ("p1", "u-p1", "new")
        assert informer.get("p2", "a") is None
    watch = next(seen for seen in api.seen if seen.query.get("watch"))
    assert watch.query["resourceVersion"] == "10"
    assert watch.query["allowWatchBookmarks"] == "true"


async def test_a_broken_watch_is_resumed_at_the_last_version_seen_bookmarks_included(
    api: Any, client: Client
) -> None:
    api.answer("GET", "/api/v1/pods", listing(10))
    api.on(
        "WATCH",
        "/api/v1/pods",
        api.watch(event("ADDED", pod("p1", 11)), event("BOOKMARK", {"metadata": {"resourceVersion": "20"}})),
        api.watch(event("ADDED", pod("p2", 21)), then=forever),
    )
    log = Log()
    async with running(client, log):
        await log.until("+p2")
    assert log.calls == ["+p1", "+p2"]
    assert [s.query["resourceVersion"] for s in api.seen if s.query.get("watch")] == ["10", "20"]
    assert sum(1 for s in api.seen if not s.query.get("watch")) == 1, "no second list"


@pytest.mark.parametrize("as_event", [True, False])
async def test_410_leads_to_a_new_list_whose_differences_are_reported(
    api: Any, client: Client, as_event: bool
) -> None:
    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
    api.answer(
        "GET",
        "/api/v1/pods",
        listing(10, pod("same", 1), pod("changed", 2), pod("lost", 3), pod("reborn", 4, uid="old")),
        listing(30, pod("same", 1), pod("changed", 25, v="x"), pod("reborn", 26, uid="new"), pod("new", 27)),
    )
    first = api.watch(event("ERROR", gone)) if as_event else api.json(gone, 410)
    api.on("WATCH", "/api/v1/pods", first, api.watch(then=forever))
    log = Log()
    async with running(client, log):
        await log.until("-lost/u-lost")
    assert log.calls[:4] == ["+same", "+changed", "+lost", "+reborn"]
    assert log.calls[4:] == ["changed:>x", "-reborn/old", "+reborn", "+new", "-lost/u-lost"]


async def test_an_undecodable_object_is_skipped_and_the_value_known_before_stays(
    api: Any, client: Client
) -> None:
    bad = pod("p1", 11)
    bad["metadata"]["labels"] = "not a map"
    api.answer("GET", "/api/v1/pods", listing(10, pod("p1", 3, v="good")))
    api.on(
        "WATCH",
        "/api/v1/pods",
        api.watch(
            event("MODIFIED", bad),
            event("MODIFIED", {"metadata": 5}),
            event("ADDED", pod("p2", 12)),
            then=forever,
        ),
    )
    log = Log()
    async with running(client, log) as informer:
        await log.until("+p2")
        assert informer.get("p1", "a") == ("p1", "u-p1", "good")
        assert informer.counters.undecodable == 2


async def test_a_line_that_is_no_event_is_passed_by_a_new_list(api: Any, client: Client) -> None:
    api.on("GET", "/api/v1/pods", *(api.json(listing(version, pod("p1", version))) for version in (10, 20)))
    garbage = {"type": 5, "object": {}}
    api.on(
        "WATCH", "/api/v1/pods", api.watch(garbage), api.watch(event("ADDED", pod("p2", 21)), then=forever)
    )
    log = Log()
    async with running(client, log) as informer:
        await log.until("+p2")
        assert informer.counters.lists == 2


async def test_a_handler_that_raises_does_not_stop_the_informer(api: Any, client: Client) -> None:
    api.answer("GET", "/api/v1/pods", listing(10, pod("boom", 3), pod("p2", 4)))
    api.on("WATCH", "/api/v1/pods", api.watch(event("ADDED", pod("p3", 11)), then=forever))
    log = Log()
    async with running(client, log) as informer:
        await log.until("+p3")
        assert informer.counters.handler_errors == 1


async def test_a_failing_list_is_tried_again(api: Any, client: Client) -> None:
    api.on("GET", "/api/v1/pods", api.json({"reason": "down"}, 503), api.json(listing(10, pod("p1", 3))))
    api.on("WATCH", "/api/v1/pods", api.watch(then=forever))
    log = Log()
    async with running(client, log) as informer:
        await asyncio.wait_for(informer.synced.wait(), 60)
        assert informer.counters.failures == 1
    assert log.calls == ["+p1"]


async def test_a_list_that_expires_between_its_pages_starts_again(api: Any, client: Client) -> None:
    first = listing(10, pod("p1", 3))
    first["metadata"]["continue"] = "c"
    api.on(
        "GET",
        "/api/v1/pods",
        api.json(first),
        api.json({"reason": "Expired"}, 410),
        api.json(listing(11, pod("p1", 3), pod("p2", 4))),
    )
    api.on("WATCH", "/api/v1/pods", api.watch(then=forever))
    log = Log()
    async with running(client, log) as informer:
        await asyncio.wait_for(informer.synced.wait(), 60)
        assert len(informer) == 2
    assert log.calls == ["+p1", "+p2"]


async def test_a_fresh_read_is_passed_when_the_watch_has_reached_it(
    api: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(informer_module, "_GRACE_S", 60.0)
    gate = asyncio.Event()
    api.answer("GET", "/api/v1/pods", listing(10), listing(15))
    second = api.watch(event("ADDED", pod("p1", 15)), then=forever)
    api.on("WATCH", "/api/v1/pods", api.watch(then=gate.wait), second)
    log = Log()
    async with running(client, log) as informer:
        await asyncio.wait_for(informer.synced.wait(), 60)
        passing = asyncio.create_task(informer.pass_fresh_read())
        await asyncio.sleep(0.05)
        assert not passing.done(), "the watch has only seen version 10"
        gate.set()
        await asyncio.wait_for(passing, 60)
        assert log.calls == ["+p1"]
        assert informer.counters.lists == 1


async def test_a_fresh_read_that_the_watch_does_not_reach_makes_a_new_list(api: Any, client: Client) -> None:
    first, target = listing(10, pod("p1", 3)), listing(40, pod("p1", 3))
    api.answer("GET", "/api/v1/pods", first, target, listing(41, pod("p2", 39)))
    api.on("WATCH", "/api/v1/pods", api.watch(then=forever))
    log = Log()
    async with running(client, log) as informer:
        await asyncio.wait_for(informer.synced.wait(), 60)
        await asyncio.wait_for(informer.pass_fresh_read(), 60)
        assert log.calls == ["+p1", "+p2", "-p1/u-p1"]
        assert informer.resource_version == "41"


async def test_a_server_that_closes_watches_at_once_is_not_asked_in_a_tight_loop(
    api: Any, client: Client
) -> None:
    api.answer("GET", "/api/v1/pods", listing(10))
    api.on("WATCH", "/api/v1/pods", api.watch())
    log = Log()
    async with running(client, log) as informer:
        await asyncio.wait_for(informer.synced.wait(), 60)
        async with asyncio.timeout(60):
            while informer.counters.watches < 2:  # noqa: ASYNC110 -- under a time-out
                await asyncio.sleep(0.02)
        assert informer.counters.failures >= informer.counters.watches - 1, "each is followed by a delay"


async def test_a_connection_that_is_cut_in_the_middle_of_an_event_is_resumed(api: Any) -> None:
    async def cut(request: Any) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"type":"ADDED","object":{"meta')
        assert request.transport is not None
        request.transport.abort()
        return response

    api.answer("GET", "/api/v1/pods", listing(10))
    api.on("WATCH", "/api/v1/pods", cut, api.watch(event("ADDED", pod("p1", 11)), then=forever))
    log = Log()
    async with Client(ClientConfig(api.url), Limits(qps=0)) as client, running(client, log):
        await log.until("+p1")
    assert log.calls == ["+p1"]


GONE = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What informers ask of their back-off, which is without delays."""
    calls: list[str] = []

    class Told(Backoff):
        def next(self) -> float:
            calls.append("next")
            return 0.0

        def reset(self) -> None:
            calls.append("reset")

    monkeypatch.setattr(informer_module, "Backoff", Told)
    return calls


async def test_watches_that_expire_at_once_are_followed_by_lists_further_and_further_apart(
    api: Any, client: Client, asked: list[str]
) -> None:
    """A list of all pods each time, for ever: this would keep an API server down that is starting."""
    api.answer("GET", "/api/v1/pods", listing(10))
    api.on("WATCH", "/api/v1/pods", api.watch(event("ERROR", GONE)), api.json(GONE, 410))
    async with running(client, Log(), clock=lambda: 0.0) as informer, asyncio.timeout(60):
        while informer.counters.lists < 5:  # noqa: ASYNC110 -- under a time-out
            await asyncio.sleep(0.01)
    assert asked[:4] == ["next"] * 4


async def test_after_a_watch_that_went_on_for_a_while_the_delay_begins_anew(
    api: Any, client: Client, asked: list[str]
) -> None:
    api.answer("GET", "/api/v1/pods", listing(10))
    api.on("WATCH", "/api/v1/pods", api.watch(event("ERROR", GONE)), api.watch(then=forever))
    times = iter(range(0, 10_000, 10))
    async with running(client, Log(), clock=lambda: next(times)) as informer, asyncio.timeout(60):
        while informer.counters.lists < 2:  # noqa: ASYNC110 -- under a time-out
            await asyncio.sleep(0.01)
    assert asked[:2] == ["reset", "next"]
