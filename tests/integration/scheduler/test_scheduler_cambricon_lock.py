"""Cambricon's node lock around a Binding (vendors/cambricon.md §7, cases 19 to 27 and 34)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
import pytest
from aiohttp import web

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder
from hami.kube.operations import patch_metadata
from hami.kube.resources import NODES
from hami.local.api.apiserver import ApiServer
from hami.protocol.keys import CAMBRICON_LOCK, NODE_LOCK
from hami.protocol.lock import LockOwner
from hami.protocol.timestamps import format_handshake, format_rfc3339, parse_rfc3339
from hami.protocol.views import Node
from hami.scheduler.edge.node_locks import LockContention, LockFailed, NodeLocks

CAMBRICON = {
    "resourceCountName": "cambricon.com/vmlu",
    "resourceMemoryName": "cambricon.com/mlu.smlu.vmemory",
    "resourceCoreName": "cambricon.com/mlu.smlu.vcore",
}
OWNER = LockOwner("default", "p")
NODE = "/api/v1/nodes/n1"
BINDING = "/api/v1/namespaces/default/pods/{}/binding"


def now() -> float:
    return datetime.now(UTC).timestamp()


@asynccontextmanager
async def mlu_world(start: Any, *annotations: tuple[str, str]) -> AsyncIterator[Any]:
    async with start(device_config={"cambricon": CAMBRICON}) as world:
        amounts = {
            "cambricon.com/mlu.smlu.vcore": "800",
            "cambricon.com/mlu.smlu.vmemory": "768",
            "nvidia.com/gpu": "10",
        }
        card = (
            '[{"id":"GPU-n1","count":10,"devmem":8000,"devcore":100,"type":"NVIDIA T4","health":true,'
            '"mode":"hami-core"}]'
        )
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": "n1",
                "annotations": {
                    "hami.io/node-nvidia-register": card,
                    "hami.io/node-handshake": f"Requesting_{format_handshake(now())}",
                    **dict(annotations),
                },
            },
            "status": {"capacity": amounts, "allocatable": amounts},
        }
        await world.request("POST", "/api/v1/nodes", node)
        await world.until(lambda: "n1" in world.scheduler.state.node_names())
        yield world


async def placed(world: Any, name: str, *words: str) -> Any:
    limits = {"MLU": {"cambricon.com/vmlu": "1", "cambricon.com/mlu.smlu.vmemory": "20"}}
    limits["MLU"]["cambricon.com/mlu.smlu.vcore"] = "25"
    limits["NVIDIA"] = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    containers = [
        {"name": word.lower(), "image": "app", "resources": {"limits": limits[word]}} for word in words
    ]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"schedulerName": "hami-scheduler", "containers": containers},
    }
    stored = await world.request("POST", "/api/v1/namespaces/default/pods", pod)
    assert (await world.filter(stored, "n1"))["NodeNames"] == ["n1"]
    return stored


async def annotations_of(world: Any) -> dict[str, str]:
    node = await world.request("GET", NODE)
    found: dict[str, str] = node["metadata"].get("annotations", {})
    return found


def refuse_bindings(world: Any) -> None:
    async def intercept(request: web.Request) -> web.StreamResponse | None:
        if request.method == "POST" and request.path.endswith("/binding"):
            return web.json_response({"kind": "Status", "code": 403, "reason": "Told"}, status=403)
        return None

    world.api.intercept = intercept


async def test_the_lock_is_set_before_the_binding_and_all_keys_come_with_it(start: Any) -> None:
    async with mlu_world(start) as world:
        pod = await placed(world, "p", "MLU")
        stored = await world.pod("p")
        assert not any(key.startswith("CAMBRICON") for key in stored["metadata"].get("annotations", {}))
        assert await world.bind(pod, "n1") == ""
        assert world.writes()[-2:] == [("PATCH", NODE), ("POST", BINDING.format("p"))]
        assert abs(parse_rfc3339((await annotations_of(world))[CAMBRICON_LOCK]) - now()) < 60
        stored = await world.pod("p")
        assert stored["spec"]["nodeName"] == "n1"
        written = stored["metadata"]["annotations"]
        assert written["CAMBRICON_DSMLU_PROFILE"] == "7_25_20"
        assert written["CAMBRICON_DSMLU_ASSIGNED"] == written["CAMBRICON_DSMLU_ASSIGHED"] == "false"


async def test_a_second_pod_waits_until_the_lock_is_gone(start: Any) -> None:
    async with mlu_world(start) as world:
        first, second = await placed(world, "p", "MLU"), await placed(world, "q", "MLU")
        assert await world.bind(first, "n1") == ""
        assert await world.bind(second, "n1") == "node n1 has been locked within 2 minutes"
        held = (await annotations_of(world))[CAMBRICON_LOCK]
        assert held, "the refused pod leaves the first one's lock alone"
        patch = {"metadata": {"annotations": {CAMBRICON_LOCK: None}}}
        await world.request("PATCH", NODE, patch, "application/merge-patch+json")
        assert await world.bind(second, "n1") == ""


async def test_a_refused_binding_gives_the_lock_back(start: Any) -> None:
    async with mlu_world(start) as world:
        pod = await placed(world, "p", "MLU")
        refuse_bindings(world)
        assert "403" in await world.bind(pod, "n1")
        assert CAMBRICON_LOCK not in await annotations_of(world)


async def test_a_failed_bind_of_another_vendors_pod_leaves_the_lock(start: Any) -> None:
    async with mlu_world(start) as world:
        mlu, other = await placed(world, "p", "MLU"), await placed(world, "q", "NVIDIA")
        assert await world.bind(mlu, "n1") == ""
        refuse_bindings(world)
        assert "403" in await world.bind(other, "n1")
        assert CAMBRICON_LOCK in await annotations_of(world)


async def test_a_pod_of_both_vendors_takes_both_locks_and_gives_back_what_it_took(start: Any) -> None:
    async with mlu_world(start) as world:
        pod = await placed(world, "p", "NVIDIA", "MLU")
        assert await world.bind(pod, "n1") == ""
        held = await annotations_of(world)
        assert held[NODE_LOCK].endswith(",default,p")
        assert CAMBRICON_LOCK in held
        assert world.writes()[-3:] == [("PATCH", NODE), ("PATCH", NODE), ("POST", BINDING.format("p"))]


async def test_what_was_taken_first_is_given_back_when_the_second_lock_is_held(start: Any) -> None:
    held = f"{format_rfc3339(now())},default,busy"
    async with mlu_world(start, (NODE_LOCK, held)) as world:
        busy = {"metadata": {"name": "busy"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
        await world.request("POST", "/api/v1/namespaces/default/pods", busy)
        pod = await placed(world, "p", "NVIDIA", "MLU")
        assert "has been locked within" in await world.bind(pod, "n1")
        left = await annotations_of(world)
        assert left[NODE_LOCK] == held
        assert CAMBRICON_LOCK not in left


# --- the lock by itself -----------------------------------------------------------------------------------


@asynccontextmanager
async def locking(api: ApiServer, *clocks: list[float]) -> AsyncIterator[tuple[Client, list[NodeLocks]]]:
    """As many schedulers as there are clocks."""
    async with Client(ClientConfig(api.url), Limits(qps=0)) as client:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        await client.create(NODES, node, msgspec.Raw)
        made = [
            NodeLocks(
                client, EventRecorder(client, "test"), clock=partial(at.__getitem__, 0), rng=random.Random(0)
            )
            for at in clocks
        ]
        yield client, made


async def lock_of(client: Client) -> str | None:
    return (await client.get(NODES, "n1", Node)).annotations.get(CAMBRICON_LOCK)


@pytest.mark.parametrize(("seconds", "taken"), [(60, False), (180, True)])
async def test_an_old_lock_is_taken_over_after_two_minutes(
    embedded_api: ApiServer, seconds: float, taken: bool
) -> None:
    at = [now()]
    async with locking(embedded_api, at) as (client, (locks,)):
        text = format_rfc3339(at[0] - seconds)
        await patch_metadata(client, NODES, "n1", annotations={CAMBRICON_LOCK: text})
        if taken:
            assert await locks.acquire("n1", OWNER, "dsmlu") == format_rfc3339(at[0])
        else:
            with pytest.raises(LockContention, match="has been locked within 2 minutes"):
                await locks.acquire("n1", OWNER, "dsmlu")
            assert await lock_of(client) == text


async def test_an_unreadable_lock_is_taken_over_two_minutes_after_it_was_first_seen(
    embedded_api: ApiServer,
) -> None:
    at = [now()]
    async with locking(embedded_api, at) as (client, (locks,)):
        await patch_metadata(client, NODES, "n1", annotations={CAMBRICON_LOCK: "garbage"})
        for later in (0, 119):
            with pytest.raises(LockContention):
                await locks.acquire("n1", OWNER, "dsmlu")
            at[0] += later
        at[0] += 2
        assert await locks.acquire("n1", OWNER, "dsmlu") == format_rfc3339(at[0])


async def test_the_two_locks_of_a_node_do_not_know_each_other(embedded_api: ApiServer) -> None:
    async with locking(embedded_api, [now()]) as (client, (locks,)):
        await patch_metadata(client, NODES, "n1", annotations={NODE_LOCK: "garbage"})
        text = await locks.acquire("n1", OWNER, "dsmlu")
        await locks.release("n1", OWNER, text, "dsmlu")
        assert await lock_of(client) is None
        assert (await client.get(NODES, "n1", Node)).annotations[NODE_LOCK] == "garbage"


async def test_who_waits_for_one_lock_holds_up_nobody_who_wants_the_other(embedded_api: ApiServer) -> None:
    """A pod of both vendors has the common lock, which another waits for, when it asks for the second one."""
    async with locking(embedded_api, [now()]) as (_, (locks,)):
        await locks.acquire("n1", OWNER)
        waiting = asyncio.create_task(locks.acquire("n1", LockOwner("default", "q")))
        try:
            await asyncio.sleep(0.1)
            assert await locks.acquire("n1", OWNER, "dsmlu", wait_s=0.3)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def test_of_two_schedulers_in_the_same_second_one_gets_the_lock(embedded_api: ApiServer) -> None:
    at = [now()]
    async with locking(embedded_api, at, at) as (client, both):
        outcomes = await asyncio.gather(
            *(locks.acquire("n1", OWNER, "dsmlu") for locks in both), return_exceptions=True
        )
        texts = [one for one in outcomes if isinstance(one, str)]
        assert len(texts) == 1
        assert [type(one) for one in outcomes if not isinstance(one, str)] == [LockContention]
        assert await lock_of(client) == texts[0]


async def test_a_lock_that_is_gone_is_released_and_a_missing_node_is_an_error(
    embedded_api: ApiServer,
) -> None:
    async with locking(embedded_api, [now()]) as (_, (locks,)):
        await locks.release("n1", OWNER, "2026-08-22T10:00:00Z", "dsmlu")
        with pytest.raises(LockFailed, match="404"):
            await locks.release("nowhere", OWNER, "2026-08-22T10:00:00Z", "dsmlu")


async def test_somebody_elses_lock_is_not_released(embedded_api: ApiServer) -> None:
    async with locking(embedded_api, [now()]) as (client, (locks,)):
        await patch_metadata(client, NODES, "n1", annotations={CAMBRICON_LOCK: "2026-08-22T10:00:00Z"})
        await locks.release("n1", OWNER, "2026-08-22T10:00:01Z", "dsmlu")
        assert await lock_of(client) == "2026-08-22T10:00:00Z"
