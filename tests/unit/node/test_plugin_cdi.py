"""The CDI strategies in the running plugin, in both allocation modes (device-plugin.md §8, §17)."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cdi_rules import problems
from driver_world import FOLDER, VERSION, install_driver, touch
from exact_world import PLAIN, World, gpus
from node_cards import U1, U2
from plugin_world import Node

from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.cdi import kinds
from hami.node.cdi.edits import CdiError
from hami.node.exact.errors import RefusedError
from hami.node.nvml import GpuIdentity
from hami.node.paths import HostPaths
from hami.node.plugin.answer import CdiDelivery
from hami.node.plugin.delivery import build_delivery, driver_roots
from hami.node.plugin.health_rules import XidRules
from hami.node.plugin.options import PluginOptions
from hami.node.plugin.platform import Platform
from hami.node.plugin.strategies import cdi_delivery

GIB = 1 << 30
TWO = [(U1, "NVIDIA A", GIB), (U2, "NVIDIA A", GIB)]
CARDS = (
    GpuIdentity(0, U1, "NVIDIA A", "00000000:00:00.0", 0),
    GpuIdentity(1, U2, "NVIDIA A", "00000000:01:00.0", 1),
)
Make = Callable[..., Any]
Until = Callable[..., Awaitable[None]]


@pytest.fixture
def node(cluster: Any, make_nvml: Make) -> Iterator[Node]:
    folder = tempfile.mkdtemp(prefix="hc")
    made = Node(cluster, make_nvml(TWO), Path(folder))
    install_driver(Path(folder, "driver-root"))
    yield made
    shutil.rmtree(folder)


def switch_on(node: Node, *strategies: str, **other: Any) -> None:
    cdi = cdi_delivery(strategies, other.pop("prefix", "cdi.k8s.io/"), other.pop("extras", ()))
    options = node.plugin._options
    node.plugin._options = replace(
        options, driver_root="/driver-root", delivery=replace(options.delivery, cdi=cdi, **other)
    )


def documents(node: Node) -> dict[str, Any]:
    found = {}
    for path in (node.root / "var/run/cdi").iterdir():
        content = path.read_bytes()
        assert problems(content) == []
        found[path.name] = json.loads(content)
    return found


async def allocated(node: Node) -> Any:
    async with node.kubelet.plugin() as stub:
        call = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[f"{U2}-0"])])
        return (await stub.Allocate(call)).container_responses[0]


async def test_l21_with_cdi_cri_kubelet_gets_names_that_the_documents_describe(
    node: Node, make_pod: Make, until: Until
) -> None:
    switch_on(node, "cdi-cri")
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        answer = await allocated(node)
    assert [device.name for device in answer.cdi_devices] == [f"k8s.device-plugin.nvidia.com/gpu={U1}"]
    assert dict(answer.annotations) == {}
    assert "NVIDIA_VISIBLE_DEVICES" not in answer.envs
    assert answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert [mount.container_path for mount in answer.mounts][-1] == "/overrideEnv"
    found = documents(node)
    assert list(found) == ["k8s.device-plugin.nvidia.com-gpu.json"]
    assert [device["name"] for device in found.popitem()[1]["devices"]] == [U1, U2]


async def test_l22_with_cdi_annotations_the_runtime_is_told_by_annotation(
    node: Node, make_pod: Make, until: Until
) -> None:
    touch(node.root / "driver-root", "dev/nvidia-fs0")
    switch_on(node, "cdi-annotations", prefix="x.io/", extras=(kinds.GDRCOPY, kinds.GDS))
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        answer = await allocated(node)
    ((key, value),) = answer.annotations.items()
    assert key.startswith("x.io/nvidia-device-plugin_")
    assert value == f"k8s.device-plugin.nvidia.com/gpu={U1},k8s.device-plugin.nvidia.com/gds=all"
    assert list(answer.cdi_devices) == []
    assert sorted(documents(node)) == [
        "k8s.device-plugin.nvidia.com-gds.json",
        "k8s.device-plugin.nvidia.com-gpu.json",
    ]


async def test_a_list_of_strategies_gives_every_way(node: Node, make_pod: Make, until: Until) -> None:
    switch_on(node, "envvar", "cdi-annotations", "cdi-cri")
    node.plugin._options = replace(node.plugin._options, by_index=True)
    node.cluster.add(make_pod("p", f"{U2},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        answer = await allocated(node)
    assert answer.envs["NVIDIA_VISIBLE_DEVICES"] == "1"
    assert [device.name for device in answer.cdi_devices] == ["k8s.device-plugin.nvidia.com/gpu=1"]
    assert list(answer.annotations.values()) == ["k8s.device-plugin.nvidia.com/gpu=1"]
    (document,) = documents(node).values()
    assert [device["name"] for device in document["devices"]] == ["0", "1"]


async def test_a_reload_makes_the_documents_anew(node: Node, until: Until) -> None:
    switch_on(node, "cdi-cri")
    async with node:
        await until(lambda: node.kubelet.registered)
        file = node.root / "var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json"
        (node.root / "var/run/cdi/k8s.device-plugin.nvidia.com-mofed.json").write_text("{}")
        file.write_text("emptied")
        node.plugin.reload()
        await until(lambda: len(node.kubelet.registered) == 2)
    (document,) = documents(node).values()
    assert [device["name"] for device in document["devices"]] == [U1, U2]


async def test_without_a_driver_the_plugin_does_not_start_with_cdi(node: Node) -> None:
    shutil.rmtree(node.root / "driver-root")
    switch_on(node, "cdi-cri")
    async with node:
        assert node.task is not None
        with pytest.raises(CdiError, match="nvidiaDriverRoot"):
            await asyncio.wait_for(asyncio.shield(node.task), 20)
    assert node.kubelet.registered == []


async def test_a_directory_that_cannot_be_written_stops_the_start(node: Node) -> None:
    (node.root / "var/run").mkdir(parents=True)
    (node.root / "var/run/cdi").write_text("a file")
    switch_on(node, "cdi-cri")
    async with node:
        assert node.task is not None
        with pytest.raises(CdiError, match="CDI documents"):
            await asyncio.wait_for(asyncio.shield(node.task), 20)


async def test_a_failure_at_a_reload_is_tried_again(node: Node, until: Until) -> None:
    switch_on(node, "cdi-cri")
    async with node:
        await until(lambda: node.kubelet.registered)
        (node.root / "driver-root").rename(node.root / "away")
        node.plugin.reload()
        await until(lambda: node.plugin.rounds >= 3)
        (node.root / "away").rename(node.root / "driver-root")
        await until(lambda: len(node.kubelet.registered) == 2)


# ---- mode exact --------------------------------------------------------------------------------------------


def exact_delivery(host: HostPaths, *strategies: str) -> Any:
    install_driver(Path(host.root, "driver-root"))
    options = PluginOptions(
        paths=host,
        kubelet_socket="",
        delivery=replace(PLAIN, cdi=cdi_delivery(strategies, "cdi.k8s.io/", ())),
        rules=XidRules(),
        driver_root="/driver-root",
    )
    return build_delivery(options, CARDS)


@pytest.mark.parametrize("strategy", ["cdi-cri", "cdi-annotations"])
async def test_in_mode_exact_a_container_s_own_document_holds_its_cards(
    cluster: Any, host: HostPaths, make_pod: Make, strategy: str
) -> None:
    world = World(cluster, host)
    world.delivery = exact_delivery(host, strategy)
    cluster.add(make_pod("p", f"{U2},NVIDIA,3000,30:;"))
    world.held["p", "app"] = gpus(0)
    env = await world.started("p")
    edits = world.edits(gpus(0))
    assert problems(world.path(gpus(0)).read_bytes()) == []
    assert env["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert (env["HAMI_DEVICE_UUIDS"], env["CUDA_DEVICE_MEMORY_LIMIT_0"]) == (U2, "3000m")
    assert [node["path"] for node in edits["deviceNodes"]] == [
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia1",
    ]
    targets = [mount["containerPath"] for mount in edits["mounts"]]
    assert f"/{FOLDER}/libcuda.so.{VERSION}" in targets
    assert targets[-1] == "/overrideEnv"
    assert [hook["hookName"] for hook in edits["hooks"]] == ["createContainer"] * 2


async def test_in_mode_exact_a_card_without_a_document_is_refused(
    cluster: Any, host: HostPaths, make_pod: Make
) -> None:
    world = World(cluster, host)
    world.delivery = replace(PLAIN, cdi=CdiDelivery(cri=True, only=True))
    cluster.add(make_pod("p", f"{U2},NVIDIA,3000,30:;"))
    world.held["p", "app"] = gpus(0)
    with pytest.raises(RefusedError, match=f"no CDI document describes .*{U2}"):
        await world.pre_start(*gpus(0))
    assert not world.path(gpus(0)).exists()


# ---- roots and platforms -----------------------------------------------------------------------------------


def test_device_nodes_are_looked_for_in_the_driver_s_root_if_it_has_any(host: HostPaths) -> None:
    options = PluginOptions(
        paths=host,
        kubelet_socket="",
        delivery=PLAIN,
        rules=XidRules(),
        driver_root="/driver-root",
        driver_host_root="/run/nvidia/driver",
        dev_root="/",
    )
    assert driver_roots(options).dev_here == host.root
    touch(Path(host.root), "driver-root/dev/nvidiactl")
    found = driver_roots(options)
    assert found.here == found.dev_here == f"{host.root}/driver-root"
    assert (found.host, found.dev_host) == ("/run/nvidia/driver", "")


def test_on_wsl_a_card_is_reached_through_one_node(host: HostPaths) -> None:
    options = PluginOptions(
        paths=host, kubelet_socket="", delivery=PLAIN, rules=XidRules(), pass_device_specs=True
    )
    nodes = build_delivery(options, CARDS, Platform.WSL).device_nodes
    assert [node.container_path for node in nodes[U1] + nodes[U2]] == ["/dev/dxg", "/dev/dxg"]
    with_cdi = replace(options, delivery=replace(PLAIN, cdi=CdiDelivery(cri=True, only=True)))
    with pytest.raises(CdiError, match="this is the Windows Subsystem for Linux; use"):
        build_delivery(with_cdi, CARDS, Platform.WSL)
