"""Vastai: the acceptance cases of vendors/vastai.md §10."""

from typing import Any

import pytest
from vendor_desk import NOW, Desk, pod

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.timestamps import format_handshake
from hami.scheduler.core.answers import Placement
from hami.vendors.engine import node_bonus, node_devices
from hami.vendors.types import ContainerDevice, ScoreContext

Lab = Any
REGISTER = "hami.io/node-va-register"
HANDSHAKE = "hami.io/node-handshake-va"
VA = "vastaitech.com/va"
MUTEX = {"hami.io/gpu-scheduler-policy": "mutex"}


def die(aic: str, number: int, **values: Any) -> dict[str, Any]:
    custom = {"DeviceStrategy": "die", **({"AIC": aic} if aic else {})}
    plain = {"id": f"{aic or 'x'}-{number}", "count": 1, "devmem": 32768, "type": "Vastai", "health": True}
    return {**plain, "custominfo": custom, **values}


def dies(**groups: int) -> list[dict[str, Any]]:
    """So many dies per AIC (`none`: without one), listed so that the walk starts at the last."""
    return [die("" if aic == "none" else aic, n) for aic, size in groups.items() for n in range(size)]


def full(number: int, **values: Any) -> dict[str, Any]:
    return {"id": f"{number}-0", "count": 1, "devmem": 65536, "type": "Vastai", "health": True, **values}


def va(number: int = 1) -> dict[str, Any]:
    return {VA: number}


@pytest.fixture
def desk(lab: Lab) -> Desk:
    return Desk(lab.vendor("Vastai"))


def aics(text: str) -> list[str]:
    """The AICs of an allocation text, in order."""
    return [piece.split(",")[0].partition("-")[0] for piece in text.strip(";").split(":") if piece]


def test_case_1_the_registered_dies(desk: Desk) -> None:
    desk.registered("n1", die("12", 0), die("12", 1, index=1), die("13", 0, index=2, devcore=7))
    cards = desk.cards("n1")
    assert [(one.id, one.devcore, one.vendor) for one in cards] == [
        ("12-0", 100, "Vastai"),
        ("12-1", 100, "Vastai"),
        ("13-0", 100, "Vastai"),
    ]
    assert cards[2].custom == {"DeviceStrategy": "die", "AIC": "13"}


