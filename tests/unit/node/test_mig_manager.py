"""Dynamic MIG as a whole on a driver in memory: start, allocation, what goes, what is found again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mig_world import FakeGiven, FakeMig, mig_pod, reservation, slot

from hami.kube.errors import Conflict, Forbidden, KubeError, ServerError, TransportError
from hami.node.config import MigAllowed
from hami.node.errors import AllocateError, NvmlError, SliceBusyError
from hami.node.mig.instances import MigCards
from hami.node.mig.journal import Journal
from hami.node.mig.manager import FAILED, FOREIGN, MigManager
from hami.node.paths import HostPaths
from hami.protocol.views import Pod, decode

U1 = "GPU-11111111-2222-3333-4444-555555555555"
U2 = "GPU-66666666-7777-8888-9999-000000000000"
NOTE = "hami.io/vgpu-mig-allocations"
ALLOWED = (MigAllowed(("A100",), ("1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb")),)
Make = Callable[..., dict[str, Any]]


class World:
    """One node in mode mig: cards, pods, the manager of one process after the other."""

    def __init__(self, cluster: Any, host: HostPaths, make_pod: Make) -> None:
        self.cluster = cluster
        self.host = host
        self.make_pod = make_pod
        self.driver = FakeMig(U1, U2)
        self.given = FakeGiven()
        self.now = 0.0
        self.changing = 0
        self.boot = Path(host.root, "boot_id")
        self.boot.write_text("boot-1\n")
        self.journal = Path(host.root, "usr/local/vgpu/mig-instances.json")
        self.manager = self.process()

    def process(self) -> MigManager:
        """A new process: nothing but the journal is known."""

        @contextmanager
        def applying() -> Any:
            self.changing += 1
            yield

        wrapped: Callable[[], AbstractContextManager[None]] = applying
        self.manager = MigManager(
            MigCards(self.driver, wrapped),
            self.cluster,
            Journal(self.host, str(self.boot)),
            self.given,
            clock=lambda: self.now,
            retry_s=0.001,
            patience_s=0.0,
        )
        return self.manager

    async def start(self) -> None:
        await self.process().prepare(self.driver.gpus())

    def add(self, name: str, *reservations: dict[str, object], **more: Any) -> None:
        self.cluster.add(mig_pod(self.make_pod, name, *reservations, **more))

    def pod(self, name: str) -> Pod:
        return decode(msgspec.json.encode(self.cluster.objects["team-a", name]), Pod)

    async def realise(self, name: str, *uuids: str, position: int = 0) -> list[str]:
        """The MIG UUIDs of one container of a pod."""
        found = await self.manager.realise(self.pod(name), [(position, slot(*(uuids or (U1,))))])
        return [each.uuid for each in found.of(position)]

    def end(self, name: str, phase: str = "Succeeded") -> None:
        self.cluster.objects["team-a", name]["status"]["phase"] = phase

    def ids(self, name: str, position: int = 0) -> tuple[str, int, int]:
        item = json.loads(self.cluster.notes(name)[NOTE])[position]
        return item["migUUID"], item["gpuInstanceID"], item["computeInstanceID"]

    def events(self, reason: str) -> list[str]:
        return [text for _, found, text in self.cluster.events if found == reason]


@pytest.fixture
def world(cluster: Any, host: HostPaths, make_pod: Make) -> World:
    return World(cluster, host, make_pod)


# --- start ---


async def test_at_start_unused_cards_are_divided_and_cleared(world: World) -> None:
    world.driver.card(U2).current = world.driver.card(U2).pending = True
    world.driver.add(U2, 1, 0)
    await world.start()
    assert [card.current for card in world.driver.cards] == [True, True]
    assert world.driver.places(U2) == []
    assert world.changing == 1, "others are asked to keep away while the mode changes, and only then"
    gpu = world.driver.gpus()[0]
    assert world.manager.offer(gpu, ALLOWED).count == 7


async def test_a_card_with_a_pod_keeps_its_instances_and_the_other_is_cleared(world: World) -> None:
    world.driver = FakeMig(U1, U2, divided=True)
    made, other = world.driver.add(U1, 0, 6), world.driver.add(U2, 0, 6)
    ids = (made.compute[0], made.id, 0)
    world.add("p", reservation(U1, "1g.5gb", 6, 1, ids=ids), phase="Running")
    world.given.pods[made.compute[0]] = {"uid-p"}
    await world.start()
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    assert world.driver.places(U2) == []
    assert [each.uuid for each in world.manager.instances] == [made.compute[0]]
    assert other.id not in world.driver.card(U2).instances


@pytest.mark.parametrize("failure", [TransportError("refused"), ServerError(503, "Unavailable", "later")])
async def test_g8_without_the_api_server_no_card_is_reset(world: World, failure: KubeError) -> None:
    world.driver = FakeMig(U1, divided=True)
    world.driver.add(U1, 0, 6)
    world.cluster.fail_reads = [failure]
    await world.start()
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    assert "API server" in world.manager.offer(world.driver.gpus()[0], ALLOWED).why
    await world.manager.reconcile()
    assert world.driver.places(U1) == [], "the pods are known now, and nobody uses the card"
    assert world.manager.offer(world.driver.gpus()[0], ALLOWED).count == 7


async def test_g8_without_the_api_server_an_undivided_card_is_not_divided(world: World) -> None:
    world.cluster.fail_reads = [TransportError("refused")]
    await world.start()
    assert [card.current for card in world.driver.cards] == [False, False]


async def test_g9_a_card_with_a_bare_process_on_an_instance_is_not_reset(world: World) -> None:
    world.driver = FakeMig(U1, divided=True)
    world.driver.add(U1, 0, 6).processes = 1
    await world.start()
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    assert "not made by this plugin" in world.events(FOREIGN)[0]


async def test_a_card_that_pods_use_undivided_is_divided_when_they_have_ended(world: World) -> None:
    world.cluster.add(world.make_pod("old", f"{U1},NVIDIA,3000,30:;", phase="Running"))
    await world.start()
    assert [card.current for card in world.driver.cards] == [False, True]
    assert "not divided" in world.manager.offer(world.driver.gpus()[0], ALLOWED).why
    world.end("old")
    await world.manager.reconcile()
    assert world.driver.card(U1).current
    assert world.manager.offer(world.driver.gpus()[0], ALLOWED).count == 7


async def test_after_a_reboot_a_card_is_divided_for_the_pods_that_wait_for_its_slices(world: World) -> None:
    world.add("p", reservation(U1, "1g.5gb", 6, 1, ids=("MIG-before", 7, 0)), phase="Running")
    await world.start()
    assert world.driver.card(U1).current
    (uuid,) = await world.realise("p")
    assert world.ids("p")[0] == uuid != "MIG-before"


async def test_a_card_with_a_process_is_not_divided_for_waiting_pods(world: World) -> None:
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    world.driver.card(U1).processes = 1
    await world.start()
    assert not world.driver.card(U1).current


async def test_g10_a_card_that_needs_a_reset_is_reported_and_others_go_on(world: World) -> None:
    world.driver.card(U1).needs_reset = True
    await world.start()
    (told,) = world.events(FAILED)
    assert U1 in told
    assert "GPU reset" in told
    assert "nvidia-smi --gpu-reset -i 0" in told, "what to do next"
    assert world.driver.card(U2).current
    await world.manager.reconcile()
    assert len(world.events(FAILED)) == 1, "told once for the same words"
    world.driver.card(U1).current = True
    await world.manager.reconcile()
    assert world.manager.offer(world.driver.gpus()[0], ALLOWED).count == 7


async def test_g10_a_card_that_leaves_mig_at_its_next_reset_is_reported(world: World) -> None:
    world.driver = FakeMig(U1, divided=True)
    world.driver.card(U1).pending = False
    world.driver.add(U1, 0, 6)
    await world.start()
    assert "nvidia-smi -i 0 -mig 1" in world.events(FAILED)[0]
    assert world.driver.places(U1) == [("1g.5gb", 6)]


async def test_a_card_without_mig_is_told_and_offers_nothing(world: World) -> None:
    world.driver.card(U1).has_mig = False
    await world.start()
    assert "has no MIG" in world.events(FAILED)[0]
    assert world.manager.offer(world.driver.gpus()[0], ALLOWED).profiles == ()


@pytest.mark.parametrize("step", ["mode", "enable", "instances", "destroy"])
async def test_a_driver_that_refuses_at_start_is_told_and_asked_again(world: World, step: str) -> None:
    world.driver = FakeMig(U1, divided=step != "enable")
    world.driver.add(U1, 0, 6)
    world.driver.fail[step] = [NvmlError(f"cannot {step}: Unknown Error", 999)]
    await world.start()
    assert "Unknown Error" in world.events(FAILED)[0]
    assert await world.manager.reconcile() is False
    assert world.driver.places(U1) == []
    assert world.driver.card(U1).current


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


# --- the pod's annotation ---


def conflicts(count: int, error: KubeError) -> Callable[[Any], KubeError | None]:
    left = [error] * count
    return lambda _: left.pop() if left else None


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


# --- the plugin ends and starts again ---


async def test_g7_a_restart_adopts_the_instance_of_a_running_pod(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    (uuid,) = await world.realise("p")
    (instance,) = world.driver.card(U1).instances.values()
    instance.processes = 1
    await world.start()
    assert world.driver.card(U1).instances == {instance.id: instance}
    assert [each.uuid for each in world.manager.instances] == [uuid]
    world.end("p")
    instance.processes = 0
    await world.manager.reconcile()
    assert world.driver.places(U1) == []


@pytest.mark.parametrize("lost", ["missing", "broken"])
async def test_g7_without_a_journal_a_pods_annotation_counts_if_kubelet_knows_the_same(
    world: World, lost: str
) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    (uuid,) = await world.realise("p")
    world.journal.unlink() if lost == "missing" else world.journal.write_bytes(b"{")
    world.given.pods[uuid] = {"uid-p"}
    await world.start()
    assert [(each.uuid, each.owners) for each in world.manager.instances] == [(uuid, frozenset({"uid-p"}))]


async def test_without_a_journal_a_pods_annotation_alone_claims_nothing(world: World) -> None:
    await world.start()
    foreign = world.driver.add(U1, 0, 6)
    world.add("thief", reservation(U1, "1g.5gb", 6, 1, ids=(foreign.compute[0], foreign.id, 0)))
    world.journal.unlink()
    world.given.pods[foreign.compute[0]] = {"uid-owner"}
    await world.start()
    with pytest.raises(AllocateError, match="has not made"):
        await world.realise("thief")
    assert "nvidia-smi mig -i 0 -dci -gi 1" in world.events(FOREIGN)[0]
    world.end("thief")
    await world.manager.reconcile()
    assert list(world.driver.card(U1).instances) == [foreign.id], "and never makes it go"


async def test_an_instance_that_the_journal_does_not_know_is_nobodys_though_kubelet_knows_the_pod(
    world: World,
) -> None:
    await world.start()
    world.add("keeps", reservation(U1, "1g.5gb", 0, 1), phase="Running")
    foreign = world.driver.add(U1, 0, 6)
    world.add("thief", reservation(U1, "1g.5gb", 6, 1, ids=(foreign.compute[0], foreign.id, 0)))
    world.given.pods[foreign.compute[0]] = {"uid-thief"}
    await world.start()
    assert world.manager.instances == (), "the journal is there and names no instance of this card"


async def test_a_journal_written_before_a_card_was_looked_at_does_not_speak_for_it(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    (uuid,) = await world.realise("p")
    world.journal.unlink()
    world.cluster.fail_reads = [TransportError("refused")]
    await world.start()
    assert world.journal.exists()
    world.given.pods[uuid] = {"uid-p"}
    await world.start()
    assert [each.uuid for each in world.manager.instances] == [uuid]


async def test_a_pod_that_names_the_instance_of_another_in_its_annotation_never_gets_it(world: World) -> None:
    await world.start()
    world.add("owner", reservation(U1, "1g.5gb", 6, 1))
    (uuid,) = await world.realise("owner")
    world.add("thief", reservation(U1, "1g.5gb", 6, 1, ids=world.ids("owner")))
    for begin in (world.manager.reconcile, world.start):
        await begin()
        with pytest.raises(AllocateError, match="another pod"):
            await world.realise("thief")
        assert [each.owners for each in world.manager.instances] == [frozenset({world.pod("owner").uid})]
    assert await world.realise("owner") == [uuid]
    world.end("owner")
    await world.manager.reconcile()
    assert await world.realise("thief") != [uuid], "one of its own, made anew"


async def test_a_pod_that_names_an_instance_that_nobody_here_made_never_gets_it(world: World) -> None:
    await world.start()
    foreign = world.driver.add(U1, 0, 6)
    world.add("thief", reservation(U1, "1g.5gb", 6, 1, ids=(foreign.compute[0], foreign.id, 0)))
    await world.manager.reconcile()
    with pytest.raises(AllocateError, match="has not made"):
        await world.realise("thief")
    world.end("thief")
    await world.manager.reconcile()
    assert list(world.driver.card(U1).instances) == [foreign.id], "and never makes it go"


async def test_without_a_journal_the_pod_that_kubelet_knows_owns_an_instance_that_two_name(
    world: World,
) -> None:
    await world.start()
    world.add("owner", reservation(U1, "1g.5gb", 6, 1))
    (uuid,) = await world.realise("owner")
    world.add("thief", reservation(U1, "1g.5gb", 6, 1, ids=world.ids("owner")))
    world.journal.write_bytes(b"{")
    world.given.pods[uuid] = {"uid-owner"}
    await world.start()
    with pytest.raises(AllocateError, match="another pod"):
        await world.realise("thief")
    assert await world.realise("owner") == [uuid]


async def test_g11_after_two_restarts_the_next_pods_instance_survives_the_end_of_the_first(
    world: World,
) -> None:
    await world.start()
    world.add("first", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("first")
    (number,) = world.driver.card(U1).instances
    old = world.manager
    await world.start()
    await world.start()
    world.end("first")
    await world.manager.reconcile()
    world.add("second", reservation(U1, "1g.5gb", 6, 1))
    (uuid,) = await world.realise("second")
    assert list(world.driver.card(U1).instances) == [number], "the same GPU instance id again"
    await old.reconcile()
    await world.manager.reconcile()
    assert world.driver.card(U1).instances[number].compute[0] == uuid


@pytest.mark.parametrize("step", ["create", "create_compute", "devices", "patch"])
async def test_an_instance_that_a_killed_plugin_left_unrecorded_is_found_and_destroyed(
    world: World, step: str
) -> None:
    await world.start()
    world.add("other", reservation(U1, "1g.5gb", 0, 1), phase="Running")
    await world.realise("other")
    world.add("p", reservation(U1, "1g.5gb", 6, 1))

    class Killed(BaseException):
        """The process ends here."""

    def die(*_: Any) -> Any:
        raise Killed

    plain = getattr(world.driver, step, None)
    if step == "create":

        def made_and_killed(*parameters: Any) -> Any:
            assert plain is not None
            plain(*parameters)
            raise Killed

        setattr(world.driver, step, made_and_killed)
    elif plain is not None:
        setattr(world.driver, step, die)
    else:
        world.cluster.fail_pod_patches = die
    world.manager._undo = lambda made: None  # type: ignore[method-assign] # dead processes undo nothing
    with pytest.raises(Killed):
        await world.realise("p")
    assert ("1g.5gb", 6) in world.driver.places(U1)
    if plain is not None:
        setattr(world.driver, step, plain)
    world.cluster.fail_pod_patches = lambda _: None
    world.end("p", "Failed")  # kubelet: UnexpectedAdmissionError
    await world.start()
    await world.manager.reconcile()
    assert world.driver.places(U1) == [("1g.5gb", 0)], "only what a pod has"
    assert world.events(FOREIGN) == []


async def test_what_a_killed_plugin_made_serves_the_same_pod_when_it_asks_again(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    world.cluster.fail_pod_patches = conflicts(1, Forbidden(403, "Forbidden", "no"))
    world.manager._undo = lambda made: None  # type: ignore[method-assign]
    with pytest.raises(AllocateError):
        await world.realise("p")
    (instance,) = world.driver.card(U1).instances.values()
    await world.start()
    assert await world.realise("p") == [instance.compute[0]]
    assert world.ids("p")[0] == instance.compute[0]


async def test_after_a_reboot_the_journal_claims_nothing(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1), phase="Running")
    await world.realise("p")
    world.boot.write_text("boot-2\n")
    world.driver = FakeMig(U1, U2, divided=True)
    world.driver.add(U1, 0, 5, id=1)  # somebody made it before us
    await world.start()
    await world.manager.reconcile()
    assert world.manager.instances == ()
    assert world.driver.places(U1) == [("1g.5gb", 5)]
    assert "is not on the card" in world.events(FAILED)[0], "the pod's instance is lost, that is told"


async def test_a_lost_instance_keeps_everything_else_on_its_card_until_its_pod_has_ended(
    world: World,
) -> None:
    await world.start()
    world.add("lost", reservation(U1, "1g.5gb", 6, 1), phase="Running")
    world.add("p", reservation(U1, "1g.5gb", 5, 1), phase="Running")
    await world.realise("lost")
    await world.realise("p")
    number = next(each.gpu_instance for each in world.manager.instances if each.key.start == 6)
    del world.driver.card(U1).instances[number]
    await world.start()
    world.end("p")
    await world.manager.reconcile()
    assert world.driver.places(U1) == [("1g.5gb", 5)], "this card is not touched"
    world.end("lost")
    await world.manager.reconcile()
    assert world.driver.places(U1) == []


async def test_a_lost_instance_is_made_again_when_its_container_starts_again(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1), phase="Running")
    (before,) = await world.realise("p")
    world.driver.card(U1).instances.clear()
    await world.start()
    (after,) = await world.realise("p")
    assert after != before
    assert world.ids("p")[0] == after


async def test_after_a_reset_of_the_card_no_container_gets_an_instance_that_is_gone(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1), phase="Running")
    (before,) = await world.realise("p")
    world.driver.card(U1).instances.clear()
    (after,) = await world.realise("p")
    assert after != before
    assert world.driver.places(U1) == [("1g.5gb", 6)]
    assert world.ids("p")[0] == after


async def test_an_instance_that_is_lost_while_its_pod_runs_is_told(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1), phase="Running")
    await world.realise("p")
    world.driver.card(U1).instances.clear()
    await world.manager.reconcile()
    assert "team-a/p" in world.events(FAILED)[0]
    assert "is not on the card" in world.events(FAILED)[0]


async def test_a_card_that_is_not_divided_any_more_is_divided_again(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))
    await world.realise("p")
    card = world.driver.card(U1)
    card.instances.clear()
    card.current = card.pending = False
    assert await world.manager.reconcile() is True, "look again soon"
    assert world.manager.instances == ()
    assert "any more" in world.manager.offer(world.driver.gpus()[0], ALLOWED).why
    await world.manager.reconcile()
    assert card.current
    assert world.manager.offer(world.driver.gpus()[0], ALLOWED).count == 7


async def test_a_journal_that_cannot_be_written_stops_the_making_and_nothing_else(world: World) -> None:
    await world.start()
    world.add("p", reservation(U1, "1g.5gb", 6, 1))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    world.manager._journal.save = full  # type: ignore[method-assign]
    with pytest.raises(AllocateError, match=r"journal.*No space left"):
        await world.realise("p")
    assert world.driver.places(U1) == []
    assert await world.manager.reconcile() is False


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
