"""Allocation mode exact with the real plugin as a process, the kubelet stand-in and simulated cards."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from local_harness import until

from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, annotations_of, clone, dig, meta, name_of
from hami.local.api.podlog import LogRequest
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.local.api.store import Event
from hami.local.cluster import Cluster, ClusterConfig, GpuNode, default_native
from hami.local.components import Component, hami_command
from hami.local.kubelet.containers import Isolation
from hami.local.kubelet.kubelet import Kubelet, NodeConfig
from hami.node.api import podresources_v1_pb2 as pb
from hami.node.api import podresources_v1_pb2_grpc as rpc
from hami.protocol.inventory import decode_json

NATIVE = default_native()
REGISTER = "hami.io/node-nvidia-register"
MODE = "hami.io/allocation-mode"
ALLOCATED = "hami.io/vgpu-devices-allocated"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
LOCK = "hami.io/mutex.lock"
LIMIT_S = 60.0
SHOW = "echo $CUDA_DEVICE_MEMORY_LIMIT_0 $CUDA_DEVICE_SM_LIMIT $CUDA_DEVICE_MEMORY_SHARED_CACHE"


class Node:
    """One node with two simulated cards; pods are bound to it as a scheduler leaves them."""

    def __init__(self, api: ApiServer, directory: Path) -> None:
        self.api = api
        self.root = directory / "n1"
        self.vgpu = self.root / "usr/local/vgpu"
        self.cdi = self.root / "var/run/cdi"
        config = NodeConfig("n1", self.root, restart_backoff_s=0.05)
        self.kubelet = Kubelet(config, api.registry, time.time, Isolation.NONE)
        self._directory = directory
        (directory / "device-config.yaml").write_text("nvidia:\n  deviceSplitCount: 5\n")
        api.write_kubeconfig(directory / "kubeconfig")
        library = self.vgpu / f"lib/v{version('hami')}/libvgpu.so"
        library.parent.mkdir(parents=True)
        shutil.copyfile(NATIVE / "libvgpu.so", library)
        (self.vgpu / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so\n")
        self.plugin = self.component("exact")
        api.registry.store.subscribe(self._observe)
        self.locks: list[str] = []

    def component(self, mode: str) -> Component:
        """The device plugin in ``mode``."""
        driver = NATIVE / "fakegpu"
        assert (driver / "libnvidia-ml.so.1").exists(), "the simulated driver is missing: run `make native`"
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self._directory),
            "KUBECONFIG": str(self._directory / "kubeconfig"),
            "NODE_NAME": "n1",
            "HOOK_PATH": "/usr/local",
            "LD_LIBRARY_PATH": str(driver),
            "FAKEGPU_STATE": str(self._directory / "cards"),
            "FAKEGPU_DEVICES": "2",
            "FAKEGPU_UUID_SEED": "test",
            "NVIDIA_VISIBLE_DEVICES": "all",
        }
        flags = [
            *("--config-file", str(self._directory / "device-config.yaml")),
            *("--host-root", str(self.root)),
            *("--allocation-mode", mode),
        ]
        return Component(
            f"plugin-{mode}", lambda: hami_command("device-plugin", *flags), env, self._directory
        )

    async def use(self, mode: str) -> None:
        """Another DaemonSet pod takes over."""
        await self.plugin.stop()
        self.plugin = self.component(mode)
        await self.plugin.start()
        await self.until(lambda: self.notes_of_node.get(MODE) == mode and self.allocatable == "10")

    @property
    def notes_of_node(self) -> dict[str, str]:
        return dict(annotations_of(self.api.store.get(NODES, "", "n1")))

    @property
    def allocatable(self) -> str | None:
        return (dig(self.api.store.get(NODES, "", "n1"), "status", "allocatable") or {}).get("nvidia.com/gpu")

    @property
    def cards(self) -> list[str]:
        return [card.id for card in decode_json(self.notes_of_node[REGISTER], "NVIDIA").devices]

    def pod(self, name: str) -> Object:
        return self.api.store.get(PODS, "default", name)

    def notes(self, name: str) -> dict[str, str]:
        return dict(annotations_of(self.pod(name)))

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    def restarts(self, name: str) -> int:
        statuses = dig(self.pod(name), "status", "containerStatuses") or [{}]
        return int(statuses[0].get("restartCount", 0))

    def waiting(self, name: str) -> str:
        """Why the first container does not run."""
        statuses = dig(self.pod(name), "status", "containerStatuses") or [{}]
        waiting = dig(statuses[0], "state", "waiting") or {}
        return f"{waiting.get('reason', '')}: {waiting.get('message', '')}"

    def events(self, reason: str) -> list[str]:
        return [event["message"] for event in self.api.store.list(EVENTS) if event.get("reason") == reason]

    def documents(self) -> dict[str, dict[str, str]]:
        """Environment of every document by file name."""
        found = {}
        for path in self.cdi.glob("*.json"):
            edits = json.loads(path.read_text())["devices"][0]["containerEdits"]
            found[path.name] = dict(pair.split("=", 1) for pair in edits["env"])
        return found

    async def log(self, name: str, container: str = "main") -> str:
        request = LogRequest(self.pod(name), container, False, False, False, None, None, None)
        return b"".join([chunk async for chunk in self.kubelet.read_log(request)]).decode()

    async def logged(self, name: str) -> str:
        """The log of the present run, once there is some."""
        async with asyncio.timeout(LIMIT_S):
            while not (text := await self.log(name)).endswith("\n"):  # noqa: ASYNC110 - the log is a file
                await asyncio.sleep(0.05)
        return text

    async def bound(
        self, name: str, allocation: str, script: str = "sleep 60", *, policy: str = "Never", **spec: Any
    ) -> None:
        """A pod as it is after the Binding: on the node, with every annotation."""
        notes = {
            "hami.io/vgpu-node": "n1",
            "hami.io/bind-phase": "allocating",
            "hami.io/bind-time": str(int(time.time())),
            TO_ALLOCATE: allocation,
            ALLOCATED: allocation,
        }
        body = {
            "metadata": {"name": name, "annotations": notes if allocation else {}},
            "spec": {
                "nodeName": "n1",
                "restartPolicy": policy,
                "containers": [container("main", script)],
                **spec,
            },
        }
        await self.api.registry.create(PODS, "default", body)

    async def annotate(self, name: str, **notes: str) -> None:
        def change(current: Object) -> Object:
            changed: Object = clone(current)
            meta(changed).setdefault("annotations", {}).update(notes)
            return changed

        await self.api.registry.update(PODS, "default", name, change)

    async def until(self, condition: Callable[[], Any]) -> None:
        await until(condition, LIMIT_S, lambda: self.plugin.error("the condition never became true"))

    def _observe(self, key: str, event: Event) -> None:
        if key == NODES.key and LOCK in annotations_of(event.obj):
            self.locks.append(annotations_of(event.obj)[LOCK])


def container(name: str, script: str = "sleep 60", gpus: int = 1) -> Object:
    return {
        "name": name,
        "image": "none",
        "command": ["sh", "-c", script],
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
    }


@pytest.fixture
async def node(embedded_api: ApiServer) -> AsyncIterator[Node]:
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        running = Node(embedded_api, Path(directory))
        try:
            await running.kubelet.start()
            await running.plugin.start()
            await running.until(lambda: running.allocatable == "10" and MODE in running.notes_of_node)
            yield running
        finally:
            await running.plugin.stop()
            await running.kubelet.stop()


async def test_the_node_says_its_mode_and_a_pod_runs_with_its_entry(node: Node) -> None:
    assert node.notes_of_node[MODE] == "exact"
    await node.bound("p", f"{node.cards[1]},NVIDIA,3000,30:;", SHOW)
    await node.until(lambda: node.phase("p") == "Succeeded")
    uid = meta(node.pod("p"))["uid"]
    assert f"3000m 30 {node.vgpu}/containers/{uid}_main/" in await node.log("p")
    await node.until(lambda: node.notes("p")["hami.io/bind-phase"] == "success")
    assert node.notes("p")[TO_ALLOCATE] == ";"
    assert node.notes("p")[ALLOCATED] == f"{node.cards[1]},NVIDIA,3000,30:;"
    assert node.locks == []


async def test_x2_a_crash_loop_gets_the_same_answer_each_time(node: Node) -> None:
    await node.bound("p", f"{node.cards[0]},NVIDIA,1000,10:;", f"{SHOW}; exit 1", policy="Always")
    uid = meta(node.pod("p"))["uid"]
    directory = node.vgpu / f"containers/{uid}_main"
    await node.until(lambda: node.restarts("p") >= 1)
    (directory / "used.cache").write_text("region")
    documents = node.documents()
    await node.until(lambda: node.restarts("p") >= 5)
    assert node.documents() == documents
    assert len(documents) == 1
    assert (directory / "used.cache").read_text() == "region"
    assert node.notes("p")[ALLOCATED] == f"{node.cards[0]},NVIDIA,1000,10:;"


async def test_x3_a_plugin_killed_before_the_start_of_the_container_answers_after_it(node: Node) -> None:
    ask = node.kubelet.devices.pre_start
    killed = asyncio.Event()

    async def kill_first(pod_uid: str, name: str) -> None:
        if not killed.is_set():
            killed.set()
            await node.plugin.kill()
        await ask(pod_uid, name)

    node.kubelet.devices.pre_start = kill_first  # type: ignore[method-assign, assignment]
    await node.bound("p", f"{node.cards[1]},NVIDIA,2000,20:;", SHOW)
    await node.until(lambda: node.phase("p") == "Succeeded")
    assert killed.is_set()
    assert (await node.log("p")).startswith("2000m 20 ")


async def test_x5_ids_used_again_never_show_the_old_limits(node: Node) -> None:
    await node.bound("a", f"{node.cards[0]},NVIDIA,1111,11:;")
    await node.until(lambda: node.phase("a") == "Running")
    (old,) = node.documents()
    await node.api.registry.delete(PODS, "default", "a", DeleteOptions(grace_s=0))
    await node.until(lambda: node.kubelet.devices.book.grants == [])
    await node.bound("b", f"{node.cards[1]},NVIDIA,2222,22:;", SHOW)
    await node.until(lambda: node.phase("b") == "Succeeded")
    assert list(node.documents()) == [old]
    assert (await node.log("b")).startswith("2222m 22 ")


async def test_x6_pods_start_while_another_client_uses_up_the_calls_that_kubelet_allows(node: Node) -> None:
    socket = node.root / "var/lib/kubelet/pod-resources/kubelet.sock"
    refused = 0

    async def hammer(stub: Any) -> None:
        nonlocal refused
        while True:
            try:
                await stub.List(pb.ListPodResourcesRequest())
            except grpc.aio.AioRpcError as error:
                refused += error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED

    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        others = asyncio.create_task(hammer(rpc.PodResourcesListerStub(channel)))
        try:
            await node.until(lambda: refused > 0)
            for index in range(4):
                allocation = f"{node.cards[index % 2]},NVIDIA,{1000 + index},{index}:;"
                await node.bound(f"p{index}", allocation, SHOW)
            await node.until(lambda: all(node.phase(f"p{index}") == "Succeeded" for index in range(4)))
        finally:
            others.cancel()
            await asyncio.wait({others})
    for index in range(4):
        assert (await node.log(f"p{index}")).startswith(f"{1000 + index}m {index} ")


async def test_x7_a_pod_without_annotations_waits_with_the_reason(node: Node) -> None:
    await node.bound("p", "")
    text = "pod default/p has no device allocation; it must be scheduled by hami-scheduler"
    await node.until(lambda: text in node.waiting("p"))
    assert node.waiting("p").startswith("CreateContainerConfigError")
    await node.until(lambda: text in node.events("AllocateFailed"))
    await node.until(lambda: node.notes("p").get("hami.io/allocate-error") == text)
    assert node.documents() == {}


async def test_annotations_that_name_a_card_of_another_node_fail_the_pod(node: Node) -> None:
    await node.bound("p", "GPU-of-another-node,NVIDIA,1000,10:;")
    await node.until(
        lambda: "names card GPU-of-another-node, which this node does not have" in node.waiting("p")
    )
    await node.until(lambda: node.notes("p")["hami.io/bind-phase"] == "failed")
    assert node.documents() == {}


async def test_x11_documents_lost_in_a_reboot_are_back_before_the_container_runs(node: Node) -> None:
    await node.bound("p", f"{node.cards[0]},NVIDIA,1000,10:;", f"{SHOW}; sleep 0.3; exit 1", policy="Always")
    await node.until(lambda: node.restarts("p") >= 1)
    node.cdi.rename(node.root / "lost")  # at once, whatever is being written
    await node.plugin.kill()
    await node.kubelet.restart()
    before = node.restarts("p")
    await node.until(lambda: node.restarts("p") > before + 1)
    assert (await node.logged("p")).startswith("1000m 10 ")
    assert len(node.documents()) == 1


async def test_x13_pods_of_mode_lock_run_on_and_restart_after_the_switch(node: Node) -> None:
    await node.use("lock")
    stop = node.root / "stop"
    script = f"{SHOW}; while [ ! -e {stop} ]; do sleep 0.05; done; rm {stop}; exit 1"
    await node.bound("p", f"{node.cards[0]},NVIDIA,1000,10:;", script, policy="Always")
    await node.until(lambda: node.phase("p") == "Running")
    first = await node.logged("p")
    await node.use("exact")
    assert (node.phase("p"), node.restarts("p")) == ("Running", 0)
    stop.touch()
    await node.until(lambda: node.restarts("p") == 1 and node.phase("p") == "Running")
    await node.until(lambda: not stop.exists())
    async with asyncio.timeout(LIMIT_S):
        while await node.log("p") != first:  # noqa: ASYNC110 - the log is a file
            await asyncio.sleep(0.05)
    await node.bound("q", f"{node.cards[1]},NVIDIA,2000,20:;", SHOW)
    await node.until(lambda: node.phase("q") == "Succeeded")
    assert (await node.log("q")).startswith("2000m 20 ")


async def test_a_switch_back_to_lock_says_so_on_the_node_and_serves(node: Node) -> None:
    await node.use("lock")
    await node.bound("p", f"{node.cards[0]},NVIDIA,1000,10:;", SHOW)
    await node.until(lambda: node.phase("p") == "Succeeded")
    assert node.notes_of_node[MODE] == "lock"


async def test_x14_an_init_container_gets_another_card_than_the_container_after_it(node: Node) -> None:
    first, second = node.cards
    show = "echo $NVIDIA_VISIBLE_DEVICES $CUDA_DEVICE_MEMORY_LIMIT_0"
    await node.bound(
        "p",
        f"{first},NVIDIA,1000,10:;{second},NVIDIA,2000,20:;",
        show,
        initContainers=[container("init", show)],
    )
    await node.until(lambda: node.phase("p") == "Succeeded")
    assert await node.log("p", "init") == f"{first} 1000m\n"
    assert await node.log("p") == f"{second} 2000m\n"
    await node.until(lambda: node.notes("p")["hami.io/bind-phase"] == "success")


async def test_x15_a_changed_annotation_stops_the_next_start_also_after_a_crash_of_the_plugin(
    node: Node,
) -> None:
    stop = node.root / "stop"
    script = f"while [ ! -e {stop} ]; do sleep 0.05; done; exit 1"
    await node.bound("p", f"{node.cards[0]},NVIDIA,1000,10:;", script, policy="Always")
    await node.until(lambda: node.notes("p")["hami.io/bind-phase"] == "success")
    documents = node.documents()
    await node.annotate("p", **{ALLOCATED: f"{node.cards[0]},NVIDIA,2000,10:;"})
    stop.touch()
    text = "was given {0} with 1000 MiB and 10 % first, its annotation now says {0} with 2000 MiB and 10 %"
    await node.until(lambda: text.format(node.cards[0]) in node.waiting("p"))
    await node.plugin.kill()
    count = len(node.events("AllocateFailed"))
    await node.until(lambda: node.plugin.starts == 2 and node.allocatable == "10")
    await node.until(lambda: text.format(node.cards[0]) in node.waiting("p"))
    assert count >= 1
    assert node.documents() == documents
    assert node.notes("p")["hami.io/bind-phase"] == "success"


async def test_a_restarted_kubelet_leads_to_the_same_containers(node: Node) -> None:
    stop = node.root / "stop"
    script = f"{SHOW}; while [ ! -e {stop} ]; do sleep 0.05; done; exit 1"
    await node.bound("p", f"{node.cards[0]},NVIDIA,1000,10:;", script, policy="Always")
    await node.until(lambda: node.phase("p") == "Running")
    await node.kubelet.restart()
    await node.until(lambda: node.allocatable == "10")
    await node.bound("q", f"{node.cards[1]},NVIDIA,2000,20:;", SHOW)
    await node.until(lambda: node.phase("q") == "Succeeded")
    assert (await node.log("q")).startswith("2000m 20 ")
    stop.touch()
    await node.until(lambda: node.restarts("p") >= 1)
    assert len(node.documents()) == 2


async def ended(cluster: Cluster, name: str) -> None:
    """Wait until the containers of a pod have ended."""
    async with asyncio.timeout(90):
        while True:
            if cluster.api.store.get(PODS, "default", name)["status"]["phase"] in ("Succeeded", "Failed"):
                return
            await asyncio.sleep(0.05)


async def test_x1_many_pods_at_once_need_no_lock_and_each_container_gets_its_own() -> None:
    config = ClusterConfig(
        [GpuNode("n1", cards=4)], default_native(), allocation_mode="exact", monitor=False,
        isolation=Isolation.NONE,
    )  # fmt: skip
    async with Cluster(config) as cluster:
        locks: list[str] = []
        calls: list[tuple[str, str]] = []
        kubelet = cluster.nodes["n1"].kubelet
        allocate = kubelet.devices._allocate_one

        async def counted(pod_uid: str, name: str, *rest: Any) -> Any:
            calls.append((pod_uid, name))
            return await allocate(pod_uid, name, *rest)

        def observe(key: str, event: Event) -> None:
            if key == NODES.key and LOCK in annotations_of(event.obj):
                locks.append(name_of(event.obj))

        kubelet.devices._allocate_one = counted  # type: ignore[method-assign, assignment]
        cancel = cluster.api.store.subscribe(observe)
        wanted: dict[tuple[str, str], int] = {}
        for index in range(12):
            names = ("a", "b", "c")[: 1 + index % 3]
            containers = []
            for position, name in enumerate(names):
                mib = 1000 + 100 * index + position
                wanted[(f"p{index}", name)] = mib
                limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(mib), "nvidia.com/gpucores": "5"}
                containers.append({**container(name, SHOW), "resources": {"limits": limits}})
            body = {
                "metadata": {"name": f"p{index}"},
                "spec": {"restartPolicy": "Never", "containers": containers},
            }
            await cluster.api.registry.create(PODS, "default", body)
        for name in {name for name, _ in wanted}:
            await ended(cluster, name)
        cancel()
        assert cluster.api.logs is not None
        for (name, inside), mib in wanted.items():
            pod = cluster.api.store.get(PODS, "default", name)
            request = LogRequest(pod, inside, False, False, False, None, None, None)
            text = b"".join([chunk async for chunk in cluster.api.logs.read_log(request)]).decode()
            assert text.startswith(f"{mib}m 5 "), (name, inside, text)
        assert locks == []
        assert len(calls) == len(set(calls)) == len(wanted)


async def test_x9_a_pod_that_sets_every_variable_itself_gets_the_plugins_values() -> None:
    config = ClusterConfig([GpuNode("n1")], default_native(), allocation_mode="exact", monitor=False)
    async with Cluster(config) as cluster:
        program = str(cluster.config.native / "fakegpu" / "gpuprog")
        own = {
            "CUDA_DEVICE_MEMORY_LIMIT": "39000m",
            "CUDA_DEVICE_MEMORY_LIMIT_0": "39000m",
            "CUDA_DEVICE_SM_LIMIT": "100",
            "CUDA_DEVICE_SM_LIMIT_0": "100",
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": "/tmp/mine.cache",
            "CUDA_OVERSUBSCRIBE": "true",
            "GPU_CORE_UTILIZATION_POLICY": "disable",
            "LIBVGPU_HOSTPID_BROKER": "1",
            "HAMI_DEVICE_UUIDS": "GPU-x",
            "NVIDIA_VISIBLE_DEVICES": "all",
            "VGPU_FAILURE_POLICY": "open",
        }
        limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4096", "nvidia.com/gpucores": "30"}
        main = {
            **container("main", f"env; {program} meminfo"),
            "resources": {"limits": limits},
            "env": [{"name": key, "value": value} for key, value in own.items()],
        }
        body = {"metadata": {"name": "p"}, "spec": {"restartPolicy": "Never", "containers": [main]}}
        await cluster.api.registry.create(PODS, "default", body)
        await ended(cluster, "p")
        request = LogRequest(
            cluster.api.store.get(PODS, "default", "p"), "main", False, False, False, None, None, None
        )
        assert cluster.api.logs is not None
        text = b"".join([chunk async for chunk in cluster.api.logs.read_log(request)]).decode()
        lines = text.splitlines()
        seen = dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("{"))
        assert {key for key, value in own.items() if seen[key] == value} == set()
        (info,) = [json.loads(line) for line in lines if line.startswith("{")]
        assert info["total_bytes"] == 4096 << 20
