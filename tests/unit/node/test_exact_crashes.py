"""Mode exact, killed between any two steps, and what kubelet sees of it over gRPC."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from exact_world import ALLOCATED, GPU, TO_ALLOCATE, World, gpus
from node_cards import U1, U2

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.cluster import Cluster
from hami.node.config import Settings
from hami.node.exact.cdi import device_name
from hami.node.exact.documents import Documents
from hami.node.exact.server import ExactService
from hami.node.lock import LockReleaser
from hami.node.paths import HostPaths, pod_resources_socket
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.board import Board
from hami.node.plugin.cards import CardReader
from hami.node.plugin.registration import Registrar
from hami.node.plugin.workspace import Workspace

Make = Callable[..., Any]


class Killed(BaseException):
    """The process ends here."""


STEPS = [
    (Workspace, "prepare_lock_parent"),
    (Workspace, "find_sources"),
    (Workspace, "ensure_cache_directory"),
    (Workspace, "write_limits"),
    (Workspace, "check_limits"),
    (Workspace, "write_checkpoint"),
    (Documents, "write"),
]


@pytest.fixture
def world(cluster: Any, host: HostPaths, make_pod: Make) -> World:
    """Pod ``p`` with two containers on different cards."""
    made = World(cluster, host)
    cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;{U2},NVIDIA,4000,40:;", containers=("app", "side")))
    made.held[("p", "app")] = gpus(0)
    made.held[("p", "side")] = gpus(1)
    return made


@pytest.mark.parametrize("after", [pytest.param(False, id="before"), pytest.param(True, id="after")])
@pytest.mark.parametrize(("owner", "step"), [pytest.param(*step, id=step[1]) for step in STEPS])
async def test_x4_a_kill_at_any_step_leaves_nothing_to_undo(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: type, step: str, after: bool
) -> None:
    whole = getattr(owner, step)

    def fatal(self: Any, *arguments: Any, **named: Any) -> Any:
        if after:
            whole(self, *arguments, **named)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, fatal)
        with pytest.raises(Killed):
            await world.started("p")
    world.plugin = world.start()
    await world.plugin.restore(True)
    first, second = await world.started("p"), await world.started("p", "side")
    await world.plugin.mark_served()
    assert (first["CUDA_DEVICE_MEMORY_LIMIT_0"], first["HAMI_DEVICE_UUIDS"]) == ("3000m", U1)
    assert (second["CUDA_DEVICE_MEMORY_LIMIT_0"], second["HAMI_DEVICE_UUIDS"]) == ("4000m", U2)
    assert world.cluster.patches == [("p", {"hami.io/bind-phase": "success", TO_ALLOCATE: ";;"})]
    assert sorted(path.name for path in world.directory.iterdir()) == sorted(
        world.path(gpus(index)).name for index in (0, 1)
    )
    assert [entry["container"] for entry in world.checkpoint()["entries"]] == ["app", "side"]


async def test_x4_killed_after_the_document_and_before_the_mark_the_mark_is_made_up_for(
    world: World,
) -> None:
    def killed(_notes: Any) -> None:
        raise Killed

    await world.started("p", "side")
    world.cluster.fail_pod_patches = killed
    await world.started("p")
    assert world.cluster.patches == []
    world.cluster.fail_pod_patches = lambda _notes: None
    world.plugin = world.start()
    await world.plugin.restore(True)
    await world.plugin.mark_served()
    assert world.cluster.notes("p")["hami.io/bind-phase"] == "success"
    assert world.cluster.notes("p")[ALLOCATED] == f"{U1},NVIDIA,3000,30:;{U2},NVIDIA,4000,40:;"


async def test_the_loop_follows_marks_and_collects(world: World) -> None:
    await world.started("p")
    await world.started("p", "side")
    world.cluster.notes("p")["hami.io/bind-phase"] = "allocating"
    world.held.clear()
    world.now += 10_000_000_000
    loop = asyncio.create_task(world.plugin.run(GPU))
    try:
        async with asyncio.timeout(20):
            while world.cluster.notes("p")["hami.io/bind-phase"] != "success":  # noqa: ASYNC110 - an annotation
                await asyncio.sleep(0.005)
    finally:
        loop.cancel()
        await asyncio.wait({loop})
    assert list(world.directory.iterdir()) == []


# --- over gRPC ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def kubelet(world: World) -> AsyncIterator[Any]:
    """A stub on the service of ``world``'s plugin."""
    cluster: Cluster = world.cluster
    allocator = Allocator(cluster, Workspace(world.host), world.host, LockReleaser(cluster))
    board = Board()
    board.show(world.cards)
    service = ExactService(world.plugin, allocator, board, world.settings, world.delivery)
    with tempfile.TemporaryDirectory() as folder:
        server = grpc.aio.server()
        rpc.add_DevicePluginServicer_to_server(service, server)
        server.add_insecure_port(f"unix:{folder}/plugin.sock")
        await server.start()
        options = (("grpc.default_authority", "localhost"),)
        try:
            async with grpc.aio.insecure_channel(f"unix:{folder}/plugin.sock", options=options) as channel:
                yield rpc.DevicePluginStub(channel)
        finally:
            await server.stop(None)


async def test_kubelet_is_told_to_call_before_each_start_and_gets_a_name_for_its_ids(world: World) -> None:
    async with kubelet(world) as stub:
        assert (await stub.GetDevicePluginOptions(pb.Empty())).pre_start_required
        requests = [pb.ContainerAllocateRequest(devices_ids=ids) for ids in (["b", "a"], ["c"])]
        answer = await stub.Allocate(pb.AllocateRequest(container_requests=requests))
    assert [[device.name for device in one.cdi_devices] for one in answer.container_responses] == [
        [f"hami.io/vgpu={device_name(['a', 'b'])}"],
        [f"hami.io/vgpu={device_name(['c'])}"],
    ]
    assert not any(one.envs or one.mounts or one.devices for one in answer.container_responses)
    assert world.cluster.patches == []
    assert not world.directory.exists()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_kubelet_sees_why_a_container_does_not_start(world: World) -> None:
    async with kubelet(world) as stub:
        await stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=gpus(0)))
        assert world.path(gpus(0)).exists()
        code, text = await refused(stub.PreStartContainer(pb.PreStartContainerRequest(devices_ids=["x"])))
        assert (code, text) == (
            grpc.StatusCode.UNAVAILABLE,
            "kubelet lists no container with these devices",
        )
        world.cluster.notes("p").clear()
        request = pb.PreStartContainerRequest(devices_ids=gpus(1))
        code, text = await refused(stub.PreStartContainer(request))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert text == "pod team-a/p has no device allocation; it must be scheduled by hami-scheduler"
        code, _ = await refused(stub.PreStartContainer(pb.PreStartContainerRequest()))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        nothing = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest()])
        code, _ = await refused(stub.Allocate(nothing))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
    await world.plugin.drain(30)


async def test_the_node_says_exact_so_that_no_lock_is_taken(cluster: Any, make_nvml: Make) -> None:
    cluster.node_annotations["hami.io/allocation-mode"] = "lock"
    board = Board()
    reader = CardReader(make_nvml([(U1, "NVIDIA A", 1 << 30)]))
    await Registrar(cluster, reader, board, Settings(), mode="exact").once()
    assert cluster.node_annotations["hami.io/allocation-mode"] == "exact"


def test_the_sockets_of_kubelet_lie_beside_each_other() -> None:
    found = pod_resources_socket("/var/lib/kubelet/device-plugins/kubelet.sock")
    assert found == "/var/lib/kubelet/pod-resources/kubelet.sock"
