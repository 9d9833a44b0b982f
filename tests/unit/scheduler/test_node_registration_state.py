"""Which devices a node has in the state (scheduler.md §4.2, §5.2; vendors/README.md R4, R8)."""

import json
from typing import Any

import msgspec
import pytest

from hami.protocol import views

Lab = Any
REGISTER, HANDSHAKE = "hami.io/node-nvidia-register", "hami.io/node-handshake"
OLD = "Requesting_2026-08-22 11:00:00"  # long before the lab's clock, 2026-08-22 12:00:00 UTC


def see(lab: Lab, register: str | None, handshake: str | None = "Reported_now", **parts: Any) -> Any:
    """A node event of n1; the outcome of the state."""
    annotations = {REGISTER: register, HANDSHAKE: handshake, **parts.get("annotations", {})}
    kept = {key: text for key, text in annotations.items() if text is not None}
    allocatable = parts.get("allocatable")
    status = {} if allocatable is None else {"allocatable": {"nvidia.com/gpu": allocatable}}
    obj = {
        "metadata": {"name": "n1", "annotations": kept, "labels": parts.get("labels", {})},
        "status": status,
    }
    return lab.state.upsert_node(msgspec.convert(obj, views.Node), lab.now)


def cards(*ids: str, **overrides: Any) -> str:
    base = {"count": 10, "devmem": 8000, "devcore": 100, "health": True}
    return json.dumps([{"id": one, **base, **overrides} for one in ids])


def ids(lab: Lab) -> list[str]:
    return [one.info.id for one in lab.state.node_usage("n1").cards]


def test_a_node_without_register_annotation_is_left_alone(lab: Lab) -> None:
    assert see(lab, None, None).patches == ()
    assert lab.state.node_names() == []


def test_a_registered_node_is_asked_to_answer(lab: Lab) -> None:
    assert see(lab, cards("a")).patches == (("n1", {HANDSHAKE: "Requesting_2026-08-22 12:00:00"}),)
    assert ids(lab) == ["a"]


def test_a_node_that_was_asked_is_not_asked_again(lab: Lab) -> None:
    assert see(lab, cards("a"), OLD, allocatable="10").patches == ()
    assert ids(lab) == ["a"]


def test_changed_devices_replace_the_old_ones(lab: Lab) -> None:
    see(lab, cards("a"))
    see(lab, cards("b", "c"))
    assert ids(lab) == ["b", "c"]


def test_usage_survives_a_change_of_devices(lab: Lab) -> None:
    see(lab, cards("a"))
    lab.holder("h", "n1", "b,NVIDIA,100,0:;")
    see(lab, cards("a", "b"))
    assert lab.used("n1") == {"a": (0, 0, 0), "b": (1, 100, 0)}


@pytest.mark.parametrize("text", ["", "{}", "null", "no json"])
def test_an_unreadable_registration_keeps_the_last_good_one_and_is_noticed(lab: Lab, text: str) -> None:
    see(lab, cards("a"))
    outcome = see(lab, text)
    assert [notice.reason for notice in outcome.notices] == ["RegistrationUnreadable"]
    assert ids(lab) == ["a"]


@pytest.mark.parametrize(
    ("register", "scores", "words"),
    [
        pytest.param("A,1,1,1,t,0,true:junk:", None, ["device 1"], id="7"),
        pytest.param(None, "not json", ["node-nvidia-score", "unusable"], id="T9"),
    ],
)
def test_what_cannot_be_used_of_a_registration_is_told_and_counted(
    lab: Lab, register: str | None, scores: str | None, words: list[str]
) -> None:
    extra = {} if scores is None else {"hami.io/node-nvidia-score": scores}
    outcome = see(lab, register or cards("A"), annotations=extra)
    (notice,) = outcome.notices
    assert (notice.kind, notice.name, notice.reason) == ("Node", "n1", "RegistrationDoubtful")
    assert all(word in notice.message for word in words)
    assert ids(lab) == ["A"]
    assert lab.state.doubtful_registrations == 1
    see(lab, cards("A"))
    assert lab.state.doubtful_registrations == 0


def test_an_unreadable_registration_is_counted_until_it_is_gone(lab: Lab) -> None:
    see(lab, "no json")
    assert lab.state.doubtful_registrations == 1
    lab.state.delete_node("n1")
    assert lab.state.doubtful_registrations == 0
    see(lab, "no json")
    see(lab, None)
    assert lab.state.doubtful_registrations == 0


@pytest.mark.parametrize("register", [pytest.param("[]", id="11"), pytest.param(None, id="absent")])
def test_an_empty_registration_drops_the_node(lab: Lab, register: str | None) -> None:
    see(lab, cards("a"))
    see(lab, register)
    assert lab.state.node_names() == []


def test_a_dead_plugin_takes_its_devices_away_and_the_handshake(lab: Lab) -> None:
    see(lab, cards("a"), "Reported_now")
    outcome = see(lab, cards("a"), OLD)
    assert outcome.patches == (("n1", {HANDSHAKE: None}),)
    assert [notice.reason for notice in outcome.notices] == ["DevicesDropped"]
    assert lab.state.node_names() == []


