"""Parts of the running process that fail, and the end of the process while it cannot begin."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.local.api.apiserver import ApiServer
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge import app, background
from hami.scheduler.edge.informers import Informers
from hami.scheduler.edge.settings import SchedulerSettings


async def test_a_bug_in_a_part_is_counted_and_the_scheduler_goes_on(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers that fail on what some node says must not stop the scheduling of all the others."""
    monkeypatch.setattr(background, "_PAUSE_S", (0.01, 0.01))
    failed = 0
    tick = ClusterState.tick

    def broken(self: Any, now: float) -> Any:
        nonlocal failed
        if failed < 3:
            failed += 1
            raise KeyError("bug")
        return tick(self, now)

    monkeypatch.setattr(ClusterState, "tick", broken)
    async with start() as world:
        await world.add_node("n1")
        await world.until(lambda: failed == 3)
        pod = await world.add_pod("p")
        assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
        assert 'hami_scheduler_internal_errors{zone="vGPU"} 3' in await world.metrics()


async def test_the_process_ends_with_the_failure_of_what_it_needs(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()
    run = Informers.run

    async def ending(self: Any) -> None:
        running = asyncio.create_task(run(self))
        await go.wait()
        running.cancel()
        await asyncio.wait({running})
        raise KeyError("bug")

    monkeypatch.setattr(Informers, "run", ending)
    with pytest.raises(KeyError):
        async with start():
            go.set()
    assert [vars(one)["part"] for one in caplog.records if one.message == "background.ended"] == ["informers"]


async def test_a_scheduler_that_waits_for_its_certificate_still_ends_when_told(
    embedded_api: ApiServer, tmp_path: Path
) -> None:
    """The API server does not answer: it cannot make or read the Secret."""
    asked = asyncio.Event()

    async def silent(_request: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    settings = SchedulerSettings(
        device_config_file=tmp_path / "unused",
        hostname="host",
        http_bind="127.0.0.1:0",
        metrics_bind_address="127.0.0.1:0",
        tls_secret=("default", "tls"),
        tls_hosts=("localhost",),
    )
    stop = asyncio.Event()
    embedded_api.intercept = silent
    async with Client(ClientConfig(embedded_api.url), Limits(qps=0)) as client:
        running = asyncio.create_task(app.Scheduler.build(settings, (), client).run(stop))
        await asked.wait()
        stop.set()
        await running
    embedded_api.intercept = None
