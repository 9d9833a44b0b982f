"""A changed device config in a running scheduler: taken up without losing state, or told of and left."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge import reload as reload_module
from hami.scheduler.edge.device_config import DeviceConfigFile

NVIDIA = {
    "resourceCountName": "nvidia.com/gpu",
    "resourceMemoryName": "nvidia.com/gpumem",
    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
    "resourceCoreName": "nvidia.com/gpucores",
    "resourcePriorityName": "nvidia.com/priority",
    "defaultGPUNum": 1,
}


def write(path: Path, **settings: Any) -> None:
    path.write_text(yaml.safe_dump({"nvidia": {**NVIDIA, **settings}}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "device-config.yaml"
    write(found)
    return found


@asynccontextmanager
async def following(start: Any, path: Path, **settings: Any) -> AsyncIterator[Any]:
    """A scheduler that looks at the file when it is told to."""
    source = DeviceConfigFile(path)
    source.load()
    named = {"pod_name": "hami-scheduler-0", "pod_namespace": "default"}
    async with start(source=source, **named, **settings) as world:
        yield world


async def check(world: Any) -> None:
    await world.scheduler.config.check(world.scheduler.reconfigure)


async def own_events(world: Any) -> list[tuple[str, str, str]]:
    await world.scheduler.recorder.flush(10)
    found = (await world.request("GET", "/api/v1/namespaces/default/events"))["items"]
    return [
        (one["type"], one["reason"], one["message"])
        for one in found
        if one["involvedObject"]["name"] == "hami-scheduler-0"
    ]


async def test_what_pods_ask_and_what_quotas_allow_is_read_anew(start: Any, path: Path) -> None:
    async with following(start, path) as world:
        await world.add_node("n1")
        quota = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.nvidia.com/gpumem": "2000"}}}
        await world.request("POST", "/api/v1/namespaces/default/resourcequotas", quota)
        await world.until(lambda: len(world.scheduler.informers.quotas) == 1)
        running = await world.add_pod("running", mem=1000)
        await world.filter(running, "n1")
        assert await world.bind(running, "n1") == ""
        write(path, memoryFactor=2)
        await check(world)
        assert world.used_mib("n1") == [1000], "what runs is counted as it was written down"
        pod = await world.add_pod("p", mem=1000)
        assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"], "the quota is 4000 MiB"
        assert world.used_mib("n1") == [3000], "1000 units are 2000 MiB"
        third = await world.add_pod("q", mem=501)
        assert "ResourceQuotaNotFit" in (await world.filter(third, "n1"))["FailedNodes"]["n1"]
        assert 'hami_scheduler_config_reloads{zone="vGPU"} 1' in await world.metrics()
        assert ("Normal", "DeviceConfigReloaded", "the changed device config is in force") in (
            await own_events(world)
        )


async def test_reservations_and_bindings_under_way_stay(start: Any, path: Path) -> None:
    async with following(start, path) as world:
        await world.add_node("n1")
        reserved, binding = await world.add_pod("r", mem=1000), await world.add_pod("b", mem=2000)
        for pod in (reserved, binding):
            assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
        arrived, go = asyncio.Event(), asyncio.Event()

        async def intercept(request: web.Request) -> web.StreamResponse | None:
            if request.path.endswith("/pods/b/binding"):
                arrived.set()
                await go.wait()
            return None

        world.api.intercept = intercept
        bound = asyncio.create_task(world.bind(binding, "n1"))
        await arrived.wait()
        write(path, defaultMemory=500)
        await check(world)
        assert world.used_mib("n1") == [3000]
        go.set()
        assert await bound == ""
        await world.until(lambda: len(world.scheduler.state.reservations()) == 1)
        assert world.used_mib("n1") == [3000]
        world.api.intercept = None
        await world.request(
            "PATCH",
            "/api/v1/nodes/n1",
            {"metadata": {"annotations": {"hami.io/mutex.lock": None}}},
            "application/merge-patch+json",
        )
        assert await world.bind(reserved, "n1") == ""
        assert world.used_mib("n1") == [3000]


async def test_events_while_the_new_state_is_made_are_in_both(
    start: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that ends, one that is placed and a node that comes while the objects are listed anew."""
    async with following(start, path) as world:
        await world.add_node("n1")
        ended = await world.add_pod("ended", mem=4000)
        await world.filter(ended, "n1")
        assert await world.bind(ended, "n1") == ""
        await world.until(lambda: not world.scheduler.state.reservations())
        arrived, go = asyncio.Event(), asyncio.Event()

        async def intercept(request: web.Request) -> web.StreamResponse | None:
            if request.path == "/api/v1/resourcequotas" and "limit" in request.query:
                arrived.set()
                await go.wait()
            return None

        world.api.intercept = intercept
        write(path, defaultMemory=700)
        checking = asyncio.create_task(check(world))
        await arrived.wait()
        await world.add_node("n2")
        pod = await world.add_pod("p", mem=None)
        assert (await world.filter(pod, "n2"))["NodeNames"] == ["n2"], "it answers meanwhile"
        assert world.used_mib("n2") == [8000], "under the old config: a whole card"
        await world.request("DELETE", "/api/v1/namespaces/default/pods/ended", {"gracePeriodSeconds": 0})
        go.set()
        await checking
        assert (world.used_mib("n1"), world.used_mib("n2")) == ([0], [8000])
        second = await world.add_pod("q", mem=None)
        await world.filter(second, "n1")
        assert world.used_mib("n1") == [700]