def test_a_dead_plugin_is_not_taken_back_without_evidence_of_life(lab: Lab) -> None:
    see(lab, cards("a"), "Reported_now")
    see(lab, cards("a"), OLD)
    assert see(lab, cards("a"), None).patches == ()
    assert lab.state.node_names() == []
    see(lab, cards("a"), "Reported_again")
    assert ids(lab) == ["a"]


def test_time_alone_declares_a_plugin_dead(lab: Lab) -> None:
    see(lab, cards("a"), "Requesting_2026-08-22 12:00:00")
    due = lab.state.next_timer()
    assert due is not None
    assert lab.state.tick(due - 1).notices == ()
    assert ids(lab) == ["a"]
    assert lab.state.tick(due).patches == (("n1", {HANDSHAKE: None}),)
    assert lab.state.node_names() == []
    assert lab.state.next_timer() is None


def test_an_allocatable_device_keeps_a_silent_plugin_alive(lab: Lab) -> None:
    see(lab, cards("a"), "Requesting_2026-08-22 12:00:00", allocatable="10")
    lab.state.tick(lab.now + 10_000)
    assert ids(lab) == ["a"]


def test_no_allocatable_device_is_dead_at_once(lab: Lab) -> None:
    see(lab, cards("a"), "Reported_now", allocatable="10")
    see(lab, cards("a"), "Reported_now", allocatable="0")
    assert lab.state.node_names() == []


def test_a_new_leader_writes_the_handshakes_a_follower_could_not(lab: Lab) -> None:
    see(lab, cards("a"))
    assert lab.state.handshake_writes("n1", lab.now).patches == (
        ("n1", {HANDSHAKE: "Requesting_2026-08-22 12:00:00"}),
    )
    see(lab, cards("a"), "Requesting_2026-08-22 12:00:00")
    assert lab.state.handshake_writes("n1", lab.now).patches == ()


def test_a_new_leader_finds_out_that_a_plugin_died_meanwhile(lab: Lab) -> None:
    see(lab, cards("a"), "Requesting_2026-08-22 12:00:00")
    assert lab.state.handshake_writes("n1", lab.now + 100).patches == (("n1", {HANDSHAKE: None}),)
    assert lab.state.node_names() == []


def test_the_same_node_again_changes_nothing(lab: Lab) -> None:
    see(lab, cards("a"), OLD, allocatable="10")
    version = lab.state.version
    assert see(lab, cards("a"), OLD, allocatable="10").patches == ()
    assert lab.state.version == version


@pytest.mark.parametrize("key", [HANDSHAKE, "hami.io/mutex.lock"])
def test_handshakes_and_locks_change_no_version(lab: Lab, key: str) -> None:
    see(lab, cards("a"), OLD, allocatable="10")
    version = lab.state.version
    see(lab, cards("a"), OLD, allocatable="10", annotations={key: "Requesting_2026-08-22 11:59:59"})
    assert lab.state.version == version


def test_a_cordon_or_another_count_of_slots_is_a_change(lab: Lab) -> None:
    see(lab, cards("a"), OLD, allocatable="10")
    version = lab.state.version
    see(lab, cards("a"), OLD, allocatable="9")
    assert lab.state.version > version


def test_nodes_outside_the_selector_are_dropped(lab: Lab) -> None:
    lab = lab.fresh(node_selector={"gpu": "on"})
    see(lab, cards("a"), labels={"gpu": "on"})
    assert ids(lab) == ["a"]
    see(lab, cards("a"), labels={"gpu": "off"})
    assert lab.state.node_names() == []


def test_a_deleted_node_comes_back_clean(lab: Lab) -> None:
    see(lab, cards("a"), "Reported_now")
    see(lab, cards("a"), OLD)
    lab.state.delete_node("n1")
    see(lab, cards("a"), "Requesting_2026-08-22 12:00:00")
    assert ids(lab) == ["a"]


def test_the_inventory_names_each_kind_of_card_once(lab: Lab) -> None:
    see(lab, cards("a", "b"))
    lab.node("n2", lab.card("c", devmem=1))
    kinds = lab.state.inventory.kinds("NVIDIA")
    assert [(one.id, one.devmem) for one in kinds] == [("a", 8000), ("c", 1)]
    lab.state.delete_node("n1")
    assert [one.id for one in lab.state.inventory.kinds("NVIDIA")] == ["c"]


def test_a_hundred_cards_on_a_node_are_no_problem_beside_small_nodes(lab: Lab) -> None:
    see(lab, cards(*(f"c{at}" for at in range(100))))
    lab.node("n2", lab.card("only"))
    answer = lab.filter(lab.pod("new", lab.container(gpus=90, mem=10)))
    assert answer.node == "n1"
    assert lab.refused(lab.pod("more", lab.container(gpus=101, mem=10))) == {
        "n1": "NodeInsufficientDevice",
        "n2": "NodeInsufficientDevice",
    }
