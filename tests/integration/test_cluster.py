"""The whole way of a pod on the embedded cluster, with the real programs as processes, and their faults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from local_harness import until

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, annotations_of, dig
from hami.local.api.podlog import LogRequest
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.local.cluster import Cluster, ClusterConfig, ClusterError, GpuNode, default_native
from hami.local.components import ComponentError
from hami.local.demo import read_usage
from hami.local.kubelet.containers import Isolation

LIMIT_S = 60.0


BOTH_MODES = pytest.mark.parametrize(
    "cluster", [pytest.param("lock", id="lock"), pytest.param("exact", id="exact")], indirect=True
)
"""The same scenario in both allocation modes."""


class Workload:
    """Makes pods on a cluster and looks at them."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.program = str(cluster.config.native / "fakegpu" / "gpuprog")

    async def create(
        self, name: str, script: str, mib: int, cores: int, *, scheduler: str = "", **container: Any
    ) -> Object:
        limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(mib), "nvidia.com/gpucores": str(cores)}
        body = {
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "schedulerName": scheduler,
                "containers": [
                    {
                        "name": "main",
                        "image": "none",
                        "command": ["sh", "-c", script.replace("GPUPROG", self.program)],
                        "resources": {"limits": limits},
                        **container,
                    }
                ],
            },
        }
        stored, _ = await self.cluster.api.registry.create(PODS, "default", body)
        return stored

    def get(self, name: str) -> Object:
        return self.cluster.api.store.get(PODS, "default", name)

    def phase(self, name: str) -> str:
        return str(self.get(name)["status"]["phase"])

    def rejection(self, name: str) -> str:
        for condition in dig(self.get(name), "status", "conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition["message"])
        return ""

    async def running(self, name: str) -> None:
        await until(lambda: self.phase(name) != "Pending")
        assert self.phase(name) == "Running", self.get(name)["status"]

    async def finished(self, name: str) -> str:
        """The log of a pod that has ended."""
        await until(lambda: self.phase(name) in ("Succeeded", "Failed"))
        return await self.log(name)

    async def log(self, name: str) -> str:
        logs = self.cluster.api.logs
        assert logs is not None
        request = LogRequest(self.get(name), "main", False, False, False, None, None, None)
        return b"".join([chunk async for chunk in logs.read_log(request)]).decode()

    async def calls(self, name: str) -> list[dict[str, Any]]:
        """The program's JSON lines."""
        lines = (await self.log(name)).splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.fixture
def workload(cluster: Cluster) -> Workload:
    return Workload(cluster)


async def test_a_program_sees_its_limit_as_the_size_of_the_card(workload: Workload) -> None:
    await workload.create("p", "GPUPROG meminfo", 4096, 30)
    await workload.finished("p")
    info = (await workload.calls("p"))[0]
    assert (info["total_bytes"], info["device_total_bytes"]) == (4096 << 20, 4096 << 20)


@BOTH_MODES
async def test_two_pods_share_a_card_and_only_the_one_over_its_limit_is_refused(workload: Workload) -> None:
    await workload.create("bob", "exec GPUPROG worker --mib 6000", 8192, 50)
    await workload.running("bob")
    await workload.create("alice", "GPUPROG alloc 6144; GPUPROG alloc 3000", 4096, 30)
    await workload.finished("alice")
    allocations = [call["result"] for call in await workload.calls("alice") if call["call"] == "cuMemAlloc"]
    assert allocations == [2, 0]
    before = len(await workload.calls("bob"))
    async with asyncio.timeout(LIMIT_S):
        while len(await workload.calls("bob")) <= before:  # noqa: ASYNC110 - the log is a file
            await asyncio.sleep(0.05)
    assert all(call["result"] == 0 for call in await workload.calls("bob"))


async def test_without_namespaces_limits_hold_too() -> None:
    config = ClusterConfig([GpuNode("n1")], default_native(), isolation=Isolation.NONE, monitor=False)
    async with Cluster(config) as cluster:
        workload = Workload(cluster)
        await workload.create("alice", "GPUPROG alloc 6144; GPUPROG alloc 3000", 4096, 30)
        await workload.finished("alice")
        results = [call["result"] for call in await workload.calls("alice") if call["call"] == "cuMemAlloc"]
        assert results == [2, 0]


@BOTH_MODES
async def test_a_placed_pod_carries_its_allocation_and_the_node_is_unlocked(workload: Workload) -> None:
    await workload.create("p", "sleep 60", 4096, 30)
    await workload.running("p")
    await until(lambda: annotations_of(workload.get("p")).get("hami.io/bind-phase") == "success")
    pod = workload.get("p")
    assert pod["spec"]["schedulerName"] == "hami-scheduler"
    assert annotations_of(pod)["hami.io/vgpu-node"] == "n1"
    assert ",NVIDIA,4096,30:" in annotations_of(pod)["hami.io/vgpu-devices-allocated"]
    node = workload.cluster.api.store.get(NODES, "", "n1")
    assert "hami.io/mutex.lock" not in annotations_of(node)


@BOTH_MODES
async def test_a_pod_that_does_not_fit_says_why_and_starts_when_room_is_made(workload: Workload) -> None:
    await workload.create("big", "sleep 600", 32768, 50)
    await workload.running("big")
    await workload.create("late", "sleep 600", 16384, 20)
    reason = await until(lambda: workload.rejection("late"))
    assert reason == "0/1 nodes are available: 1 1/1 CardInsufficientMemory."
    await workload.cluster.api.registry.delete(PODS, "default", "big", DeleteOptions(grace_s=0))
    await workload.running("late")


@BOTH_MODES
async def test_the_monitor_shows_limit_and_use_of_each_container(workload: Workload) -> None:
    await workload.create("p", "exec GPUPROG worker --mib 1000", 4096, 30)
    await workload.running("p")
    async with asyncio.timeout(LIMIT_S):
        while True:
            usage = read_usage(await workload.cluster.metrics("n1")).get("p")
            if usage is not None and usage.used_bytes > 0 and usage.core_used_percent > 0:
                break
            await asyncio.sleep(0.1)
    assert (usage.limit_bytes, usage.core_limit_percent) == (4096 << 20, 30)
    assert 1000 << 20 <= usage.used_bytes <= 4096 << 20


async def test_a_privileged_pod_with_a_device_is_denied_by_name(workload: Workload) -> None:
    with pytest.raises(ApiError, match="container main is privileged"):
        await workload.create("p", "true", 1024, 10, securityContext={"privileged": True})


async def test_a_pod_without_devices_runs_beside_them(workload: Workload) -> None:
    body = {
        "metadata": {"name": "plain"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "main", "image": "none", "command": ["sh", "-c", "env"]}],
        },
    }
    await workload.cluster.api.registry.create(PODS, "default", body)
    log = await workload.finished("plain")
    assert "CUDA_DEVICE_MEMORY_LIMIT" not in log


