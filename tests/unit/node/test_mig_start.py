"""Dynamic MIG when the plugin starts, and starts again: cards are divided, instances found again."""

from __future__ import annotations

from typing import Any

import pytest
from mig_node import ALLOWED, Make, World, conflicts
from mig_world import FakeMig, reservation
from node_cards import U1, U2

from hami.kube.errors import Forbidden, KubeError, ServerError, TransportError
from hami.node.errors import AllocateError, NvmlError
from hami.node.mig.manager import FAILED, FOREIGN
from hami.node.paths import HostPaths


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
