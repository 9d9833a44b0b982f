"""Limits of the HTTP edge: long heads, many bodies at once, and who may ask what."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from hami.cli import scheduler as cli
from hami.kube import connections
from hami.kube.certificates import create_authority, issue
from hami.kube.connections import is_loopback
from hami.scheduler.edge import server
from hami.scheduler.edge.routes import scheduler_routes
from hami.scheduler.edge.server import Application, empty, listen, serve


async def echo(body: bytes) -> tuple[int, bytes]:
    return 200, json.dumps({"bytes": len(body)}).encode()


@asynccontextmanager
async def connected(
    max_body_bytes: int = 1000,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    application = Application({"/echo": echo}, {"/healthz": empty}, max_body_bytes)
    with listen("127.0.0.1:0") as sock:
        task = asyncio.create_task(serve(application, sock, None, "test"))
        reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
        try:
            yield reader, writer
        finally:
            writer.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def answer_to(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the server closes the connection, whichever way."""
    received = b""
    async with asyncio.timeout(60):
        try:
            while chunk := await reader.read(1 << 16):
                received += chunk
        except ConnectionError:
            pass
    return received


LONG = b"x" * (4 * connections.MAX_HEAD_BYTES)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /echo HTTP/1.1\r\nHost: x\r\nX-Long: " + LONG,
        b"POST /" + LONG,
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"A: bbbbbbbb\r\n" * (len(LONG) // 13),
    ],
)
async def test_an_endless_head_is_refused(head: bytes) -> None:
    async with connected() as (reader, writer):
        for start in range(0, len(head), 4096):
            writer.write(head[start : start + 4096])
            await asyncio.sleep(0)
        received = await answer_to(reader)
        assert b"200 OK" not in received
        assert received == b"" or received.startswith(b"HTTP/1.1 431 ")


