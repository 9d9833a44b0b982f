"""A watch that is behind, and what a watch shows of a Binding (scheduler.md 74, 83; protocol.md 56)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from hami.local.api.apiserver import ApiServer

LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases"


class HeldWatch:
    """The watch of pods is open, and shows nothing until it is released; lists are answered."""

    def __init__(self, api: ApiServer) -> None:
        self.released = asyncio.Event()
        api.intercept = self

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        if request.path == "/api/v1/pods" and "watch" in request.query:
            await self.released.wait()
        return None


async def lead(world: Any, holder: str, transitions: int, *, create: bool = False) -> None:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 60, "leaseTransitions": transitions}
    if create:
        lease = {"metadata": {"name": "hami-scheduler", "namespace": "kube-system"}, "spec": spec}
        await world.request("POST", LEASES, lease)
    else:
        kind = "application/merge-patch+json"
        await world.request("PATCH", f"{LEASES}/hami-scheduler", {"spec": spec}, kind)


async def bind_as_another_scheduler(world: Any, name: str, node: str, mem: int) -> None:
    annotations = {
        "hami.io/vgpu-node": node,
        "hami.io/vgpu-time": "1",
        "hami.io/vgpu-devices-allocated": f"GPU-{node}-0,NVIDIA,{mem},0:;",
    }
    binding = {
        "metadata": {"name": name, "annotations": annotations},
        "target": {"kind": "Node", "name": node},
    }
    await world.request("POST", f"/api/v1/namespaces/default/pods/{name}/binding", binding)


async def test_a_reserved_pod_that_the_informer_has_not_seen_is_bound(
    start: Any, embedded_api: ApiServer
) -> None:
    watch = HeldWatch(embedded_api)
    async with start() as world:
        await world.add_node("n1")
        pod = await world.add_pod("p")
        await world.filter(pod, "n1")
        assert len(world.scheduler.informers.pods) == 0
        assert await world.bind(pod, "n1") == ""
        assert len(world.scheduler.informers.pods) == 0
        assert (await world.pod("p"))["spec"]["nodeName"] == "n1"
        assert world.used_mib("n1") == [1000]
        watch.released.set()
        uid = pod["metadata"]["uid"]
        await world.until(lambda: world.scheduler.state.reservation(uid) is None)
        assert world.used_mib("n1") == [1000]


async def test_a_new_leader_gives_no_card_twice_although_its_watch_is_behind(
    start: Any, embedded_api: ApiServer
) -> None:
    watch = HeldWatch(embedded_api)
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await lead(world, "other_1", 1, create=True)
        await world.add_node("n1")
        first, second = await world.add_pod("first", mem=8000), await world.add_pod("second", mem=8000)
        await bind_as_another_scheduler(world, first["metadata"]["name"], "n1", 8000)
        waiting = asyncio.create_task(world.filter(second, "n1"))
        assert world.used_mib("n1") == [0], "the watch has not shown the pod of the old leader"
        await lead(world, "host_1", 2)
        answer = await waiting
        assert answer["FailedNodes"] == {"n1": "1/1 CardInsufficientMemory"}
        assert world.used_mib("n1") == [8000]
        watch.released.set()


async def test_the_watch_shows_a_binding_as_one_change(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    version = pod["metadata"]["resourceVersion"]
    url = f"{world.api.url}/api/v1/namespaces/default/pods?watch=true&resourceVersion={version}"
    async with world.http.get(url) as stream:
        assert await world.bind(pod, "n1") == ""
        await world.request("DELETE", "/api/v1/namespaces/default/pods/p", {"gracePeriodSeconds": 0})
        seen: list[Any] = []
        while not seen or seen[-1]["type"] != "DELETED":
            seen.append(json.loads(await stream.content.readline()))
    assert [event["type"] for event in seen] == ["MODIFIED", "DELETED"]
    bound = seen[0]["object"]
    assert bound["spec"]["nodeName"] == "n1"
    assert bound["metadata"]["labels"]["hami.io/vgpu-node"] == "n1"
    assert set(bound["metadata"]["annotations"]) == {
        "hami.io/vgpu-node",
        "hami.io/vgpu-time",
        "hami.io/vgpu-devices-to-allocate",
        "hami.io/vgpu-devices-allocated",
        "hami.io/bind-phase",
        "hami.io/bind-time",
    }
