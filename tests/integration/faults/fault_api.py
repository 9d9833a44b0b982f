"""Faults between the API server and one client: traps on single requests, storms over all of them.

Clients are told apart by their User-Agent; a device plugin also by its node. The embedded kubelet and
scheduler loop do not use HTTP and are never disturbed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from aiohttp import web

from hami.local.api.apiserver import ApiServer
from hami.local.api.errors import ApiError
from hami.local.api.objects import dig
from hami.local.api.resources import PODS

READ, WRITE, WATCH = "read", "write", "watch"


@dataclass(slots=True)
class Trap:
    """Fires once, at the ``skip``-th further request of ``actor`` and ``kind``.

    ``landed``: the request takes effect, only its answer is lost; otherwise it is lost itself.
    """

    actor: str
    kind: str
    skip: int
    landed: bool
    fire: Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Storm:
    """What happens to each request of ``actors``: the odds of each fault (the rest passes)."""

    actors: frozenset[str]
    odds: Mapping[str, float] = field(
        default_factory=lambda: {
            "429": 0.15, "500": 0.1, "503": 0.05, "slow": 0.1, "lost": 0.1, "landed": 0.1, "garbage": 0.05,
        }
    )  # fmt: skip
    slow_s: float = 0.5


class ApiFaults:
    """The interceptor of an API server; ``quiet()`` ends storm and traps."""

    def __init__(self, api: ApiServer, rng: random.Random) -> None:
        self.storm: Storm | None = None
        self.counts: dict[str, int] = {}
        self._api = api
        self._rng = rng
        self._traps: list[Trap] = []
        self._watches: set[asyncio.Transport] = set()
        api.intercept = self

    def arm(self, trap: Trap) -> None:
        self._traps.append(trap)

    def quiet(self) -> None:
        """No further faults."""
        self._traps.clear()
        self.storm = None

    def cut_watches(self) -> None:
        """Break the connections of all watches, in the middle of whatever is being sent."""
        for transport in list(self._watches):
            transport.abort()
        self._watches.clear()

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        actor, kind = self._actor(request), _kind(request)
        if kind == WATCH and request.transport is not None:
            self._watches = {one for one in self._watches if not one.is_closing()}
            self._watches.add(request.transport)
        for trap in self._traps:
            if trap.actor == actor and trap.kind == kind:
                trap.skip -= 1
                if trap.skip < 0:
                    self._traps.remove(trap)
                    return await self._spring(trap, request)
                break
        if self.storm is not None and actor in self.storm.actors:
            return await self._storm(self.storm, request, kind)
        return None

    async def _spring(self, trap: Trap, request: web.Request) -> web.StreamResponse:
        if trap.landed and trap.kind != WATCH:
            await self._let_it_land(request)
        await trap.fire()
        return _abort(request)

    async def _storm(self, storm: Storm, request: web.Request, kind: str) -> web.StreamResponse | None:
        names, odds = list(storm.odds), list(storm.odds.values())
        name = self._rng.choices([*names, ""], [*odds, max(0.0, 1.0 - sum(odds))])[0]
        if not name:
            return None
        self.counts[name] = self.counts.get(name, 0) + 1
        match name:
            case "429":
                return _status(429, {"Retry-After": "1"})
            case "500" | "503":
                return _status(int(name), {})
            case "slow":
                await asyncio.sleep(self._rng.random() * storm.slow_s)
                return None
            case "garbage":
                if kind == WRITE:
                    await self._let_it_land(request)
                return web.Response(body=b'{"kind": "Pod", "metad', content_type="application/json")
            case "landed" if kind == WRITE:
                await self._let_it_land(request)
        return _abort(request)

    async def _let_it_land(self, request: web.Request) -> None:
        try:
            await self._api._route(request)
        except ApiError:
            return  # refused: nobody will hear of that either

    def _actor(self, request: web.Request) -> str:
        """``scheduler``, ``<node>-plugin``, ``<node>-monitor``; otherwise the User-Agent."""
        agent = request.headers.get("User-Agent", "")
        if agent == "hami-scheduler":
            return "scheduler"
        for word, role in (("device-plugin", "plugin"), ("monitor", "monitor")):
            if word in agent:
                return f"{self._node(request)}-{role}"
        return agent

    def _node(self, request: web.Request) -> str:
        parts = request.path.strip("/").split("/")
        if "nodes" in parts[:-1]:
            return parts[parts.index("nodes") + 1]
        selector = unquote(request.query.get("fieldSelector", ""))
        if "spec.nodeName=" in selector:
            return selector.partition("spec.nodeName=")[2]
        if "pods" in parts[:-1]:
            pod = self._api.store.find(PODS, parts[parts.index("namespaces") + 1], parts[-1])
            return str(dig(pod or {}, "spec", "nodeName"))
        return ""


def _kind(request: web.Request) -> str:
    if request.method != "GET":
        return WRITE
    return WATCH if request.query.get("watch") in ("1", "true") else READ


def _status(code: int, headers: Mapping[str, str]) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": "Storm", "message": "the test makes a storm"}
    return web.json_response(body, status=code, headers=dict(headers))


def _abort(request: web.Request) -> web.Response:
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
