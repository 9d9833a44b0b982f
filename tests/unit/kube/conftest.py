"""A small API server whose answers each test scripts."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.local.serving import serving

Responder = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as the server got it."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class FakeApi:
    """Answers with what was scripted for (method, path); a list of responders is used up one by one."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    script: dict[tuple[str, str], list[Responder] | Responder] = field(default_factory=dict)

    def on(self, method: str, path: str, *responders: Responder) -> None:
        """Use each responder once, the last one for ever."""
        self.script[(method, path)] = list(responders)

    def answer(self, method: str, path: str, *answers: Any, status: int = 200, headers: Any = None) -> None:
        """Script plain JSON answers."""
        self.on(method, path, *[self.json(answer, status, headers) for answer in answers])

    @staticmethod
    def json(answer: Any, status: int = 200, headers: Any = None) -> Responder:
        async def respond(_: web.Request) -> web.StreamResponse:
            return web.json_response(answer, status=status, headers=headers)

        return respond

    @staticmethod
    def watch(*events: Any, then: Callable[[], Awaitable[object]] | None = None) -> Responder:
        """A watch that sends the events, waits for ``then`` and ends."""

        async def respond(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "application/json"})
            await response.prepare(request)
            for event in events:
                await response.write(json.dumps(event).encode() + b"\n")
            if then is not None:
                await then()
            return response

        return respond

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append(Seen(request.method, request.path, dict(request.query), dict(request.headers), body))
        kind = "WATCH" if request.query.get("watch") == "true" else request.method
        responders = self.script.get((kind, request.path))
        if not responders:
            return web.json_response(
                {"kind": "Status", "reason": "NotFound", "message": "no route"}, status=404
            )
        if isinstance(responders, list):
            responder = responders.pop(0) if len(responders) > 1 else responders[0]
        else:
            responder = responders
        return await responder(request)

    def count(self, method: str, path: str) -> int:
        return sum(1 for seen in self.seen if (seen.method, seen.path) == (method, path))


@pytest.fixture
async def api() -> AsyncIterator[FakeApi]:
    fake = FakeApi()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{tail:.*}", fake.handle)
    async with serving(app) as port:
        fake.url = f"http://127.0.0.1:{port}"
        yield fake


@pytest.fixture
async def client(api: FakeApi) -> AsyncIterator[Client]:
    async with Client(ClientConfig(api.url), Limits(qps=0, timeout_s=10.0)) as made:
        yield made
