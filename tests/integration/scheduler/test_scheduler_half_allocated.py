"""Ascend pods of several containers keep the next one waiting until all are allocated (ascend.md §9)."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from hami.kube.operations import patch_metadata
from hami.kube.resources import NODES, PODS
from hami.protocol.keys import NODE_LOCK
from hami.protocol.timestamps import format_handshake
from hami.scheduler.edge.half_allocated import WAIT_S

WORD = "Ascend910B3"
COUNT, MEMORY = f"huawei.com/{WORD}", f"huawei.com/{WORD}-memory"
TO_ALLOCATE = f"hami.io/{WORD}-devices-to-allocate"
CHIP = {
    "chipName": "910B3",
    "commonWord": WORD,
    "resourceName": COUNT,
    "resourceMemoryName": MEMORY,
    "memoryAllocatable": 65536,
    "memoryCapacity": 65536,
    "templates": [{"name": "vir05_1c_16g", "memory": 16384}],
}


async def add_node(world: Any) -> None:
    card = {"id": "d0", "count": 4, "devmem": 65536, "devcore": 20, "type": WORD, "health": True}
    annotations = {
        f"hami.io/node-register-{WORD}": json.dumps([card, {**card, "id": "d1", "index": 1}]),
        f"hami.io/node-handshake-{WORD}": f"Requesting_{format_handshake(datetime.now(UTC).timestamp())}",
    }
    amounts = {COUNT: "8"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n1", "annotations": annotations},
        "status": {"capacity": amounts, "allocatable": amounts},
    }
    await world.request("POST", "/api/v1/nodes", node)
    await world.until(lambda: "n1" in world.scheduler.state.node_names())


async def placed(world: Any, name: str, containers: int) -> Any:
    """A pod that has passed /filter."""
    limits = {COUNT: "1", MEMORY: "16384"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [
                {"name": f"c{number}", "image": "app", "resources": {"limits": limits}}
                for number in range(containers)
            ],
        },
    }
    made = await world.request("POST", "/api/v1/namespaces/default/pods", pod)
    answer = await world.filter(made, "n1")
    assert answer["NodeNames"] == ["n1"], answer
    return made


async def plugin_allocates(world: Any, name: str, left: str) -> None:
    """The plugin has served a container: the rest is written back, and the lock is given back."""
    client = world.scheduler.client
    await patch_metadata(client, PODS, name, namespace="default", annotations={TO_ALLOCATE: left})
    await patch_metadata(client, NODES, "n1", annotations={NODE_LOCK: None})


@pytest.mark.parametrize("ending", ["allocated", "deleted", "late"])
async def test_the_next_pod_waits_for_the_last_container(
    start: Any, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    async with start(device_config={"vnpus": {"configs": [CHIP]}}) as world:
        await add_node(world)
        first, second = await placed(world, "first", 2), await placed(world, "second", 1)
        assert await world.bind(first, "n1") == ""
        await plugin_allocates(world, "first", ";d1,Ascend910B3,16384,0:;")
        refused = await world.bind(second, "n1")
        assert refused == "containers of pod default/first are still being allocated on node n1"
        node = await world.request("GET", "/api/v1/nodes/n1")
        assert NODE_LOCK not in node["metadata"]["annotations"]
        if ending == "allocated":
            await plugin_allocates(world, "first", ";;")
        elif ending == "deleted":
            await world.request("DELETE", "/api/v1/namespaces/default/pods/first?gracePeriodSeconds=0")
        else:
            binder = world.scheduler.binder
            clock = binder._half_done._clock
            monkeypatch.setattr(binder._half_done, "_clock", lambda: clock() + WAIT_S)
        assert await world.bind(second, "n1") == ""


async def test_the_next_pod_waits_also_while_the_answer_to_the_binding_is_on_its_way(start: Any) -> None:
    """The plugin may have given the lock back before we know that the pod is bound."""
    async with start(device_config={"vnpus": {"configs": [CHIP]}}) as world:
        await add_node(world)
        first, second = await placed(world, "first", 2), await placed(world, "second", 1)
        path = "/api/v1/namespaces/default/pods/first/binding"
        stored, go = asyncio.Event(), asyncio.Event()

        async def slow(request: web.Request) -> web.StreamResponse | None:
            if request.path != path:
                return None
            world.api.intercept = None
            await world.request("POST", path, await request.json())
            stored.set()
            await go.wait()
            return web.json_response({"kind": "Status"}, status=201)

        world.api.intercept = slow
        binding = asyncio.create_task(world.bind(first, "n1"))
        await stored.wait()
        await plugin_allocates(world, "first", ";d1,Ascend910B3,16384,0:;")
        refused = await world.bind(second, "n1")
        assert refused == "containers of pod default/first are still being allocated on node n1"
        go.set()
        assert await binding == ""


async def test_a_pod_whose_binding_is_refused_keeps_nobody_waiting(start: Any) -> None:
    async with start(device_config={"vnpus": {"configs": [CHIP]}}) as world:
        await add_node(world)
        first, second = await placed(world, "first", 2), await placed(world, "second", 1)

        async def refuse(request: web.Request) -> web.StreamResponse | None:
            refused = request.path.endswith("/pods/first/binding")
            return web.json_response({"kind": "Status"}, status=422) if refused else None

        world.api.intercept = refuse
        assert await world.bind(first, "n1") != ""
        assert world.scheduler.binder._half_done._last == {}
        assert await world.bind(second, "n1") == ""


async def test_a_pod_of_one_container_keeps_nobody_waiting(start: Any) -> None:
    async with start(device_config={"vnpus": {"configs": [CHIP]}}) as world:
        await add_node(world)
        first, second = await placed(world, "first", 1), await placed(world, "second", 1)
        assert await world.bind(first, "n1") == ""
        await plugin_allocates(world, "first", "d1,Ascend910B3,16384,0:;")
        assert await world.bind(second, "n1") == ""
