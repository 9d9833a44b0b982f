"""Kunlunxin cards, whole and in slices (kunlun.md §6, §7, §9)."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_desk import NOW, Desk, limits_of, pod

from hami.scheduler.core.answers import Placement
from hami.scheduler.core.state import ClusterState
from hami.vendors.engine import annotations, read_inventory
from hami.vendors.kunlun import doubts
from hami.vendors.types import (
    AdmissionRejected,
    AnnotateContext,
    Card,
    ContainerDevice,
    DeviceInfo,
    PodInfo,
    PodShape,
    ScoreContext,
    SlotKind,
    Usage,
)

WHOLE, SHARE = "kunlun", "XPU"
XPU, VXPU, MEMORY = "kunlunxin.com/xpu", "kunlunxin.com/vxpu", "kunlunxin.com/vxpu-memory"
USE, NO_USE = "hami.io/use-xpu-uuid", "baidu.com/nouse-gpuuuid"
QUARTER, HALF, CARD = 24576, 49152, 98304


def whole_desk(
    lab: Any, used: Sequence[int] = (), changes: Mapping[str, Any] | None = None, **state: Any
) -> Desk:
    """Node x1 with eight whole cards, some in use."""
    desk = Desk(lab.vendor(WHOLE, changes or {}), **state)
    desk.node("x1", capacity={XPU: 8})
    for index in used:
        desk.hold(f"h{index}", "x1", f"x1-kunlun-{index},kunlun,98304,100:;")
    return desk


def slices(*, bad: Sequence[int] = ()) -> list[dict[str, Any]]:
    """Eight registered cards s0..s7."""
    return [
        {"id": f"s{at}", "index": at, "count": 4, "devmem": CARD, "devcore": 100, "type": "XPU"}
        | ({} if at in bad else {"health": True})
        for at in range(8)
    ]


def share_desk(
    lab: Any, held: Sequence[tuple[int, int]] = (), changes: Mapping[str, Any] | None = None, **parts: Any
) -> Desk:
    """Node n1 with eight cards for slices; `held`: (card, MiB) of slices in use."""
    desk = Desk(lab.vendor(SHARE, changes or {}))
    desk.registered("n1", *slices(**parts), capacity={VXPU: 32})
    for number, (index, mib) in enumerate(held):
        desk.hold(f"h{number}", "n1", f"s{index},XPU,{mib},{mib * 100 // CARD}:;")
    return desk


def ids(text: str) -> list[str]:
    return [piece.split(",")[0] for piece in text.replace(";", "").split(":") if piece]


def whole_of(desk: Desk, count: int, **annotations: str) -> list[int]:
    written = desk.written(pod({XPU: count}, annotations=annotations))
    found = [int(one.rpartition("-")[2]) for one in ids(written["hami.io/kunlun-allocated"])]
    assert written["BAIDU_COM_DEVICE_IDX"] == ",".join(map(str, found))
    return found


def slices_of(desk: Desk, count: int, mib: int) -> list[str]:
    return ids(desk.allocated(pod({VXPU: count, MEMORY: mib})))


# --- whole cards ------------------------------------------------------------------------------------------


def test_the_capacity_gives_eight_cards_in_two_groups(lab: Any) -> None:  # 1
    cards = whole_desk(lab).cards("x1")
    assert [card.id for card in cards] == [f"x1-kunlun-{at}" for at in range(8)]
    parts = {(card.count, card.devmem, card.devcore, card.health) for card in cards}
    assert parts == {(100, CARD, 100, True)}
    assert [card.numa for card in cards] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_cards_beyond_the_topology_are_told_and_never_chosen(lab: Any) -> None:
    profile = lab.vendor(WHOLE)
    (warning,) = read_inventory(profile, lab.node(capacity={XPU: 9})).warnings
    assert "1 cards have an index above 7" in warning
    desk = Desk(profile)
    desk.node("x1", capacity={XPU: 16})
    assert whole_of(desk, 8) == list(range(8))
    assert desk.refused(pod({XPU: 16}), "x1") == "1/16 NumaNotFit"


def test_without_capacity_the_cards_are_gone(lab: Any) -> None:  # 2
    desk = whole_desk(lab)
    desk.node("x1", capacity={XPU: 0}, now=NOW + 15)
    assert desk.cards("x1") == []


@pytest.mark.parametrize(
    ("used", "count", "chosen"),
    [
        pytest.param((6,), 4, [0, 1, 2, 3], id="3"),
        pytest.param((5,), 2, [4, 6], id="4"),
        pytest.param((0, 1, 2, 4, 5, 6), 2, [3, 7], id="6"),
        pytest.param((0, 4), 4, [2, 3, 6, 7], id="7"),
        pytest.param((3, 6), 4, [0, 1, 4, 5], id="8"),
    ],
)
@pytest.mark.parametrize("policy", ["spread", "binpack"])
def test_groups_are_told_by_index_whatever_the_order_of_the_list(
    lab: Any, used: tuple[int, ...], count: int, chosen: list[int], policy: str
) -> None:
    assert whole_of(whole_desk(lab, used), count, **{"hami.io/gpu-scheduler-policy": policy}) == chosen


def test_cards_that_are_not_linked_do_not_fit(lab: Any) -> None:  # 5
    assert whole_desk(lab, (0, 1, 2, 5, 6, 7)).refused(pod({XPU: 2}), "x1") == "1/8 NumaNotFit"


def test_a_count_without_a_shape_is_denied_and_never_fits(lab: Any) -> None:  # 9
    desk = whole_desk(lab)
    assert desk.denied(pod({XPU: 3})).startswith("kunlunxin.com/xpu must be one of [1, 2, 4, 8]")
    assert desk.refused(pod({XPU: 3}), "x1") == "1/8 NumaNotFit"
    whole_desk(lab, changes={"kunlun/strictCounts": False}).admitted(pod({XPU: 3}))


def test_an_unhealthy_card_is_counted_beside_the_topology(lab: Any) -> None:  # 10
    desk = Desk(lab.vendor(SHARE, {"kunlun/maxVFsPerNode": 0}))
    desk.registered("n1", *slices(bad=[2]), capacity={VXPU: 32})
    assert desk.refused(pod({VXPU: 8, MEMORY: CARD})) == "1/8 CardNotHealth, 1/8 NumaNotFit"


@pytest.mark.parametrize(
    ("steering", "chosen"),
    [
        pytest.param({USE: "x1-kunlun-6"}, [6], id="11"),
        pytest.param({USE: "  "}, [0], id="13"),
        pytest.param({NO_USE: "x1-kunlun-0,x1-kunlun-1"}, [2], id="both pairs of keys"),
    ],
)
def test_a_pod_may_name_its_cards(lab: Any, steering: dict[str, str], chosen: list[int]) -> None:
    assert whole_of(whole_desk(lab), 1, **steering) == chosen


def test_a_card_must_pass_both_pairs_of_lists(lab: Any) -> None:  # 12
    obj = pod({XPU: 1}, annotations={USE: "x1-kunlun-6", NO_USE: "x1-kunlun-6"})
    assert whole_desk(lab).refused(obj, "x1") == "8/8 CardUuidMismatch"


@pytest.mark.parametrize("policy", [pytest.param("binpack", id="14"), pytest.param("spread", id="15")])
def test_the_server_that_stays_less_fragmented_wins_under_either_policy(lab: Any, policy: str) -> None:
    desk = whole_desk(lab, (0, 1, 2), node_policy=policy)
    desk.node("x2", capacity={XPU: 8})
    answer = desk.place(pod({XPU: 1}))
    assert isinstance(answer, Placement)
    assert answer.node == "x1"
    assert [round(abs(score), -3) for _, score in sorted(answer.scores)] == [3000, 0]


@pytest.mark.parametrize(
    ("before", "given", "value"),
    [
        ((0, 1, 2), (3,), 3000),
        ((), (0,), 0),
        ((0, 1, 2, 3), (4,), 1000),
        ((0,), (1,), 3000),
        ((0, 1, 2, 3), (4, 5, 6, 7), 3000),
        ((), (0, 1, 2, 3), 2000),
        ((), tuple(range(8)), 3000),
    ],
)
def test_the_bonus_looks_at_all_used_cards(
    lab: Any, before: tuple[int, ...], given: tuple[int, ...], value: int
) -> None:
    cards = [Card(DeviceInfo(f"c{at}", at), Usage(1 if at in before else 0)) for at in range(8)]
    allocation = (tuple(ContainerDevice(f"c{at}", WHOLE, 1, 1, at) for at in given),)
    bonus = lab.vendor(WHOLE).hooks.node_bonus(ScoreContext(lab.node(), allocation, cards, "binpack"))
    assert (bonus.value, bonus.weight, bonus.higher_is_better) == (value, 1.0, True)


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@given(
    used=st.lists(st.frozensets(st.integers(0, 7)), min_size=1, max_size=6),
    count=st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=30)
def test_the_best_of_many_servers_is_the_best_of_few(
    lab: Any, policy: str, used: list[frozenset[int]], count: int
) -> None:
    """Above 64 nodes only those are judged that may be better; full servers change nothing."""
    desks = [Desk(lab.vendor(WHOLE), node_policy=policy) for _ in range(2)]
    for desk, full in zip(desks, (0, 70), strict=True):
        for number, cards in enumerate([*used, *[frozenset(range(8))] * full]):
            desk.node(f"x{number:02}", capacity={XPU: 8})
            for index in cards:
                name = f"x{number:02}-kunlun-{index}"
                desk.hold(f"h-{name}", f"x{number:02}", f"{name},kunlun,98304,100:;")
    few, many = (desk.place(pod({XPU: count})) for desk in desks)
    if isinstance(few, Placement):
        assert isinstance(many, Placement)
        assert many.node == few.node
    else:
        assert not isinstance(many, Placement)


def several(lab: Any, changes: Mapping[str, Any]) -> dict[str, str]:
    """Annotations of a pod whose init and app containers have cards 1; 2 and 3."""
    allocation = (
        (ContainerDevice("c1", WHOLE, CARD, 100, 1),),
        (),
        (ContainerDevice("c2", WHOLE, CARD, 100, 2), ContainerDevice("c3", WHOLE, CARD, 100, 3)),
    )
    shape = PodShape((SlotKind.INIT, SlotKind.APP, SlotKind.APP), ("i", "a", "b"))
    now = datetime(2026, 8, 22, tzinfo=UTC)
    context = AnnotateContext(PodInfo("u", "ns", "p", {}, shape), allocation, lab.node(), now)
    return annotations(lab.vendor(WHOLE, changes), context)


def test_several_containers_share_one_list_of_indexes_and_that_is_told(lab: Any) -> None:
    written = several(lab, {})
    assert written == {
        "hami.io/kunlun-allocated": "c1,kunlun,98304,100:;;c2,kunlun,98304,100:c3,kunlun,98304,100:;",
        "BAIDU_COM_DEVICE_IDX": "1,2,3",
    }
    assert several(lab, {"kunlun/multiContainerIdx": "last"})["BAIDU_COM_DEVICE_IDX"] == "2,3"
    profile, shape = lab.vendor(WHOLE), PodShape((SlotKind.APP,), ("a",))
    ((reason, text),) = doubts(PodInfo("u", "ns", "p", written, shape), profile)
    assert reason == "SeveralXpuContainers"
    assert "2 containers" in text
    alone = {"hami.io/kunlun-allocated": "c1,kunlun,98304,100:;"}
    assert doubts(PodInfo("u", "ns", "p", alone, shape), profile) == []


# --- slices: admission and requests -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        pytest.param("24577", "49152", id="16"),
        ("1", "24576"),
        ("0", "24576"),
        ("49153", "98304"),
        ("24Gi", "24576"),
        ("25G", "24576"),
        ("26G", "49152"),
        ("1048576", "98304"),
    ],
)
def test_memory_becomes_that_of_a_slice_in_limits_and_requests(lab: Any, asked: str, stored: str) -> None:
    obj = share_desk(lab).admitted(pod({VXPU: 1, MEMORY: asked}))
    assert limits_of(obj)[MEMORY] == stored
    assert obj["spec"]["containers"][0]["resources"]["requests"][MEMORY] == stored


@pytest.mark.parametrize("memory", ["-1", "3000000001", "x"])
def test_memory_that_is_no_amount_is_denied(lab: Any, memory: str) -> None:
    desk = share_desk(lab)
    assert f"{MEMORY} value {memory}" in desk.denied(pod({VXPU: 1, MEMORY: memory}))
    with pytest.raises(AdmissionRejected):
        desk.numbers(pod({VXPU: 1, MEMORY: memory}))


def test_without_memory_a_slice_is_the_whole_card(lab: Any) -> None:  # 17
    desk = share_desk(lab)
    assert desk.numbers(desk.admitted(pod({VXPU: 1}))) == (1, CARD, 100, 100)
    assert desk.numbers(pod({VXPU: 2, MEMORY: 30000})) == (2, HALF, 0, 50)


def test_counts_of_slices_are_denied_only_where_the_configuration_says_so(lab: Any) -> None:
    share_desk(lab).admitted(pod({VXPU: 3}))
    strict = share_desk(lab, changes={"kunlun/strictCounts": True})
    assert strict.denied(pod({VXPU: 3})).startswith("kunlunxin.com/vxpu must be one of [1, 2, 4, 8]")


def test_slices_count_against_the_quota_at_admission_and_in_the_fit(lab: Any) -> None:
    desk = share_desk(lab)
    desk.quota({MEMORY: 2 * QUARTER})
    assert "exceeding resource quota" in desk.denied(pod({VXPU: 1}))
    assert slices_of(desk, 2, QUARTER)
    assert desk.refused(pod({VXPU: 1, MEMORY: HALF + 1})) == "8/8 ResourceQuotaNotFit"


# --- slices: fit ------------------------------------------------------------------------------------------


def test_slices_of_one_size_share_a_card(lab: Any) -> None:  # 18
    desk = share_desk(lab, [(0, HALF)])
    assert slices_of(desk, 1, QUARTER) == ["s1"]


def test_a_group_is_full_of_cards_that_are_idle_or_of_the_size(lab: Any) -> None:  # 19
    desk = share_desk(lab, [(1, QUARTER), (3, QUARTER), (5, HALF)])
    assert slices_of(desk, 4, QUARTER) == ["s0", "s1", "s2", "s3"]


def test_cards_with_slices_of_another_size_do_not_fit(lab: Any) -> None:  # 20
    desk = share_desk(lab, [(at, HALF) for at in range(8)])
    assert desk.refused(pod({VXPU: 1, MEMORY: QUARTER})) == "1/8 NumaNotFit"


def test_under_mutex_only_unused_cards_will_do(lab: Any) -> None:  # 21
    held = [(at, QUARTER) for at in range(8)]
    mutex = {"hami.io/gpu-scheduler-policy": "mutex"}
    obj = pod({VXPU: 1, MEMORY: QUARTER}, annotations=mutex)
    assert share_desk(lab, held).refused(obj) == "8/8 ExclusiveDeviceAllocateConflict"


def test_a_card_that_is_nearly_full_has_no_room(lab: Any) -> None:  # 22
    desk = share_desk(lab, [(at, 90000) for at in range(8)])
    assert desk.refused(pod({VXPU: 1, MEMORY: QUARTER})) == "1/8 NumaNotFit"


def test_sizes_of_a_pod_that_starts_are_kept_apart(lab: Any) -> None:  # 27
    desk = Desk(lab.vendor(SHARE))
    desk.registered("n1", slices()[0], capacity={VXPU: 4})
    text = f"s0,XPU,{HALF},50:;s0,XPU,{QUARTER},25:;"
    desk.hold("starting", "n1", text, inits=1, status={"phase": "Pending"})
    quarter, half = pod({VXPU: 1, MEMORY: QUARTER}), pod({VXPU: 1, MEMORY: HALF})
    assert desk.refused(quarter) == desk.refused(half) == "1/1 NumaNotFit"
    ended = {"name": "init0", "state": {"terminated": {"exitCode": 0}}}
    done = {"phase": "Running", "initContainerStatuses": [ended]}
    desk.hold("starting", "n1", text, inits=1, status=done)
    assert desk.used("n1")["s0"].mem == QUARTER
    assert ids(desk.allocated(quarter)) == ["s0"]


def test_the_handles_of_a_server_limit_the_cards_that_are_opened(lab: Any) -> None:
    desk = share_desk(lab, [(at, QUARTER) for at in range(6)])
    assert slices_of(desk, 2, QUARTER) == ["s0", "s1"]
    assert slices_of(desk, 4, QUARTER) == ["s0", "s1", "s2", "s3"]
    obj = pod({VXPU: 8, MEMORY: QUARTER})
    assert desk.refused(obj) == "1/8 NumaNotFit, 2/8 ModeNotFit"
    assert desk.refused(pod({VXPU: 1, MEMORY: HALF})) == "1/8 NumaNotFit, 2/8 ModeNotFit"
    assert slices_of(desk, 1, CARD) == ["s6"]
    free = share_desk(lab, [(at, QUARTER) for at in range(6)], {"kunlun/maxVFsPerNode": 0})
    assert len(slices_of(free, 8, QUARTER)) == 8


def test_an_opened_card_is_combined_with_the_idle_one_it_is_linked_to(lab: Any) -> None:
    held = [(0, HALF), (1, HALF), (2, HALF), (3, HALF), (5, QUARTER)]
    desk = share_desk(lab, held, {"kunlun/maxVFsPerNode": 16})
    assert slices_of(desk, 2, QUARTER) == ["s4", "s5"]


@pytest.mark.parametrize(("count", "chosen"), [(3, "012"), (5, "01234"), (6, "012345"), (7, "0123456")])
def test_other_counts_of_slices_are_gathered_group_by_group(lab: Any, count: int, chosen: str) -> None:
    desk = share_desk(lab, changes={"kunlun/maxVFsPerNode": 0})
    assert slices_of(desk, count, QUARTER) == [f"s{at}" for at in chosen]
    strict = share_desk(lab, changes={"kunlun/strictCounts": True})
    assert strict.refused(pod({VXPU: count, MEMORY: QUARTER})) == "1/8 NumaNotFit"


# --- slices: nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "allocatable", "left"),
    [
        pytest.param("Requesting_2026-08-22 09:58:50", 4, 8, id="23"),
        pytest.param("Requesting_2026-08-22 09:58:50", 0, 0, id="24"),
        pytest.param("Requesting_garbage", 4, 8, id="28a"),
        pytest.param("Requesting_garbage", 0, 0, id="28b"),
    ],
)
def test_the_handshake_tells_whether_the_plugin_lives(
    lab: Any, value: str, allocatable: int, left: int
) -> None:
    desk = share_desk(lab)
    key = "hami.io/node-handshake-xpu"
    outcome = desk.registered(
        "n1",
        *slices(),
        annotations={key: value},
        capacity={VXPU: 32},
        allocatable={VXPU: allocatable},
    )
    assert len(desk.cards("n1")) == left
    assert ({"n1": {key: None}} if not left else {}) == {
        name: dict(changes) for name, changes in outcome.patches
    }


def test_an_id_that_no_allocation_can_hold_is_refused_and_told(lab: Any) -> None:  # 25
    profile = lab.vendor(SHARE)
    cards = [{**slices()[0], "id": "0000:03:00.0"}, slices()[1]]
    node = lab.node(annotations={profile.rules.register.key: json.dumps(cards)})
    found = read_inventory(profile, node)
    assert [card.id for card in found.devices] == ["s1"]
    assert "0000:03:00.0" in found.warnings[0]


def test_an_empty_list_takes_the_vendor_off_the_node(lab: Any) -> None:  # 26
    desk = share_desk(lab)
    desk.registered("n1", capacity={VXPU: 32})
    assert desk.cards("n1") == []


# --- both modes on one node -------------------------------------------------------------------------------


def test_a_card_in_use_in_one_mode_is_not_there_for_the_other(lab: Any) -> None:
    whole, share = lab.vendor(WHOLE), lab.vendor(SHARE)
    desk = Desk(share)
    desk.state = ClusterState((whole, share))
    register = {share.rules.register.key: json.dumps(slices())}
    desk.node("n1", annotations=register, capacity={XPU: 8, VXPU: 32})
    first = pod({VXPU: 1, MEMORY: QUARTER}, name="first")
    assert ids(desk.allocated(first)) == ["s0"]
    desk.bind(first)
    eight = pod({XPU: 8}, name="eight")
    assert desk.refused(eight) == "1/8 NumaNotFit"
    four = pod({XPU: 4}, name="four")
    assert desk.written(four)["BAIDU_COM_DEVICE_IDX"] == "4,5,6,7"
    desk.bind(four)
    assert slices_of(desk, 4, QUARTER) == ["s0", "s1", "s2", "s3"]
    assert desk.refused(pod({VXPU: 8, MEMORY: CARD}, name="all")) == "1/8 NumaNotFit"


def test_containers_of_one_pod_do_not_get_the_same_card_in_both_modes(lab: Any) -> None:
    whole, share = lab.vendor(WHOLE), lab.vendor(SHARE)
    desk = Desk(share)
    desk.state = ClusterState((whole, share))
    register = {share.rules.register.key: json.dumps(slices())}
    desk.node("n1", annotations=register, capacity={XPU: 8, VXPU: 32})
    written = desk.written(pod({XPU: 1}, {VXPU: 1, MEMORY: QUARTER}))
    assert written["BAIDU_COM_DEVICE_IDX"] == "0"
    assert ids(written["hami.io/xpu-devices-allocated"]) == ["s1"]
