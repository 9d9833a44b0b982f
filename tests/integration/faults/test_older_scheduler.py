"""The device plugin under a scheduler of HAMi's age: annotations, then the lock, then a bare Binding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from fault_invariants import ALLOCATED, LOCK, faults, registered

from hami.local.api.objects import Object, annotations_of, clone, dig, meta
from hami.local.api.resources import NODES, PODS
from hami.local.cluster import Cluster

LIMIT_S = 60.0


class OlderScheduler:
    """Places pods the way HAMi does, each step for itself."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.registry = cluster.api.registry
        self.card = str(registered(cluster.api.store.get(NODES, "", "n1"))[0]["id"])

    async def create(self, name: str, mib: int, script: str = "sleep 600") -> None:
        limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(mib)}
        container = {
            "name": "main", "image": "none", "command": ["sh", "-c", script], "resources": {"limits": limits},
        }  # fmt: skip
        spec = {"schedulerName": "older", "restartPolicy": "Never", "containers": [container]}
        await self.registry.create(PODS, "default", {"metadata": {"name": name}, "spec": spec})

    async def decide(self, name: str, mib: int) -> None:
        slot = f"{self.card},NVIDIA,{mib},0:;"
        await self.annotate(
            PODS, "default", name,
            {"hami.io/vgpu-node": "n1", "hami.io/vgpu-time": "1787400000", ALLOCATED: slot,
             "hami.io/vgpu-devices-to-allocate": slot},
        )  # fmt: skip

    async def lock(self, name: str) -> None:
        at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self.annotate(NODES, "", "n1", {LOCK: f"{at},default,{name}"})

    async def bind(self, name: str) -> None:
        """Phase and time, then a Binding that carries nothing."""
        at = str(int(datetime.now(UTC).timestamp()))
        await self.annotate(
            PODS, "default", name, {"hami.io/bind-phase": "allocating", "hami.io/bind-time": at}
        )
        self.registry.bind("default", name, {"metadata": {"name": name}, "target": {"name": "n1"}})

    async def annotate(self, resource: Any, namespace: str, name: str, wanted: dict[str, str]) -> None:
        def change(current: Object) -> Object:
            new: Object = clone(current)
            meta(new)["annotations"] = {**annotations_of(current), **wanted}
            return new

        await self.registry.update(resource, namespace, name, change)

    def pod(self, name: str) -> Object:
        return self.cluster.api.store.get(PODS, "default", name)

    async def phase(self, name: str, phase: str) -> None:
        await self.until(lambda: dig(self.pod(name), "status", "phase") in (phase, "Failed"))
        assert dig(self.pod(name), "status", "phase") == phase, self.pod(name)["status"]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110 - the condition is on objects of the API
                await asyncio.sleep(0.02)

    def node_lock(self) -> str | None:
        return annotations_of(self.cluster.api.store.get(NODES, "", "n1")).get(LOCK)


async def settled(cluster: Cluster) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await faults(cluster):  # noqa: ASYNC110 - the condition is on several processes
            await asyncio.sleep(0.1)


async def test_a_pod_of_an_older_scheduler_gets_its_limits_and_the_lock_is_given_back(
    cluster: Cluster,
) -> None:
    older = OlderScheduler(cluster)
    await older.create("p", 3000)
    await older.decide("p", 3000)
    await older.lock("p")
    await older.bind("p")
    await older.phase("p", "Running")
    await older.until(lambda: older.node_lock() is None)
    assert annotations_of(older.pod("p"))["hami.io/bind-phase"] == "success"
    await settled(cluster)


async def test_the_plugin_killed_while_an_older_scheduler_binds_leaves_a_cluster_that_settles(
    cluster: Cluster,
) -> None:
    older = OlderScheduler(cluster)
    await older.create("p", 3000)
    await older.decide("p", 3000)
    await older.lock("p")
    await cluster.component("n1-plugin").kill()
    await older.bind("p")
    await older.until(lambda: dig(older.pod("p"), "status", "phase") in ("Running", "Failed"))
    # Whatever became of it: the next pod of that scheduler runs, as do ours beside it.
    await older.until(
        lambda: dig(cluster.nodes["n1"].kubelet.node(), "status", "allocatable", "nvidia.com/gpu") == "10"
    )
    await older.create("q", 4000)
    await older.decide("q", 4000)
    await older.lock("q")
    await older.bind("q")
    await older.phase("q", "Running")
    await settled(cluster)


async def test_both_schedulers_place_pods_on_one_node(cluster: Cluster) -> None:
    older = OlderScheduler(cluster)
    await older.create("theirs", 30000)
    await older.decide("theirs", 30000)
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "20000"}
    container = {
        "name": "main",
        "image": "none",
        "command": ["sleep", "600"],
        "resources": {"limits": limits},
    }
    spec = {"schedulerName": "hami-scheduler", "containers": [container]}
    await cluster.api.registry.create(PODS, "default", {"metadata": {"name": "ours"}, "spec": spec})
    await older.until(lambda: "CardInsufficientMemory" in str(dig(older.pod("ours"), "status", "conditions")))
    await older.lock("theirs")
    await older.bind("theirs")
    await older.phase("theirs", "Running")
    await settled(cluster)
    assert dig(older.pod("ours"), "status", "phase") == "Pending"