@pytest.mark.parametrize(
    ("text", "error"), [(":", DevicesMalformed), ("", DevicesMalformed), ("[]", DevicesAbsent)]
)
def test_case_2_texts_without_a_card(lab: Lab, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        node_devices(lab.vendor("Vastai"), lab.node(annotations={REGISTER: text}))


def test_case_3_a_card_that_does_not_say_it_is_healthy(desk: Desk) -> None:
    card = full(0)
    del card["health"]
    desk.registered("n1", card)
    assert desk.refused(pod(va())) == "1/1 CardNotHealth"


def test_case_4_a_number_of_cards_is_all_there_is_to_ask(desk: Desk) -> None:
    assert desk.admitted(pod(va()))["spec"]["schedulerName"] == "hami-scheduler"
    assert desk.numbers(pod(va())) == (1, 0, 100, 0)


def test_case_5_requests_alone_are_not_claimed_but_counted(desk: Desk) -> None:
    container = {"name": "a", "resources": {"requests": {VA: "1"}}}
    assert desk.review(pod(container)).patch in (None, (), [])
    assert desk.numbers(pod(container)) == (1, 0, 100, 0)


@pytest.mark.parametrize("number", ["1500m", "0", "2147483648"])
def test_what_is_no_number_of_cards_is_denied(desk: Desk, number: str) -> None:
    assert f"invalid {VA} value {number}" in desk.denied(pod({VA: number}))


def test_case_6_the_last_card_in_both_keys(desk: Desk) -> None:
    desk.registered("n1", full(0), full(1, index=1))
    written = desk.written(pod(va()))
    assert written["hami.io/Vastai-devices-allocated"] == "1-0,Vastai,0,0:;"
    assert written["hami.io/Vastai-devices-to-allocate"] == "1-0,Vastai,0,0:;"


def test_case_7_a_card_in_use(desk: Desk) -> None:
    desk.registered("n1", full(0))
    desk.hold("x", "n1", "0-0,Vastai,0,0:;")
    assert desk.refused(pod(va())) == "1/1 CardTimeSlicingExhausted"


def test_case_8_one_of_two_is_excluded(desk: Desk) -> None:
    desk.registered("n1", full(0), full(1))
    asking = {"vastaitech.com/nouse-gpuuuid": "0-0"}
    assert desk.refused(pod(va(2), annotations=asking)) == (
        "1/2 AllocatedCardsInsufficientRequest, 1/2 CardUuidMismatch"
    )


def test_case_9_more_cards_than_the_node_has(desk: Desk) -> None:
    desk.registered("n1", full(0), full(1))
    assert desk.refused(pod(va(3))) == "NodeInsufficientDevice"


@pytest.mark.parametrize(
    ("groups", "number", "chosen"),
    [
        pytest.param({"a": 3, "b": 2, "c": 1}, 2, "bb", id="10"),
        pytest.param({"a": 3, "b": 2, "c": 1}, 3, "aaa", id="three"),
        pytest.param({"a": 3, "b": 2, "c": 1}, 4, "aaac", id="11"),
        pytest.param({"a": 3, "b": 2, "c": 1}, 5, "aaabb", id="five"),
        pytest.param({"a": 2, "none": 2}, 3, "aax", id="dies without an AIC"),
        pytest.param({"a": 2, "b": 2}, 4, "bbaa", id="ties as in the walk"),
    ],
)
def test_dies_of_one_container_are_kept_together(
    desk: Desk, groups: dict[str, int], number: int, chosen: str
) -> None:
    desk.registered("n1", *dies(**groups))
    assert aics(desk.allocated(pod(va(number)))) == list(chosen)


def test_dies_that_are_all_needed_keep_the_order_of_the_walk(desk: Desk) -> None:
    desk.registered("n1", die("a", 0), die("b", 0), die("a", 1), die("b", 1), die("a", 2))
    assert aics(desk.allocated(pod(va(5)))) == list("ababa")


def test_too_few_dies_never_fit(desk: Desk) -> None:
    desk.registered("n1", *dies(a=2, b=1))
    desk.hold("x", "n1", "b-0,Vastai,0,0:;")
    assert desk.refused(pod(va(3))) == "1/3 CardTimeSlicingExhausted, 2/3 AllocatedCardsInsufficientRequest"


def test_a_single_die_among_whole_cards_makes_a_node_of_dies(desk: Desk) -> None:
    desk.registered("n1", full(7), *dies(a=2), full(8, id="8-0"))
    assert aics(desk.allocated(pod(va(2)))) == ["a", "a"]


def test_case_12_mutex_wants_a_card_of_which_no_die_is_in_use(desk: Desk) -> None:
    desk.registered("n1", die("12", 0), die("12", 1), die("13", 0))
    desk.hold("x", "n1", "12-0,Vastai,0,0:;")
    assert desk.allocated(pod(va(), annotations=MUTEX)) == "13-0,Vastai,0,0:;"


def test_case_13_mutex_refuses_the_neighbour_of_a_die_in_use(desk: Desk) -> None:
    desk.registered("n1", die("12", 0, count=2), die("12", 1))
    desk.hold("x", "n1", "12-0,Vastai,0,0:;")
    assert desk.refused(pod(va(), annotations=MUTEX)) == "2/2 ExclusiveDeviceAllocateConflict"


def bonus(lab: Lab, policy: Any, *slots: list[dict[str, Any]]) -> float:
    allocation = tuple(
        tuple(ContainerDevice(one["id"], "Vastai", 0, 0, 0, one.get("custominfo", {})) for one in slot)
        for slot in slots
    )
    return node_bonus(lab.vendor("Vastai"), ScoreContext(lab.node(), allocation, (), policy))


def test_case_14_the_share_of_the_dies_on_one_card_ranks_a_node(lab: Lab) -> None:
    assert bonus(lab, "binpack", dies(a=3, b=1)) == pytest.approx(0.75 * 10_000)
    assert bonus(lab, "spread", dies(a=3, b=1)) == pytest.approx(-0.75 * 10_000)
    assert bonus(lab, "binpack", dies(a=2), dies(a=1, b=1), []) == pytest.approx(0.75 * 10_000), "the mean"


def test_case_15_whole_cards_have_no_rank(lab: Lab) -> None:
    assert bonus(lab, "binpack", [full(0), full(1)]) == 0
    assert bonus(lab, "binpack", dies(a=1), [full(1)]) == 0
    assert bonus(lab, "binpack", dies(a=1, none=1)) == 0
    assert bonus(lab, "binpack") == 0


@pytest.mark.parametrize("policy", ["spread", "binpack"])
def test_case_16_dies_together_win_under_either_policy(lab: Lab, policy: str) -> None:
    desk = Desk(lab.vendor("Vastai"), node_policy=policy)
    desk.registered("a", *dies(a=4))
    desk.registered("b", *dies(a=2, b=2))
    answer = desk.place(pod(va(4)))
    assert isinstance(answer, Placement)
    assert answer.node == "a"


@pytest.mark.parametrize(
    ("value", "allocatable", "alive"),
    [
        pytest.param(f"Requesting_{format_handshake(NOW - 120)}", 0, False, id="17"),
        pytest.param("Requesting_garbage", 4, True, id="18 healthy"),
        pytest.param("Requesting_garbage", 0, False, id="18"),
    ],
)
def test_an_unanswered_request_matters_when_nothing_is_allocatable(
    desk: Desk, value: str, allocatable: int, alive: bool
) -> None:
    desk.registered("n1", full(0), allocatable={VA: 1})
    outcome = desk.registered("n1", full(0), annotations={HANDSHAKE: value}, allocatable={VA: allocatable})
    assert bool(desk.cards("n1")) is alive
    assert (("n1", {HANDSHAKE: None}) in outcome.patches) is not alive


def test_case_19_a_vastai_pod_needs_the_node_lock(desk: Desk) -> None:
    desk.registered("n1", full(0), full(1))
    desk.written(pod({}, inits=[va()]))
    reservation = desk.state.reservation("uid-p")
    assert reservation is not None
    assert reservation.locks == (("Vastai", "hami"),)


def test_case_20_a_pod_without_cards_is_none_of_ours(desk: Desk) -> None:
    assert desk.state.parse(pod({"cpu": 1})) is None


def test_case_21_what_a_plugin_has_erased_still_counts(desk: Desk) -> None:
    desk.registered("n1", *dies(a=2))
    left = {"hami.io/Vastai-devices-to-allocate": "a-0,Vastai,0,0:;"}
    desk.hold("x", "n1", ";", annotations=left)
    assert desk.used("n1")["a-0"].slots == 1
