"""Ascend NPUs on nodes: modes, choice of cards, annotations, scores (ascend.md §6, §7, §11)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from vendor_desk import NOW, Desk, pod

from hami.scheduler.core.answers import Placement
from hami.scheduler.core.state import ClusterState
from hami.vendors.types import ContainerDevice, ScoreContext, VendorProfile

SOFT = {"huawei.com/vnpu-mode": "hami-core"}
B2, B3, B4, P310, C = "Ascend910B2", "Ascend910B3", "Ascend910B4", "Ascend310P", "Ascend910C"
C_AT = "vnpus/configs/6"
MIB = {B2: 65536, B3: 65536, B4: 32768, P310: 21527, C: 65536}


def cards(word: str, number: int, networks: Sequence[Any] = (), **parts: Any) -> list[dict[str, Any]]:
    """Registered cards d0, d1, ...; `networks`: their NetworkIDs."""
    plain = {"count": 4, "devmem": MIB[word], "devcore": 20, "type": word, "health": True, **parts}
    found = [{"id": f"d{at}", "index": at, **plain} for at in range(number)]
    for at, network in enumerate(networks):
        found[at]["custominfo"] = {"NetworkID": network}
    return found


def desk_of(profile: VendorProfile, registered: Sequence[Mapping[str, Any]], **parts: Any) -> Desk:
    """One node n1 with these cards."""
    desk = Desk(profile)
    total = sum(card["count"] for card in registered)
    desk.registered("n1", *registered, capacity={profile.names.count: total}, **parts)
    return desk


def asking(word: str, count: int, memory: int | None = None, core: int | None = None) -> dict[str, int]:
    name = f"huawei.com/{word}"
    limits = {name: count, f"{name}-memory": memory, f"{name}-core": core}
    return {key: amount for key, amount in limits.items() if amount is not None}


def whole(desk: Desk, word: str, *ids: str) -> None:
    """Cards in whole use by other pods."""
    for one in ids:
        desk.hold(f"holder-{one}", "n1", f"{one},{word},{MIB[word]},0:;")


def chosen(desk: Desk, word: str, count: int, memory: int | None = None) -> list[str]:
    text = desk.allocated(pod(asking(word, count, memory)))
    return [piece.split(",")[0] for piece in text.rstrip(";").split(":") if piece]


# --- modes ------------------------------------------------------------------------------------------------


def test_a_node_that_says_it_is_hard_refuses_a_soft_pod(lab: Any) -> None:  # 27
    profile = lab.vendor(B3, {"vnpus/hamiVnpuCore": True})
    desk = desk_of(profile, cards(B3, 8), annotations={"hami-vnpu-core": "false"})
    assert desk.refused(pod(asking(B3, 1, 4096), annotations=SOFT)) == "1/8 ModeNotFit"
    assert chosen(desk, B3, 1) == ["d7"]


def test_a_node_that_says_nothing_is_what_the_configuration_says(lab: Any) -> None:  # 28
    profile = lab.vendor(B3, {"vnpus/hamiVnpuCore": True})
    desk = desk_of(profile, cards(B3, 1))
    assert desk.allocated(pod(asking(B3, 1, 4096), annotations=SOFT)) == "d0,Ascend910B3,4096,0:;"
    hard = desk_of(lab.vendor(B3), cards(B3, 1))
    assert hard.refused(pod(asking(B3, 1, 4096), annotations=SOFT)) == "1/1 ModeNotFit"


def test_a_soft_pod_counts_100_cores_whatever_is_registered(lab: Any) -> None:  # 29
    desk = desk_of(lab.vendor(B3), cards(B3, 1), annotations={"hami-vnpu-core": "true"})
    obj = pod(asking(B3, 1, 4096, 60), annotations=SOFT)
    assert desk.allocated(obj) == "d0,Ascend910B3,4096,60:;"
    desk.bind(obj)
    more = pod(asking(B3, 1, 4096, 60), annotations=SOFT, name="q")
    assert desk.refused(more) == "1/1 CardInsufficientCore"


def test_strict_mode_keeps_templates_off_soft_nodes(lab: Any) -> None:
    soft = {"annotations": {"hami-vnpu-core": "true"}}
    strict = desk_of(lab.vendor(B3, {"vnpus/strictMode": True}), cards(B3, 2), **soft)
    assert strict.refused(pod(asking(B3, 1, 10000))) == "1/2 ModeNotFit"
    assert chosen(strict, B3, 1) == ["d1"]
    assert chosen(desk_of(lab.vendor(B3), cards(B3, 2), **soft), B3, 1, 10000) == ["d1"]


def test_a_total_of_soft_memory_is_shared_by_the_cards(lab: Any) -> None:  # 48
    profile = lab.vendor(B3, {"vnpus/hamiCoreMemoryScope": "total"})
    desk = desk_of(profile, cards(B3, 2), annotations={"hami-vnpu-core": "true"})
    written = desk.written(pod(asking(B3, 2, 65536), annotations=SOFT))
    assert written["hami.io/Ascend910B3-devices-allocated"] == (
        "d1,Ascend910B3,32768,0:d0,Ascend910B3,32768,0:;"
    )
    assert json.loads(written["huawei.com/Ascend910B3"]) == [
        {"UUID": "d1", "memory": 65536},
        {"UUID": "d0", "memory": 65536},
    ]


# --- choice of cards --------------------------------------------------------------------------------------


def test_cards_of_one_network_group_are_taken_together(lab: Any) -> None:  # 30
    desk = desk_of(lab.vendor(B3), cards(B3, 3, [0, 1, 1]))
    assert chosen(desk, B3, 2) == ["d2", "d1"]


def test_the_smallest_group_that_holds_all_is_taken(lab: Any) -> None:  # 31
    desk = desk_of(lab.vendor(B3), cards(B3, 6, [0, 0, 0, 0, 1, 1]))
    assert chosen(desk, B3, 2) == ["d5", "d4"]
    assert chosen(desk, B3, 3) == ["d3", "d2", "d1"]
    assert chosen(desk, B3, 5) == ["d3", "d2", "d1", "d0", "d5"]


def test_a_group_that_is_no_number_is_a_group_of_its_own(lab: Any) -> None:
    desk = desk_of(lab.vendor(B3), cards(B3, 4, [0, "x", 0, None]))
    assert chosen(desk, B3, 2) == ["d3", "d1"]
    assert len(chosen(desk, B3, 3)) == 3


def test_without_network_groups_cards_are_taken_in_order(lab: Any) -> None:  # 43
    desk = desk_of(lab.vendor(P310), cards(P310, 3))
    assert chosen(desk, P310, 2) == ["d2", "d1"]


@pytest.mark.parametrize(
    ("free", "count", "text"),
    [
        pytest.param({0, 1, 2, 4, 6}, 4, "2/4 AllocatedCardsInsufficientRequest", id="32"),
        pytest.param({0, 2}, 2, "0/2 AllocatedCardsInsufficientRequest", id="33"),
    ],
)
def test_a_super_pod_gives_whole_modules_or_nothing(lab: Any, free: set[int], count: int, text: str) -> None:
    desk = desk_of(lab.vendor(C), cards(C, 8))
    whole(desk, C, *(f"d{at}" for at in range(8) if at not in free))
    reasons = desk.refused(pod(asking(C, count))).split(", ")
    assert text in reasons
    assert f"{8 - len(free)}/{count} CardInsufficientMemory" in reasons


def test_a_full_module_is_taken_before_a_single_die(lab: Any) -> None:  # 34
    desk = desk_of(lab.vendor(C), cards(C, 8))
    whole(desk, C, *(f"d{at}" for at in range(3, 8)))
    assert sorted(chosen(desk, C, 2)) == ["d0", "d1"]


def test_modules_need_no_network_groups(lab: Any) -> None:  # 35
    assert sorted(chosen(desk_of(lab.vendor(C), cards(C, 2)), C, 2)) == ["d0", "d1"]


def test_without_super_pod_single_dies_will_do(lab: Any) -> None:
    desk = desk_of(lab.vendor(C, {f"{C_AT}/superPod": False}), cards(C, 6))
    whole(desk, C, "d1", "d5")
    assert chosen(desk, C, 2) == ["d3", "d2"]
    assert chosen(desk, C, 4) == ["d3", "d2", "d4", "d0"]


def test_a_card_serves_one_size_within_a_pod(lab: Any) -> None:
    desk = desk_of(lab.vendor(B3), cards(B3, 1))
    small, large = asking(B3, 1, 16384), asking(B3, 1, 32768)
    assert desk.refused(pod(small, large)) == "1/1 CardNotFoundCustomFilterRule"
    equal = "d0,Ascend910B3,16384,0:;"
    assert desk.allocated(pod(small, small)) == equal * 2


def test_units_of_templates_are_counted_where_the_configuration_says_so(lab: Any) -> None:
    slots: dict[str, Any] = {"count": 8}
    plain = desk_of(lab.vendor(B2), cards(B2, 1, **slots))
    counting = desk_of(lab.vendor(B2, {"vnpus/checkTemplateUnits": True}), cards(B2, 1, **slots))
    for number in range(6):
        for desk in (plain, counting):
            obj = pod(asking(B2, 1, 8192), name=f"p{number}")
            desk.allocated(obj)
            desk.bind(obj)
    last = pod(asking(B2, 1, 8192), name="last")
    assert plain.allocated(last)
    assert counting.refused(last) == "1/1 CardInsufficientCore"  # six AI CPUs are in use


# --- reasons of single cards ------------------------------------------------------------------------------


def test_a_card_without_slots_is_exhausted(lab: Any) -> None:  # 36
    desk = Desk(lab.vendor(B3))
    desk.registered("n1", *cards(B3, 1), capacity={"huawei.com/Ascend910B3": 8})
    for number in range(4):
        desk.hold(f"h{number}", "n1", "d0,Ascend910B3,1,0:;")
    assert desk.refused(pod(asking(B3, 1, 16384))) == "1/1 CardTimeSlicingExhausted"


def test_a_slice_in_use_leaves_no_room_for_a_whole_card(lab: Any) -> None:  # 37
    desk = desk_of(lab.vendor(B3), cards(B3, 1))
    desk.hold("h", "n1", "d0,Ascend910B3,16384,0:;")
    assert desk.refused(pod(asking(B3, 1))) == "1/1 CardInsufficientMemory"


def test_what_bypassed_the_webhook_is_charged_the_template(lab: Any) -> None:
    desk = desk_of(lab.vendor(B3), cards(B3, 1))
    assert desk.allocated(pod(asking(B3, 1, 10000))) == "d0,Ascend910B3,16384,0:;"


def test_cards_of_another_chip_are_not_there(lab: Any) -> None:  # 44
    wanted, there = lab.vendor(B4), lab.vendor("Ascend910B4-1")
    desk = Desk(wanted)
    desk.state = ClusterState((wanted, there))
    text = json.dumps(cards(B3, 1, type="Ascend910B4-1"))
    desk.node("n1", annotations={there.rules.register.key: text}, capacity={there.names.count: 4})
    assert desk.refused(pod(asking(B4, 1))) == "NodeInsufficientDevice"


def test_a_card_that_does_not_say_it_is_healthy_is_not(lab: Any) -> None:  # 45
    (card,) = cards(B3, 1)
    del card["health"]
    assert desk_of(lab.vendor(B3), [card]).refused(pod(asking(B3, 1))) == "1/1 CardNotHealth"


def test_a_pod_may_name_its_cards(lab: Any) -> None:  # 46
    desk = desk_of(lab.vendor(P310), cards(P310, 1))
    obj = pod(asking(P310, 1), annotations={"hami.io/use-Ascend310P-uuid": "A,B"})
    assert desk.refused(obj) == "1/1 CardUuidMismatch"


# --- annotations ------------------------------------------------------------------------------------------


def test_the_plugin_finds_template_and_memory(lab: Any) -> None:  # 38
    desk = desk_of(lab.vendor(B4), [{**cards(B4, 1)[0], "id": "Q1"}])
    written = desk.written(pod(asking(B4, 1, 8192)))
    assert written["hami.io/Ascend910B4-devices-to-allocate"] == "Q1,Ascend910B4,8192,0:;"
    assert written["hami.io/Ascend910B4-devices-allocated"] == "Q1,Ascend910B4,8192,0:;"
    assert written["huawei.com/Ascend910B4"] == '[{"UUID":"Q1","temp":"vir05_1c_8g","memory":8192}]'
    assert written["predicate-time"] == str(int(NOW))


@pytest.mark.parametrize(
    ("core", "text"),
    [
        pytest.param(50, '[{"UUID":"Q1","memory":4096,"core":50}]', id="39"),
        pytest.param(None, '[{"UUID":"Q1","memory":4096}]', id="no cores"),
    ],
)
def test_soft_pods_have_limits_and_no_template(lab: Any, core: int | None, text: str) -> None:
    soft = {"annotations": {"hami-vnpu-core": "true"}}
    desk = desk_of(lab.vendor(B3), [{**cards(B3, 1)[0], "id": "Q1"}], **soft)
    obj = pod(asking(B3, 1, 4096, core), annotations=SOFT)
    assert desk.written(obj)["huawei.com/Ascend910B3"] == text


def test_a_whole_card_has_no_template(lab: Any) -> None:
    written = desk_of(lab.vendor(B3), cards(B3, 1)).written(pod(asking(B3, 1)))
    assert written["huawei.com/Ascend910B3"] == '[{"UUID":"d0","memory":65536}]'


def test_an_init_container_without_devices_keeps_its_place(lab: Any) -> None:  # 40
    desk = desk_of(lab.vendor(P310), cards(P310, 1))
    written = desk.written(pod(asking(P310, 1, 3072), inits=[{}]))
    assert written["hami.io/Ascend310P-devices-to-allocate"] == ";d0,Ascend310P,3072,0:;"


# --- scores -----------------------------------------------------------------------------------------------


def bonus_of(lab: Any, *customs: Mapping[str, Any]) -> float:
    devices = tuple(ContainerDevice(f"d{at}", B3, 1, 0, custom=one) for at, one in enumerate(customs))
    hook = lab.vendor(B3).hooks.node_bonus
    bonus = hook(ScoreContext(lab.node(), ((), devices), (), "binpack"))
    assert bonus.higher_is_better
    return float(bonus.value * bonus.weight)


def test_the_bonus_is_the_share_of_the_largest_group(lab: Any) -> None:  # 41, 42
    groups = [{"NetworkID": number} for number in (0, 0, 0, 1)]
    assert bonus_of(lab, *groups) == 7.5
    assert bonus_of(lab, groups[0]) == 10.0
    assert bonus_of(lab, groups[0], {}) == 0.0
    assert bonus_of(lab, {"NetworkID": "x"}) == 0.0
    assert lab.vendor(P310).hooks.node_bonus is None


@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_the_better_group_wins_under_either_policy(lab: Any, policy: str) -> None:  # 52
    desk = Desk(lab.vendor(B3), node_policy=policy)
    capacity = {"huawei.com/Ascend910B3": 16}
    desk.registered("n2", *cards(B3, 4, [0, 0, 0, 1]), capacity=capacity)
    desk.registered("n1", *cards(B3, 4, [0, 0, 0, 0]), capacity=capacity)
    answer = desk.place(pod(asking(B3, 4)))
    assert isinstance(answer, Placement)
    assert answer.node == "n1"
    worse, better = sorted(abs(score) for _, score in answer.scores)
    assert (worse, better) == (7.5, 10.0)


# --- nodes ------------------------------------------------------------------------------------------------


def test_an_empty_list_of_cards_takes_the_vendor_off_the_node(lab: Any) -> None:  # 51
    desk = desk_of(lab.vendor(B3), cards(B3, 1))
    assert len(desk.cards("n1")) == 1
    desk.registered("n1", capacity={"huawei.com/Ascend910B3": 4})
    assert desk.cards("n1") == []


@pytest.mark.parametrize(("allocatable", "left"), [(8, 1), (0, 0)])
def test_garbage_in_the_handshake_counts_as_expired(lab: Any, allocatable: int, left: int) -> None:  # 53
    desk = desk_of(lab.vendor(B3), cards(B3, 1))
    for now in (NOW, NOW + 100):
        desk.registered(
            "n1",
            *cards(B3, 1),
            annotations={"hami.io/node-handshake-Ascend910B3": "Requesting_garbage"},
            capacity={"huawei.com/Ascend910B3": 8},
            allocatable={"huawei.com/Ascend910B3": allocatable},
            now=now,
        )
    assert len(desk.cards("n1")) == left
