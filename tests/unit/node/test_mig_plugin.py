"""MIG in the whole plugin: a kubelet over real gRPC, a driver in memory."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cdi_rules import problems
from driver_world import install_driver
from mig_world import MODEL, NOTE, FakeMig, mig_pod, reservation
from node_cards import U1, U2
from plugin_world import Node

from hami.kube.errors import ApiError
from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.api import deviceplugin_v1beta1_pb2_grpc as rpc
from hami.node.config import MigAllowed, Settings, SharedResource, TimeSlicing
from hami.node.nvml import XidEvent
from hami.node.plugin.answer import CdiDelivery, Delivery

REGISTER = "hami.io/node-nvidia-register"
DYNAMIC = Settings(
    split_count=3,
    mode="mig",
    memory_scaling=2.0,
    mig_allowlist=(MigAllowed(("A100",), ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")),),
)
Make = Callable[..., dict[str, Any]]
Until = Callable[..., Awaitable[None]]
Build = Callable[..., Node]


@pytest.fixture
def nvml(make_nvml: Callable[..., Any]) -> Any:
    return make_nvml([(U1, MODEL, 40960 << 20), (U2, MODEL, 40960 << 20)])


@pytest.fixture
def build(cluster: Any, nvml: Any, folder: Path) -> Build:
    """Makes a node whose cards have this driver, in mode mig unless the settings are others."""

    def make(driver: FakeMig, settings: Settings = DYNAMIC, **options: Any) -> Node:
        node = Node(cluster, nvml, folder, mig=driver, **options)
        node.settings = settings
        return node

    return make


@asynccontextmanager
async def serving(node: Node, until: Until, resources: int = 1) -> AsyncIterator[Node]:
    """The node once everything is registered with kubelet and with the scheduler."""
    async with node:
        await until(lambda: len(node.kubelet.registered) >= resources)
        await until(lambda: REGISTER in node.cluster.node_annotations)
        yield node


@asynccontextmanager
async def stub_of(node: Node, resource: str) -> AsyncIterator[Any]:
    found = next(item for item in node.kubelet.registered if item.resource_name == resource)
    options = (("grpc.default_authority", "localhost"),)
    path = node.kubelet.folder / found.endpoint
    async with grpc.aio.insecure_channel(f"unix:{path}", options=options) as channel:
        yield rpc.DevicePluginStub(channel)


def request(*containers: list[str]) -> Any:
    return pb.AllocateRequest(
        container_requests=[pb.ContainerAllocateRequest(devices_ids=ids) for ids in containers]
    )


async def devices(stub: Any) -> list[Any]:
    stream = stub.ListAndWatch(pb.Empty())
    found = (await stream.read()).devices
    stream.cancel()
    return list(found)


def registered(node: Node) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(node.cluster.node_annotations[REGISTER])
    return found


# --- dynamic MIG ---


async def test_cards_of_mode_mig_are_registered_with_their_profiles_and_unscaled(
    build: Build, until: Until
) -> None:
    node = build(FakeMig(U1, U2))
    async with serving(node, until), node.kubelet.plugin() as stub:
        first, second = registered(node)
        assert (first["id"], first["mode"], first["count"]) == (U1, "mig", 7)
        assert (first["devmem"], first["devcore"]) == (40960, 100), "neither is scaled"
        assert [item["name"] for item in first["migProfiles"]] == ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"]
        assert first["migProfiles"][1] == {
            "name": "2g.10gb",
            "memoryMB": 9856,
            "core": 29,
            "sliceCount": 2,
            "placements": [{"start": 0, "size": 2}, {"start": 2, "size": 2}, {"start": 4, "size": 2}],
        }
        assert second["id"] == U2
        offered = await devices(stub)
        assert len(offered) == 14, "as many as a card can have instances, although the split count is 3"


async def test_r10_a_card_whose_model_is_not_allowed_is_left_out_and_named(
    cluster: Any,
    make_nvml: Callable[..., Any],
    folder: Path,
    until: Until,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeMig(U1, U2)
    driver.card(U2).name = "NVIDIA L4"
    nvml = make_nvml([(U1, MODEL, 40960 << 20), (U2, "NVIDIA L4", 24576 << 20)])
    node = Node(cluster, nvml, folder, mig=driver)
    node.settings = DYNAMIC
    async with serving(node, until), node.kubelet.plugin() as stub:
        assert [card["id"] for card in registered(node)] == [U1]
        assert len(await devices(stub)) == 7
        told = [
            getattr(record, "cause", "") for record in caplog.records if record.msg == "register.left_out"
        ]
        assert len(told) == 1
        assert "'NVIDIA L4'" in told[0]
        assert not driver.card(U2).current, "it is not touched"


async def test_a_filtered_card_is_not_divided(build: Build, until: Until) -> None:
    driver = FakeMig(U1, U2)
    node = build(
        driver, Settings(mode="mig", mig_allowlist=DYNAMIC.mig_allowlist, excluded_indexes=frozenset({1}))
    )
    async with serving(node, until):
        assert [card["id"] for card in registered(node)] == [U1]
        assert [card.current for card in driver.cards] == [True, False]


async def test_g1_d15_a_container_gets_its_instance_and_nothing_else(
    build: Build, cluster: Any, folder: Path, until: Until, make_pod: Make
) -> None:
    driver = FakeMig(U1, U2)
    node = build(driver)
    cluster.add(mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1)))
    cluster.node_annotations["hami.io/mutex.lock"] = "2026-08-21T08:14:55Z,team-a,p"
    async with serving(node, until), node.kubelet.plugin() as stub:
        parent = folder / "tmp/vgpulock"
        before = parent.stat().st_mtime_ns, list(parent.iterdir())
        (answer,) = (await stub.Allocate(request([f"{U2}-1"]))).container_responses
        (made,) = driver.card(U1).instances.values()
        assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": made.compute[0]}
        assert not answer.mounts
        assert not answer.devices
        assert (parent.stat().st_mtime_ns, list(parent.iterdir())) == before, "D15: not touched"
        assert not (folder / "usr/local/vgpu/containers/uid-p_app").exists()
        notes = cluster.notes("p")
        (item,) = json.loads(notes[NOTE])
        assert (item["migUUID"], item["gpuInstanceID"], item["computeInstanceID"]) == (
            made.compute[0],
            made.id,
            0,
        )
        assert notes["hami.io/bind-phase"] == "success"
        assert "hami.io/mutex.lock" not in cluster.node_annotations


async def test_device_nodes_of_an_instance_are_its_card_and_its_capabilities(
    build: Build, cluster: Any, until: Until, make_pod: Make
) -> None:
    driver = FakeMig(U1, U2)
    node = build(driver, pass_device_specs=True, dev_root="/run/nvidia")
    cluster.add(mig_pod(make_pod, "p", reservation(U2, "1g.5gb", 6, 1)))
    async with serving(node, until), node.kubelet.plugin() as stub:
        (answer,) = (await stub.Allocate(request([f"{U1}-1"]))).container_responses
        (made,) = driver.card(U2).instances.values()
        caps = [200 + 2 * made.id, 200 + 2 * made.id + 1]
        assert [item.host_path for item in answer.devices] == [
            "/run/nvidia/dev/nvidia1",
            *(f"/run/nvidia/dev/nvidia-caps/nvidia-cap{minor}" for minor in caps),
        ]


async def test_with_a_cdi_strategy_each_instance_has_a_document_that_goes_with_it(
    build: Build, cluster: Any, folder: Path, until: Until, make_pod: Make
) -> None:
    install_driver(folder / "driver")
    driver = FakeMig(U1, U2)
    delivery = Delivery(extras={}, device_nodes={}, cdi=CdiDelivery(cri=True, only=True))
    node = build(driver, delivery=delivery, driver_root="/driver")
    documents = folder / "var/run/cdi"
    cluster.add(mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1)))
    async with serving(node, until), node.kubelet.plugin() as stub:
        before = {path.name for path in documents.iterdir()}
        (answer,) = (await stub.Allocate(request([f"{U1}-1"]))).container_responses
        (made,) = driver.card(U1).instances.values()
        uuid = made.compute[0]
        assert [device.name for device in answer.cdi_devices] == [f"k8s.device-plugin.nvidia.com/gpu={uuid}"]
        (file,) = {path.name for path in documents.iterdir()} - before
        assert file == f"k8s.device-plugin.nvidia.com-gpu-{uuid}.json"
        content = (documents / file).read_bytes()
        assert problems(content) == []
        (device,) = json.loads(content)["devices"]
        assert device["name"] == uuid
        assert [item["path"] for item in device["containerEdits"]["deviceNodes"]] == [
            "/dev/nvidia0",
            f"/dev/nvidia-caps/nvidia-cap{100 + 2 * made.id}",
            f"/dev/nvidia-caps/nvidia-cap{100 + 2 * made.id + 1}",
        ]
        cluster.objects["team-a", "p"]["status"]["phase"] = "Succeeded"
        node.changes.happened.set()
        await until(lambda: not (documents / file).exists())
        assert {path.name for path in documents.iterdir()} == before


async def test_without_capability_nodes_no_document_is_made_and_no_instance_is_left(
    build: Build, cluster: Any, folder: Path, until: Until, make_pod: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plugin_world.MINORS", {})
    install_driver(folder / "driver")
    driver = FakeMig(U1, U2)
    delivery = Delivery(extras={}, device_nodes={}, cdi=CdiDelivery(cri=True, only=True))
    node = build(driver, delivery=delivery, driver_root="/driver")
    cluster.add(mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1)))
    async with serving(node, until), node.kubelet.plugin() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="names no device node of MIG-"):
            await stub.Allocate(request([f"{U1}-1"]))
        assert driver.places(U1) == []


async def test_g2_a_call_whose_second_container_fails_leaves_nothing(
    build: Build, cluster: Any, until: Until, make_pod: Make
) -> None:
    driver = FakeMig(U1, U2)
    node = build(driver)
    pod = mig_pod(
        make_pod,
        "p",
        reservation(U1, "1g.5gb", 6, 1),
        reservation(U1, "2g.10gb", 1, 2, container=1),  # no such place
        containers=("one", "two"),
    )
    cluster.add(pod)
    cluster.node_annotations["hami.io/mutex.lock"] = "2026-08-21T08:14:55Z,team-a,p"
    async with serving(node, until), node.kubelet.plugin() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="does not offer"):
            await stub.Allocate(request([f"{U1}-1"], [f"{U1}-2"]))
        assert driver.places(U1) == []
        notes = cluster.notes("p")
        assert notes["hami.io/bind-phase"] == "failed"
        assert "resolve allocated NVIDIA devices" in notes["hami.io/allocate-error"]
        assert "hami.io/mutex.lock" not in cluster.node_annotations


async def test_a_pod_whose_slots_cannot_be_emptied_keeps_no_instance_and_no_ids(
    build: Build, cluster: Any, until: Until, make_pod: Make
) -> None:
    driver = FakeMig(U1, U2)
    node = build(driver)
    cluster.add(mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1)))
    cluster.fail_pod_patches = lambda notes: (
        ApiError(422, "Invalid", "no") if "hami.io/vgpu-devices-to-allocate" in notes else None
    )
    async with serving(node, until), node.kubelet.plugin() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="422"):
            await stub.Allocate(request([f"{U1}-1"]))
        assert driver.places(U1) == []
        assert "migUUID" not in cluster.notes("p")[NOTE]


async def test_g6_the_instance_of_an_ended_pod_goes_while_the_plugin_runs(
    build: Build, cluster: Any, until: Until, make_pod: Make
) -> None:
    driver = FakeMig(U1, U2)
    node = build(driver)
    cluster.add(mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1)))
    async with serving(node, until), node.kubelet.plugin() as stub:
        await stub.Allocate(request([f"{U1}-1"]))
        cluster.objects["team-a", "p"]["status"]["phase"] = "Succeeded"
        node.changes.happened.set()
        await until(lambda: driver.places(U1) == [])


async def test_a_card_that_becomes_ready_later_is_registered_and_offered_then(
    build: Build, cluster: Any, until: Until, make_pod: Make
) -> None:
    node = build(FakeMig(U1, U2))
    cluster.add(make_pod("old", f"{U1},NVIDIA,3000,30:;", phase="Running", bind_phase="success"))
    async with serving(node, until), node.kubelet.plugin() as stub:
        assert [card["id"] for card in registered(node)] == [U2]
        cluster.objects["team-a", "old"]["status"]["phase"] = "Succeeded"
        node.changes.happened.set()
        await until(lambda: len(registered(node)) == 2)
        assert len(await devices(stub)) == 14


async def test_g7_g11_restarts_of_kubelet_leave_instances_and_the_manager_alone(
    build: Build, cluster: Any, until: Until, make_pod: Make
) -> None:
    driver = FakeMig(U1, U2)
    node = build(driver)
    cluster.add(mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1)))
    async with serving(node, until):
        async with node.kubelet.plugin() as stub:
            await stub.Allocate(request([f"{U1}-1"]))
        (instance,) = driver.card(U1).instances.values()
        for times in (2, 3):
            node.plugin.reload()
            await until(lambda times=times: len(node.kubelet.registered) == times)
        cluster.objects["team-a", "p"]["status"]["phase"] = "Succeeded"
        cluster.add(mig_pod(make_pod, "next", reservation(U1, "1g.5gb", 6, 1)))
        async with node.kubelet.plugin() as stub:
            await stub.Allocate(request([f"{U1}-1"]))
        (after,) = driver.card(U1).instances.values()
        assert after.id == instance.id, "the same GPU instance id again"
        assert after is not instance
        node.changes.happened.set()
        await asyncio.sleep(0.05)
        assert list(driver.card(U1).instances.values()) == [after]


async def test_the_mig_lock_is_there_while_a_card_is_divided_and_gone_afterwards(
    build: Build, folder: Path, until: Until
) -> None:
    driver = FakeMig(U1, U2)
    lock = folder / "tmp/hami/hami-mig-apply.lock"
    seen = []
    plain = driver.enable
    driver.enable = lambda gpu: (seen.append(lock.exists()), plain(gpu))[1]  # type: ignore[method-assign, func-returns-value]
    node = build(driver)
    async with serving(node, until):
        assert seen == [True, True]
        assert not lock.exists()


# --- static MIG ---


def static(strategy: str, **more: Any) -> Settings:
    return Settings(split_count=3, mig_strategy=strategy, **more)


async def test_strategy_none_offers_whole_cards_only(
    cluster: Any, nvml: Any, folder: Path, until: Until
) -> None:
    driver = FakeMig(U1, U2, divided=True)
    driver.add(U1, 0, 6)
    node = Node(cluster, nvml, folder, mig=driver)
    async with serving(node, until), node.kubelet.plugin() as stub:
        assert [item.resource_name for item in node.kubelet.registered] == ["nvidia.com/gpu"]
        assert all(item.ID.startswith("GPU-") for item in await devices(stub))


async def test_strategy_mixed_offers_a_resource_for_each_profile_and_the_undivided_cards(
    build: Build, until: Until
) -> None:
    driver = FakeMig(U1, U2)
    driver.card(U1).current = driver.card(U1).pending = True
    small, other = driver.add(U1, 0, 6), driver.add(U1, 0, 5)
    large = driver.add(U1, 2, 0)
    node = build(driver, static("mixed"))
    async with serving(node, until, 3):
        found = {item.resource_name: item.endpoint for item in node.kubelet.registered}
        assert found == {
            "nvidia.com/gpu": "nvidia-gpu.sock",
            "nvidia.com/mig-1g.5gb": "nvidia-mig-1g.5gb.sock",
            "nvidia.com/mig-3g.20gb": "nvidia-mig-3g.20gb.sock",
        }
        assert [card["id"] for card in registered(node)] == [U2], "divided cards are not the scheduler's"
        async with stub_of(node, "nvidia.com/mig-1g.5gb") as stub:
            offered = await devices(stub)
            assert [item.ID for item in offered] == [small.compute[0], other.compute[0]]
            assert [item.topology.nodes[0].ID for item in offered] == [0, 0], "always with topology"
        async with stub_of(node, "nvidia.com/mig-3g.20gb") as stub:
            assert [item.ID for item in await devices(stub)] == [large.compute[0]]
        async with stub_of(node, "nvidia.com/gpu") as stub:
            assert {item.ID for item in await devices(stub)} == {f"{U2}-{slot}" for slot in range(3)}


async def test_strategy_single_offers_devices_under_the_configured_name(build: Build, until: Until) -> None:
    driver = FakeMig(U1, U2, divided=True)
    made = [driver.add(U1, 0, 6), driver.add(U2, 0, 6)]
    node = build(driver, static("single", resource_name="acme.io/gpu"))
    async with serving(node, until), node.kubelet.plugin() as stub:
        (found,) = node.kubelet.registered
        assert (found.resource_name, found.endpoint) == ("acme.io/gpu", "nvidia-gpu.sock")
        assert [item.ID for item in await devices(stub)] == [item.compute[0] for item in made]
        assert registered(node) == []


async def test_l27_static_devices_are_answered_without_a_pod(
    build: Build, cluster: Any, until: Until
) -> None:
    driver = FakeMig(U1, U2, divided=True)
    one, two = driver.add(U1, 0, 6), driver.add(U1, 0, 5)
    node = build(driver, static("mixed"))
    lock = "2026-08-21T08:14:55Z,team-a,somebody"
    cluster.node_annotations["hami.io/mutex.lock"] = lock
    async with serving(node, until), stub_of(node, "nvidia.com/mig-1g.5gb") as stub:
        patches = len(cluster.patches)
        answers = (await stub.Allocate(request([one.compute[0]], [two.compute[0]]))).container_responses
        assert [dict(answer.envs) for answer in answers] == [
            {"NVIDIA_VISIBLE_DEVICES": one.compute[0]},
            {"NVIDIA_VISIBLE_DEVICES": two.compute[0]},
        ]
        assert not any(answer.mounts for answer in answers)
        assert len(cluster.patches) == patches
        assert cluster.node_annotations["hami.io/mutex.lock"] == lock


async def test_l28_a_second_share_of_a_device_is_refused_when_configured(build: Build, until: Until) -> None:
    driver = FakeMig(U1, U2, divided=True)
    one = driver.add(U1, 0, 6)
    sharing = TimeSlicing((SharedResource("nvidia.com/mig-1g.5gb", 2),), fail_requests_greater_than_one=True)
    node = build(driver, static("mixed", sharing=sharing))
    ids = [f"{one.compute[0]}::0", f"{one.compute[0]}::1"]
    async with serving(node, until), stub_of(node, "nvidia.com/mig-1g.5gb") as stub:
        assert [item.ID for item in await devices(stub)] == ids
        with pytest.raises(grpc.aio.AioRpcError, match="maximum request size for shared resources is 1"):
            await stub.Allocate(request(ids))
        (answer,) = (await stub.Allocate(request(ids[1:]))).container_responses
        assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": one.compute[0]}
        with pytest.raises(grpc.aio.AioRpcError, match="unknown device MIG-x"):
            await stub.Allocate(request(["MIG-x"]))
        with pytest.raises(grpc.aio.AioRpcError, match="at least one device id"):
            await stub.Allocate(request([]))


async def test_static_devices_are_answered_by_index_and_with_nodes_when_asked_for(
    build: Build, until: Until
) -> None:
    driver = FakeMig(U1, U2, divided=True)
    driver.add(U1, 0, 6)
    one = driver.add(U1, 0, 5)
    node = build(driver, static("mixed"), by_index=True, pass_device_specs=True, dev_root="/drv")
    async with serving(node, until), stub_of(node, "nvidia.com/mig-1g.5gb") as stub:
        (answer,) = (await stub.Allocate(request([one.compute[0]]))).container_responses
        assert dict(answer.envs) == {"NVIDIA_VISIBLE_DEVICES": "0:1"}
        assert [item.host_path for item in answer.devices] == ["/drv/dev/nvidia0"]


async def test_h8_an_event_of_one_instance_makes_only_its_device_unhealthy(
    build: Build, cluster: Any, nvml: Any, until: Until
) -> None:
    driver = FakeMig(U1, U2, divided=True)
    one, two = driver.add(U1, 0, 6), driver.add(U1, 0, 5)
    node = build(driver, static("mixed"))

    async def health(stub: Any) -> dict[str, str]:
        return {item.ID: item.health for item in await devices(stub)}

    async with serving(node, until), stub_of(node, "nvidia.com/mig-1g.5gb") as stub:
        nvml.xids.append(XidEvent(U1, 79, two.id, 0))
        await until(lambda: len(cluster.events) > 0)
        assert await health(stub) == {one.compute[0]: "Healthy", two.compute[0]: "Unhealthy"}
        nvml.xids.append(XidEvent(U1, 79))
        await until(lambda: len(cluster.events) > 1)
        assert await health(stub) == {one.compute[0]: "Unhealthy", two.compute[0]: "Unhealthy"}


@pytest.mark.parametrize(
    ("divided", "instances", "words"),
    [
        ((U1,), ((U1, 0, 6),), "GPU 0 is divided by MIG and GPU 1 not"),
        ((U1, U2), ((U1, 0, 6),), "GPU 1 is divided by MIG and has no devices"),
        ((U1, U2), ((U1, 0, 6), (U2, 1, 0)), r"0:0 \(1g.5gb\) and 1:0 \(2g.10gb\) differ"),
    ],
)
async def test_strategy_single_does_not_start_on_a_node_that_is_not_all_alike(
    build: Build,
    cluster: Any,
    until: Until,
    divided: tuple[str, ...],
    instances: tuple[tuple[str, int, int], ...],
    words: str,
) -> None:
    driver = FakeMig(U1, U2)
    for uuid in divided:
        driver.card(uuid).current = driver.card(uuid).pending = True
    for each in instances:
        driver.add(*each)
    node = build(driver, static("single"))
    async with node:
        await until(lambda: any(re.search(words, text) for _, _, text in cluster.events))
        assert node.kubelet.registered == []


async def test_strategy_single_without_a_divided_card_offers_whole_cards(build: Build, until: Until) -> None:
    node = build(FakeMig(U1, U2), static("single"))
    async with serving(node, until), node.kubelet.plugin() as stub:
        assert len(await devices(stub)) == 6
        assert len(registered(node)) == 2


async def test_strategy_mixed_warns_of_a_divided_card_without_devices_and_of_parts_of_instances(
    build: Build, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeMig(U1, U2, divided=True)
    driver.add(U2, 0, 6)
    node = build(driver, static("mixed"))
    async with serving(node, until):
        told = [getattr(record, "cause", "") for record in caplog.records if record.msg == "mig.not_offered"]
        assert told == [f"GPU 0 ({U1}) is divided by MIG and has no devices"]
