"""The kubelet stand-in with a fake device plugin, and containers as real processes."""

from __future__ import annotations

import asyncio
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from local_harness import reaped, until

from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, dig
from hami.local.api.podlog import LogRequest
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.local.kubelet import pod_resources
from hami.local.kubelet.containers import Isolation, probe_isolation
from hami.local.kubelet.kubelet import Kubelet, NodeConfig, NodeLogs
from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as pb_grpc
from hami.node.api import podresources_v1_pb2 as res_pb
from hami.node.api import podresources_v1_pb2_grpc as res_grpc

GPU = "example.com/gpu"


class FakePlugin:
    """A device plugin with four devices; records what the kubelet asks."""

    def __init__(self, directory: Path, host: Path) -> None:
        self.directory = directory
        self.host = host
        self.allocated: list[list[str]] = []
        self.pre_started: list[list[str]] = []
        self.refuse = ""
        self.proceed = asyncio.Event()
        self.proceed.set()
        self.health = {f"gpu-{index}": "Healthy" for index in range(4)}
        self._update = asyncio.Event()
        self._server: Any = None

    async def start(self, *, prefers: bool = False, pre_start: bool = False) -> None:
        self._server = grpc.aio.server()
        pb_grpc.add_DevicePluginServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.directory / 'fake.sock'}")
        await self._server.start()
        async with grpc.aio.insecure_channel(f"unix:{self.directory / 'kubelet.sock'}") as channel:
            options = pb.DevicePluginOptions(
                get_preferred_allocation_available=prefers, pre_start_required=pre_start
            )
            await pb_grpc.RegistrationStub(channel).Register(
                pb.RegisterRequest(
                    version="v1beta1", endpoint="fake.sock", resource_name=GPU, options=options
                )
            )

    async def stop(self) -> None:
        await self._server.stop(None)

    def set_health(self, device: str, health: str) -> None:
        self.health[device] = health
        self._update.set()

    async def GetDevicePluginOptions(self, request: Any, context: Any) -> Any:
        return pb.DevicePluginOptions()

    async def ListAndWatch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            yield pb.ListAndWatchResponse(
                devices=[pb.Device(ID=device, health=health) for device, health in self.health.items()]
            )
            await self._update.wait()
            self._update.clear()

    async def GetPreferredAllocation(self, request: Any, context: Any) -> Any:
        wanted = request.container_requests[0]
        last = sorted(wanted.available_deviceIDs, reverse=True)[: wanted.allocation_size]
        return pb.PreferredAllocationResponse(
            container_responses=[pb.ContainerPreferredAllocationResponse(deviceIDs=last)]
        )

    async def Allocate(self, request: Any, context: Any) -> Any:
        if self.refuse:
            await context.abort(grpc.StatusCode.UNKNOWN, self.refuse)
        devices = list(request.container_requests[0].devices_ids)
        self.allocated.append(devices)
        await self.proceed.wait()
        answer = pb.ContainerAllocateResponse(
            envs={"GPU_IDS": ",".join(devices), "GPU_CACHE": "/hami-test/data/cache"},
            mounts=[pb.Mount(container_path="/hami-test/data", host_path=str(self.host), read_only=False)],
        )
        return pb.AllocateResponse(container_responses=[answer])

    async def PreStartContainer(self, request: Any, context: Any) -> Any:
        self.pre_started.append(list(request.devices_ids))
        return pb.PreStartContainerResponse()


