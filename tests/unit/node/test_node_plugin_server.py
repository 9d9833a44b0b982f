"""The plugin as kubelet sees it: real gRPC over Unix sockets, a small kubelet, a fake API server and NVML."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from node_cards import U1, U2
from plugin_world import Node

from hami.kube.errors import ServerError, TransportError
from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.config import Settings
from hami.node.errors import NodeError, NvmlError
from hami.node.exact.errors import PodResourcesError
from hami.node.nvml import XidEvent
from hami.node.plugin import service
from hami.node.plugin.answer import Delivery
from hami.node.plugin.board import Board
from hami.node.plugin.cards import CardReader
from hami.node.plugin.health import HealthWatcher
from hami.node.plugin.health_rules import XidRules
from hami.node.plugin.registration import Registrar
from hami.node.plugin.server import PluginServer, PluginService, RegisterError

GIB = 1 << 30
TWO = [(U1, "NVIDIA A", GIB), (U2, "NVIDIA A", GIB)]
Make = Callable[..., Any]
Until = Callable[..., Awaitable[None]]


@pytest.fixture
def node(cluster: Any, make_nvml: Make, folder: Path) -> Node:
    return Node(cluster, make_nvml(TWO), folder)


async def first_list(stub: Any) -> Any:
    stream = stub.ListAndWatch(pb.Empty())
    try:
        return await stream.read()
    finally:
        stream.cancel()


async def test_d6_the_plugin_registers_and_answers(node: Node, make_pod: Make, until: Until) -> None:
    node.settings = Settings(split_count=3, resource_name="acme.io/gpu")
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        request = node.kubelet.registered[0]
        assert (request.version, request.endpoint, request.resource_name) == (
            "v1beta1",
            "nvidia-gpu.sock",
            "acme.io/gpu",
        )
        async with node.kubelet.plugin() as stub:
            options = await stub.GetDevicePluginOptions(pb.Empty())
            assert options == request.options
            assert not options.pre_start_required
            devices = (await first_list(stub)).devices
            assert [device.ID for device in devices] == [f"{u}-{i}" for u in (U1, U2) for i in range(3)]
            assert {device.health for device in devices} == {"Healthy"}
            call = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-2"])]
            )
            (answer,) = (await stub.Allocate(call)).container_responses
            assert answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
            assert [mount.container_path for mount in answer.mounts] == [
                "/usr/local/vgpu/libvgpu.so",
                "/usr/local/vgpu",
                "/tmp/vgpulock",
                "/etc/ld.so.preload",
                "/overrideEnv",
            ]
            await stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=[f"{U1}-2"]))
    assert not (node.kubelet.folder / "nvidia-gpu.sock").exists()


async def test_l11_an_allocation_without_a_pod_is_a_grpc_error(node: Node, until: Until) -> None:
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            call = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-2"])]
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Allocate(call)
            assert "no binding pod found on node n1" in (caught.value.details() or "")


async def test_preferred_allocation_is_offered_when_switched_on(
    node: Node, make_pod: Make, until: Until
) -> None:
    node.settings = Settings(split_count=1, preferred_allocation=True)
    node.cluster.add(make_pod("p", f"{U2},NVIDIA,1,1:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        assert node.kubelet.registered[0].options.get_preferred_allocation_available
        async with node.kubelet.plugin() as stub:
            wish = pb.ContainerPreferredAllocationRequest(
                available_deviceIDs=[f"{U1}-0", f"{U2}-0"], allocation_size=1
            )
            answer = await stub.GetPreferredAllocation(
                pb.PreferredAllocationRequest(container_requests=[wish])
            )
            assert [list(item.deviceIDs) for item in answer.container_responses] == [[f"{U2}-0"]]


async def test_d7_a_restarted_kubelet_gets_one_new_registration(node: Node, until: Until) -> None:
    async with node:
        await until(lambda: len(node.kubelet.registered) == 1)
        await node.kubelet.stop()
        await node.kubelet.start()
        await until(lambda: len(node.kubelet.registered) == 2)
        async with node.kubelet.plugin() as stub:
            assert len((await first_list(stub)).devices) == 6
        assert node.plugin.rounds == 2


async def test_d8_reload_takes_the_new_settings(node: Node, until: Until) -> None:
    async with node:
        await until(lambda: len(node.kubelet.registered) == 1)
        node.settings = Settings(split_count=5)
        node.plugin.reload()
        await until(lambda: len(node.kubelet.registered) == 2)
        async with node.kubelet.plugin() as stub:
            assert len((await first_list(stub)).devices) == 10


async def test_a_reload_waits_for_the_allocation_that_runs(node: Node, make_pod: Make, until: Until) -> None:
    """kubelet does not ask twice: a call that breaks off costs the pod its admission."""
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    asked, go_on = asyncio.Event(), asyncio.Event()
    pods = node.cluster.pods

    async def slow() -> Any:
        asked.set()
        await go_on.wait()
        return await pods()

    async with node:
        await until(lambda: node.kubelet.registered)
        node.cluster.pods = slow
        async with node.kubelet.plugin() as stub:
            call = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-2"])]
            )
            answering = asyncio.ensure_future(stub.Allocate(call))
            await asked.wait()
            node.plugin.reload()
            await asyncio.wait({answering}, timeout=1)
            go_on.set()
            (answer,) = (await answering).container_responses
            assert answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
        await until(lambda: len(node.kubelet.registered) == 2)


async def test_a_reload_ends_the_streams_of_devices_itself(node: Node, until: Until) -> None:
    """A server that stops waits for its streams, and meanwhile kubelet refuses pods that ask for cards."""
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            stream = stub.ListAndWatch(pb.Empty())
            await stream.read()
            node.plugin.reload()
            assert await stream.read() == grpc.aio.EOF
            assert await stream.code() == grpc.StatusCode.OK
        await until(lambda: len(node.kubelet.registered) == 2)


async def test_d9_every_open_stream_gets_a_health_change(node: Node, until: Until) -> None:
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            streams = [stub.ListAndWatch(pb.Empty()) for _ in range(2)]
            for stream in streams:
                await stream.read()
            node.nvml.xids.append(XidEvent(U1, 79))
            for stream in streams:
                devices = (await stream.read()).devices
                sick = {device.ID for device in devices if device.health == "Unhealthy"}
                assert sick == {f"{U1}-{index}" for index in range(3)}
                stream.cancel()
        await until(lambda: any(reason == "HAMiDeviceUnhealthy" for _, reason, _ in node.cluster.events))
        (told,) = [text for _, reason, text in node.cluster.events if reason == "HAMiDeviceUnhealthy"]
        assert told.startswith(f"{U1}: XID 79; ")
        assert told.endswith("then restart the device plugin's pod")
        await until(
            lambda: node.cluster.node_annotations["hami.io/node-nvidia-register"].count("health") == 1
        )


async def test_d4_without_an_offered_card_the_plugin_stays_alive(node: Node, until: Until) -> None:
    node.settings = Settings(excluded_indexes=frozenset({0, 1}))
    async with node:
        await until(lambda: node.cluster.node_annotations.get("hami.io/node-nvidia-register") == "[]")
        assert node.kubelet.registered == []


async def test_nvml_that_is_missing_at_start_ends_the_plugin(node: Node) -> None:
    node.nvml.list_error = NvmlError("cannot initialise NVML", 12)
    async with node:
        assert node.task is not None
        with pytest.raises(NvmlError):
            await asyncio.wait_for(asyncio.shield(node.task), 20)


async def test_nvml_that_fails_later_is_tried_again(node: Node, until: Until) -> None:
    async with node:
        await until(lambda: len(node.kubelet.registered) == 1)
        # Only then has the first start, in which NVML must not fail, come to its end.
        await until(lambda: "hami.io/node-nvidia-register" in node.cluster.node_annotations)
        node.nvml.list_error = NvmlError("cannot initialise NVML", 12)
        node.plugin.reload()
        await until(lambda: node.plugin.rounds >= 3)
        node.nvml.list_error = None
        await until(lambda: len(node.kubelet.registered) == 2)


async def test_a_loop_that_dies_makes_the_plugin_start_again(
    node: Node, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Registrar) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(Registrar, "once", broken)
    async with node:
        await until(lambda: node.plugin.rounds >= 2)
        monkeypatch.undo()
        await until(lambda: "hami.io/node-nvidia-register" in node.cluster.node_annotations)


async def test_an_api_server_that_is_down_at_start_is_waited_for(node: Node, until: Until) -> None:
    node.cluster.fail_reads = [TransportError("refused"), ServerError(503, "", "starting")]
    async with node:
        await until(lambda: node.kubelet.registered)
        assert node.cluster.fail_reads == []


async def test_a_start_that_waits_for_kubelets_lists_is_tried_again(
    node: Node, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_RESTORE_BACKOFF_S", (0.01, 0.01))
    answers: list[str | PodResourcesError] = [PodResourcesError("does not answer"), "lock"]

    class Choice:
        async def choose(self) -> str:
            answer = answers.pop(0)
            if isinstance(answer, PodResourcesError):
                raise answer
            return answer

    node.plugin._exact_side = service.ExactSide(Choice(), None)  # type: ignore[arg-type]
    async with node:
        await until(lambda: node.kubelet.registered)
    assert answers == []


async def test_d20_an_unsafe_lock_parent_is_reported_and_the_plugin_runs(
    node: Node, folder: Path, until: Until
) -> None:
    (folder / "tmp").mkdir()
    (folder / "tmp/vgpulock").write_text("planted")
    async with node:
        await until(lambda: node.kubelet.registered)
    assert "HAMiLockParentUnsafe" in [event[1] for event in node.cluster.events]


async def test_a_file_in_place_of_our_socket_is_not_removed(node: Node, until: Until) -> None:
    planted = node.kubelet.folder / "nvidia-gpu.sock"
    planted.mkdir()
    async with node:
        await until(lambda: node.plugin.rounds >= 2)
        assert planted.is_dir()
        planted.rmdir()
        await until(lambda: node.kubelet.registered)


async def test_l23_device_nodes_are_answered_when_asked_for(node: Node, make_pod: Make, until: Until) -> None:
    dev = node.root / "dev"
    dev.mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        (dev / name).touch()
    node.plugin._options = replace(node.plugin._options, pass_device_specs=True, dev_root="/driver/")
    node.settings = Settings(split_count=1, numa_topology=True)
    node.cluster.add(make_pod("p", f"{U2},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            call = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-0"])]
            )
            (answer,) = (await stub.Allocate(call)).container_responses
            devices = (await first_list(stub)).devices
    names = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia1"]
    assert [item.container_path for item in answer.devices] == [f"/dev/{name}" for name in names]
    assert [item.host_path for item in answer.devices] == [f"/driver/dev/{name}" for name in names]
    assert {item.permissions for item in answer.devices} == {"rw"}
    assert [[numa.ID for numa in device.topology.nodes] for device in devices] == [[0], [0]]


async def test_the_runtime_is_told_indexes_where_that_is_chosen(
    node: Node, make_pod: Make, until: Until
) -> None:
    node.plugin._options = replace(node.plugin._options, by_index=True)
    node.cluster.add(make_pod("p", f"{U2},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            call = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U2}-0"])]
            )
            (answer,) = (await stub.Allocate(call)).container_responses
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "1"


async def test_l7_a_failed_allocation_is_a_grpc_error_with_its_reason(
    node: Node, make_pod: Make, until: Until
) -> None:
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,1,1:{U2},NVIDIA,1,1:;"))
    node.cluster.node_annotations["hami.io/mutex.lock"] = f"{lock_time()},team-a,p"
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            call = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-0"])]
            )
            with pytest.raises(grpc.aio.AioRpcError, match="device number not matched"):
                await stub.Allocate(call)


def lock_time() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_a_kubelet_that_comes_later_is_waited_for(node: Node, until: Until) -> None:
    running = asyncio.create_task(node.plugin.run())
    await until(lambda: node.plugin.rounds == 1)
    await asyncio.sleep(0.3)
    assert not list(node.kubelet.folder.iterdir())
    await node.kubelet.start()
    await until(lambda: node.kubelet.registered)
    node.plugin.stop()
    await running
    await node.kubelet.stop()


async def test_a_plugin_that_waits_for_kubelet_can_be_stopped(node: Node, until: Until) -> None:
    running = asyncio.create_task(node.plugin.run())
    await until(lambda: node.plugin.rounds == 1)
    node.plugin.stop()
    await running
    assert node.kubelet.registered == []


async def test_a_new_kubelet_socket_ends_the_pause_after_a_failed_start(node: Node, until: Until) -> None:
    """kubelet ended just when the plugin registered; its successor must not be left waiting."""
    node.plugin._options = replace(node.plugin._options, retry_s=3600.0)
    node.kubelet.refusals = 1
    async with node:
        await until(lambda: node.kubelet.refusals == 0)
        await node.kubelet.stop()
        await node.kubelet.start()
        await until(lambda: node.kubelet.registered)
        assert node.plugin.rounds == 2


async def test_a_plugin_without_cards_does_not_start_again_by_itself(node: Node, until: Until) -> None:
    node.settings = Settings(excluded_indexes=frozenset({0, 1}))
    async with node:
        await until(lambda: node.cluster.node_annotations.get("hami.io/node-nvidia-register") == "[]")
        await asyncio.sleep(0.6)  # longer than two looks at kubelet's socket
        assert node.plugin.rounds == 1


async def test_a_kubelet_that_refuses_is_asked_again(node: Node, until: Until) -> None:
    node.kubelet.refusals = 2
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            assert len((await first_list(stub)).devices) == 6
        assert node.plugin.rounds == 3


async def test_without_a_kubelet_socket_the_plugin_serves_and_never_registers(
    node: Node, until: Until
) -> None:
    node.plugin._options = replace(node.plugin._options, kubelet_socket="")
    running = asyncio.create_task(node.plugin.run())
    path = node.kubelet.folder / "nvidia-gpu.sock"
    await until(path.is_socket)
    options = (("grpc.default_authority", "localhost"),)
    async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
        assert len((await first_list(rpc.DevicePluginStub(channel))).devices) == 6
    node.plugin.stop()
    await running
    assert node.kubelet.registered == []


async def test_entries_of_pods_that_are_gone_are_forgotten_while_the_plugin_runs(
    node: Node, make_pod: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_PRUNE_S", 0.02)
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    checkpoint = node.root / "usr/local/vgpu/allocations.json"
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            call = pb.AllocateRequest(
                container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U1}-0"])]
            )
            await stub.Allocate(call)
        assert b"uid-p" in checkpoint.read_bytes()
        node.cluster.fail_reads = [ServerError(503, "", "busy")]
        node.cluster.objects.clear()
        await until(lambda: b"uid-p" not in checkpoint.read_bytes())
        assert node.plugin.rounds == 1


async def test_a_folder_in_which_nothing_can_be_served_is_a_typed_error(
    node: Node, make_nvml: Make, tmp_path: Path
) -> None:
    board = Board()
    plugin_service = PluginService(
        node.plugin._allocator, board, Settings(), Delivery(extras={}, device_nodes={})
    )
    server = PluginServer(plugin_service, str(tmp_path / ("x" * 120) / "a.sock"))
    with pytest.raises(NodeError, match="cannot serve"):
        await server.start()
    await server.stop()


async def test_a_kubelet_that_is_gone_is_a_register_error(node: Node, tmp_path: Path) -> None:
    plugin_service = PluginService(
        node.plugin._allocator, Board(), Settings(), Delivery(extras={}, device_nodes={})
    )
    server = PluginServer(plugin_service, str(node.kubelet.folder / "a.sock"))
    await server.start()
    with pytest.raises(RegisterError, match="kubelet refuses"):
        await server.register(str(node.kubelet.folder / "absent.sock"), "nvidia.com/gpu")
    await server.stop()
    await server.stop()


async def test_h9_a_driver_that_cannot_be_watched_makes_all_cards_unhealthy(
    make_nvml: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = make_nvml(TWO)
    calls = []

    def refuse(gpus: Any) -> Any:
        calls.append(gpus)
        raise NvmlError("no events", 3)

    monkeypatch.setattr(nvml, "watch", refuse)
    board = Board()
    board.show(CardReader(nvml).read())
    watcher = HealthWatcher(nvml, nvml.gpus(), XidRules(), board, wait_s=0.01, backoff_s=(0.01, 0.02))
    watcher.start()
    await until(lambda: len(calls) >= 3)
    await watcher.stop()
    assert set(board.faults) == {U1, U2}
    assert set(board.faults.values()) == {"no events"}


async def test_h4_without_checks_nothing_is_watched(make_nvml: Make) -> None:
    nvml = make_nvml(TWO)
    watcher = HealthWatcher(nvml, nvml.gpus(), XidRules(disable_all=True), Board())
    watcher.start()
    await watcher.stop()
    assert nvml.waits == 0


async def test_h10_without_recovery_a_card_stays_unhealthy(node: Node, until: Until) -> None:
    """Also over a reset, after which no further event comes, and a reload; only a new process looks anew."""
    async with node:
        await until(lambda: node.kubelet.registered)
        node.nvml.xids.append(XidEvent(U1, 79))
        await until(lambda: any(reason == "HAMiDeviceUnhealthy" for _, reason, _ in node.cluster.events))
        seen = node.nvml.waits
        await until(lambda: node.nvml.waits > seen + 3)
        async with node.kubelet.plugin() as stub:
            devices = (await first_list(stub)).devices
            assert {device.ID for device in devices if device.health == "Unhealthy"} == {
                f"{U1}-{index}" for index in range(3)
            }
        node.settings = replace(node.settings, split_count=2)
        node.plugin.reload()
        await until(lambda: len(node.kubelet.registered) == 2)
        async with node.kubelet.plugin() as stub:
            devices = (await first_list(stub)).devices
            assert {device.ID for device in devices if device.health == "Unhealthy"} == {f"{U1}-0", f"{U1}-1"}
        told = [reason for _, reason, _ in node.cluster.events if reason == "HAMiDeviceUnhealthy"]
        assert len(told) == 1
