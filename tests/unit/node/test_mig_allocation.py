"""Dynamic MIG: reservations become instances, and the pod knows their ids."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mig_node import Make, World, conflicts
from mig_world import NOTE, reservation, slot
from node_cards import U1, U2

from hami.kube.errors import Conflict, Forbidden, KubeError, ServerError, TransportError
from hami.node.errors import AllocateError, NvmlError, SliceBusyError
from hami.node.mig.manager import FAILED
from hami.node.paths import HostPaths


@pytest.fixture
def world(cluster: Any, host: HostPaths, make_pod: Make) -> World:
    return World(cluster, host, make_pod)


# --- allocation ---


async def test_g1_a_reservation_becomes_an_instance_at_its_place_and_the_pod_knows_its_ids(
    world: World,
) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    (uuid,) = await world.realise("p")
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    made = next(iter(world.driver.card(U1).instances.values()))
    assert world.ids("p") == (uuid, made.id, 0)
    assert uuid == made.compute[0]


async def test_two_instances_of_one_container_come_in_device_order(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "2g.10gb", 2, 2), reservation(U2, "1g.5gb", 6, 1, device=1))
    uuids = await world.realise("p", U1, U2)
    assert world.ids("p", 0)[0] == uuids[0]
    assert world.ids("p", 1)[0] == uuids[1]
    assert (world.driver.places(U1), world.driver.places(U2)) == ([("2g.10gb", 2)], [("1g.5gb", 6)])


async def test_an_init_container_and_the_container_after_it_share_a_place(world: World) -> None:
    await world.start()
    world.add(
        "p",
        reservation(U1, "1g.5gb", 6, 1),
        reservation(U1, "1g.5gb", 6, 1, container=1),
        init=["prepare"],
    )
    assert await world.realise("p", position=0) == await world.realise("p", position=1)
    assert world.ids("p", 0) == world.ids("p", 1)
    assert world.driver.places(U1) == [("1g.5gb", 6)]


@pytest.mark.parametrize("step", ["create", "create_compute", "devices"])
async def test_g2_what_was_made_is_destroyed_when_the_next_one_fails(world: World, step: str) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1), reservation(U1, "1g.5gb", 5, 1, device=1))
    failure = NvmlError(f"cannot {step}: Unknown Error", 999)
    plain = getattr(world.driver, step)
    calls = 0

    def second_fails(*parameters: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise failure
        return plain(*parameters)

    setattr(world.driver, step, second_fails)
    with pytest.raises(AllocateError, match=r"resolve allocated NVIDIA devices.*Unknown Error"):
        await world.realise("p", U1, U1)
    assert world.driver.places(U1) == []
    assert world.manager.instances == ()
    assert "migUUID" not in world.cluster.notes("p")[NOTE]


async def test_g2_what_was_there_before_the_failed_call_stays(world: World) -> None:
    await world.start()
    world.add(
        "p",
        reservation(U1, "1g.5gb", 6, 1),
        reservation(U1, "1g.5gb", 6, 1, container=1),
        reservation(U1, "1g.5gb", 5, 1, container=1, device=1),
        init=["prepare"],
    )
    await world.realise("p", position=0)
    world.driver.fail["create"] = [NvmlError("no", 999)]
    with pytest.raises(AllocateError):
        await world.realise("p", U1, U1, position=1)
    assert world.driver.places(U1) == [("1g.5gb", 6)]


async def test_what_cannot_be_undone_goes_with_the_next_round(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    world.driver.fail = {"create_compute": [NvmlError("no", 999)], "destroy": [NvmlError("not now", 999)]}
    with pytest.raises(AllocateError):
        await world.realise("p")
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    assert "not now" in world.events(FAILED)[0]
    await world.manager.reconcile()
    assert world.driver.places(U1) == []


async def test_a_call_that_fails_later_gives_its_instances_back(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    realised = await world.manager.realise(world.pod("p"), [(0, slot(U1))])
    await world.manager.undo(realised)
    assert world.driver.places(U1) == []


async def test_g5_a_place_that_the_driver_does_not_offer_is_an_error_and_no_other_is_tried(
    world: World,
) -> None:
    await world.start()
    world.add("p", reservation(U1, "2g.10gb", 1, 2))
    with pytest.raises(AllocateError, match=r"does not offer 2g at 1\+2.*0\+2, 2\+2, 4\+2"):
        await world.realise("p")
    assert not [call for call in world.driver.calls if call.startswith("create")]


async def test_a_place_that_a_foreign_instance_takes_is_an_error_with_the_way_out(world: World) -> None:
    await world.start()
    foreign = world.driver.add(U1, 1, 4)
    world.add("p", reservation(U1, "1g.5gb", 5, 1))
    with pytest.raises(AllocateError, match=rf"not made.*-dgi -gi {foreign.id}"):
        await world.realise("p")
    assert world.driver.places(U1) == [("2g.10gb", 4)]


async def test_a_card_that_is_not_ready_takes_no_instance(world: World) -> None:
    world.driver.card(U1).needs_reset = True
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    with pytest.raises(AllocateError, match=r"takes no MIG instances.*GPU reset"):
        await world.realise("p")


async def test_without_the_list_of_pods_nothing_is_allocated(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    world.cluster.fail_reads = [TransportError("refused")]
    with pytest.raises(AllocateError, match="cannot list the pods"):
        await world.realise("p")
    assert world.driver.places(U1) == []


async def test_the_place_of_an_ended_pod_is_made_anew_for_the_next(world: World) -> None:
    await world.start()
    world.add("old", reservation(U1, "1g.5gb", 6, 1))
    (before,) = await world.realise("old")
    world.end("old")
    world.add("new", reservation(U1, "1g.5gb", 6, 1))
    (after,) = await world.realise("new")
    assert after != before, "nothing of the old pod's memory is handed on"
    assert world.driver.places(U1) == [("1g.5gb", 6)]


async def test_the_instance_of_an_ended_pod_that_still_has_processes_is_never_handed_on(
    world: World,
) -> None:
    await world.start()
    world.add("old", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("old")
    (instance,) = world.driver.card(U1).instances.values()
    instance.processes = 1
    world.end("old")
    world.add("new", reservation(U1, "1g.5gb", 6, 1))
    with pytest.raises(SliceBusyError, match="another pod"):
        await world.realise("new")
    assert world.driver.card(U1).instances[instance.id] is instance
    instance.processes = 0
    assert await world.realise("new")


async def test_an_allocation_waits_for_a_place_that_is_just_becoming_free(world: World) -> None:
    await world.start()
    world.add("old", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("old")
    (instance,) = world.driver.card(U1).instances.values()
    instance.processes = 1
    world.end("old")
    world.add("new", reservation(U1, "1g.5gb", 6, 1))
    world.manager._patience_s = 1.0  # a clock that stands still
    waiting = asyncio.create_task(world.realise("new"))
    while world.driver.calls.count("is_busy") < 6:  # noqa: ASYNC110 - a counter
        await asyncio.sleep(0)
    instance.processes = 0
    assert await waiting


async def test_work_that_has_begun_is_finished_before_a_cancelled_caller_leaves(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    plain = world.driver.create_compute
    loop = asyncio.get_running_loop()
    call: asyncio.Task[list[str]] = asyncio.create_task(world.realise("p"))

    def cancelled_meanwhile(*parameters: Any) -> int:
        loop.call_soon_threadsafe(call.cancel)
        return plain(*parameters)

    world.driver.create_compute = cancelled_meanwhile  # type: ignore[method-assign, assignment]
    with pytest.raises(asyncio.CancelledError):
        await call
    assert world.driver.places(U1) == [], "the caller never heard of it"
    assert world.manager.instances == ()


# --- the pod's annotation ---


@pytest.mark.parametrize(
    "error", [Conflict(409, "Conflict", "changed"), ServerError(500, "x", "y"), TransportError("lost")]
)
async def test_ids_are_written_again_after_a_conflict_or_a_disturbance(
    world: World, error: KubeError
) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    world.cluster.fail_pod_patches = conflicts(4, error)
    (uuid,) = await world.realise("p")
    assert world.ids("p")[0] == uuid


@pytest.mark.parametrize(
    ("count", "error"), [(5, Conflict(409, "Conflict", "changed")), (1, Forbidden(403, "Forbidden", "no"))]
)
async def test_an_instance_whose_ids_cannot_be_written_is_destroyed(
    world: World, count: int, error: KubeError
) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    world.cluster.fail_pod_patches = conflicts(count, error)
    with pytest.raises(AllocateError, match="record MIG runtime placement"):
        await world.realise("p")
    assert world.driver.places(U1) == []


async def test_the_same_container_again_gets_the_same_instance_and_writes_nothing(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    first = await world.realise("p")
    patches = len(world.cluster.patches)
    assert await world.realise("p") == first
    assert len(world.cluster.patches) == patches
