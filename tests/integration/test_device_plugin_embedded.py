"""The real device plugin and monitor as processes: embedded API server, kubelet stand-in, simulated cards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from local_harness import until
from prometheus_client.parser import text_string_to_metric_families

from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, dig
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.local.cluster import default_native
from hami.local.components import Component, hami_command
from hami.local.kubelet.containers import Isolation
from hami.local.kubelet.kubelet import Kubelet, NodeConfig
from hami.node.hostpid.child import ask
from hami.node.hostpid.codec import BrokerProtocolError
from hami.protocol import region_layout as layout
from hami.protocol.inventory import DeviceInfo, decode_json

NATIVE = default_native()
REGISTER = "hami.io/node-nvidia-register"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
LOCK = "hami.io/mutex.lock"
LIMIT_S = 60.0


class Node:
    """One node with two simulated cards and HAMi's programs."""

    environment: ClassVar[dict[str, str]] = {}

    def __init__(self, api: ApiServer, directory: Path) -> None:
        self.api = api
        self.directory = directory
        self.root = directory / "n1"
        self.vgpu = self.root / "usr/local/vgpu"
        self.kubelet = Kubelet(NodeConfig("n1", self.root), api.registry, time.time, Isolation.NONE)
        self.config = directory / "device-config.yaml"
        self.config.write_text("nvidia:\n  deviceSplitCount: 3\n")
        self.node_config = directory / "config.json"
        api.write_kubeconfig(directory / "kubeconfig")
        library = self.vgpu / f"lib/v{version('hami')}/libvgpu.so"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"library")
        (self.vgpu / "ld.so.preload").write_text("/usr/local/vgpu/libvgpu.so\n")
        self.plugin = self.component("device-plugin", "/usr/local", *self.plugin_flags())

    def plugin_flags(self) -> list[str]:
        return [
            *("--config-file", str(self.config)),
            *("--node-config-file", str(self.node_config)),
            *("--host-root", str(self.root)),
        ]

    def component(self, name: str, hook: str, *flags: str) -> Component:
        driver = NATIVE / "fakegpu"
        assert (driver / "libnvidia-ml.so.1").exists(), "the simulated driver is missing: run `make native`"
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.directory),
            "KUBECONFIG": str(self.directory / "kubeconfig"),
            "NODE_NAME": "n1",
            "HOOK_PATH": hook,
            "LD_LIBRARY_PATH": str(driver),
            "FAKEGPU_STATE": str(self.directory / "cards"),
            "FAKEGPU_DEVICES": "2",
            "FAKEGPU_UUID_SEED": "test",
            "NVIDIA_VISIBLE_DEVICES": "all",
            **self.environment,
        }
        return Component(name, lambda: hami_command(name, *flags), env, self.directory)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Node]:
        try:
            await self.kubelet.start()
            await self.plugin.start()
            await self.until(lambda: self.allocatable == "6" and REGISTER in self.annotations)
            yield self
        finally:
            await self.plugin.stop()
            await self.kubelet.stop()

    @property
    def object(self) -> Object:
        return self.api.store.get(NODES, "", "n1")

    @property
    def annotations(self) -> dict[str, str]:
        return dig(self.object, "metadata", "annotations") or {}

    @property
    def allocatable(self) -> str | None:
        return (dig(self.object, "status", "allocatable") or {}).get("nvidia.com/gpu")

    @property
    def cards(self) -> tuple[DeviceInfo, ...]:
        return decode_json(self.annotations[REGISTER], "NVIDIA").devices

    def pod(self, name: str) -> Object:
        return self.api.store.get(PODS, "default", name)

    def notes(self, name: str) -> dict[str, str]:
        return dig(self.pod(name), "metadata", "annotations") or {}

    async def lock(self, pod: str) -> None:
        stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

        def change(node: Object) -> Object:
            node.setdefault("metadata", {}).setdefault("annotations", {})[LOCK] = f"{stamp},default,{pod}"
            return node

        await self.api.registry.update(NODES, "", "n1", lambda node: change(json.loads(json.dumps(node))))

    async def bound(self, name: str, allocation: str, script: str = "sleep 60", gpus: int = 1) -> None:
        """A pod as it is after our Binding: on the node, with every annotation."""
        await self.lock(name)
        await self.api.registry.create(
            PODS,
            "default",
            {
                "metadata": {
                    "name": name,
                    "annotations": {
                        "hami.io/vgpu-node": "n1",
                        "hami.io/bind-phase": "allocating",
                        "hami.io/bind-time": str(int(time.time())),
                        TO_ALLOCATE: allocation,
                        "hami.io/vgpu-devices-allocated": allocation,
                    },
                },
                "spec": {
                    "nodeName": "n1",
                    "restartPolicy": "Never",
                    "containers": [
                        {
                            "name": "main",
                            "image": "none",
                            "command": ["sh", "-c", script],
                            "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
                        }
                    ],
                },
            },
        )

    async def until(self, condition: Callable[[], Any]) -> None:
        await until(condition, LIMIT_S, lambda: self.plugin.error("the condition never became true"))


