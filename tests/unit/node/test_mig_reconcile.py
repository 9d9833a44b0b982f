"""Dynamic MIG: which instances go and which stay, and when the plugin looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from mig_node import Make, World
from mig_world import NOTE, reservation
from node_cards import U1, U2

from hami.kube.errors import TransportError
from hami.node.mig.manager import FAILED, FOREIGN
from hami.node.paths import HostPaths
from hami.protocol.views import Pod


@pytest.fixture
def world(cluster: Any, host: HostPaths, make_pod: Make) -> World:
    return World(cluster, host, make_pod)


# --- what goes, and what stays ---


@pytest.mark.parametrize("end", ["Succeeded", "Failed", "gone"])
async def test_g6_the_instance_of_a_pod_that_has_ended_is_destroyed(world: World, end: str) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    world.add("stays", reservation(U1, "1g.5gb", 5, 1))
    await world.realise("p")
    await world.realise("stays")
    if end == "gone":
        del world.cluster.objects["team-a", "p"]
    else:
        world.end("p", end)
    assert await world.manager.reconcile() is False
    assert world.driver.places(U1) == [("1g.5gb", 5)]


async def test_an_instance_stays_while_a_container_of_a_deleted_pod_may_run(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1), phase="Running")
    await world.realise("p")
    pod = world.cluster.objects["team-a", "p"]
    pod["metadata"]["deletionTimestamp"] = "2026-08-21T10:00:00Z"
    await world.manager.reconcile()
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    pod["status"]["containerStatuses"] = [{"name": "app", "state": {"terminated": {"exitCode": 0}}}]
    await world.manager.reconcile()
    assert world.driver.places(U1) == []


async def test_an_instance_with_processes_is_kept_and_told_after_two_minutes(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("p")
    (instance,) = world.driver.card(U1).instances.values()
    instance.processes = 2
    world.end("p")
    assert await world.manager.reconcile() is True, "look again soon"
    world.now = 119.0
    await world.manager.reconcile()
    assert world.events(FAILED) == []
    world.now = 120.0
    await world.manager.reconcile()
    assert "still has processes" in world.events(FAILED)[0]
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    instance.processes = 0
    await world.manager.reconcile()
    assert world.driver.places(U1) == []


async def test_without_the_list_of_pods_nothing_is_destroyed(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("p")
    world.end("p")
    world.cluster.fail_reads = [TransportError("refused")]
    assert await world.manager.reconcile() is True
    assert world.driver.places(U1) == [("1g.5gb", 6)]


async def test_while_one_pod_cannot_be_read_nothing_is_destroyed_and_the_pod_is_named(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("p")
    world.end("p")
    world.add("bad", reservation(U2, "1g.5gb", 6, 1), phase="Running")
    world.cluster.notes("bad")[NOTE] = "{"
    assert await world.manager.reconcile() is True
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    assert "team-a/bad" in world.events(FAILED)[0]
    world.end("bad")
    await world.manager.reconcile()
    assert world.driver.places(U1) == []


async def test_an_allocation_during_the_listing_of_pods_is_never_undone_by_it(world: World) -> None:
    await world.start()
    plain = world.cluster.pods
    listed, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> list[Pod]:
        found: list[Pod] = await plain()
        if not listed.is_set():
            listed.set()
            await go_on.wait()
        return found

    world.cluster.pods = slow
    round_of_the_loop = asyncio.create_task(world.manager.reconcile())
    await listed.wait()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))  # bound after the list was made
    await world.realise("p")
    go_on.set()
    assert await round_of_the_loop is True
    assert world.driver.places(U1) == [("1g.5gb", 6)]


async def test_an_instance_of_somebody_else_is_told_and_left_alone(world: World) -> None:
    await world.start()
    world.driver.add(U1, 1, 0)
    await world.manager.reconcile()
    await world.manager.reconcile()
    assert len(world.events(FOREIGN)) == 1
    assert world.driver.places(U1) == [("2g.10gb", 0)]


async def test_an_instance_that_somebody_exchanged_is_not_destroyed(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("p")
    (instance,) = world.driver.card(U1).instances.values()
    instance.compute[0] = "MIG-somebody-elses"
    world.end("p")
    await world.manager.reconcile()
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    assert world.manager.instances == ()


# --- the loop ---


class Changes:
    """Pod changes that a test makes."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.next = asyncio.Event()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def wait(self, timeout_s: float) -> None:
        self.waits.append(timeout_s)
        await self.next.wait()
        self.next.clear()


async def test_g6_the_loop_looks_when_a_pod_changes_and_sooner_while_something_is_left(
    world: World, until: Callable[..., Any]
) -> None:
    world.cluster.fail_reads = [TransportError("refused")]
    await world.start()
    changes, ready = Changes(), []
    loop = asyncio.create_task(world.manager.run(changes, lambda: ready.append(True)))
    await until(lambda: len(changes.waits) == 1)
    assert ready == [True], "cards became ready with the first list of pods"
    assert changes.waits == [60.0]
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("p")
    (instance,) = world.driver.card(U1).instances.values()
    instance.processes = 1
    world.end("p")
    changes.next.set()
    await until(lambda: len(changes.waits) == 2)
    assert changes.waits[1] == 5.0
    instance.processes = 0
    changes.next.set()
    await until(lambda: len(changes.waits) == 3)
    assert world.driver.places(U1) == []
    loop.cancel()
    await asyncio.wait({loop})