@BOTH_MODES
async def test_after_a_crash_of_the_scheduler_usage_is_known_again(workload: Workload) -> None:
    await workload.create("big", "sleep 600", 32768, 50)
    await workload.running("big")
    await workload.cluster.component("scheduler").kill()
    # While the scheduler is down its webhook is too, and failurePolicy is Ignore: the name is given here.
    await workload.create("late", "sleep 600", 16384, 20, scheduler="hami-scheduler")
    reason = "0/1 nodes are available: 1 1/1 CardInsufficientMemory."
    await until(lambda: workload.rejection("late") == reason)
    await workload.create("small", "sleep 600", 4096, 20)
    await workload.running("small")


@BOTH_MODES
async def test_after_a_crash_of_the_plugin_new_pods_start_and_old_ones_run_on(workload: Workload) -> None:
    await workload.create("old", "sleep 600", 4096, 20)
    await workload.running("old")
    await workload.cluster.component("n1-plugin").kill()
    await workload.create("new", "GPUPROG alloc 1000", 4096, 20)
    await workload.finished("new")
    assert (await workload.calls("new"))[0]["result"] == 0
    assert workload.phase("old") == "Running"


async def test_while_the_scheduler_hangs_pods_wait_and_start_afterwards(workload: Workload) -> None:
    scheduler = workload.cluster.component("scheduler")
    scheduler.pause()
    await workload.cluster.api.registry.create(
        PODS,
        "default",
        {
            "metadata": {"name": "p", "labels": {"hami.io/webhook": "ignore"}},
            "spec": {
                "schedulerName": "hami-scheduler",
                "containers": [
                    {
                        "name": "main",
                        "image": "none",
                        "command": ["sleep", "600"],
                        "resources": {"limits": {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}},
                    }
                ],
            },
        },
    )
    await asyncio.sleep(0.5)
    assert workload.phase("p") == "Pending"
    scheduler.resume()
    await workload.running("p")