@pytest.fixture
async def node(embedded_api: ApiServer) -> AsyncIterator[Node]:
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        async with Node(embedded_api, Path(directory)).running() as running:
            yield running


async def test_the_cards_are_registered_and_offered(node: Node) -> None:
    assert [card.index for card in node.cards] == [0, 1]
    assert {card.type for card in node.cards} == {"NVIDIA A100-SXM4-40GB"}
    assert all(card.health and card.count == 3 and card.devmem > 40_000 for card in node.cards)


async def test_a_pod_is_allocated_marked_and_unlocked(node: Node) -> None:
    card = node.cards[1].id
    await node.bound("p", f"{card},NVIDIA,3000,30:;")
    await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Running")
    assert node.notes("p")["hami.io/bind-phase"] == "success"
    assert node.notes("p")[TO_ALLOCATE] == ";"
    assert LOCK not in node.annotations
    uid = node.pod("p")["metadata"]["uid"]
    (answer,) = node.kubelet.devices.answers(uid, "main")
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == card
    assert answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    limits = (node.vgpu / f"limits/{uid}_main").read_text()
    assert "CUDA_DEVICE_SM_LIMIT=30\n" in limits
    assert (node.vgpu / f"containers/{uid}_main").is_dir()


async def test_a_mismatch_fails_the_pod_with_its_reason(node: Node) -> None:
    first, second = (card.id for card in node.cards)
    await node.bound("p", f"{first},NVIDIA,1000,0:{second},NVIDIA,1000,0:;")
    await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Failed")
    assert dig(node.pod("p"), "status", "reason") == "UnexpectedAdmissionError"
    assert "device number not matched" in node.notes("p")["hami.io/allocate-error"]
    assert node.notes("p")["hami.io/bind-phase"] == "failed"
    await node.until(lambda: LOCK not in node.annotations)
    await node.until(
        lambda: any(event.get("reason") == "AllocateFailed" for event in node.api.store.list(EVENTS))
    )


async def test_a_restarted_kubelet_gets_the_plugin_back(node: Node) -> None:
    await node.kubelet.restart()
    await node.until(lambda: node.allocatable == "6")
    await node.bound("p", f"{node.cards[0].id},NVIDIA,1000,0:;")
    await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Running")


async def test_limits_files_are_back_after_a_crash_of_the_plugin(node: Node) -> None:
    await node.bound("p", f"{node.cards[0].id},NVIDIA,1000,20:;")
    await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Running")
    file = node.vgpu / f"limits/{node.pod('p')['metadata']['uid']}_main"
    content = file.read_text()
    file.unlink()
    await node.plugin.kill()
    await node.until(file.exists)
    assert file.read_text() == content


async def test_sighup_reads_the_node_config_again(node: Node) -> None:
    node.node_config.write_bytes(msgspec.json.encode({"nodeconfig": [{"name": "n1", "devicesplitcount": 5}]}))
    os.kill(node.plugin.pid, signal.SIGHUP)
    await node.until(lambda: node.allocatable == "10")


async def test_an_xid_takes_the_card_out_of_service(node: Node) -> None:
    tool = NATIVE / "fakegpu/fakegpud"
    assert tool.exists(), "the simulated driver is incomplete: run `make native`"
    env = {"FAKEGPU_STATE": str(node.directory / "cards")}
    process = await asyncio.create_subprocess_exec(str(tool), "xid", "1", "79", env=env)
    assert await process.wait() == 0
    await node.until(lambda: node.allocatable == "3")
    await node.until(lambda: [card.health for card in node.cards] == [True, False])


async def test_a_lost_card_does_not_take_its_neighbour_along(node: Node) -> None:
    env = {"FAKEGPU_STATE": str(node.directory / "cards")}
    tool = str(NATIVE / "fakegpu/fakegpud")
    process = await asyncio.create_subprocess_exec(tool, "set", "0", "lost", "1", env=env)
    assert await process.wait() == 0
    os.kill(node.plugin.pid, signal.SIGHUP)
    await node.until(lambda: [card.health for card in node.cards] == [False, True])
    await node.until(lambda: node.allocatable == "3")


class NodeWithBroker(Node):
    """The gate of the host PID broker is on."""

    environment: ClassVar[dict[str, str]] = {"LIBVGPU_HOSTPID_BROKER": "1"}


