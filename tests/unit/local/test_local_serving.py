"""hami.local.serving: what is open when an HTTP application ends."""

from __future__ import annotations

import asyncio
import socket

import pytest
from aiohttp import web

from hami.local.serving import serving


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_of_the_last_moment_is_closed(turns: int) -> None:
    """After two turns it is accepted, and its protocol has not heard of it yet."""
    async with serving(web.Application()) as port:
        client = socket.create_connection(("127.0.0.1", port))
        for _ in range(turns):
            await asyncio.sleep(0)
    with client:
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            assert await asyncio.wait_for(loop.sock_recv(client, 1), 30) == b""
        except ConnectionResetError:
            pass
