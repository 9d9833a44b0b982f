"""The HTTP application: bare ASGI, GET and HEAD only. Decides who is answered; answers come from `Api`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from hami.dashboard.access import Access
from hami.dashboard.api import PREFIX, Api
from hami.dashboard.errors import StatusError
from hami.dashboard.guard import MAX_REQUEST_BYTES, Hosts, Rates
from hami.dashboard.listing import QueryError
from hami.dashboard.page import Asset, load_assets, load_shell, page
from hami.dashboard.scope import EVERYTHING, namespaces_of
from hami.kube.bugs import BugLog
from hami.protocol.errors import HamiError

ANSWER_TIMEOUT_S: Final = 60.0
SEND_TIMEOUT_S: Final = 30.0
_MAX_SEGMENTS: Final = 8
_PIECE: Final = 64 << 10
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"
_HTML: Final = "text/html; charset=utf-8"
_PROBES: Final = frozenset({"/healthz", "/readyz"})
_CONTENT_SECURITY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SECURITY: Final = (
    (b"content-security-policy", _CONTENT_SECURITY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)

Send = Callable[[Any], Awaitable[None]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    kind: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


@dataclass(slots=True)
class Dashboard:
    """The application. `alive` and `ready` are what the probes tell, `metrics` the process's own series."""

    api: Api
    access: Access
    hosts: Hosts
    rates: Rates
    clock: Callable[[], float]  # for rates: any clock that only grows
    alive: Callable[[], bool]
    ready: Callable[[], bool]
    metrics: Callable[[Mapping[int, int]], bytes]
    bugs: BugLog = field(default_factory=lambda: BugLog(log))
    answered: dict[int, int] = field(default_factory=dict)  # status -> answers
    assets: Mapping[str, Asset] = field(default_factory=load_assets)
    shell: str = field(default_factory=load_shell)

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:  # noqa: ARG002 - bodies are not read
        """One request, by the ASGI protocol."""
        if scope["type"] != "http":
            return
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await self._answer(scope)
        except TimeoutError:
            answer = _error(503, "the answer took too long; try again")
        except Exception as error:
            self.bugs.note("http.failed", error, route=scope["path"][:100])
            answer = _error(500, f"internal error: {type(error).__name__}")
        self.answered[answer.status] = self.answered.get(answer.status, 0) + 1
        await _send(send, answer, with_body=scope["method"] != "HEAD", close=_has_body(scope))

    async def _answer(self, scope: Any) -> Answer:
        refused = self._refusal(scope)
        if refused is not None:
            return refused
        try:
            return await self._route(scope)
        except StatusError as error:
            extra: tuple[tuple[bytes, bytes], ...] = ()
            if error.status == 401:
                extra = ((b"www-authenticate", b'Bearer realm="hami-dashboard"'),)
            return _error(error.status, str(error), extra)
        except QueryError as error:
            return _error(400, str(error))
        except HamiError as error:
            return _error(422, str(error))

    def _refusal(self, scope: Any) -> Answer | None:
        """Why the request is not looked at, None when it is."""
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_REQUEST_BYTES:
            return _error(431, f"the request has more than {MAX_REQUEST_BYTES} bytes")
        if scope["path"] not in _PROBES:
            address = scope["client"][0] if scope["client"] else ""
            client = f"{address} {self.access.reader(_headers(scope))}"
            if not self.rates.allow(client, self.clock()):
                return _error(429, "too many requests; slow down", ((b"retry-after", b"1"),))
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) != 1 or not self.hosts.allow(hosts[0].decode("latin-1")):
                text = "this page is not known by that name: add it with --allowed-host, or use the address"
                return _error(421, text)
        if scope["method"] not in ("GET", "HEAD"):
            return _error(405, "the dashboard is read-only: GET and HEAD only", ((b"allow", b"GET, HEAD"),))
        return None

    async def _route(self, scope: Any) -> Answer:
        path: str = scope["path"]
        if path in self.assets:
            return Answer(200, *self.assets[path])
        match path:
            case "/":
                return await self._page(_headers(scope))
            case "/healthz":
                return _state(good=self.alive())
            case "/readyz":
                return _state(good=self.ready())
            case "/metrics":
                kind = "text/plain; version=0.0.4; charset=utf-8"
                return Answer(200, self.metrics(self.answered), kind)
        segments = _segments(scope["raw_path"])
        if segments is None or not path.startswith(f"{PREFIX}/"):
            return _error(404, "there is nothing here")
        seen = await self.access.scope(_headers(scope), self._namespaces)
        return Answer(200, await self.api.answer(segments[2:], scope["query_string"], seen), _JSON)

    async def _page(self, headers: Mapping[str, str]) -> Answer:
        try:
            seen = await self.access.scope(headers, self._namespaces)
            summary = self.api.seen(seen).summary
        except StatusError:
            summary = None
        return Answer(200, page(self.shell, summary), _HTML)

    def _namespaces(self) -> frozenset[str]:
        return frozenset(namespaces_of(self.api.seen(EVERYTHING)))


def _headers(scope: Any) -> dict[str, str]:
    """Headers by lower-case name; one that is sent twice counts as not sent, nobody knows which is meant."""
    found: dict[str, str] = {}
    repeated = set()
    for raw, value in scope["headers"]:
        name = raw.decode("latin-1").lower()
        if name in found:
            repeated.add(name)
        found[name] = value.decode("latin-1")
    return {name: value for name, value in found.items() if name not in repeated}


def _segments(raw_path: bytes) -> list[str] | None:
    """The parts of a path, each decoded by itself; None for what is no path of ours."""
    parts = raw_path.partition(b"?")[0].split(b"/")[1:]
    if not 3 <= len(parts) <= _MAX_SEGMENTS:
        return None
    try:
        return [unquote(part.decode("ascii"), errors="strict") for part in parts]
    except UnicodeError:
        return None


def _has_body(scope: Any) -> bool:
    """Whether the client may be sending a body, which nobody reads: the connection is closed then."""
    for name, value in scope["headers"]:
        if name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0"):
            return True
    return False


def _state(*, good: bool) -> Answer:
    return Answer(200, b"ok\n", _TEXT) if good else Answer(503, b"not ready\n", _TEXT)


def _error(status: int, message: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
    body = msgspec.json.encode({"error": {"status": status, "message": message}})
    return Answer(status, body, _JSON, headers)


async def _send(send: Send, answer: Answer, *, with_body: bool, close: bool) -> None:
    """Raises `TimeoutError` for a client that does not take the answer: the connection is then dropped."""
    headers = [
        (b"content-type", answer.kind.encode()),
        (b"content-length", str(len(answer.body)).encode()),
        *_SECURITY,
        *answer.headers,
    ]
    if close:
        headers.append((b"connection", b"close"))
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        body = answer.body if with_body else b""
        # in pieces: each waits until the client has taken most of what was sent before
        for start in range(0, len(body), _PIECE):
            piece = body[start : start + _PIECE]
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
