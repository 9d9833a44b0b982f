"""HTTP applications on a loopback port, ended without an open connection left."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class LoopbackServer:
    """``app`` on 127.0.0.1 from ``start`` to ``stop``, which gives requests ``grace_s`` to end."""

    def __init__(self, app: web.Application, grace_s: float, tls: ssl.SSLContext | None = None) -> None:
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=grace_s, handler_cancellation=True, handle_signals=False
        )
        self._tls = tls
        self._listener: socket.socket | None = None

    async def start(self, port: int = 0) -> int:
        """Listen; the port (``port``, or a free one for 0). Raises ``OSError`` where it is taken."""
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", port), reuse_port=True)
        await web.SockSite(self._runner, self._listener, ssl_context=self._tls).start()
        bound: int = self._listener.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """End every request and connection.

        Accepting ends first. From there asyncio's loop turns twice until a connection's protocol hears of
        it; one of a listener that was closed in between would stay open for good.
        """
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            for _ in range(3):
                await asyncio.sleep(0)
        await self._runner.cleanup()


@asynccontextmanager
async def serving(app: web.Application, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Serve ``app`` on a free port, which is given."""
    server = LoopbackServer(app, 0.5, tls)
    try:
        yield await server.start()
    finally:
        await server.stop()
