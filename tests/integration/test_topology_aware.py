"""From the links that NVML shows to the cards that a pod gets, on the embedded cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from local_harness import until

from hami.local.api.objects import Object, annotations_of, dig
from hami.local.api.resources import EVENTS, NODES, PODS
from hami.local.cluster import Cluster, ClusterConfig, GpuNode, default_native
from hami.protocol.inventory import decode_json
from hami.protocol.pair_scores import decode_pair_scores

SCORES = "hami.io/node-nvidia-score"
LINKS = "0-3:4,1-2:2"
"""Two pairs, four links and two: neither is the pair that stands first or is next on PCIe."""


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    nodes = [GpuNode("n1", cards=4, settings={"FAKEGPU_NVLINKS": LINKS})]
    async with Cluster(ClusterConfig(nodes, default_native(), monitor=False)) as running:
        yield running


def node_notes(cluster: Cluster) -> dict[str, str]:
    return annotations_of(cluster.api.store.get(NODES, "", "n1"))


def pod(name: str, cards: int) -> Object:
    limits = {"nvidia.com/gpu": cards, "nvidia.com/gpumem": 1000}
    container = {
        "name": "main",
        "image": "busybox",
        "command": ["sleep", "60"],
        "resources": {"limits": limits},
    }
    notes = {"hami.io/gpu-scheduler-policy": "topology-aware"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": notes},
        "spec": {"containers": [container]},
    }


async def placed(cluster: Cluster, name: str, cards: int) -> set[int]:
    """Indexes of the cards that a new pod runs on."""
    await cluster.api.registry.create(PODS, "default", pod(name, cards))
    await until(lambda: dig(cluster.api.store.get(PODS, "default", name), "status", "phase") == "Running")
    found = annotations_of(cluster.api.store.get(PODS, "default", name))["hami.io/vgpu-devices-allocated"]
    registered = decode_json(node_notes(cluster)["hami.io/node-nvidia-register"], "NVIDIA").devices
    return {device.index for device in registered if device.id in found}


async def test_pods_get_the_cards_that_are_linked_best(cluster: Cluster) -> None:
    await until(lambda: SCORES in node_notes(cluster))
    notes = node_notes(cluster)
    cards = decode_json(notes["hami.io/node-nvidia-register"], "NVIDIA").devices
    scores = decode_pair_scores(notes[SCORES])
    table = [[scores[one.id].get(other.id) for other in cards] for one in cards]
    assert table == [[None, 40, 10, 410], [40, None, 210, 10], [10, 210, None, 40], [410, 10, 40, None]]
    assert await placed(cluster, "pair", 2) == {0, 3}
    (single,) = await placed(cluster, "single", 1)
    assert single in (1, 2)
    # The cards of running pods are shared: the best pair is still the best one.
    assert await placed(cluster, "another-pair", 2) == {0, 3}


async def test_a_link_that_one_end_does_not_know_is_an_event_of_the_node() -> None:
    nodes = [GpuNode("n1", cards=2, settings={"FAKEGPU_NVLINKS": "0>1:4"})]
    async with Cluster(ClusterConfig(nodes, default_native(), monitor=False)) as cluster:

        def events() -> list[Object]:
            found = cluster.api.store.list(EVENTS)
            return [event for event in found if event.get("reason") == "AsymmetricGPUP2PLink"]

        await until(events)
        (event,) = events()
        assert event["type"] == "Warning"
        assert dig(event, "metadata", "namespace") == "default"
        assert dig(event, "source", "component") == "hami-device-plugin"
        assert dig(event, "involvedObject", "kind") == "Node"
        assert {
            number
            for row in decode_pair_scores(node_notes(cluster)[SCORES]).values()
            for number in row.values()
        } == {0}


async def test_a_driver_that_fails_on_links_leaves_the_cards_usable() -> None:
    settings = {"FAKEGPU_FAULTS": "nvmlDeviceGetNvLinkState:*=999"}
    nodes = [GpuNode("n1", cards=3, settings=settings)]
    async with Cluster(ClusterConfig(nodes, default_native(), monitor=False)) as cluster:
        assert len(await placed(cluster, "pair", 2)) == 2
        assert SCORES not in node_notes(cluster)
