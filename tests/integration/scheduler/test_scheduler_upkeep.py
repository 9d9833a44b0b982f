"""What the scheduler does beside scheduling: role labels, certificates, memory, its start and its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hami.kube.certificates import create_authority, issue, write_pair
from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.local.api.apiserver import ApiServer
from hami.scheduler.edge import app, roles, tls
from hami.scheduler.edge.device_config import DeviceConfigFile
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.roles import keep_role_labels, write_role_labels
from hami.scheduler.edge.settings import SchedulerSettings, SettingsError
from hami.scheduler.edge.tls import ReloadingTls, TlsError

PODS = "/api/v1/namespaces/default/pods"
COMPONENT = {"app.kubernetes.io/component": "hami-scheduler"}


def refusal(code: int) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": "said the test"}, status=code)


# --- role labels ----------------------------------------------------------------------------------------


class Pods:
    """Scheduler pods in the embedded cluster, and requests to them that are refused."""

    def __init__(self, api: ApiServer, client: Client) -> None:
        self.refuse: dict[tuple[str, str], list[int]] = {}
        self._client = client
        api.intercept = self

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        codes = self.refuse.get((request.method, request.path), [])
        return refusal(codes.pop(0)) if codes else None

    async def make(self, *names: str) -> None:
        for name in names:
            metadata = {"name": name, "labels": COMPONENT}
            body = {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}}
            await self._client.json("POST", PODS, dict, body=msgspec.json.encode(body))

    async def role(self, name: str) -> str:
        found: dict[str, Any] = await self._client.json("GET", f"{PODS}/{name}", dict)
        return str(found["metadata"]["labels"].get("hami.io/scheduler-role", ""))


@pytest.mark.parametrize("code", [403, 404])
async def test_a_label_that_cannot_be_written_does_not_stop_the_others(
    embedded_api: ApiServer, code: int
) -> None:
    async with Client(ClientConfig(embedded_api.url), Limits(qps=0)) as client:
        pods = Pods(embedded_api, client)
        await pods.make("a", "b")
        pods.refuse["PATCH", f"{PODS}/a"] = [code]
        await write_role_labels(client, "default", "b")
        assert (await pods.role("a"), await pods.role("b")) == ("", "leader")
        await write_role_labels(client, "default", "b")
        assert await pods.role("a") == "follower"


async def test_labels_are_written_again_after_a_failure_and_only_while_leading(
    embedded_api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "_LOOK_S", 0.01)
    monkeypatch.setattr(roles, "_PERIOD_S", 0.01)
    async with Client(ClientConfig(embedded_api.url), Limits(qps=0)) as client:
        pods = Pods(embedded_api, client)
        await pods.make("a", "b")
        pods.refuse["GET", PODS] = [403]
        leadership = Leadership("h", electing=False)
        task = asyncio.create_task(keep_role_labels(client, leadership, "default", "a"))
        while await pods.role("b") != "follower":  # noqa: ASYNC110 -- it tells nobody
            await asyncio.sleep(0.01)
        assert pods.refuse["GET", PODS] == []
        leadership._electing = True
        await pods.make("c")
        while embedded_api.seen:  # a round that had begun goes on to its end
            embedded_api.seen.clear()
            await asyncio.sleep(0.3)
        await asyncio.sleep(0.1)
        assert list(embedded_api.seen) == []
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- certificates ---------------------------------------------------------------------------------------


def write(folder: Path, name: str) -> tuple[Path, Path]:
    paths = folder / "tls.crt", folder / "tls.key"
    write_pair(issue(create_authority(name, time.time()), name, time.time(), hosts=["127.0.0.1"]), *paths)
    return paths


async def test_a_certificate_is_picked_up_by_the_running_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_CHECK_EVERY_S", 0.01)
    caplog.set_level(logging.INFO)
    served = ReloadingTls(*write(tmp_path, "old"))
    assert served.check() is False
    task = asyncio.create_task(served.run())
    write(tmp_path, "new")
    while "tls.reloaded" not in caplog.messages:  # noqa: ASYNC110 -- the check tells nobody
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert served.check() is False


def test_a_missing_certificate_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match=r"tls\.crt"):
        ReloadingTls(tmp_path / "tls.crt", tmp_path / "tls.key")


# --- the process ----------------------------------------------------------------------------------------


def test_a_config_file_that_cannot_be_read_is_a_settings_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        DeviceConfigFile(tmp_path / "nowhere").load()


def test_what_the_config_file_says_in_vain_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "device-config.yaml"
    path.write_text("{nvidia: {resourceCountName: nvidia.com/gpu}, quantum: {x: 1}}")
    profile, *_ = DeviceConfigFile(path).load()
    assert profile.common_word == "NVIDIA"
    assert "config.warning" in caplog.messages


async def test_sigterm_ends_the_scheduler_in_order(
    embedded_api: ApiServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = SchedulerSettings(
        Path("unused"), hostname="h", http_bind="127.0.0.1:0", metrics_bind_address="127.0.0.1:0"
    )
    running = asyncio.create_task(app.run_scheduler(settings, ClientConfig(embedded_api.url), ()))
    while "scheduler.synced" not in caplog.messages:
        await asyncio.sleep(0.01)
        assert not running.done(), running.result()
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)


async def test_full_collections_wait_until_nothing_is_being_answered(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_IDLE_COLLECT_S", 0.01)
    counted: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda *_: counted.append(1))
    async with start() as world:
        await world.until(lambda: len(counted) > 3)
        world.scheduler.extender.in_flight = 1
        await asyncio.sleep(0.05)
        before = len(counted)
        await asyncio.sleep(0.1)
        assert len(counted) == before
        world.scheduler.extender.in_flight = 0
        await world.until(lambda: len(counted) > before)