async def test_a_search_under_way_begins_anew_under_the_new_config(start: Any, path: Path) -> None:
    async with following(start, path) as world:
        await world.add_node("n1")
        pod = await world.add_pod("p", mem=None)
        extender = world.scheduler.extender
        once, parsed = extender._search_once, []

        async def interrupted(asking: Any, *rest: Any) -> Any:
            parsed.append(asking.request())
            if len(parsed) == 1:
                search = world.scheduler.state.search(
                    asking.request(), world.scheduler.state.candidates(["n1"]), 0
                )
                write(path, defaultMemory=600)
                await check(world)
                assert not search.open
                return await once(asking, *rest) if not asking.is_outdated else _closed(search)
            return await once(asking, *rest)

        extender._search_once = interrupted
        assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
        assert len(parsed) == 2
        assert world.used_mib("n1") == [600]


def _closed(search: Any) -> Exception:
    with pytest.raises(Exception, match="device config has changed") as caught:
        search.advance(1)
    return caught.value


async def test_admission_goes_by_the_new_config(start: Any, path: Path) -> None:
    async with following(start, path) as world:
        container = {"name": "a", "image": "i", "resources": {"limits": {"nvidia.com/gpumem": "100"}}}
        pod = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [container]}}
        review = {"request": {"uid": "u", "operation": "CREATE", "namespace": "default", "object": pod}}

        async def runtime_class() -> str:
            url = f"{world.url}/webhook"
            async with world.http.post(url, json=review) as response:
                answer = (await response.json())["response"]
            patch = json.loads(base64.b64decode(answer["patch"]))
            return next((one["value"] for one in patch if one["path"].endswith("/runtimeClassName")), "")

        assert await runtime_class() == ""
        write(path, runtimeClassName="nvidia")
        await check(world)
        assert await runtime_class() == "nvidia"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda path: path.write_text("nvidia: ["), "not YAML"),
        (lambda path: write(path, resourceCountName="acme.com/gpu"), "acme.com/gpu: this takes a restart"),
        (lambda path: path.unlink(), "there is no such file"),
    ],
)
async def test_a_bad_file_changes_nothing_and_is_told_of(
    start: Any, path: Path, change: Callable[[Path], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(start, path) as world:
        await world.add_node("n1")
        pod = await world.add_pod("p")
        await world.filter(pod, "n1")
        change(path)
        for _ in range(3):
            await check(world)
        assert [
            reason in vars(record)["cause"] for record in caplog.records if record.message == "config.bad"
        ] == [True]
        ((kind, name, text),) = await own_events(world)
        assert (kind, name) == ("Warning", "DeviceConfigInvalid")
        assert reason in text
        assert text.endswith("the config in force stays")
        assert 'hami_scheduler_config_errors{zone="vGPU"} 1' in await world.metrics()
        for probe in ("healthz", "readyz"):
            async with world.http.get(f"{world.url}/{probe}") as response:
                assert response.status == 200
        assert await world.bind(pod, "n1") == ""
        write(path)
        await check(world)
        text = await world.metrics()
        assert 'hami_scheduler_config_errors{zone="vGPU"} 0' in text
        assert 'hami_scheduler_config_reloads{zone="vGPU"} 0' in text


async def test_a_config_under_which_an_object_cannot_be_counted_is_not_taken_up(
    start: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(start, path) as world:
        await world.add_node("n1")
        upsert = ClusterState.upsert_node

        def broken(self: Any, *arguments: Any) -> Any:
            if self is not world.scheduler.state:
                raise KeyError("bug")
            return upsert(self, *arguments)

        monkeypatch.setattr(ClusterState, "upsert_node", broken)
        before = world.scheduler.state.profiles
        write(path, memoryFactor=7)
        await check(world)
        assert world.scheduler.state.profiles is before
        ((_, reason, text),) = await own_events(world)
        assert reason == "DeviceConfigInvalid"
        assert "an object cannot be counted: KeyError('bug')" in text
        assert 'hami_scheduler_config_errors{zone="vGPU"} 1' in await world.metrics()
        monkeypatch.undo()
        await world.add_node("n2")


async def test_a_pod_that_fitted_nowhere_is_touched_once_to_be_read_anew(start: Any, path: Path) -> None:
    async with following(start, path) as world:
        await world.add_node("n1")
        pod = await world.add_pod("p", mem=9000)
        assert (await world.filter(pod, "n1"))["NodeNames"] is None
        pending = world.scheduler.pending
        write(path, memoryFactor=1, defaultCores=10)
        await check(world)
        now = pending._clock()
        pending._clock = lambda: now + 60.0
        assert await pending.touch_fitting() == 1
        assert await pending.touch_fitting() == 0
        assert "hami.io/requeue" in (await world.pod("p"))["metadata"]["annotations"]


async def test_the_file_is_looked_at_by_itself(
    start: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload_module, "CHECK_EVERY_S", 0.02)
    async with following(start, path) as world:
        write(path, memoryFactor=3)
        await world.until(lambda: world.scheduler.config.applied == 1)
        assert world.scheduler.state.profiles["NVIDIA"].names.memory_factor == 3