async def open_connections(port: int, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connections that have had one answer each and are idle."""
    opened = []
    for _ in range(count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"0\r\n\r\n")
        opened.append((reader, writer))
    return opened


@pytest.mark.parametrize("local", [False, True])
async def test_idle_connections_of_other_hosts_make_room(
    monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    monkeypatch.setattr(connections.BoundedProtocol, "max_connections", 3)
    monkeypatch.setattr(connections, "is_loopback", lambda _client: local)
    with listen("127.0.0.1:0") as sock:
        task = asyncio.create_task(serve(Application({}, {"/healthz": empty}, 0), sock, None, "test"))
        opened = await open_connections(sock.getsockname()[1], 5)
        for _, writer in opened:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = [await answer_to(reader) for reader, _ in opened]
        assert sum(b"200 OK" in answer for answer in answers) == (5 if local else 3)
        for _, writer in opened:
            writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_connections_that_ask_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.BoundedProtocol, "max_connections", 3)
    monkeypatch.setattr(connections, "is_loopback", lambda _client: False)
    with listen("127.0.0.1:0") as sock:
        port = sock.getsockname()[1]
        task = asyncio.create_task(serve(Application({}, {"/healthz": empty}, 0), sock, None, "test"))
        (asked,) = await open_connections(port, 1)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        late = await open_connections(port, 1)
        for _, writer in (asked, *late):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        for reader, _ in (asked, *late):
            assert b"200 OK" in await answer_to(reader), "who asks is not closed for who does not"
        for _, writer in (asked, *silent, *late):
            writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_endless_trailers_end_the_connection() -> None:
    async with connected() as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n")
        for _ in range(100):
            writer.write(b"T: " + b"x" * 4096 + b"\r\n")
            await asyncio.sleep(0)
        assert b"200 OK" not in await answer_to(reader)


async def test_a_long_body_in_small_chunks_is_read() -> None:
    async with connected(1 << 20) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(400):
            writer.write(b"1\r\nx\r\n" * 100)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(b'{"bytes": 40000}')) == b'{"bytes": 40000}'


async def test_requests_one_after_the_other_never_add_up_to_a_long_head() -> None:
    async with connected() as (reader, writer):
        request = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n" + b"x" * 900
        for _ in range(200):
            writer.write(request)
            await reader.readuntil(b'{"bytes": 900}')


async def test_more_bodies_at_once_than_memory_is_set_aside_for_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_HELD_AT_LEAST", 0)
    application = Application({"/echo": echo}, {}, 1000)
    hold = asyncio.Event()

    async def ask(client: str) -> int:
        scope = {"type": "http", "path": "/echo", "method": "POST", "client": (client, 1)}
        messages = [{"type": "http.request", "body": b"x" * 1000, "more_body": True}]
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await hold.wait()
            return {"type": "http.request", "body": b""}

        async def send(message: dict[str, Any]) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        await application(scope, receive, send)
        return statuses[0]

    waiting = [asyncio.create_task(ask("10.0.0.7")) for _ in range(server.BODIES_AT_ONCE)]
    await asyncio.sleep(0)
    assert await ask("10.0.0.8") == 503
    waiting += [asyncio.create_task(ask("127.0.0.1")) for _ in range(server.BODIES_AT_ONCE)]
    await asyncio.sleep(0)
    assert await ask("127.0.0.1") == 503, "what others hold is not taken from kube-scheduler's"
    hold.set()
    assert await asyncio.gather(*waiting) == [200] * 2 * server.BODIES_AT_ONCE
    assert await ask("10.0.0.7") == 200


@pytest.mark.parametrize(
    ("client", "local"),
    [
        (("127.0.0.1", 1), True),
        (("127.8.9.1", 1), True),
        (("::1", 1), True),
        (("::ffff:127.0.0.1", 1), True),
        (("10.0.0.7", 1), False),
        (("::ffff:10.0.0.7", 1), False),
        (("fd00::1", 1), False),
        (("", 0), False),
        (None, False),
    ],
)
def test_which_clients_are_on_this_machine(client: tuple[str, int] | None, local: bool) -> None:
    assert is_loopback(client) is local


@pytest.mark.parametrize(
    ("client", "remote_extender", "expected"),
    [
        ("127.0.0.1", False, {"/filter": "filter", "/bind": "bind", "/simulate": "simulate"}),
        ("10.0.0.7", False, {"/filter": "simulate", "/bind": 403, "/simulate": "simulate"}),
        ("10.0.0.7", True, {"/filter": "filter", "/bind": "bind", "/simulate": "simulate"}),
    ],
)
async def test_other_hosts_get_dry_runs_and_reviews_only(
    client: str, remote_extender: bool, expected: dict[str, str | int]
) -> None:
    def verb(name: str) -> Any:
        async def handle(_body: bytes) -> bytes:
            return name.encode()

        return handle

    verbs: Any = SimpleNamespace(**{name: verb(name) for name in ("filter", "bind", "simulate")})
    application = scheduler_routes(verbs, None, {}, 1000, remote_extender=remote_extender)  # type: ignore[arg-type]

    async def ask(path: str) -> str | int:
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await application(
            {"type": "http", "path": path, "method": "POST", "client": (client, 1)}, receive, send
        )
        status: int = sent[0]["status"]
        return sent[1]["body"].decode() if status == 200 else status

    assert {path: await ask(path) for path in expected} == expected
    assert await ask("/webhook") == 400


@pytest.mark.parametrize(("flags", "remote"), [([], False), (["--remote-extender"], True)])
def test_other_hosts_may_bind_only_when_the_flag_says_so(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], remote: bool
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(cli, "_run", lambda given: seen.append(cli._settings(given, {}).remote_extender))
    result = CliRunner().invoke(cli.command, ["--device-config-file", "x", *flags], catch_exceptions=False)
    assert (result.exit_code, seen) == (0, [remote])


async def test_a_tls_handshake_that_does_not_end_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.2)
    now = time.time()
    pair = issue(create_authority("test", now), "test", now, hosts=["127.0.0.1"])
    (tmp_path / "crt").write_bytes(pair.certificate_pem)
    (tmp_path / "key").write_bytes(pair.key_pem)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    application = Application({"/echo": echo}, {"/healthz": empty}, 1000)
    with listen("127.0.0.1:0") as sock:
        task = asyncio.create_task(serve(application, sock, tls, "test"))
        reader, writer = await asyncio.open_connection(*sock.getsockname()[:2])
        writer.write(b"\x16\x03\x01")  # the first bytes of a handshake
        assert await answer_to(reader) == b""
        writer.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
