"""The HTTP side of the monitor and its command line (monitor.md §13)."""

from __future__ import annotations

import asyncio
import gzip
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from monitor_world import GIB, Bench, pod, region_bytes
from node_cards import U1, U2
from prometheus_client.parser import text_string_to_metric_families

from hami.cli.monitor import command, resync_seconds
from hami.kube import connections
from hami.node.errors import SettingsError
from hami.node.metrics_server import MAX_CONNECTIONS, Application, ListenError, MetricsServer, listen
from hami.node.monitor.service import Monitor


@pytest.fixture
def bench(tmp_path: Path, make_nvml: Callable[..., Any]) -> Bench:
    return Bench(tmp_path, make_nvml([(U1, "A100", 40 * GIB), (U2, "A100", 40 * GIB)]))


class Served:
    """The HTTP server of a bench on a free port."""

    def __init__(self, monitor: Monitor) -> None:
        self.listener = listen("127.0.0.1:0")
        self.server = MetricsServer(Application(monitor), self.listener)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    async def __aenter__(self) -> Served:
        self.task = asyncio.create_task(self.server.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.stop()
        await self.task

    async def get(self, path: str, method: str = "GET", **headers: str) -> tuple[int, bytes, Any]:
        def fetch() -> tuple[int, bytes, Any]:
            request = urllib.request.Request(self.url + path, headers=headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return answer.status, answer.read(), answer.headers
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read(), error.headers

        return await asyncio.to_thread(fetch)


async def test_49_the_scrape_is_prometheus_text_in_one_zone(bench: Bench) -> None:
    bench.pods.add(pod("uid-a", "web"))
    bench.directory("uid-a_web", region_bytes(used=7))
    async with Served(bench.monitor) as served:
        status, body, headers = await served.get("/metrics")
        packed = (await served.get("/metrics", **{"Accept-Encoding": "gzip"}))[1]
        openmetrics = await served.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(body.decode()))
    for family in families:
        for sample in family.samples:
            assert (sample.labels.get("zone") == "vGPU") != (family.name == "hami_build_info")
            assert family.type == ("counter" if sample.name.endswith("_total") else "gauge")
    assert b"hami_vgpu_memory_used_bytes" in gzip.decompress(packed)
    assert openmetrics[1].rstrip().endswith(b"# EOF")


async def test_health_and_readiness(bench: Bench) -> None:
    bench.pods.synced = False
    async with Served(bench.monitor) as served:
        assert (await served.get("/healthz"))[0] == 200
        assert (await served.get("/readyz"))[0] == 503
        bench.pods.synced = True
        assert (await served.get("/readyz"))[0] == 200
        bench.now += 61
        assert (await served.get("/healthz"))[0] == 503
        assert (await served.get("/other"))[0] == 404
        assert (await served.get("/metrics", method="POST"))[0] == 405


async def test_connections_that_ask_nothing_keep_nobody_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "is_loopback", lambda _client: False)
    async with Served(bench.monitor) as served:
        where = served.listener.getsockname()
        silent = [await asyncio.open_connection(*where) for _ in range(MAX_CONNECTIONS + 5)]
        assert (await served.get("/healthz"))[0] == 200
        async with asyncio.timeout(60):
            for reader, _ in silent[:5]:
                assert await closed(reader)
        for _, writer in silent:
            writer.close()


async def test_a_client_that_does_not_finish_its_head_is_disconnected(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 0.1)
    async with Served(bench.monitor) as served, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*served.listener.getsockname())
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        assert await closed(reader)
        writer.close()


async def closed(reader: asyncio.StreamReader) -> bool:
    """Wait for the end of a connection, whichever way it comes."""
    try:
        return await reader.read() == b""
    except ConnectionError:
        return True


def test_a_taken_port_and_a_bad_address_are_errors() -> None:
    with listen("127.0.0.1:0") as taken, pytest.raises(ListenError, match="cannot listen"):
        listen(f"127.0.0.1:{taken.getsockname()[1]}")
    for address in ("9394", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", ""):
        with pytest.raises(SettingsError):
            listen(address)


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 300), ("abc", 300), ("1h30m", 5400), ("250ms", 60), ("-5m", 60), ("0s", 60)]
)
def test_2_3_the_resync_interval(text: str | None, seconds: float) -> None:
    assert resync_seconds(text) == seconds


@pytest.mark.parametrize("missing", ["HOOK_PATH", "NODE_NAME"])
def test_1_a_missing_variable_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOOK_PATH", "NODE_NAME"):
        monkeypatch.setenv(name, "" if name == missing else "x")
    result = CliRunner().invoke(command, ["-v=4", "--logtostderr", "--v", "2"])
    assert result.exit_code != 0
    assert missing in result.output


def test_5_the_version_has_six_lines_and_unknown_flags_are_refused() -> None:
    result = CliRunner().invoke(command, ["version"])
    assert result.exit_code == 0
    assert len(result.output.splitlines()) >= 6
    assert CliRunner().invoke(command, ["--no-such-flag"]).exit_code != 0