@BOTH_MODES
async def test_after_a_restart_of_kubelet_the_plugin_registers_again(workload: Workload) -> None:
    await workload.create("old", "sleep 600", 4096, 20)
    await workload.running("old")
    await workload.cluster.nodes["n1"].kubelet.restart()
    await workload.create("new", "sleep 600", 4096, 20)
    await workload.running("new")
    grants = workload.cluster.nodes["n1"].kubelet.devices.book.grants
    assert len({device for grant in grants for device in grant.device_ids}) == 2


@BOTH_MODES
async def test_a_restart_of_the_api_server_is_survived_by_every_component(workload: Workload) -> None:
    await workload.cluster.api.restart()
    await workload.create("p", "sleep 600", 4096, 20)
    await workload.running("p")


async def test_events_tell_the_story_of_a_pod(workload: Workload) -> None:
    await workload.create("p", "sleep 600", 4096, 20)
    await workload.running("p")
    wanted = {"FilteringSucceed", "BindingSucceed", "Scheduled", "Started"}
    await until(
        lambda: wanted <= {event["reason"] for event in workload.cluster.api.store.list(EVENTS, "default")}
    )


async def test_a_component_that_cannot_start_is_named_with_its_log() -> None:
    config = ClusterConfig([GpuNode("n1")], default_native(), scheduler_args=["--no-such-flag"])
    with pytest.raises(ComponentError, match=r"(?s)^scheduler: .*log: .*scheduler\.log.*no-such-flag"):
        async with Cluster(config):
            pass


async def test_a_folder_whose_name_is_too_long_for_sockets_is_named(tmp_path: Path) -> None:
    config = ClusterConfig([GpuNode("n1")], default_native(), directory=tmp_path / ("x" * 100))
    with pytest.raises(ClusterError, match="set TMPDIR to a folder with a shorter name"):
        async with Cluster(config):
            pass


async def test_a_full_node_is_passed_over_until_none_is_left() -> None:
    config = ClusterConfig([GpuNode("n1"), GpuNode("n2")], default_native(), monitor=False)
    async with Cluster(config) as cluster:
        workload = Workload(cluster)
        for name in ("a", "b"):
            await workload.create(name, "sleep 600", 32768, 50)
            await workload.running(name)
        assert {workload.get(name)["spec"]["nodeName"] for name in ("a", "b")} == {"n1", "n2"}
        await workload.create("c", "sleep 600", 16384, 50)
        assert await until(lambda: workload.rejection("c")) == (
            "0/2 nodes are available: 2 1/1 CardInsufficientMemory."
        )


async def test_pods_that_come_at_once_share_the_cards_of_a_node_in_turn() -> None:
    config = ClusterConfig([GpuNode("n1", cards=2)], default_native(), monitor=False)
    async with Cluster(config) as cluster:
        workload = Workload(cluster)
        names = [f"p{index}" for index in range(4)]
        for name in names:
            await workload.create(name, "sleep 600", 20000, 50)
        for name in names:
            await workload.running(name)
        placed = [annotations_of(workload.get(name))["hami.io/vgpu-devices-allocated"] for name in names]
        cards = [entry.partition(",")[0] for entry in placed]
        assert sorted(cards.count(card) for card in set(cards)) == [2, 2]


async def test_the_monitor_comes_back_at_its_address(workload: Workload) -> None:
    url = workload.cluster.nodes["n1"].metrics_url
    monitor = workload.cluster.component("n1-monitor")
    await monitor.kill()
    await until(lambda: monitor.starts == 2)
    await monitor.wait_event("server.listening", LIMIT_S, server="metrics")
    assert "hami_monitor_nvml_up" in await workload.cluster.metrics("n1")
    assert workload.cluster.nodes["n1"].metrics_url == url


async def test_a_missing_native_build_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="run `make native` first"):
        async with Cluster(ClusterConfig([GpuNode("n1")], tmp_path)):
            pass
