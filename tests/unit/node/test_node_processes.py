"""Device plugin and monitor put together as their commands do, against an embedded API server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from node_cards import U1

from hami.cli import device_plugin, monitor
from hami.kube.client import Client
from hami.kube.config import load_config
from hami.kube.errors import Conflict, NotFound
from hami.kube.events import EventRecorder
from hami.kube.informer import Informer
from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.cluster import KubeCluster
from hami.node.metrics_server import listen
from hami.node.monitor import process as monitor_process
from hami.node.monitor.service import Monitor
from hami.node.plugin import process as plugin_process
from hami.node.plugin.library import LibraryError, install
from hami.protocol import region_layout as layout
from hami.protocol.errors import HamiError

LONG = "gpu-node-" + "x" * 61
Make = Callable[..., Any]
Until = Callable[..., Awaitable[None]]


@pytest.fixture
async def api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    server.write_kubeconfig(folder / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
    for name in ("CONFIG_FILE", "HAMI_RESYNC_INTERVAL", "LIBVGPU_HOSTPID_BROKER"):
        monkeypatch.delenv(name, raising=False)
    try:
        yield server
    finally:
        await server.stop()


async def add_node(api: ApiServer, name: str) -> None:
    await api.registry.create(NODES, "", {"metadata": {"name": name}})


async def add_pod(api: ApiServer, name: str, node: str, annotations: dict[str, str] | None = None) -> str:
    """A pod bound to a node, without any label; its UID."""
    await api.registry.create(
        PODS,
        "default",
        {
            "metadata": {"name": name, "annotations": annotations or {}},
            "spec": {"nodeName": node, "containers": [{"name": "web", "image": "x"}]},
        },
    )
    return str(api.store.get(PODS, "default", name)["metadata"]["uid"])


def events(api: ApiServer) -> list[str]:
    return [str(item.get("reason")) for item in api.store.list(EVENTS)]


# ---- monitor -----------------------------------------------------------------------------------------------


class RunningMonitor:
    """The monitor of a command line, in this process, on a free port."""

    def __init__(self, folder: Path, node: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
        self.base = folder / "vgpu"
        (self.base / "containers").mkdir(parents=True)
        monkeypatch.setenv("HOOK_PATH", str(self.base))
        monkeypatch.setenv("NODE_NAME", node)
        context = monitor.command.make_context("monitor", ["--metrics-bind-address=127.0.0.1:0", *flags])
        config = monitor._process_config(context.params)
        self.config = replace(config, nvml_library=str(folder / "no-such-library.so"))
        self.listeners: list[socket.socket] = []
        monkeypatch.setattr(monitor_process, "listen", self.listen)
        self.task: asyncio.Task[None] | None = None

    def listen(self, address: str) -> socket.socket:
        self.listeners.append(listen(address))
        return self.listeners[-1]

    async def __aenter__(self) -> RunningMonitor:
        self.task = asyncio.create_task(monitor_process.run_monitor(self.config))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        assert self.task is not None
        if kind is not None:
            self.task.cancel()
            await asyncio.wait({self.task})
            return
        if not self.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await self.task

    async def get(self, path: str) -> str:
        if not self.listeners:
            return ""
        host, port = self.listeners[0].getsockname()[:2]

        def fetch() -> str:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://{host}:{port}{path}") as answer,
            ):
                return str(answer.read().decode())
            return ""

        return await asyncio.to_thread(fetch)

    def region(self, name: str) -> None:
        data = bytearray(layout.V1.SIZE + 1)
        layout.V1.magic.write(data, layout.MAGIC)
        layout.V1.major.write(data, 1)
        layout.V1.device_count.write(data, 1)
        data[layout.V1.uuid.offset : layout.V1.uuid.offset + len(U1)] = U1.encode()
        layout.V1.limit.write(data, 5 << 30)
        (self.base / "containers" / name).mkdir()
        (self.base / "containers" / name / "k.cache").write_bytes(data)


async def ready(running: RunningMonitor) -> None:
    async with asyncio.timeout(60):
        while await running.get("/readyz") != "ok\n":  # noqa: ASYNC110 - asks the monitor
            await asyncio.sleep(0.01)


async def test_4_61_the_command_line_of_the_chart_on_a_node_with_a_long_name(
    api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_node(api, LONG)
    uid = await add_pod(api, "p", LONG)
    other = await add_pod(api, "q", "elsewhere")
    async with RunningMonitor(folder, LONG, monkeypatch, "-v=4", "--legacy-metrics=true") as running:
        running.region(f"{uid}_web")
        running.region(f"{other}_web")
        await ready(running)
        text = await running.get("/metrics")
    lines = [line for line in text.splitlines() if line.startswith("hami_vgpu_memory_limit_bytes{")]
    assert len(lines) == 1
    assert 'pod="p"' in lines[0]
    assert "vGPU_device_memory_limit_in_bytes{" in text
    assert "hami_monitor_nvml_up{" in text
    assert "hami_build_info{" in text


async def test_the_confirming_list_is_read_from_the_api_server(api: ApiServer, folder: Path) -> None:
    uid = await add_pod(api, "p", "n1")
    await add_pod(api, "q", "elsewhere")
    async with Client(load_config()) as client:
        watch = monitor_process.PodWatch(client, "n1")
        assert await watch.list_uids() == {uid}
        assert not watch.synced
        running = asyncio.create_task(watch.informer.run())
        await watch.informer.synced.wait()
        assert set(watch.by_uid()) == {uid}
        late = await add_pod(api, "r", "n1")
        async with asyncio.timeout(60):
            while late not in watch.by_uid():  # noqa: ASYNC110 - the watch tells nobody
                await asyncio.sleep(0.01)
        assert set(watch.by_uid()) == {uid, late}
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize(("owner", "work"), [(Monitor, "tick"), (Informer, "run")], ids=["tick", "watch"])
async def test_what_dies_ends_the_monitor_with_its_error(
    api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch, owner: type, work: str
) -> None:
    async def die(self: object) -> None:
        raise ArithmeticError("a bug")

    monkeypatch.setattr(owner, work, die)
    running = RunningMonitor(folder, "n1", monkeypatch)
    with pytest.raises(ArithmeticError, match="a bug"):
        await monitor_process.run_monitor(running.config)


# ---- device plugin -----------------------------------------------------------------------------------------


class Kubelet(rpc.RegistrationServicer):  # type: ignore[misc]
    """Takes registrations; looks at the host at that moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "var/lib/kubelet/device-plugins"
        self.folder.mkdir(parents=True)
        self.requests: list[Any] = []
        self.lock_parent: int | None = None
        self._server = grpc.aio.server()
        rpc.add_RegistrationServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.folder}/kubelet.sock")

    async def Register(self, request: Any, context: Any) -> Any:
        self.lock_parent = stat.S_IMODE((self.root / "tmp/vgpulock").stat().st_mode)
        self.requests.append(request)
        return pb.Empty()

    async def __aenter__(self) -> Kubelet:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(None)


