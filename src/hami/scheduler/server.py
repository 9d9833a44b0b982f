"""The HTTP edge: bare ASGI on uvicorn (scheduler.md §2.1). No logic of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hami.protocol.errors import HamiError

HEADER_TIMEOUT_S = 15.0
BODY_TIMEOUT_S = 60.0
_KEEP_ALIVE_S = 120  # longer than the 90 s of kube-scheduler, so that the client closes idle connections
_GRACE_S = 5
_JSON = ((b"content-type", b"application/json"),)
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_METRICS = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Post = Callable[[bytes], Awaitable[tuple[int, bytes]]]
Stream = Callable[[], AsyncIterator[bytes]]

log = logging.getLogger(__name__)


class ListenError(HamiError):
    """An address cannot be listened on."""


class Application:
    """Routes of one listener: POST routes take and give JSON bytes, GET routes stream text."""

    def __init__(self, posts: Mapping[str, Post], gets: Mapping[str, Stream], max_body_bytes: int) -> None:
        self._posts = posts
        self._gets = gets
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """One request, by the ASGI protocol."""
        if scope["type"] != "http":
            return
        path, method = scope["path"], scope["method"]
        if path in self._posts:
            if method != "POST":
                await _answer(send, 405, b"", _TEXT, ((b"allow", b"POST"),))
                return
            await self._post(self._posts[path], receive, send)
        elif path in self._gets:
            if method not in ("GET", "HEAD"):
                await _answer(send, 405, b"", _TEXT, ((b"allow", b"GET, HEAD"),))
                return
            await _stream(self._gets[path], send)
        else:
            await _answer(send, 404, b"404 page not found\n", _TEXT)

    async def _post(self, handler: Post, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _body(receive, self._max_body_bytes)
        except TimeoutError:
            await _answer(send, 408, b"the request took too long\n", _TEXT, ((b"connection", b"close"),))
            return
        if body is None:
            return
        status, answer = await handler(body)
        await _answer(send, status, answer, _JSON)


async def _body(receive: Receive, max_bytes: int) -> bytes | None:
    """The whole body; None when the client went away. More than ``max_bytes`` is read and cut right after
    them."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunk = message.get("body", b"")
        if size <= max_bytes:
            chunks.append(chunk)
        size += len(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    kind: tuple[tuple[bytes, bytes], ...],
    extra: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    headers = [*kind, *extra, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _stream(source: Stream, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": list(_METRICS)})
    async for chunk in source():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def empty() -> AsyncIterator[bytes]:
    """The body of `/healthz` and `/readyz`."""
    return
    yield b""


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` as Go's net package writes it (``:9395``, ``[::1]:443``); raises ``ListenError``."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ListenError(f"listen address {address!r} is not host:port")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """A listening socket; without a host on all addresses, IPv6 and IPv4. Raises ``ListenError``."""
    host, port = parse_address(address)
    try:
        if not host and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error


class _Protocol(HttpToolsProtocol):
    """Closes connections whose request head does not arrive within ``HEADER_TIMEOUT_S``."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._start_head_timer()

    def on_headers_complete(self) -> None:
        self._stop_head_timer()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        self._stop_head_timer()
        self._head_timer = self.loop.call_later(HEADER_TIMEOUT_S, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.transport is not None:
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(application: Application, sock: socket.socket, tls: ssl.SSLContext | None, name: str) -> None:
    """Serve until cancelled, then let running requests end (5 s at most)."""
    config = uvicorn.Config(
        application,
        http=_Protocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )
    config.load()
    config.ssl = tls
    server = _Server(config)
    host, port = sock.getsockname()[:2]
    log.info("server.listening", extra={"server": name, "host": host, "port": port, "tls": tls is not None})
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        await task
