"""``pods/portforward`` over WebSocket: SPDY in a tunnel, as kubectl does, and the older plain channels."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import WSMsgType, web

from hami.local.api.errors import bad_request
from hami.local.api.spdy import Data, Event, Opened, SpdyConnection, SpdyError

TUNNEL = "SPDY/3.1+portforward.k8s.io"
PROTOCOLS = (TUNNEL, "v5.channel.k8s.io", "v4.channel.k8s.io")
MAX_STREAMS = 1000
MAX_PORTS = 64
_CHUNK = 32 * 1024
_QUEUED = 64

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Connect = Callable[[int], Awaitable[Connection]]
"""Opens a connection to a port of the pod; raises OSError."""


async def serve(request: web.Request, connect: Connect, ports: Sequence[int]) -> web.WebSocketResponse:
    """Forward until the client goes. ``ports``: of the query, for clients without the tunnel."""
    offered = [item.strip() for item in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    tunnelled = TUNNEL in offered
    if not tunnelled and not 0 < len(ports) <= MAX_PORTS:
        raise bad_request(f"between 1 and {MAX_PORTS} ports are required in the query")
    socket = web.WebSocketResponse(protocols=PROTOCOLS)
    await socket.prepare(request)
    if tunnelled:
        await _Tunnel(socket, connect).run()
    else:
        await _Channels(socket, connect, ports).run()
    if not socket.closed:
        await socket.close()
    return socket


@dataclass(slots=True)
class _Pair:
    """One forwarded connection: the client's two streams, and what it has sent (None: the end)."""

    error: int | None = None
    data: int | None = None
    port: int = 0
    queue: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(_QUEUED))


class _Tunnel:
    """The streams of one tunnel: an ``error`` and a ``data`` stream per connection, tied by ``requestID``."""

    def __init__(self, socket: web.WebSocketResponse, connect: Connect) -> None:
        self._socket = socket
        self._connect = connect
        self._spdy = SpdyConnection()
        self._pairs: dict[str, _Pair] = {}
        self._by_stream: dict[int, _Pair] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        try:
            async for message in self._socket:
                if message.type is WSMsgType.BINARY:
                    for event in self._spdy.receive(message.data):
                        await self._handle(event)
                    if self._spdy.answers:
                        await self._send(bytes(self._spdy.answers))
                        self._spdy.answers.clear()
        except SpdyError:
            with contextlib.suppress(ConnectionError):
                await self._send(self._spdy.goodbye())
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _handle(self, event: Event) -> None:
        if isinstance(event, Opened):
            await self._opened(event)
            return
        if isinstance(event, Data):
            pair = self._by_stream.get(event.stream)
            if pair is not None and event.stream == pair.data:
                if event.data:
                    await pair.queue.put(event.data)
                if event.last:
                    await pair.queue.put(None)
            return
        pair = self._by_stream.pop(event.stream, None)
        if pair is not None and event.stream == pair.data:
            await pair.queue.put(None)

    async def _opened(self, event: Opened) -> None:
        kind, port = event.headers.get("streamtype"), event.headers.get("port", "")
        valid = kind in ("error", "data") and port.isdigit() and 0 < int(port) < 65536
        if not valid or len(self._by_stream) >= MAX_STREAMS:
            await self._send(self._spdy.reset(event.stream))
            return
        await self._send(self._spdy.reply(event.stream))
        request_id = event.headers.get("requestid", "")
        pair = self._pairs.setdefault(request_id, _Pair())
        self._by_stream[event.stream] = pair
        pair.port = int(port)
        if kind == "error":
            pair.error = event.stream
        else:
            pair.data = event.stream
        if pair.error is not None and pair.data is not None:
            del self._pairs[request_id]
            task = asyncio.create_task(self._forward(pair, pair.error, pair.data))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, pair: _Pair, error: int, data: int) -> None:
        text = b""
        try:
            reader, writer = await self._connect(pair.port)
        except OSError as failure:
            text = f"error forwarding port {pair.port} to pod: {failure}".encode()
            await self._send(self._spdy.data(data, b"", last=True))
        else:

            async def send(chunk: bytes, *, last: bool) -> None:
                await self._send(self._spdy.data(data, chunk, last=last))

            await _join(reader, writer, pair.queue, send)
        await self._send(self._spdy.data(error, text, last=True))
        self._by_stream.pop(error, None)
        self._by_stream.pop(data, None)

    async def _send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            await self._socket.send_bytes(data)


class _Channels:
    """Plain channels: two per port, data and error; each begins with the port as two bytes, low one first."""

    def __init__(self, socket: web.WebSocketResponse, connect: Connect, ports: Sequence[int]) -> None:
        self._socket = socket
        self._connect = connect
        self._ports = ports
        self._queues: list[asyncio.Queue[bytes | None]] = [asyncio.Queue(_QUEUED) for _ in ports]

    async def run(self) -> None:
        for index, port in enumerate(self._ports):
            for channel in (2 * index, 2 * index + 1):
                await self._socket.send_bytes(bytes([channel]) + struct.pack("<H", port))
        tasks = [asyncio.create_task(self._forward(index, port)) for index, port in enumerate(self._ports)]
        reader = asyncio.create_task(self._read())
        try:
            everything = asyncio.ensure_future(asyncio.wait(tasks))
            await asyncio.wait([everything, reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (reader, *tasks):
                task.cancel()
            await asyncio.gather(reader, *tasks, return_exceptions=True)

    async def _read(self) -> None:
        async for message in self._socket:
            if message.type is WSMsgType.BINARY and message.data:
                channel = message.data[0]
                if channel % 2 == 0 and channel // 2 < len(self._queues):
                    await self._queues[channel // 2].put(message.data[1:])

    async def _forward(self, index: int, port: int) -> None:
        try:
            reader, writer = await self._connect(port)
        except OSError as failure:
            text = f"error forwarding port {port} to pod: {failure}".encode()
            await self._send(2 * index + 1, text)
            return

        async def send(chunk: bytes, *, last: bool) -> None:
            if chunk or not last:
                await self._send(2 * index, chunk)

        await _join(reader, writer, self._queues[index], send)

    async def _send(self, channel: int, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            await self._socket.send_bytes(bytes([channel]) + data)


class _Send(Protocol):
    async def __call__(self, chunk: bytes, *, last: bool) -> None: ...


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    queue: asyncio.Queue[bytes | None],
    send: _Send,
) -> None:
    """Copy both ways until the pod's side has ended, and the client's side with it."""

    async def to_pod() -> None:
        with contextlib.suppress(ConnectionError):
            while (chunk := await queue.get()) is not None:
                writer.write(chunk)
                await writer.drain()
            if writer.can_write_eof():
                writer.write_eof()

    sender = asyncio.create_task(to_pod())
    try:
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(_CHUNK):
                await send(chunk, last=False)
        await send(b"", last=True)
    finally:
        sender.cancel()
        writer.close()
        await asyncio.gather(sender, return_exceptions=True)