async def test_the_broker_is_in_the_answer_and_its_end_ends_the_plugin(embedded_api: ApiServer) -> None:
    """Killed, it takes the plugin with it; both come back, and the pod runs on with the same mount."""
    with tempfile.TemporaryDirectory(prefix="hami-") as directory:
        async with NodeWithBroker(embedded_api, Path(directory)).running() as node:
            path = f"{node.root}/var/run/hami/hostpid/broker.sock"
            assert await asked(path) == os.getpid()
            await node.bound("p", f"{node.cards[0].id},NVIDIA,1000,20:;")
            await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Running")
            (answer,) = node.kubelet.devices.answers(node.pod("p")["metadata"]["uid"], "main")
            assert answer.envs["LIBVGPU_HOSTPID_BROKER"] == "1"
            names = [mount.container_path for mount in answer.mounts]
            assert names[names.index("/tmp/vgpulock") + 1] == "/tmp/vgpulock/hostpid"
            started = await node.plugin.wait_event("hostpid.started", LIMIT_S)
            os.kill(started["child"], signal.SIGKILL)
            failed = await node.plugin.wait_event("plugin.failed", LIMIT_S)
            assert failed["reason"] == "host PID broker: stopped unexpectedly by signal SIGKILL"
            await node.until(lambda: node.plugin.starts == 2)
            again = await node.plugin.wait_event("hostpid.started", LIMIT_S)
            assert again["child"] != started["child"]
            assert await asked(path) == os.getpid()
            assert dig(node.pod("p"), "status", "phase") == "Running"
            await node.until(lambda: node.allocatable == "6")


async def asked(path: str) -> int:
    """Our PID as the broker sees it; on a busy machine an answer may be too late."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return await asyncio.to_thread(ask, path, LIMIT_S)
        except (OSError, BrokerProtocolError):
            if time.monotonic() > deadline:
                raise


def region(uuid: str, used: int, limit: int) -> bytes:
    data = bytearray(layout.V1.SIZE + 1)
    layout.V1.magic.write(data, layout.MAGIC)
    layout.V1.major.write(data, 1)
    layout.V1.minor.write(data, 2)
    layout.V1.device_count.write(data, 1)
    data[layout.V1.uuid.offset : layout.V1.uuid.offset + len(uuid)] = uuid.encode()
    layout.V1.limit.write(data, limit)
    layout.V1.proc_num.write(data, 1)
    layout.V1Slot.status.write(data, layout.SLOT_RUNNING, layout.V1.procs.base(0))
    layout.V1Slot.used_total.write(data, used, layout.V1.procs.base(0))
    return bytes(data)


async def test_the_monitor_shows_limit_and_use_of_a_container(node: Node) -> None:
    monitor = node.component(
        "monitor",
        "/usr/local/vgpu",
        *("--metrics-bind-address", "127.0.0.1:0"),
        *("--host-root", str(node.root)),
        *("-v=4", "--legacy-metrics=true", "--logtostderr"),
    )
    await monitor.start()
    try:
        line = await monitor.wait_event("server.listening", LIMIT_S)
        url = f"http://127.0.0.1:{line['port']}/metrics"
        card = node.cards[0].id
        await node.bound("p", f"{card},NVIDIA,3000,30:;")
        labels = {"namespace": "default", "pod": "p", "container": "main", "device_uuid": card}
        await wait_for(url, "hami_vgpu_memory_limit_bytes", labels, 3000 << 20)
        await wait_for(url, "hami_vgpu_hook_active", labels, 0)
        await node.until(lambda: dig(node.pod("p"), "status", "phase") == "Running")
        uid = node.pod("p")["metadata"]["uid"]
        (node.vgpu / f"containers/{uid}_main/x.cache").write_bytes(region(card, 1 << 30, 3000 << 20))
        await wait_for(url, "hami_vgpu_memory_used_bytes", labels, 1 << 30)
        await wait_for(url, "hami_vgpu_hook_active", labels, 1)
        await wait_for(url, "hami_host_gpu_memory_total_bytes", {"device_uuid": card}, None)
        await wait_for(
            url, "vGPU_device_memory_usage_in_bytes", {"podname": "p", "deviceuuid": card}, 1 << 30
        )
        await node.api.registry.delete(PODS, "default", "p", DeleteOptions(grace_s=0))
        await wait_for(url, "hami_vgpu_memory_used_bytes", labels, False)
    finally:
        await monitor.stop()


async def wait_for(url: str, name: str, labels: dict[str, str], expected: float | bool | None) -> None:
    """Until the series has the value (None: any value, False: it does not exist)."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        found = await asyncio.to_thread(_series, url, name, labels)
        if (found is None) if expected is False else (found is not None and expected in (None, found)):
            return
        assert time.monotonic() < deadline, f"{name} {labels} is {found}, expected {expected}"
        await asyncio.sleep(0.1)


def _series(url: str, name: str, labels: dict[str, str]) -> float | None:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
    return None
