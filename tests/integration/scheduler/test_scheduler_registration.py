"""Registration and handshakes on the API server (protocol.md §4; decisions 15, 30)."""

from __future__ import annotations

import json
from typing import Any

import pytest

MERGE = "application/merge-patch+json"


async def annotations_of(world: Any, node: str) -> dict[str, str]:
    found: dict[str, str] = (await world.request("GET", f"/api/v1/nodes/{node}"))["metadata"].get(
        "annotations", {}
    )
    return found


async def test_a_new_inventory_is_used_within_one_watch_event(world: Any) -> None:
    await world.add_node("n1", cards=1)
    device = {
        "count": 10,
        "devmem": 8000,
        "devcore": 100,
        "type": "NVIDIA T4",
        "mode": "hami-core",
        "health": True,
    }
    text = json.dumps([{**device, "id": "GPU-x", "index": 0}, {**device, "id": "GPU-y", "index": 1}])
    patch = {"metadata": {"annotations": {"hami.io/node-nvidia-register": text}}}
    await world.request("PATCH", "/api/v1/nodes/n1", patch, MERGE)
    await world.until(lambda: len(world.scheduler.state.node_usage("n1").cards) == 2)


async def test_a_plugin_that_has_answered_is_asked_again(world: Any) -> None:
    await world.add_node("n1", annotations={"hami.io/node-handshake": "Reported_2026.08.22 10:00:00"})
    while not (await annotations_of(world, "n1"))["hami.io/node-handshake"].startswith("Requesting_20"):
        pass
    assert "n1" in world.scheduler.state.node_names()


async def test_an_unreadable_inventory_keeps_the_last_good_one_and_raises_an_event(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await world.add_node("n1", cards=2)
    patch = {"metadata": {"annotations": {"hami.io/node-nvidia-register": "[{"}}}
    await world.request("PATCH", "/api/v1/nodes/n1", patch, MERGE)
    found: list[str] = []
    while not found:
        await world.scheduler.recorder.flush(60)
        found = [message for kind, _, message in await world.events() if kind == "Warning"]
    assert len(world.scheduler.state.node_usage("n1").cards) == 2
    logged = [vars(record) for record in caplog.records if record.getMessage() == "node.notice"]
    assert [(line["node"], line["reason"]) for line in logged] == [("n1", "RegistrationUnreadable")]
    assert "the last good devices stay in force" in logged[0]["text"]


async def test_nodes_without_a_register_annotation_are_never_written(world: Any) -> None:
    await world.request(
        "POST", "/api/v1/nodes", {"metadata": {"name": "cpu"}, "status": {"capacity": {"cpu": "4"}}}
    )
    await world.add_node("n1")
    await world.until(lambda: world.scheduler.state.node("cpu") is not None)
    assert not any(path.endswith("/nodes/cpu") and method != "GET" for method, path in world.api.seen)
    assert "hami.io/node-handshake" not in await annotations_of(world, "cpu")


async def test_a_node_outside_the_selector_is_left_out_and_comes_in_with_its_label(start: Any) -> None:
    async with start(node_selector={"gpu": "on"}) as world:
        device = {"id": "G", "count": 1, "devmem": 1, "devcore": 100, "type": "NVIDIA T4", "health": True}
        node = {
            "metadata": {"name": "n1", "annotations": {"hami.io/node-nvidia-register": json.dumps([device])}},
            "status": {"allocatable": {"nvidia.com/gpu": "1"}, "capacity": {"nvidia.com/gpu": "1"}},
        }
        await world.request("POST", "/api/v1/nodes", node)
        await world.until(lambda: len(world.scheduler.informers.nodes) == 1)
        assert list(world.scheduler.state.node_names()) == []
        await world.request("PATCH", "/api/v1/nodes/n1", {"metadata": {"labels": {"gpu": "on"}}}, MERGE)
        await world.until(lambda: list(world.scheduler.state.node_names()) == ["n1"])


async def test_a_dead_plugin_takes_the_vendor_from_the_node_and_its_handshake_away(world: Any) -> None:
    await world.add_node("n1", annotations={"hami.io/node-handshake": "Requesting_2020-01-01 00:00:00"})
    patch = {"status": {"allocatable": {"nvidia.com/gpu": "0"}, "capacity": {"nvidia.com/gpu": "0"}}}
    await world.request("PATCH", "/api/v1/nodes/n1/status", patch, MERGE)
    await world.until(lambda: "n1" not in world.scheduler.state.node_names())
    while "hami.io/node-handshake" in await annotations_of(world, "n1"):
        pass