class Node:
    """One API server, one kubelet, one fake plugin."""

    def __init__(self, api: ApiServer, kubelet: Kubelet, plugin: FakePlugin) -> None:
        self.api = api
        self.kubelet = kubelet
        self.plugin = plugin

    def pod(self, name: str) -> Object:
        return self.api.store.get(PODS, "default", name)

    def phase_of(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    async def run(self, name: str, script: str, gpus: int = 0, **spec: Any) -> None:
        container: Object = {"name": "main", "image": "none", "command": ["sh", "-c", script]}
        if gpus:
            container["resources"] = {"limits": {GPU: str(gpus)}}
        body = {
            "metadata": {"name": name},
            "spec": {"nodeName": "n1", "restartPolicy": "Never", "containers": [container], **spec},
        }
        await self.api.registry.create(PODS, "default", body)

    async def phase(self, name: str, phase: str) -> Object:
        """The pod once it is in ``phase``; a pod that ends otherwise fails the test with its status."""
        ends = {"Succeeded", "Failed"}
        await until(lambda: dig(self.pod(name), "status", "phase") in {phase, *ends})
        assert dig(self.pod(name), "status", "phase") == phase, self.pod(name)["status"]
        return self.pod(name)

    async def log(self, name: str, **options: Any) -> str:
        asked: dict[str, Any] = {
            "container": "main", "follow": False, "previous": False, "timestamps": False,
            "tail_lines": None, "since": None, "limit_bytes": None, **options,
        }  # fmt: skip
        logs = NodeLogs(lambda: [self.kubelet])
        chunks = [chunk async for chunk in logs.read_log(LogRequest(pod=self.pod(name), **asked))]
        return b"".join(chunks).decode()


def strongest() -> Isolation:
    """What this machine allows; most tests run with it."""
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        return asyncio.run(probe_isolation(Path(directory)))


ISOLATION = strongest()
# Root can also do what a user can.
ISOLATIONS = [Isolation.ROOT, Isolation.USER] if ISOLATION is Isolation.ROOT else [ISOLATION]


@pytest.fixture
async def node(embedded_api: ApiServer) -> AsyncIterator[Node]:
    async for found in _node(embedded_api, ISOLATION):
        yield found


@pytest.fixture
async def bare_node(embedded_api: ApiServer) -> AsyncIterator[Node]:
    """A node as on a machine that allows no namespaces."""
    async for found in _node(embedded_api, Isolation.NONE):
        yield found


async def _node(api: ApiServer, isolation: Isolation) -> AsyncIterator[Node]:
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        root = Path(directory)
        host = root / "data"
        host.mkdir()
        config = NodeConfig("n1", root / "n1", restart_backoff_s=0.05)
        kubelet = Kubelet(config, api.registry, time.time, isolation)
        plugin = FakePlugin(kubelet.devices.directory, host)
        try:
            await kubelet.start()
            yield Node(api, kubelet, plugin)
        finally:
            await kubelet.stop()
            if plugin._server is not None:
                await plugin.stop()


def allocatable(node: Node) -> str | None:
    found: str | None = dig(node.api.store.get(NODES, "", "n1"), "status", "allocatable").get(GPU)
    return found


async def test_a_registered_plugin_shows_in_the_node(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")


async def test_an_unhealthy_device_leaves_allocatable_but_not_capacity(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    node.plugin.set_health("gpu-1", "Unhealthy")
    await until(lambda: allocatable(node) == "3")
    assert dig(node.api.store.get(NODES, "", "n1"), "status", "capacity")[GPU] == "4"


async def test_a_plugin_that_ends_leaves_no_allocatable_devices(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    await node.plugin.stop()
    await until(lambda: allocatable(node) == "0")


@pytest.fixture(params=ISOLATIONS, ids=lambda isolation: isolation.value)
async def isolated_node(request: pytest.FixtureRequest, embedded_api: ApiServer) -> AsyncIterator[Node]:
    """A node for each way of isolating containers that this machine allows."""
    async for found in _node(embedded_api, request.param):
        yield found


async def test_a_container_gets_environment_and_mounts_of_the_answer(isolated_node: Node) -> None:
    node = isolated_node
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    await node.run("p", 'echo ids=$GPU_IDS; echo written > "$GPU_CACHE"', gpus=2)
    await node.phase("p", "Succeeded")
    assert await node.log("p") == "ids=gpu-0,gpu-1\n"
    assert (node.plugin.host / "cache").read_text() == "written\n"


async def test_the_container_is_alone_in_its_namespaces(isolated_node: Node) -> None:
    await isolated_node.run("p", "echo pid=$$$$; hostname; id -u; ls /tmp | grep -cv ^hami-")
    await until(lambda: isolated_node.phase_of("p") in ("Succeeded", "Failed"))
    pid, hostname, *rest = (await isolated_node.log("p")).splitlines()
    alone = isolated_node.kubelet.isolation is not Isolation.NONE
    assert ((pid, hostname, rest) == ("pid=1", "p", ["0", "0"])) is alone


async def test_without_namespaces_mounted_paths_are_rewritten(bare_node: Node) -> None:
    await bare_node.plugin.start()
    await until(lambda: allocatable(bare_node) == "4")
    await bare_node.run("p", 'echo written > "$GPU_CACHE"', gpus=1)
    await bare_node.phase("p", "Succeeded")
    assert (bare_node.plugin.host / "cache").read_text() == "written\n"


async def test_the_preferred_allocation_is_followed(node: Node) -> None:
    await node.plugin.start(prefers=True)
    await until(lambda: allocatable(node) == "4")
    await node.run("p", "true", gpus=1)
    await node.phase("p", "Succeeded")
    assert node.plugin.allocated == [["gpu-3"]]


async def test_pre_start_gets_the_recorded_ids_and_pod_resources_shows_them(node: Node) -> None:
    await node.plugin.start(pre_start=True)
    await until(lambda: allocatable(node) == "4")
    await node.run("p", "sleep 60", gpus=2)
    await node.phase("p", "Running")
    assert node.plugin.pre_started == [["gpu-0", "gpu-1"]]
    socket = node.kubelet.config.host_root / "var/lib/kubelet/pod-resources/kubelet.sock"
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        answer = await res_grpc.PodResourcesListerStub(channel).List(res_pb.ListPodResourcesRequest())
    devices = answer.pod_resources[0].containers[0].devices
    assert [list(entry.device_ids) for entry in devices] == [["gpu-0"], ["gpu-1"]]


async def test_pod_resources_lists_no_ordinary_init_containers(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    limits = {"limits": {GPU: "1"}}
    init = {"name": "init", "image": "none", "command": ["true"], "resources": limits}
    side = {**init, "name": "side", "command": ["sleep", "60"], "restartPolicy": "Always"}
    await node.run("p", "sleep 60", gpus=1, initContainers=[init, side])
    await node.phase("p", "Running")
    socket = node.kubelet.config.host_root / "var/lib/kubelet/pod-resources/kubelet.sock"
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        answer = await res_grpc.PodResourcesListerStub(channel).List(res_pb.ListPodResourcesRequest())
    assert [item.name for item in answer.pod_resources[0].containers] == ["side", "main"]


async def test_pod_resources_refuses_more_calls_than_kubelet_takes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(pod_resources, "time", SimpleNamespace(monotonic=lambda: now))
    socket = node.kubelet.config.host_root / "var/lib/kubelet/pod-resources/kubelet.sock"
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub = res_grpc.PodResourcesListerStub(channel)
        calls = (stub.List(res_pb.ListPodResourcesRequest()) for _ in range(300))
        answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
    assert len(answers) - len(refused) == 10
    assert {answer.code() for answer in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_a_container_waits_for_a_plugin_that_wants_to_be_asked_before_its_start(node: Node) -> None:
    await node.plugin.start(pre_start=True)
    await until(lambda: allocatable(node) == "4")
    node.kubelet.restart_backoff_s = 0.05
    await node.run("p", "sleep 0.1; exit 1", gpus=1, restartPolicy="Always")
    await node.phase("p", "Running")
    await node.plugin.stop()
    await until(lambda: allocatable(node) == "0")

    def waiting() -> str:
        statuses = dig(node.pod("p"), "status", "containerStatuses") or [{}]
        return str((dig(statuses[0], "state", "waiting") or {}).get("message", ""))

    await until(lambda: "PreStartContainer rpc failed" in waiting())
    asked = len(node.plugin.pre_started)
    await node.plugin.start(pre_start=True)
    await until(lambda: len(node.plugin.pre_started) > asked)


async def test_a_failed_allocate_fails_the_pod_with_unexpected_admission_error(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    node.plugin.refuse = "no binding pod found on node n1"
    await node.run("p", "true", gpus=1)
    pod = await node.phase("p", "Failed")
    assert dig(pod, "status", "reason") == "UnexpectedAdmissionError"
    assert "code = Unknown desc = no binding pod found on node n1" in dig(pod, "status", "message")


async def test_too_few_devices_fail_the_pod(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    await node.run("p", "true", gpus=5)
    pod = await node.phase("p", "Failed")
    assert "Requested: 5, Available: 4" in dig(pod, "status", "message")


async def test_devices_of_a_finished_pod_are_given_again(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    for name in ("a", "b"):
        await node.run(name, "true", gpus=4)
        await node.phase(name, "Succeeded")
    assert [len(devices) for devices in node.plugin.allocated] == [4, 4]


async def test_after_a_kubelet_restart_grants_stand_and_the_plugin_can_come_back(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    await node.run("p", "sleep 60", gpus=3)
    await node.phase("p", "Running")
    await node.plugin.stop()
    await node.kubelet.restart()
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    await node.run("q", "true", gpus=2)
    pod = await node.phase("q", "Failed")
    assert "Requested: 2, Available: 1" in dig(pod, "status", "message")
    assert dig(node.pod("p"), "status", "phase") == "Running"


async def test_a_kubelet_restart_during_an_allocation_fails_the_pod_with_a_reason(node: Node) -> None:
    await node.plugin.start()
    await until(lambda: allocatable(node) == "4")
    node.plugin.proceed.clear()
    await node.run("p", "true", gpus=1)
    await until(lambda: bool(node.plugin.allocated))
    await node.kubelet.restart()
    node.plugin.proceed.set()
    pod = await node.phase("p", "Failed")
    assert "code = Canceled desc = grpc: the client connection is closing" in dig(pod, "status", "message")


async def test_init_containers_run_in_order_before_the_others(node: Node) -> None:
    inits = [
        {"name": f"i{index}", "image": "none", "command": ["sh", "-c", f"echo {index} >> /data-dir/order"],
         "volumeMounts": [{"name": "v", "mountPath": "/data-dir"}]}
        for index in (1, 2)
    ]  # fmt: skip
    main = {
        "name": "main", "image": "none", "command": ["cat", "/data-dir/order"],
        "volumeMounts": [{"name": "v", "mountPath": "/data-dir"}],
    }  # fmt: skip
    if node.kubelet.isolation is Isolation.NONE:
        for container in [*inits, main]:
            container["env"] = [{"name": "ORDER", "value": "/data-dir/order"}]
        inits[0]["command"] = ["sh", "-c", 'echo 1 >> "$ORDER"']
        inits[1]["command"] = ["sh", "-c", 'echo 2 >> "$ORDER"']
        main["command"] = ["sh", "-c", 'cat "$ORDER"']
    await node.run("p", "", initContainers=inits, containers=[main], volumes=[{"name": "v", "emptyDir": {}}])
    await node.phase("p", "Succeeded")
    assert await node.log("p") == "1\n2\n"


async def test_a_failing_program_is_restarted_with_policy_on_failure(node: Node) -> None:
    await node.run("p", "exit 7", restartPolicy="OnFailure")

    def status() -> Object:
        found: Object = (dig(node.pod("p"), "status", "containerStatuses") or [{}])[0]
        return found

    await until(lambda: status().get("restartCount", 0) >= 2 and status()["lastState"])
    assert dig(status(), "lastState", "terminated", "exitCode") == 7


async def test_a_missing_program_is_a_start_error(node: Node) -> None:
    await node.run("p", "", containers=[{"name": "main", "image": "none", "command": ["/no/such/program"]}])
    pod = await node.phase("p", "Failed")
    terminated = dig(dig(pod, "status", "containerStatuses")[0], "state", "terminated")
    assert terminated["reason"] == "StartError"
    assert "/no/such/program" in terminated["message"]


async def test_deleting_a_pod_sends_sigterm_then_removes_the_object(node: Node) -> None:
    said = node.kubelet.config.host_root / "said"
    await node.run("p", f"trap 'echo bye > {said}; exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    await node.phase("p", "Running")
    async with asyncio.timeout(60.0):
        while await node.log("p") != "ready\n":  # noqa: ASYNC110 - the log is a file
            await asyncio.sleep(0.02)
    await node.api.registry.delete(PODS, "default", "p")
    await until(lambda: node.api.store.find(PODS, "default", "p") is None)
    assert said.read_text() == "bye\n"


async def test_a_pod_that_ignores_sigterm_is_killed_after_its_grace_period(node: Node) -> None:
    await node.run("p", "trap '' TERM; while :; do sleep 0.05; done")
    await node.phase("p", "Running")
    await node.api.registry.delete(PODS, "default", "p", DeleteOptions(grace_s=1))
    await until(lambda: node.api.store.find(PODS, "default", "p") is None)


async def test_the_log_can_be_followed_and_cut(node: Node) -> None:
    await node.run("p", "for i in 1 2 3; do echo line $i; done")
    await node.phase("p", "Succeeded")
    assert await node.log("p", follow=True) == "line 1\nline 2\nline 3\n"
    assert await node.log("p", tail_lines=1) == "line 3\n"
    assert await node.log("p", limit_bytes=4) == "line"
    assert "Z line 1\n" in await node.log("p", timestamps=True)


@pytest.fixture
def nap() -> str:
    """Seconds that nobody else on this machine sleeps: the program of a test is known by them."""
    return str(10**8 + secrets.randbelow(10**8))


def sleepers(nap: str) -> list[int]:
    """PIDs of the processes that sleep for so long."""
    wanted = f"sleep\0{nap}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cmdline").read_bytes() == wanted:
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def test_no_process_is_left_when_the_kubelet_stops(node: Node, nap: str) -> None:
    await node.run("p", f"setsid sleep {nap} & sleep {nap}")
    await node.phase("p", "Running")
    await until(lambda: len(sleepers(nap)) == 2)
    await node.kubelet.stop()
    await until(lambda: not sleepers(nap))


async def test_without_namespaces_no_process_is_left_either(bare_node: Node, nap: str) -> None:
    await bare_node.run("p", f"setsid sleep {nap} & sleep {nap}")
    await until(lambda: len(sleepers(nap)) == 2)
    await bare_node.api.registry.delete(PODS, "default", "p", DeleteOptions(grace_s=0))
    await until(lambda: not sleepers(nap))


async def test_without_namespaces_what_a_program_leaves_behind_ends_with_it(
    bare_node: Node, nap: str
) -> None:
    await bare_node.run("p", f"setsid sleep {nap} > /dev/null 2>&1 &")
    await bare_node.phase("p", "Succeeded")
    await until(lambda: not sleepers(nap))


_KILLED = """
import asyncio, os, sys, pathlib
from hami.local.kubelet.containers import ContainerPlan, Isolation, start_container

async def main():
    directory = pathlib.Path(sys.argv[1])
    script = f"setsid sleep {sys.argv[3]} & sleep {sys.argv[3]}"
    plan = ContainerPlan(argv=("sh", "-c", script), env={"PATH": os.defpath})
    await start_container(plan, directory, Isolation[sys.argv[2]], directory / "log")
    print("started", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("isolation", [*ISOLATIONS, Isolation.NONE], ids=lambda found: found.value)
async def test_no_process_outlives_a_killed_cluster(tmp_path: Path, isolation: Isolation, nap: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _KILLED, str(tmp_path), isolation.name, nap, stdout=asyncio.subprocess.PIPE
    )
    async with reaped(process):
        assert process.stdout is not None
        async with asyncio.timeout(60.0):
            assert await process.stdout.readline() == b"started\n"
        await until(lambda: len(sleepers(nap)) == 2)
        process.kill()
        await process.wait()
        await until(lambda: not sleepers(nap))


async def test_events_tell_that_the_container_was_started(node: Node) -> None:
    await node.run("p", "true")
    await node.phase("p", "Succeeded")
    reasons = [event["reason"] for event in node.api.store.list(EVENTS, "default")]
    assert "Started" in reasons
