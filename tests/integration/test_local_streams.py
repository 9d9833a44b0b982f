"""exec and port-forward over WebSocket with real processes, as kubectl and the Python client speak it."""

from __future__ import annotations

import asyncio
import json
import secrets
import struct
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from local_harness import TUNNEL, Tunnel, until

from hami.local.api import spdy
from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, dig
from hami.local.api.resources import PODS
from hami.local.kubelet.containers import Isolation, probe_isolation
from hami.local.kubelet.kubelet import Kubelet, NodeConfig, NodeLogs

BASE = "/api/v1/namespaces/default/pods"
STDIN, STDOUT, STDERR, ERROR, RESIZE, CLOSE = 0, 1, 2, 3, 4, 255
FOREVER = "trap 'exit 0' TERM; while :; do sleep 0.05; done"


class Streams:
    """A kubelet on ``n1`` and WebSockets to its pods."""

    def __init__(self, api: ApiServer, session: aiohttp.ClientSession) -> None:
        self.api = api
        self.session = session

    async def run(self, name: str, *containers: str) -> None:
        """Start a pod with one shell script per container and wait until it runs."""
        body = {
            "metadata": {"name": name},
            "spec": {
                "nodeName": "n1", "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
                "containers": [
                    {"name": f"c{index}", "image": "none", "command": ["sh", "-c", script],
                     "env": [{"name": "GREETING", "value": f"hello {index}"}]}
                    for index, script in enumerate(containers)
                ],
            },
        }  # fmt: skip
        await self.api.registry.create(PODS, "default", body)
        await until(lambda: dig(self.api.store.get(PODS, "default", name), "status", "phase") == "Running")

    def open(self, path: str, *protocols: str) -> Any:
        return self.session.ws_connect(f"{self.api.url}{BASE}/{path}", protocols=protocols)

    async def exec(
        self, pod: str, *command: str, send: list[bytes] | None = None, query: str = "", protocol: str = "v5"
    ) -> tuple[bytes, bytes, Object]:
        """(stdout, stderr, final status)."""
        words = "&".join(f"command={word}" for word in command)
        path = f"{pod}/exec?{words}&stdout=true&stderr=true{query}"
        output = {STDOUT: b"", STDERR: b""}
        status: Object = {}
        async with asyncio.timeout(60.0), self.open(path, f"{protocol}.channel.k8s.io") as socket:
            assert socket.protocol == f"{protocol}.channel.k8s.io"
            for data in send or []:
                await socket.send_bytes(data)
            async for message in socket:
                channel, data = message.data[0], message.data[1:]
                if channel == ERROR:
                    status = json.loads(data)
                else:
                    output[channel] += data
        return output[STDOUT], output[STDERR], status


@pytest.fixture(params=["none", "best"])
async def streams(request: pytest.FixtureRequest, embedded_api: ApiServer) -> AsyncIterator[Streams]:
    """Without namespaces, and with the best isolation that this machine has."""
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        isolation = Isolation.NONE
        if request.param == "best":
            isolation = await probe_isolation(Path(directory) / "probe")
        kubelet = Kubelet(
            NodeConfig("n1", Path(directory) / "n1"), embedded_api.registry, time.time, isolation
        )
        embedded_api.logs = NodeLogs(lambda: [kubelet])
        async with aiohttp.ClientSession() as session:
            try:
                await kubelet.start()
                yield Streams(embedded_api, session)
            finally:
                await kubelet.stop()


# --- exec ---


@pytest.mark.parametrize("protocol", ["v5", "v4"])
async def test_a_program_runs_in_the_container(streams: Streams, protocol: str) -> None:
    await streams.run("p", FOREVER)
    script = "echo $GREETING; echo oops 1>%262; exit 3"
    out, err, status = await streams.exec("p", "sh", "-c", script, protocol=protocol)
    assert (out, err) == (b"hello 0\n", b"oops\n")
    assert status["reason"] == "NonZeroExitCode"
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "3"}]


