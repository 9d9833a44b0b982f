"""``pods/exec`` over WebSocket: the channels of v4 and v5.channel.k8s.io."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
from aiohttp import WSMsgType, web

from hami.local.api.errors import bad_request, internal
from hami.local.api.node_services import ExecSession
from hami.local.api.objects import Object
from hami.local.api.responses import success
from hami.local.kubelet.containers import ContainerStartError

PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
_DRAIN_S = 2.0  # how long output may follow the program's end: its children can hold the pipes


def check_upgrade(request: web.Request, protocols: tuple[str, ...]) -> None:
    """Raises 400 for a request that is no WebSocket handshake with one of ``protocols``."""
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise bad_request(
            "unable to upgrade: only WebSocket is served here; kubectl 1.31 and newer use it, older ones "
            "with KUBECTL_REMOTE_COMMAND_WEBSOCKETS=true"
        )
    offered = [item.strip() for item in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]
    if not set(offered) & set(protocols):
        raise bad_request(f"unable to upgrade: none of the protocols {offered} is served: {list(protocols)}")


async def serve_exec(request: web.Request, session: ExecSession, *, tty: bool) -> web.WebSocketResponse:
    """Join a program and a WebSocket until the program ends, or the client does: then so does the program."""
    socket = web.WebSocketResponse(protocols=PROTOCOLS)
    try:
        await socket.prepare(request)
        reader = asyncio.create_task(_read(socket, session))
        pumps = [asyncio.create_task(_pump(socket, STDOUT, session.stdout()))]
        if not tty:
            pumps.append(asyncio.create_task(_pump(socket, STDERR, session.stderr())))
        try:
            ended = asyncio.create_task(_outcome(session))
            await asyncio.wait([ended, reader], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                session.kill()
            outcome = await ended
            await asyncio.wait(pumps, timeout=_DRAIN_S)
            if not socket.closed and not reader.done():
                with contextlib.suppress(ConnectionError):
                    await socket.send_bytes(bytes([ERROR]) + msgspec.json.encode(outcome))
                    await socket.close()
        finally:
            for task in (reader, *pumps):
                task.cancel()
            await asyncio.gather(reader, *pumps, return_exceptions=True)
    finally:
        session.kill()
    return socket


async def _read(socket: web.WebSocketResponse, session: ExecSession) -> None:
    """Pass on what the client sends, until it goes."""
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == STDIN:
            await session.write(data)
        elif channel == RESIZE:
            with contextlib.suppress(msgspec.DecodeError, TypeError, KeyError, AttributeError):
                size = msgspec.json.decode(data)
                session.resize(int(size["Width"]), int(size["Height"]))
        elif channel == CLOSE and data[:1] == bytes([STDIN]):
            session.close_input()


async def _pump(socket: web.WebSocketResponse, channel: int, chunks: AsyncIterator[bytes]) -> None:
    with contextlib.suppress(ConnectionError):
        async for chunk in chunks:
            await socket.send_bytes(bytes([channel]) + chunk)


async def _outcome(session: ExecSession) -> Object:
    """The ``Status`` that says how the program ended."""
    try:
        code = await session.wait()
    except ContainerStartError as error:
        return internal(f"error executing command in container: {error}").status()
    if code == 0:
        return success(None)
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }
