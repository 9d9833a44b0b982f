"""The HTTP edge by itself: slow clients, bugs of ours, an orderly end (scheduler.md §2.1)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from hami.kube import connections
from hami.kube.bugs import BugLog
from hami.protocol.extender import encode_binding_result
from hami.scheduler.edge import server
from hami.scheduler.edge.metrics import Metrics
from hami.scheduler.edge.routes import verb
from hami.scheduler.edge.server import Application, empty, listen, serve
from hami.scheduler.edge.timing import Timings

log = logging.getLogger("test")


@asynccontextmanager
async def serving(**posts: Any) -> AsyncIterator[tuple[str, int, asyncio.Task[None]]]:
    routes = {f"/{name}": handler for name, handler in posts.items()}
    application = Application(routes, {"/healthz": empty}, 1000)
    with listen("127.0.0.1:0") as sock:
        task = asyncio.create_task(serve(application, sock, None, "test"))
        try:
            yield "127.0.0.1", sock.getsockname()[1], task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def echo(body: bytes) -> tuple[int, bytes]:
    return 200, json.dumps({"bytes": len(body)}).encode()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(60):
        return await reader.read()


async def test_a_client_that_does_not_finish_its_head_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.1)
    async with serving(echo=echo) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert await read_all(reader) == b""
        writer.close()


async def test_an_idle_connection_after_an_answer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1.0)
    async with serving(echo=echo) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        request = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"
        for idle_s in (1.2, 0.0):
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"200 OK" in head
            assert await reader.readexactly(len(b'{"bytes": 2}')) == b'{"bytes": 2}'
            await asyncio.sleep(idle_s)
        writer.close()


async def test_a_body_that_does_not_come_is_answered_with_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.1)
    async with serving(echo=echo) as (host, port, _):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        assert b"408" in await reader.readuntil(b"\r\n\r\n")
        writer.close()


async def test_no_more_than_the_limit_is_kept_of_a_long_body() -> None:
    async with (
        serving(echo=echo) as (host, port, _),
        aiohttp.ClientSession() as session,
        session.post(f"http://{host}:{port}/echo", data=b"x" * 1_000_000) as response,
    ):
        kept = (await response.json())["bytes"]
    assert 1000 < kept < 1_000_000, "the handler sees that it is too long, memory is not filled"


async def test_a_bug_in_a_verb_is_an_error_that_kube_scheduler_can_read() -> None:
    async def broken(_: bytes) -> bytes:
        raise KeyError("secret detail")

    async with (
        serving(bind=verb("/bind", broken, encode_binding_result, BugLog(log))) as (host, port, _),
        aiohttp.ClientSession() as session,
        session.post(f"http://{host}:{port}/bind", data=b"{}") as response,
    ):
        assert response.status == 200
        assert await response.json() == {"Error": "internal error: KeyError"}


async def test_a_running_request_is_answered_before_the_server_ends() -> None:
    release = asyncio.Event()
    entered = asyncio.Event()

    async def slow(_: bytes) -> tuple[int, bytes]:
        entered.set()
        await release.wait()
        return 200, b"{}"

    async with serving(slow=slow) as (host, port, task), aiohttp.ClientSession() as session:
        posting = asyncio.create_task(session.post(f"http://{host}:{port}/slow", data=b"x"))
        await entered.wait()
        task.cancel()
        await asyncio.sleep(0.05)
        release.set()
        response = await posting
        assert response.status == 200
        response.release()


async def test_while_metrics_are_made_other_work_goes_on(lab: Any) -> None:
    for number in range(200):
        lab.node(f"n{number}", *(lab.card(f"n{number}-{card}") for card in range(8)))
        lab.holder(f"h{number}", f"n{number}", f"n{number}-0,NVIDIA,2000,30:;")
    turns = 0
    done = False

    async def other() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    made = [(turns, chunk) async for chunk in Metrics(lab.state, Timings(), legacy=False).chunks()]
    done = True
    await task
    chunks = [chunk for _, chunk in made]
    assert len(chunks) > 10
    assert turns > 25, "the loop served others while the text was made"
    assert len({turn for turn, _ in made}) == len(made), "and between any two chunks"
    text = b"".join(chunks).decode()
    assert text.count("hami_gpu_shared_count{") == 1600
    assert text.count("hami_vgpu_memory_allocated_bytes{") == 200
