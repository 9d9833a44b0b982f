"""Objects that were read beside the watch become part of what the informer knows, if they are newer."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from hami.kube.client import Client
from hami.kube.informer import Informer
from hami.kube.operations import Page
from hami.kube.resources import PODS


class Log:
    """Names in the order of the callbacks."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_add(self, name: str) -> None:
        self.calls.append(f"+{name}")

    def on_update(self, _old: str, name: str) -> None:
        self.calls.append(f"~{name}")

    def on_delete(self, name: str) -> None:
        self.calls.append(f"-{name}")


class _Name(msgspec.Struct):
    name: str


class _Named(msgspec.Struct):
    metadata: _Name


def parse(raw: msgspec.Raw) -> str:
    return msgspec.json.decode(raw, type=_Named).metadata.name


def pod(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "a", "uid": f"u-{name}", "resourceVersion": str(version)}}


def page(version: str, *pods: dict[str, Any]) -> Page:
    return Page([msgspec.Raw(msgspec.json.encode(one)) for one in pods], version)


async def run_with(api: Any, client: Client, *pages: Page) -> tuple[list[str], Informer[str]]:
    """An informer at version 10 that knows pod ``old``, after absorbing ``pages`` and one more list."""
    lists = [
        {"metadata": {"resourceVersion": "10"}, "items": [pod("old", 5)]},
        {"metadata": {"resourceVersion": "30"}, "items": [pod("old", 5)]},
    ]
    api.answer("GET", "/api/v1/pods", *lists)
    api.on("WATCH", "/api/v1/pods", api.watch(then=asyncio.Event().wait))
    log = Log()
    informer = Informer(client, PODS, parse, log)
    running = asyncio.create_task(informer.run())
    try:
        async with asyncio.timeout(60):
            await informer.synced.wait()
            for one in pages:
                informer.absorb(one)
            informer._relist.set()
            while informer.resource_version != "30":  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    return log.calls, informer


async def test_a_newer_read_adds_what_the_watch_has_not_shown_and_a_list_takes_it_away_again(
    api: Any, client: Client
) -> None:
    calls, informer = await run_with(api, client, page("20", pod("new", 15), pod("old", 5)))
    assert calls == ["+old", "+new", "-new"]
    assert informer.get("new", "a") is None


async def test_a_read_that_the_watch_is_past_changes_nothing(api: Any, client: Client) -> None:
    calls, _ = await run_with(api, client, page("10", pod("ghost", 9)), page("9", pod("ghost", 9)))
    assert calls == ["+old"]


async def test_a_read_of_a_version_that_cannot_be_compared_changes_nothing(api: Any, client: Client) -> None:
    calls, _ = await run_with(api, client, page("opaque", pod("ghost", 9)), page("", pod("ghost", 9)))
    assert calls == ["+old"]


async def test_a_read_behind_a_list_under_way_takes_nothing_back(api: Any, client: Client) -> None:
    """The watch begins where the list ends: it would never tell of the newer object again."""
    go = asyncio.Event()
    first = {"metadata": {"resourceVersion": "30", "continue": "t"}, "items": [pod("old", 25)]}

    async def last(_: web.Request) -> web.StreamResponse:
        await go.wait()
        return web.json_response({"metadata": {"resourceVersion": "30"}, "items": []})

    api.on("GET", "/api/v1/pods", api.json(first), last)
    api.on("WATCH", "/api/v1/pods", api.watch(then=asyncio.Event().wait))
    log = Log()
    informer = Informer(client, PODS, parse, log)
    running = asyncio.create_task(informer.run())
    async with asyncio.timeout(60):
        while not log.calls:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        informer.absorb(page("20", pod("old", 15)))
        go.set()
        await informer.synced.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert log.calls == ["+old"]
