"""`hami scheduler` as a process: starts from flags and a kubeconfig, logs JSON, answers, ends on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from hami.local.api.apiserver import ApiServer

COMMAND = (sys.executable, "-c", "from hami.cli.main import main; main(prog_name='hami')", "scheduler")


@asynccontextmanager
async def process(*flags: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(
        *COMMAND, *flags, env=environment, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


async def lines_until(stream: asyncio.StreamReader, event: str, count: int = 1) -> list[dict[str, Any]]:
    """The log up to the ``count``-th line with this event; every line must be JSON."""
    lines: list[dict[str, Any]] = []
    while sum(line["event"] == event for line in lines) < count:
        text = await stream.readline()
        assert text, f"the process ended: {lines}"
        lines.append(json.loads(text))
    return lines


async def test_the_command_serves_until_it_is_told_to_stop(
    embedded_api: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    config = tmp_path / "device-config.yaml"
    config.write_text(yaml.safe_dump({"nvidia": {"resourceCountName": "nvidia.com/gpu"}}))
    flags = (
        f"--device-config-file={config}",
        "--http_bind=127.0.0.1:0",
        "--metrics-bind-address=127.0.0.1:0",
        "--scheduler-name=hami-scheduler",
        "--profiling",
        "-v=4",
    )
    async with process(*flags, KUBECONFIG=str(kubeconfig)) as running:
        assert running.stderr is not None
        lines = await lines_until(running.stderr, "scheduler.synced")
        ports = {line["server"]: line["port"] for line in lines if line["event"] == "server.listening"}
        async with aiohttp.ClientSession() as session:
            for path in ("/healthz", "/readyz", "/debug/pprof/", "/debug/pprof/goroutine"):
                async with session.get(f"http://127.0.0.1:{ports['extender']}{path}") as response:
                    assert response.status == 200
            async with session.get(f"http://127.0.0.1:{ports['metrics']}/metrics") as response:
                assert 'hami_scheduler_synced{zone="vGPU"} 1' in await response.text()
        running.terminate()
        assert await running.wait() == 0


async def test_a_config_that_cannot_be_used_ends_the_process_with_its_reason(
    kubeconfig: Path, tmp_path: Path
) -> None:
    config = tmp_path / "device-config.yaml"
    config.write_text("{}")
    async with process(f"--device-config-file={config}", KUBECONFIG=str(kubeconfig)) as running:
        assert running.stderr is not None
        lines = await lines_until(running.stderr, "scheduler.failed")
        assert "all configurations are empty" in lines[-1]["reason"]
        assert await running.wait() == 1


async def test_an_address_in_use_ends_the_process(
    embedded_api: ApiServer, kubeconfig: Path, tmp_path: Path
) -> None:
    config = tmp_path / "device-config.yaml"
    config.write_text(yaml.safe_dump({"nvidia": {"resourceCountName": "nvidia.com/gpu"}}))
    taken = embedded_api.url.removeprefix("http://")
    flags = (f"--device-config-file={config}", f"--http_bind={taken}", "--metrics-bind-address=127.0.0.1:0")
    async with process(*flags, KUBECONFIG=str(kubeconfig)) as running:
        assert running.stderr is not None
        lines = await lines_until(running.stderr, "scheduler.failed")
        assert f"cannot listen on {taken}" in lines[-1]["reason"]
        assert await running.wait() == 1
