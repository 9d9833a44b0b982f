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

from hami.kube.bugs import BugLog
from hami.kube.connections import BoundedProtocol, is_loopback
from hami.protocol.errors import HamiError

HANDSHAKE_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 60.0
BODIES_AT_ONCE = 8  # so many of the longest bodies may be held in memory together
_HELD_AT_LEAST = 16 << 20
_KEEP_ALIVE_S = 120  # longer than the 90 s of kube-scheduler, so that the client closes idle connections
_GRACE_S = 5
_JSON = ((b"content-type", b"application/json"),)
_TEXT = ((b"content-type", b"text/plain; charset=utf-8"),)
_CLOSE = ((b"connection", b"close"),)
_METRICS = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Post = Callable[[bytes], Awaitable[tuple[int, bytes]]]
Stream = Callable[[], AsyncIterator[bytes]]
Asgi = Callable[[Any, Receive, Send], Awaitable[None]]

log = logging.getLogger(__name__)


class ListenError(HamiError):
    """An address cannot be listened on."""


class Application:
    """Routes of one listener: POST routes take and give JSON bytes, GET routes stream text.

    Clients that are not on this machine (in a pod: not one of its own containers) get the POST routes
    ``remote``, where that is given.
    """

    def __init__(
        self,
        posts: Mapping[str, Post],
        gets: Mapping[str, Stream],
        max_body_bytes: int,
        remote: Mapping[str, Post] | None = None,
        bugs: BugLog | None = None,
    ) -> None:
        self._posts = posts
        self._gets = gets
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max(BODIES_AT_ONCE * max_body_bytes, _HELD_AT_LEAST)
        self._remote = posts if remote is None else remote
        self._held = {True: 0, False: 0}  # bytes of bodies in memory, of clients on this machine and others
        self._bugs = bugs or BugLog(log)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """One request, by the ASGI protocol. A bug of ours becomes a 500, or cuts off an answer that has
        begun."""
        if scope["type"] != "http":
            return
        begun = False

        async def watched(message: Any) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._answer(scope, receive, watched)
        except Exception as error:
            self._bugs.note("http.failed", error, route=scope["path"][:100])
            if not begun:
                await _answer(send, 500, f"internal error: {type(error).__name__}\n".encode(), _TEXT)

    async def _answer(self, scope: Any, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in self._posts:
            if method != "POST":
                await _answer(send, 405, b"", _TEXT, ((b"allow", b"POST"),))
                return
            local = is_loopback(scope["client"])
            posts = self._posts if local else self._remote
            if path not in posts:
                await _answer(send, 403, b"only clients on this machine may ask this\n", _TEXT, _CLOSE)
                return
            await self._post(posts[path], receive, send, local=local)
        elif path in self._gets:
            if method not in ("GET", "HEAD"):
                await _answer(send, 405, b"", _TEXT, ((b"allow", b"GET, HEAD"),))
                return
            await _stream(self._gets[path], send)
        else:
            await _answer(send, 404, b"404 page not found\n", _TEXT)

    async def _post(self, handler: Post, receive: Receive, send: Send, *, local: bool) -> None:
        body = _Body(self._max_body_bytes)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not body.complete:
                    held = body.held
                    body.take(await receive())
                    self._held[local] += body.held - held
                    if self._held[local] > self._max_held_bytes:
                        await _answer(send, 503, b"too many long requests at once\n", _TEXT, _CLOSE)
                        return
            if not body.abandoned:
                status, answer = await handler(body.joined())
                await _answer(send, status, answer, _JSON)
        except TimeoutError:
            if body.complete:
                raise
            await _answer(send, 408, b"the request took too long\n", _TEXT, _CLOSE)
        finally:
            self._held[local] -= body.held


class _Body:
    """A body as it comes in. What exceeds ``max_bytes`` is read and cut right after them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._chunks: list[bytes] = []
        self.held = 0  # bytes kept
        self.complete = False
        self.abandoned = False  # the client went away

    def take(self, message: Any) -> None:
        """The next message from the client."""
        if message["type"] == "http.disconnect":
            self.complete = self.abandoned = True
            return
        chunk = message.get("body", b"")
        if chunk and self.held <= self._max_bytes:
            self._chunks.append(chunk)
            self.held += len(chunk)
        self.complete = not message.get("more_body", False)

    def joined(self) -> bytes:
        return self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)


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
    chunks = source()
    first = await anext(chunks, b"")
    await send({"type": "http.response.start", "status": 200, "headers": list(_METRICS)})
    await send({"type": "http.response.body", "body": first, "more_body": True})
    async for chunk in chunks:
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
        raise ListenError(f"listen address {address!r} is not host:port, with a port up to 65535")
    return host.strip("[]"), int(port)


def listen(address: str) -> socket.socket:
    """A listening socket; without a host on all addresses, IPv6 and IPv4. Raises ``ListenError``."""
    host, port = parse_address(address)
    try:
        if not host and socket.has_dualstack_ipv6():
            sock = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)
        else:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.create_server((host, port), family=family, backlog=2048)
        # connections inherit it; without it, heads and bodies that leave apart wait 40 ms for each other
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: {error.strerror or error}") from error


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop. TLS handshakes that are not
    finished within ``HANDSHAKE_TIMEOUT_S`` are closed; each holds a descriptor."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        config = self.config

        def protocol() -> asyncio.Protocol:
            return BoundedProtocol(
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        limit = None if config.ssl is None else HANDSHAKE_TIMEOUT_S
        self.servers = [
            await loop.create_server(
                protocol, sock=sock, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=limit
            )
            for sock in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(application: Asgi, sock: socket.socket, tls: ssl.SSLContext | None, name: str) -> None:
    """Serve until cancelled, then let running requests end (5 s at most)."""
    config = uvicorn.Config(
        application,
        http=BoundedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
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
