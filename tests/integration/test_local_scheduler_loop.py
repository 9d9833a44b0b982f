"""The scheduler loop of the embedded cluster with a fake extender."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from local_harness import until

from hami.local.api.apiserver import ApiServer
from hami.local.api.objects import Object, dig
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.local.scheduling.scheduler_loop import Extender, Profile, SchedulerLoop
from hami.local.serving import serving

GPU = "nvidia.com/gpu"
MANAGED = frozenset({GPU, "nvidia.com/gpumem"})


class FakeExtender:
    """Answers /filter and /bind as a test tells it; binds through the API like ours."""

    def __init__(self, api: ApiServer) -> None:
        self.api = api
        self.filters: list[Any] = []
        self.binds: list[Any] = []
        self.reject: dict[str, str] = {}
        self.filter_error = ""
        self.bind_error = ""
        self.status = 200

    async def filter(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        self.filters.append(body)
        names = [name for name in body["NodeNames"] if name not in self.reject]
        answer = {
            "Nodes": None,
            "NodeNames": names[:1] or None,
            "FailedNodes": self.reject or None,
            "FailedAndUnresolvableNodes": None,
            "Error": self.filter_error,
        }
        return web.Response(body=msgspec.json.encode(answer), status=self.status)

    async def bind(self, request: web.Request) -> web.Response:
        body = msgspec.json.decode(await request.read())
        self.binds.append(body)
        if not self.bind_error:
            binding = {
                "metadata": {"uid": body["PodUID"], "annotations": {"hami.io/vgpu-node": body["Node"]}},
                "target": {"name": body["Node"]},
            }
            self.api.registry.bind(body["PodNamespace"], body["PodName"], binding)
        return web.Response(body=msgspec.json.encode({"Error": self.bind_error}))


class World:
    def __init__(self, api: ApiServer, extender: FakeExtender) -> None:
        self.api = api
        self.extender = extender

    async def node(self, name: str, **allocatable: str) -> None:
        resources = {"cpu": "2", "memory": "4Gi", "pods": "10", **allocatable}
        await self.api.registry.create(
            NODES, "", {"metadata": {"name": name}, "status": {"allocatable": resources}}
        )

    async def pod(self, name: str, limits: dict[str, str] | None = None, **spec: Any) -> None:
        container = {"name": "a", "image": "i", "resources": {"limits": limits or {}}}
        spec = {"schedulerName": "hami-scheduler", "containers": [container], **spec}
        await self.api.registry.create(PODS, "default", {"metadata": {"name": name}, "spec": spec})

    def get(self, name: str) -> Object:
        return self.api.store.get(PODS, "default", name)

    def rejected(self, name: str) -> str:
        for condition in dig(self.get(name), "status", "conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{condition['reason']}: {condition['message']}"
        return ""

    async def bound(self, name: str) -> str:
        return str(await until(lambda: dig(self.get(name), "spec", "nodeName")))


@pytest.fixture
async def world(embedded_api: ApiServer) -> AsyncIterator[World]:
    extender = FakeExtender(embedded_api)
    app = web.Application()
    app.router.add_post("/filter", extender.filter)
    app.router.add_post("/bind", extender.bind)
    async with serving(app) as port:
        profiles = [
            Profile("default-scheduler"),
            Profile("hami-scheduler", Extender(f"http://127.0.0.1:{port}", MANAGED), ignored=MANAGED),
        ]
        loop = SchedulerLoop(embedded_api.registry, time.time, profiles)
        try:
            await loop.start()
            yield World(embedded_api, extender)
        finally:
            await loop.stop()


async def test_a_pod_with_devices_is_filtered_and_bound_by_the_extender(world: World) -> None:
    await world.node("n1")
    await world.pod("p", {GPU: "1"})
    assert await world.bound("p") == "n1"
    assert world.extender.filters[0]["NodeNames"] == ["n1"]
    assert world.extender.filters[0]["Nodes"] is None
    assert world.extender.filters[0]["Pod"]["metadata"]["name"] == "p"
    bind = world.extender.binds[0]
    assert bind == {
        "PodName": "p", "PodNamespace": "default", "Node": "n1", "PodUID": world.get("p")["metadata"]["uid"],
    }  # fmt: skip
    assert world.get("p")["metadata"]["annotations"] == {"hami.io/vgpu-node": "n1"}


@pytest.mark.parametrize("scheduler", ["hami-scheduler", "default-scheduler"])
async def test_a_pod_without_devices_never_reaches_the_extender(world: World, scheduler: str) -> None:
    await world.node("n1")
    await world.pod("p", {"cpu": "1"}, schedulerName=scheduler)
    assert await world.bound("p") == "n1"
    assert world.extender.filters == []


async def test_pods_of_other_schedulers_are_left_alone(world: World) -> None:
    await world.node("n1")
    await world.pod("other", schedulerName="somebody")
    await world.pod("p")
    await world.bound("p")
    assert not dig(world.get("other"), "spec", "nodeName")


async def test_nodes_without_room_are_not_sent_to_the_extender(world: World) -> None:
    await world.node("small", cpu="500m")
    await world.node("large")
    await world.pod("p", {GPU: "1", "cpu": "1"})
    assert await world.bound("p") == "large"
    assert world.extender.filters[0]["NodeNames"] == ["large"]


async def test_a_rejection_shows_in_condition_and_event(world: World) -> None:
    await world.node("n1")
    world.extender.reject = {"n1": "1/1 CardInsufficientMemory"}
    await world.pod("p", {GPU: "1"})
    expected = "0/1 nodes are available: 1 1/1 CardInsufficientMemory."
    assert await until(lambda: world.rejected("p")) == f"Unschedulable: {expected}"
    event = next(found for found in world.api.store.list(EVENTS, "default"))
    assert (event["reason"], event["message"], event["source"]["component"]) == (
        "FailedScheduling", expected, "hami-scheduler",
    )  # fmt: skip


async def test_reasons_of_filters_and_extender_are_counted_together(world: World) -> None:
    await world.node("a", cpu="100m")
    await world.node("b")
    world.extender.reject = {"b": "CardNotHealth"}
    await world.pod("p", {GPU: "1", "cpu": "1"})
    assert await until(lambda: world.rejected("p")) == (
        "Unschedulable: 0/2 nodes are available: 1 CardNotHealth, 1 Insufficient cpu."
    )


async def test_without_nodes_the_pod_says_so(world: World) -> None:
    await world.pod("p", {GPU: "1"})
    assert await until(lambda: world.rejected("p")) == ("Unschedulable: no nodes available to schedule pods")


async def test_a_new_node_brings_a_rejected_pod_back(world: World) -> None:
    await world.pod("p", {GPU: "1"})
    await until(lambda: world.rejected("p"))
    await world.node("n1")
    assert await world.bound("p") == "n1"


async def test_the_end_of_another_pod_brings_a_rejected_pod_back(world: World) -> None:
    await world.node("n1")
    await world.pod("first", {GPU: "1"})
    await world.bound("first")
    world.extender.reject = {"n1": "1/1 CardInsufficientMemory"}
    await world.pod("p", {GPU: "1"})
    await until(lambda: world.rejected("p"))
    world.extender.reject = {}
    await world.api.registry.delete(PODS, "default", "first")
    assert await world.bound("p") == "n1"


async def test_a_touched_annotation_brings_a_rejected_pod_back(world: World) -> None:
    await world.node("n1")
    world.extender.reject = {"n1": "quota"}
    await world.pod("p", {GPU: "1"})
    await until(lambda: world.rejected("p"))
    world.extender.reject = {}

    def touch(pod: Object) -> Object:
        return {**pod, "metadata": {**pod["metadata"], "annotations": {"hami.io/requeue": "1"}}}

    await world.api.registry.update(PODS, "default", "p", touch)
    assert await world.bound("p") == "n1"


async def test_our_own_status_write_is_no_reason_to_try_again(world: World) -> None:
    await world.node("n1")
    world.extender.reject = {"n1": "full"}
    await world.pod("p", {GPU: "1"})
    await until(lambda: world.rejected("p"))
    await asyncio.sleep(1.5)
    assert len(world.extender.filters) == 1


async def test_an_error_of_the_extender_is_retried(world: World) -> None:
    await world.node("n1")
    world.extender.filter_error = "not yet synced"
    await world.pod("p", {GPU: "1"})
    assert await until(lambda: world.rejected("p")) == "SchedulerError: not yet synced"
    world.extender.filter_error = ""
    assert await world.bound("p") == "n1"


async def test_a_http_error_of_the_extender_is_retried(world: World) -> None:
    await world.node("n1")
    world.extender.status = 500
    await world.pod("p", {GPU: "1"})
    assert "code 500" in await until(lambda: world.rejected("p"))
    world.extender.status = 200
    assert await world.bound("p") == "n1"


async def test_a_failed_bind_is_retried_from_the_filter(world: World) -> None:
    await world.node("n1")
    world.extender.bind_error = "node n1 has been locked within 5m0s: node lock contention"
    await world.pod("p", {GPU: "1"})
    assert "node lock contention" in await until(lambda: world.rejected("p"))
    world.extender.bind_error = ""
    assert await world.bound("p") == "n1"
    assert len(world.extender.filters) == 2


async def test_a_gated_pod_waits_for_its_gates(world: World) -> None:
    await world.node("n1")
    await world.pod("p", schedulingGates=[{"name": "wait"}])
    await world.pod("q")
    await world.bound("q")
    assert not dig(world.get("p"), "spec", "nodeName")

    def open_gate(pod: Object) -> Object:
        spec = {key: value for key, value in pod["spec"].items() if key != "schedulingGates"}
        return {**pod, "spec": spec}

    await world.api.registry.update(PODS, "default", "p", open_gate)
    assert await world.bound("p") == "n1"


async def test_two_pods_do_not_take_the_same_room(world: World) -> None:
    await world.node("n1", cpu="1")
    for name in ("a", "b"):
        await world.pod(name, {"cpu": "1"})
    await until(lambda: world.rejected("a") or world.rejected("b"))
    bound = [name for name in ("a", "b") if dig(world.get(name), "spec", "nodeName")]
    assert len(bound) == 1