async def test_success_is_said_so(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    assert (await streams.exec("p", "true"))[2]["status"] == "Success"


async def test_input_goes_in_until_its_end(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    send = [bytes([STDIN]) + b"some ", bytes([STDIN]) + b"input", bytes([CLOSE, STDIN])]
    assert (await streams.exec("p", "cat", send=send, query="&stdin=true"))[0] == b"some input"


async def test_much_output_arrives_whole(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    out, _, status = await streams.exec("p", "sh", "-c", "head -c 3000000 /dev/zero")
    assert (len(out), status["status"]) == (3_000_000, "Success")


async def test_a_terminal_has_the_size_that_the_client_says(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    size = bytes([RESIZE]) + json.dumps({"Width": 97, "Height": 31}).encode()
    send = [size, bytes([STDIN]) + b"\n"]
    out, err, status = await streams.exec(
        "p", "sh", "-c", "read line; tty; stty size", send=send, query="&stdin=true&tty=true"
    )
    assert b"31 97" in out
    assert b"/dev/pts/" in out
    assert (err, status["status"]) == (b"", "Success")


async def test_the_container_is_chosen_by_name(streams: Streams) -> None:
    await streams.run("p", FOREVER, FOREVER)
    assert (await streams.exec("p", "sh", "-c", "echo $GREETING", query="&container=c1"))[0] == b"hello 1\n"


async def test_a_program_that_does_not_exist_is_told(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    status = (await streams.exec("p", "no-such-program"))[2]
    assert (status["status"], status["code"]) == ("Failure", 500)
    assert "executable file not found" in status["message"]


async def test_the_program_ends_with_the_client(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    duration = str(10**8 + secrets.randbelow(10**8))
    path = f"p/exec?command=sleep&command={duration}&stdout=true"
    async with streams.open(path, "v5.channel.k8s.io"):
        await until(lambda: _processes(duration))
    await until(lambda: not _processes(duration))


async def test_the_program_ends_with_the_container(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    duration = str(10**8 + secrets.randbelow(10**8))
    path = f"p/exec?command=sleep&command={duration}&stdout=true"
    async with streams.open(path, "v5.channel.k8s.io") as socket:
        await until(lambda: _processes(duration))
        await streams.api.registry.delete(PODS, "default", "p")
        async with asyncio.timeout(60.0):
            frames = [message.data async for message in socket]
    assert json.loads(frames[-1][1:])["status"] == "Failure"
    await until(lambda: not _processes(duration))


def _processes(argument: str) -> list[str]:
    """The processes of this machine that have ``argument`` as an argument of its own."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if argument.encode() in words and b"sleep" in words[:1]:
            found.append(path.parent.name)
    return found


@pytest.mark.parametrize(
    ("path", "headers", "code", "text"),
    [
        ("p/exec?stdout=true", {}, 400, "at least 1 command"),
        ("p/exec?command=ls&container=no", {}, 400, "container no is not valid"),
        ("p/exec?command=ls", {}, 400, "only WebSocket"),
        ("p/exec?command=ls", {"Upgrade": "SPDY/3.1", "Connection": "Upgrade"}, 400, "only WebSocket"),
        (
            "p/exec?command=ls",
            {"Upgrade": "websocket", "Connection": "Upgrade"},
            400,
            "none of the protocols",
        ),
        ("gone/exec?command=ls", {}, 404, "not found"),
        ("p/portforward?ports=0", {}, 400, "between 1 and 65535"),
        ("p/portforward?ports=x", {}, 400, "between 1 and 65535"),
    ],
)
async def test_what_cannot_be_opened_is_refused_with_a_status(
    streams: Streams, path: str, headers: dict[str, str], code: int, text: str
) -> None:
    await streams.run("p", FOREVER)
    async with streams.session.get(f"{streams.api.url}{BASE}/{path}", headers=headers) as answer:
        body = await answer.json()
    assert (answer.status, body["kind"]) == (code, "Status")
    assert text in body["message"]


async def test_a_pod_without_node_or_that_has_ended_cannot_be_entered(streams: Streams) -> None:
    container = {"name": "c", "image": "none"}
    for name, spec in (("unbound", {}), ("done", {"nodeName": "n1", "restartPolicy": "Never"})):
        body = {
            "metadata": {"name": name},
            "spec": {"containers": [{**container, "command": ["true"]}], **spec},
        }
        await streams.api.registry.create(PODS, "default", body)
    await until(lambda: dig(streams.api.store.get(PODS, "default", "done"), "status", "phase") == "Succeeded")
    for name, text in (("unbound", "does not have a host"), ("done", "does not run")):
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await streams.open(f"{name}/exec?command=ls", "v5.channel.k8s.io")
        assert refused.value.status == 400, text


# --- port-forward ---


@pytest.fixture
async def echo() -> AsyncIterator[int]:
    """A TCP server that sends back upper case until its peer ends; the port."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()
        writer.write(b"<end>")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


async def test_connections_are_forwarded_through_a_tunnel(streams: Streams, echo: int) -> None:
    await streams.run("p", FOREVER)
    async with streams.open("p/portforward", TUNNEL) as socket:
        tunnel = Tunnel(socket)
        first = await tunnel.connect(echo, "0")
        second = await tunnel.connect(echo, "1")
        await tunnel.send(first[1], b"one")
        await tunnel.send(second[1], b"x" * 200_000)
        await tunnel.send(first[1], b" two", last=True)
        await tunnel.send(second[1], b"", last=True)
        await tunnel.until_ended(*first, *second)
    assert tunnel.data[first[1]] == b"ONE TWO<end>"
    assert tunnel.data[second[1]] == b"X" * 200_000 + b"<end>"
    assert (tunnel.data[first[0]], tunnel.data[second[0]]) == (b"", b"")


async def test_a_port_where_nothing_listens_is_told_on_the_error_stream(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    async with streams.open("p/portforward", TUNNEL) as socket:
        tunnel = Tunnel(socket)
        error, data = await tunnel.connect(1, "0")
        await tunnel.until_ended(error, data)
        assert b"error forwarding port 1 to pod" in tunnel.data[error]
        odd = tunnel.connection.open(9, {"streamType": "strange", "port": "1"})
        await socket.send_bytes(odd)
        await tunnel.until_ended(9)


async def test_a_peer_that_breaks_the_framing_is_sent_away(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    async with streams.open("p/portforward", TUNNEL) as socket:
        await socket.send_bytes(struct.pack(">HHI", 0x8002, 1, 0))
        async with asyncio.timeout(60.0):
            frames = [message.data async for message in socket]
    assert frames == [spdy.SpdyConnection.goodbye()]


@pytest.mark.parametrize("protocol", ["v4", "v5"])
async def test_ports_of_the_query_are_channels(streams: Streams, echo: int, protocol: str) -> None:
    await streams.run("p", FOREVER)
    port = struct.pack("<H", echo)
    async with streams.open(f"p/portforward?ports={echo}", f"{protocol}.channel.k8s.io") as socket:
        async with asyncio.timeout(60.0):
            assert [await socket.receive_bytes() for _ in range(2)] == [b"\0" + port, b"\1" + port]
            await socket.send_bytes(b"\0hello")
            assert await socket.receive_bytes() == b"\0HELLO"


async def test_a_channel_to_a_closed_port_says_so(streams: Streams) -> None:
    await streams.run("p", FOREVER)
    async with streams.open("p/portforward?ports=1", "v4.channel.k8s.io") as socket:
        async with asyncio.timeout(60.0):
            frames = [message.data async for message in socket]
    assert frames[-1].startswith(b"\1error forwarding port 1 to pod")
