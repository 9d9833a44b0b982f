"""A reservation is looked at again right before its Binding: another scheduler may have used the cards."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from hami.local.api.resources import PODS

ALLOCATED = "hami.io/vgpu-devices-allocated"
BINDINGS = "/api/v1/namespaces/default/pods/{}/binding"


async def bind_elsewhere(world: Any, name: str, card: str, mem: int, cores: int) -> None:
    """A pod that another scheduler (the former leader, HAMi) puts on a card."""
    await world.add_pod(name)
    annotations = {
        "hami.io/vgpu-node": "n1",
        "hami.io/vgpu-devices-allocated": f"{card},NVIDIA,{mem},{cores}:;",
        "hami.io/bind-phase": "success",
    }
    body = {"metadata": {"name": name, "annotations": annotations}, "target": {"kind": "Node", "name": "n1"}}
    await world.request("POST", BINDINGS.format(name), body)


@pytest.mark.parametrize(("mem", "cores"), [(7500, 0), (100, 95)])
async def test_a_card_that_was_given_away_meanwhile_is_not_bound(world: Any, mem: int, cores: int) -> None:
    await world.add_node("n1")
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000", "nvidia.com/gpucores": "10"}
    pod = {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "main", "image": "app", "resources": {"limits": limits}}]},
    }
    pod = await world.request("POST", "/api/v1/namespaces/default/pods", pod)
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    await bind_elsewhere(world, "other", "GPU-n1-0", mem, cores)
    await world.until(lambda: world.used_mib("n1") == [1000 + mem])
    world.api.seen.clear()
    error = await world.bind(pod, "n1")
    assert error == "card GPU-n1-0 has been given to other pods, pod default/p will be scheduled again"
    assert ("POST", BINDINGS.format("p")) not in list(world.api.seen)
    assert world.used_mib("n1") == [mem]
    node = await world.request("GET", "/api/v1/nodes/n1")
    assert "hami.io/mutex.lock" not in node["metadata"]["annotations"]
    assert (await world.filter(pod, "n1"))["NodeNames"] in (None, [])


async def test_a_card_that_is_not_registered_any_more_is_not_bound(world: Any) -> None:
    await world.add_node("n1", cards=2)
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    reservation = world.scheduler.state.reservation(pod["metadata"]["uid"])
    gone = reservation.allocations["NVIDIA"][0][0].uuid
    node = await world.request("GET", "/api/v1/nodes/n1")
    text = node["metadata"]["annotations"]["hami.io/node-nvidia-register"].replace(gone, "GPU-new")
    patch = {"metadata": {"annotations": {"hami.io/node-nvidia-register": text}}}
    await world.request("PATCH", "/api/v1/nodes/n1", patch, "application/merge-patch+json")
    state = world.scheduler.state
    await world.until(lambda: any(c.info.id == "GPU-new" for c in state.node_usage("n1").cards))
    assert f"card {gone} is not registered any more" in await world.bind(pod, "n1")
    assert "nodeName" not in (await world.pod("p"))["spec"]


async def test_a_card_with_room_for_both_is_bound(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    await bind_elsewhere(world, "other", "GPU-n1-0", 7000, 0)
    await world.until(lambda: world.used_mib("n1") == [8000])
    assert await world.bind(pod, "n1") == ""


async def test_a_binding_of_the_predecessor_that_lands_late_is_seen_before_ours(world: Any) -> None:
    """The watch is down, so only a read of the node's pods can show it."""
    await world.add_node("n1")
    pod = await world.add_pod("p", mem=5000)
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    registry = world.api.registry

    async def late(request: web.Request) -> web.StreamResponse | None:
        if request.query.get("watch") and request.path.endswith("/pods"):
            return web.json_response({"kind": "Status", "code": 503}, status=503)
        if request.method == "PATCH" and request.path.endswith("/nodes/n1"):
            world.api.drop_watches()
            body = {"metadata": {"name": "other"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
            await registry.create(PODS, "default", body)
            annotations = {"hami.io/vgpu-node": "n1", ALLOCATED: "GPU-n1-0,NVIDIA,5000,0:;"}
            registry.bind(
                "default", "other", {"metadata": {"annotations": annotations}, "target": {"name": "n1"}}
            )
        return None

    world.api.intercept = late
    error = await world.bind(pod, "n1")
    assert error == "card GPU-n1-0 has been given to other pods, pod default/p will be scheduled again"
    assert world.used_mib("n1") == [5000]
    assert "nodeName" not in (await world.pod("p"))["spec"]


async def test_while_the_nodes_pods_cannot_be_read_a_young_scheduler_does_not_bind(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")

    async def ill(request: web.Request) -> web.StreamResponse | None:
        if "nodeName" in request.query.get("fieldSelector", ""):
            return web.json_response({"kind": "Status", "code": 500, "message": "ill"}, status=500)
        return None

    world.api.intercept = ill
    assert "the pods of node n1 cannot be read" in await world.bind(pod, "n1")
    node = await world.request("GET", "/api/v1/nodes/n1")
    assert "hami.io/mutex.lock" not in node["metadata"]["annotations"]
    world.api.intercept = None
    assert await world.bind(pod, "n1") == ""


async def test_later_the_watch_is_enough(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    world.scheduler.gate._opened_at -= 61
    world.api.seen.clear()
    assert await world.bind(pod, "n1") == ""
    assert not any("fieldSelector" in path for _, path in world.api.seen)


async def test_an_allocation_that_takes_too_much_room_on_the_pod_is_not_written(world: Any) -> None:
    await world.add_node("n1")
    node = await world.request("GET", "/api/v1/nodes/n1")
    text = node["metadata"]["annotations"]["hami.io/node-nvidia-register"]
    text = text.replace("GPU-n1-0", "G" * 110_000)  # it stands in two annotations of the pod
    patch = {"metadata": {"annotations": {"hami.io/node-nvidia-register": text}}}
    await world.request("PATCH", "/api/v1/nodes/n1", patch, "application/merge-patch+json")
    state = world.scheduler.state
    await world.until(lambda: any(len(c.info.id) == 110_000 for c in state.node_usage("n1").cards))
    pod = await world.add_pod("p")
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    world.api.seen.clear()
    error = await world.bind(pod, "n1")
    assert error.startswith("the allocation takes 220")
    assert error.endswith("bytes of annotations, over 204800")
    assert ("POST", BINDINGS.format("p")) not in list(world.api.seen)
    assert world.used_mib("n1") == [0]
    node = await world.request("GET", "/api/v1/nodes/n1")
    assert "hami.io/mutex.lock" not in node["metadata"]["annotations"]
    await world.scheduler.recorder.flush(60)
    assert ("Warning", "BindingFailed", error) in await world.events()
