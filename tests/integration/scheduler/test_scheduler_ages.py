"""Schedulers and node plugins of other ages: HAMi's two writes, registrations of before the modes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

MERGE = "application/merge-patch+json"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
LOCK = "hami.io/mutex.lock"


def now_text() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def add_old_node(world: Any, name: str = "n1") -> None:
    """A node as a plugin of before index, mode and allocation mode registers it."""
    devices = [
        {
            "id": f"GPU-{name}",
            "count": 10,
            "devmem": 8000,
            "devcore": 100,
            "type": "NVIDIA T4",
            "health": True,
        }
    ]
    annotations = {
        "hami.io/node-nvidia-register": json.dumps(devices),
        "hami.io/node-handshake": f"Reported_{datetime.now(UTC)} m=+0.08",
    }
    amounts = {"nvidia.com/gpu": "10", "cpu": "8", "memory": "32Gi", "pods": "110"}
    node = {
        "metadata": {"name": name, "annotations": annotations},
        "status": {"capacity": amounts, "allocatable": amounts},
    }
    await world.request("POST", "/api/v1/nodes", node)
    await world.until(lambda: name in world.scheduler.state.node_names())


async def decide_as_hami(world: Any, name: str, mem: int) -> None:
    """What HAMi's scheduler writes in /filter, a while before it binds."""
    slot = f"GPU-n1,NVIDIA,{mem},10:;"
    body = {
        "metadata": {
            "annotations": {
                "hami.io/vgpu-node": "n1",
                "hami.io/vgpu-time": "1787400000",
                "hami.io/vgpu-devices-allocated": slot,
                TO_ALLOCATE: slot,
            }
        }
    }
    await world.request("PATCH", f"/api/v1/namespaces/default/pods/{name}", body, MERGE)


async def test_an_assignment_that_an_older_scheduler_wrote_counts_before_it_is_bound(world: Any) -> None:
    await add_old_node(world)
    await world.add_pod("theirs", mem=6000)
    await decide_as_hami(world, "theirs", 6000)
    await world.until(lambda: world.used_mib("n1") == [6000])
    ours = await world.add_pod("ours", mem=3000)
    assert not (await world.filter(ours, "n1"))["NodeNames"]
    binding = {"metadata": {"name": "theirs"}, "target": {"kind": "Node", "name": "n1"}}
    await world.request("POST", "/api/v1/namespaces/default/pods/theirs/binding", binding)
    small = await world.add_pod("small", mem=2000)
    assert (await world.filter(small, "n1"))["NodeNames"] == ["n1"]
    assert world.used_mib("n1") == [8000], "counted once, before and after the Binding"


async def test_a_pod_that_an_older_scheduler_decided_and_left_is_decided_anew(world: Any) -> None:
    await add_old_node(world)
    pod = await world.add_pod("p", mem=6000)
    await decide_as_hami(world, "p", 6000)
    await world.until(lambda: world.used_mib("n1") == [6000])
    assert (await world.filter(await world.pod("p"), "n1"))["NodeNames"] == ["n1"]
    assert world.used_mib("n1") == [6000]
    assert await world.bind(pod, "n1") == ""
    stored = (await world.pod("p"))["metadata"]["annotations"]
    assert stored[TO_ALLOCATE] == stored["hami.io/vgpu-devices-allocated"] == "GPU-n1,NVIDIA,6000,0:;"
    assert stored["hami.io/bind-phase"] == "allocating"


async def test_on_a_node_with_an_older_plugin_one_pod_at_a_time_is_bound_under_the_lock(world: Any) -> None:
    await add_old_node(world)
    first, second = await world.add_pod("first"), await world.add_pod("second")
    for pod in (first, second):
        assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    assert await world.bind(first, "n1") == ""
    node = await world.request("GET", "/api/v1/nodes/n1")
    assert node["metadata"]["annotations"][LOCK].endswith(",default,first")
    assert "node lock contention" in await world.bind(second, "n1")
    # The older plugin consumes the allocation and gives the lock back.
    body = {"metadata": {"annotations": {TO_ALLOCATE: ";", "hami.io/bind-phase": "success"}}}
    await world.request("PATCH", "/api/v1/namespaces/default/pods/first", body, MERGE)
    await world.request("PATCH", "/api/v1/nodes/n1", {"metadata": {"annotations": {LOCK: None}}}, MERGE)
    assert (await world.filter(second, "n1"))["NodeNames"] == ["n1"]
    assert await world.bind(second, "n1") == ""
    assert world.used_mib("n1") == [2000]


async def test_a_fresh_lock_in_the_oldest_form_is_obeyed_and_left_alone(world: Any) -> None:
    await add_old_node(world)
    text = now_text()
    await world.request("PATCH", "/api/v1/nodes/n1", {"metadata": {"annotations": {LOCK: text}}}, MERGE)
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    assert "node lock contention" in await world.bind(pod, "n1")
    node = await world.request("GET", "/api/v1/nodes/n1")
    assert node["metadata"]["annotations"][LOCK] == text


async def test_a_node_whose_plugin_is_upgraded_to_exact_takes_no_lock_any_more(world: Any) -> None:
    await add_old_node(world)
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    mode = {"metadata": {"annotations": {"hami.io/allocation-mode": "exact"}}}
    await world.request("PATCH", "/api/v1/nodes/n1", mode, MERGE)
    state = world.scheduler.state
    await world.until(lambda: state.node("n1").annotations.get("hami.io/allocation-mode") == "exact")
    assert await world.bind(pod, "n1") == ""
    assert LOCK not in (await world.request("GET", "/api/v1/nodes/n1"))["metadata"]["annotations"]