def plugin_config(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> plugin_process.ProcessConfig:
    (folder / "device-config.yaml").write_text("nvidia:\n  deviceSplitCount: 3\n")
    monkeypatch.setenv("NODE_NAME", "n1")
    monkeypatch.setenv("HOOK_PATH", "/usr/local")
    arguments = [
        f"--config-file={folder / 'device-config.yaml'}",
        f"--node-config-file={folder / 'config.json'}",
        f"--host-root={folder / 'root'}",
        *flags,
    ]
    context = device_plugin.command.make_context("device-plugin", arguments)
    config: plugin_process.ProcessConfig = device_plugin._process_config(context.params)
    return config


async def test_d20_after_a_reboot_everything_is_back_before_kubelet_hears_of_us(
    api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch, make_nvml: Make, until: Until
) -> None:
    """Nothing of what lies on a tmpfs is there; SIGHUP and SIGTERM do what they say."""
    await add_node(api, "n1")
    config = plugin_config(folder, monkeypatch)
    nvml = make_nvml([(U1, "NVIDIA A100", 40 << 30)])
    monkeypatch.setattr(plugin_process, "NvmlSession", lambda library: nvml)
    async with Kubelet(folder / "root") as kubelet:
        running = asyncio.create_task(plugin_process.run_device_plugin(config))
        await until(lambda: kubelet.requests)
        assert kubelet.lock_parent == 0o1777

        def registered() -> str:
            notes = api.store.get(NODES, "", "n1")["metadata"].get("annotations") or {}
            return str(notes.get("hami.io/node-nvidia-register", ""))

        await until(lambda: U1 in registered())
        (folder / "config.json").write_text('{"nodeconfig":[{"name":"n1","devicesplitcount":5}]}')
        assert not running.done()
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: '"count":5' in registered())
        (folder / "config.json").write_text("{")
        assert not running.done()
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: "HAMiNodeConfigInvalid" in events(api))
        assert not running.done()
        os.kill(os.getpid(), signal.SIGTERM)
        await running
    assert len({request.endpoint for request in kubelet.requests}) == 1
    assert not (kubelet.folder / kubelet.requests[0].endpoint).exists()


