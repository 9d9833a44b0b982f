"""The HTTP endpoint of monitor and device plugin: ``/metrics``, ``/healthz``, ``/readyz``. Bare ASGI.

For the monitor: monitor.md §6, §10.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol

import uvicorn
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder

from hami.kube.connections import BoundedProtocol
from hami.node.errors import NodeError, SettingsError

GZIP_FROM_BYTES: Final = 1024
MAX_CONNECTIONS: Final = 64
_GRACE_S: Final = 3
_TEXT: Final = "text/plain; charset=utf-8"

log = logging.getLogger(__name__)

Send = Callable[[Any], Awaitable[None]]


class ListenError(NodeError):
    """The metrics address cannot be used."""


def listen(address: str) -> socket.socket:
    """A listening socket for ``host:port``, ``:port`` or ``[v6]:port``; port 0 takes a free one.

    Raises :class:`ListenError` when the port is taken, ``SettingsError`` for an address that cannot be read.
    """
    host, separator, port = address.rpartition(":")
    if not (separator and port.isascii() and port.isdigit() and int(port) < 65536):
        raise SettingsError(f"--metrics-bind-address {address!r} is not host:port, with a port up to 65535")
    host = host.removeprefix("[").removesuffix("]")
    family = socket.AF_INET6 if ":" in host or (not host and socket.has_dualstack_ipv6()) else socket.AF_INET
    try:
        return socket.create_server(
            (host, int(port)),
            family=family,
            dualstack_ipv6=family == socket.AF_INET6 and not host,
            backlog=64,
        )
    except (OSError, UnicodeError) as error:
        raise ListenError(f"cannot listen on {address}: {error}") from error


class Source(Protocol):
    """What is served: a monitor, a device plugin."""

    @property
    def is_alive(self) -> bool:
        """Whether the process does its work."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether what it shows can be relied on."""
        ...

    async def collect(self) -> tuple[Metric, ...]:
        """All series now."""
        ...


class Application:
    """The ASGI application on a source."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._scrape = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:  # noqa: ARG002
        """One request, by the ASGI protocol."""
        if scope["type"] != "http":
            return
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, b"method not allowed\n", _TEXT)
            return
        match scope["path"]:
            case "/metrics":
                await self._metrics(scope, send)
            case "/healthz":
                await _state(send, self._source.is_alive)
            case "/readyz":
                await _state(send, self._source.is_ready)
            case _:
                await _answer(send, 404, b"404 page not found\n", _TEXT)

    async def _metrics(self, scope: Any, send: Send) -> None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        accept = headers.get(b"accept", b"").decode("latin-1")
        async with self._scrape:
            metrics = await self._source.collect()
        encoder, content_type = choose_encoder(accept)
        body = await asyncio.to_thread(lambda: encoder(_registry(metrics)))
        extra: tuple[tuple[bytes, bytes], ...] = ((b"vary", b"accept, accept-encoding"),)
        if len(body) >= GZIP_FROM_BYTES and b"gzip" in headers.get(b"accept-encoding", b""):
            body = await asyncio.to_thread(gzip.compress, body, 5)
            extra += ((b"content-encoding", b"gzip"),)
        await _answer(send, 200, body, content_type, extra)


class _Protocol(BoundedProtocol):
    max_connections = MAX_CONNECTIONS


class MetricsServer:
    """Serves an application on a listening socket."""

    def __init__(self, application: Application, listener: socket.socket) -> None:
        config = uvicorn.Config(
            application,
            http=_Protocol,
            lifespan="off",
            access_log=False,
            log_config=None,
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = _Server(config)
        self._listener = listener

    async def run(self) -> None:
        """Serve until :meth:`stop`."""
        host, port = self._listener.getsockname()[:2]
        log.info("server.listening", extra={"server": "metrics", "host": host, "port": port})
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        """End :meth:`run` in an orderly way."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Collected:
    def __init__(self, metrics: tuple[Metric, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)


def _registry(metrics: tuple[Metric, ...]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(metrics))
    return registry


async def _state(send: Send, good: bool) -> None:
    await _answer(send, 200 if good else 503, b"ok\n" if good else b"not ready\n", _TEXT)


async def _answer(
    send: Send, status: int, body: bytes, content_type: str, extra: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
