"""Pods of other vendors from `/filter` to their node plugin and back."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from vendor_plugins import MERGE, WORDS, Plugin, plugin

from hami.protocol.allocation import decode_allocation

CONFIG = Path(__file__).parents[2] / "conformance" / "cases" / "device-config-default.json"


def device_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(CONFIG.read_text())
    del config["nvidia"]
    return config


async def placed(world: Any, one: Plugin, name: str, *nodes: str) -> Any:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", "annotations": one.says},
        "spec": {
            "schedulerName": "hami-scheduler",
            "containers": [{"name": "main", "image": "app", "resources": {"limits": one.limits}}],
        },
    }
    pod = await world.request("POST", "/api/v1/namespaces/default/pods", body)
    assert (await world.filter(pod, *(nodes or (one.node,))))["NodeNames"] == [one.node]
    return pod


def settled(world: Any, pod: Any) -> bool:
    """Whether the watch has shown the bound pod."""
    return world.scheduler.state.reservation(pod["metadata"]["uid"]) is None


def slots(world: Any, node: str) -> int:
    return sum(card.used.slots for card in world.scheduler.state.node_usage(node).cards)


@pytest.mark.parametrize("word", WORDS)
async def test_pods_reach_their_plugin_one_after_the_other(start: Any, word: str) -> None:
    async with start(device_config=device_config()) as world:
        one = plugin(word)
        await one.start(world, "n1")
        chosen = []
        for number, name in enumerate(("first", "second"), start=1):
            pod = await placed(world, one, name)
            assert await world.bind(pod, "n1") == "", "the plugin has given the lock back"
            record = (await world.pod(name))["metadata"]["annotations"][one.allocated]
            (wanted,) = [slot for slot in decode_allocation(record) if slot]
            for _ in range(one.calls_per_pod):
                given = await one.allocate(world)
                assert len(given) == len(wanted)
                assert given == [device.uuid for device in wanted] or not one.obeys
            chosen += given
            await world.until(partial(settled, world, pod))
            taken = number * one.slots
            assert slots(world, "n1") == taken, "what the plugin has done changes no account"
        assert len(chosen) == 2 * len(wanted)
        path = "/api/v1/namespaces/default/pods/first?gracePeriodSeconds=0"
        await world.request("DELETE", path)
        await world.until(lambda: slots(world, "n1") == one.slots)


@pytest.mark.parametrize("word", [word for word in WORDS if plugin(word).handshake])
async def test_a_report_is_answered_and_a_silent_plugin_loses_its_cards(start: Any, word: str) -> None:
    async with start(device_config=device_config()) as world:
        one = plugin(word)
        await one.start(world, "n1")

        async def handshake() -> str | None:
            found = (await world.request("GET", "/api/v1/nodes/n1"))["metadata"]["annotations"]
            assert found[one.register] == one.cards, "the register annotation is the plugin's"
            value: str | None = found.get(one.handshake)
            return value

        async with asyncio.timeout(60):
            while not (await handshake() or "").startswith("Requesting_"):  # noqa: ASYNC110 -- asks the API server
                await asyncio.sleep(0.01)
        status = {"status": {"allocatable": dict.fromkeys(one.capacity, "0")}}
        await world.request("PATCH", "/api/v1/nodes/n1/status", status, MERGE)
        stale = "Requesting_2026-01-01 00:00:00"
        body = {"metadata": {"annotations": {one.handshake: stale}}}
        await world.request("PATCH", "/api/v1/nodes/n1", body, MERGE)
        await world.until(lambda: "n1" not in world.scheduler.state.node_names())
        kept = stale if word == "BI-V150" else None
        async with asyncio.timeout(60):
            while await handshake() != kept:  # noqa: ASYNC110 -- asks the API server
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "word", ["DCU", "AMD", "Vastai", "Biren", "BI-V150", "XPU", "Ascend310P", "Ascend910B3"]
)
async def test_a_pod_that_its_plugin_refused_holds_its_cards_but_not_the_node(start: Any, word: str) -> None:
    async with start(device_config=device_config()) as world:
        one = plugin(word)
        await one.start(world, "n1")
        refused = await placed(world, one, "refused")
        assert await world.bind(refused, "n1") == ""
        await one.fail(world)
        await world.until(partial(settled, world, refused))
        assert slots(world, "n1") == 1, "kubelet still has the pod"
        pod = await placed(world, one, "next")
        assert await world.bind(pod, "n1") == ""
        assert await one.allocate(world)
        body = {"status": {"phase": "Failed"}}
        await world.request("PATCH", "/api/v1/namespaces/default/pods/refused/status", body, MERGE)
        await world.until(lambda: slots(world, "n1") == 1)


@pytest.mark.parametrize("word", ["Metax-GPU", "GCU", "kunlun", "Enflame"])
async def test_a_pod_whose_plugin_never_answers_holds_its_cards_and_hinders_nobody(
    start: Any, word: str
) -> None:
    async with start(device_config=device_config()) as world:
        one = plugin(word)
        await one.start(world, "n1")
        for number, name in enumerate(("first", "second"), start=1):
            pod = await placed(world, one, name)
            assert await world.bind(pod, "n1") == ""
            await world.until(partial(settled, world, pod))
            assert slots(world, "n1") == number * one.slots
        first = (await world.pod("first"))["metadata"]["annotations"]
        assert first["hami.io/bind-phase"] == "allocating"
        assert "hami.io/mutex.lock" not in (await world.request("GET", "/api/v1/nodes/n1"))["metadata"].get(
            "annotations", {}
        )


async def test_every_vendors_pod_finds_its_node_in_a_mixed_cluster(start: Any) -> None:
    async with start(device_config=device_config()) as world:
        await world.add_node("n-nvidia")
        plugins = [plugin(word) for word in WORDS]
        nodes = ["n-nvidia"]
        for one in plugins:
            name = f"n-{one.word.lower()}"
            await one.start(world, name)
            nodes.append(name)
        pod = await world.add_pod("p-nvidia")
        assert (await world.filter(pod, *nodes))["NodeNames"] == ["n-nvidia"]
        assert await world.bind(pod, "n-nvidia") == ""
        for one in plugins:
            name = f"p-{one.word.lower()}"
            pod = await placed(world, one, name, *nodes)
            assert await world.bind(pod, one.node) == ""
            assert await one.allocate(world)
            assert slots(world, one.node) == one.slots
        assert slots(world, "n-nvidia") == 1