async def test_an_edited_config_map_is_obeyed_without_a_restart(
    api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch, make_nvml: Make, until: Until
) -> None:
    """Operations case 14: nobody sends a signal or deletes a pod."""
    await add_node(api, "n1")
    config = plugin_config(folder, monkeypatch)
    nvml = make_nvml([(U1, "NVIDIA A100", 40 << 30)])
    monkeypatch.setattr(plugin_process, "NvmlSession", lambda library: nvml)
    monkeypatch.setattr(plugin_process, "FILES_EVERY_S", 0.05)

    def note(key: str) -> str:
        return str((api.store.get(NODES, "", "n1")["metadata"].get("annotations") or {}).get(key, ""))

    async with Kubelet(folder / "root") as kubelet:
        running = asyncio.create_task(plugin_process.run_device_plugin(config))
        await until(lambda: U1 in note("hami.io/node-nvidia-register"))
        (folder / "config.json").write_text('{"nodeconfig":[{"name":"n1","devicesplitcount":20}]}')
        await until(lambda: '"count":20' in note("hami.io/node-nvidia-register"))
        await until(lambda: len(note("hami.io/node-config-applied")) == 16)
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})
    assert len(kubelet.requests) == 2


async def test_d21_the_plugin_does_not_start_with_a_changed_library(
    api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "libvgpu.so"
    source.write_bytes(b"library")
    config = plugin_config(folder, monkeypatch, f"--library={source}")
    with pytest.raises(LibraryError, match="missing"):
        await plugin_process.run_device_plugin(config)
    placed = install(source, config.options.paths)
    (folder / "root" / placed.library_candidates[0]).write_bytes(b"librarY")
    with pytest.raises(LibraryError, match="SHA-256"):
        await plugin_process.run_device_plugin(config)
    source.unlink()
    with pytest.raises(LibraryError, match="cannot read"):
        await plugin_process.run_device_plugin(config)


async def test_a_good_library_is_mounted_from_where_it_was_found(
    api: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder / "libvgpu.so"
    source.write_bytes(b"library")
    config = plugin_config(folder, monkeypatch, f"--library={source}")
    install(source, config.options.paths)
    source.write_bytes(b"another build")
    placed = install(source, config.options.paths)
    verified = plugin_process._verified(config)
    assert verified.options.paths.library_version == placed.library_version
    assert placed.library_version.startswith(config.options.paths.version)


# ---- the API server as the node sees it --------------------------------------------------------------------


async def test_what_the_node_reads_and_writes(api: ApiServer, until: Until) -> None:
    await add_node(api, "n1")
    uid = await add_pod(api, "p", "n1", {"a": "1", "b": "2"})
    await add_pod(api, "q", "elsewhere")
    async with Client(load_config()) as client:
        recorder = EventRecorder(client, "test", "n1")
        sending = asyncio.create_task(recorder.run())
        cluster = KubeCluster(client, recorder, "n1")
        assert [pod.name for pod in await cluster.pods()] == ["p"]
        pod = await cluster.pod("default", "p")
        assert pod.uid == uid
        await cluster.annotate_pod(pod, {"a": None, "c": "3"})
        assert (await cluster.pod("default", "p")).annotations == {"b": "2", "c": "3"}
        before = (await cluster.node()).resource_version
        await cluster.annotate_node({"x": "1"})
        with pytest.raises(Conflict):
            await cluster.annotate_node({"x": "2"}, before)
        assert (await cluster.node()).annotations["x"] == "1"
        with pytest.raises(NotFound):
            await cluster.pod("default", "absent")
        cluster.pod_event(pod, "Warning", "OnPod", "text")
        cluster.node_event("Warning", "OnNode", "text")
        await until(lambda: {"OnPod", "OnNode"} <= set(events(api)))
        sending.cancel()
        await asyncio.wait({sending})


async def test_a_pod_of_the_same_name_is_not_annotated(api: ApiServer) -> None:
    await add_pod(api, "p", "n1")
    async with Client(load_config()) as client:
        cluster = KubeCluster(client, EventRecorder(client, "test", "n1"), "n1")
        old = await cluster.pod("default", "p")
        api.store.delete(PODS, api.store.get(PODS, "default", "p"))
        await add_pod(api, "p", "n1")
        with pytest.raises(HamiError):
            await cluster.annotate_pod(old, {"a": "1"})
        assert "a" not in (await cluster.pod("default", "p")).annotations
