"""Hygon DCU: the acceptance cases of vendors/hygon.md §9."""

from typing import Any

import pytest
from vendor_desk import Desk, csv_cards, pod

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.timestamps import format_handshake
from hami.vendors.engine import node_devices, read_inventory
from hami.vendors.handshake import Drop, Handshake, PatchNode, Refresh, Seen, seen
from hami.vendors.types import AdmissionRejected

Lab = Any
REGISTER = "hami.io/node-dcu-register"
HANDSHAKE = "hami.io/node-handshake-dcu"
REAL = "DCU-TX7A01,4,65520,100,DCU-K100_AI,0,true:DCU-TX7A02,4,65520,100,DCU-K100_AI,0,true:"


def dcu(num: Any = 1, mem: Any = None, cores: Any = None) -> dict[str, Any]:
    names = {"hygon.com/dcunum": num, "hygon.com/dcumem": mem, "hygon.com/dcucores": cores}
    return {name: value for name, value in names.items() if value is not None}


@pytest.fixture
def desk(lab: Lab) -> Desk:
    return Desk(lab.vendor("DCU"))


def on(desk: Desk, text: str = REAL, **parts: Any) -> Desk:
    desk.node("n1", annotations={REGISTER: text, **parts.pop("annotations", {})}, **parts)
    return desk


def test_case_1_the_plugins_text_has_seven_fields_and_indices_are_positions(desk: Desk) -> None:
    cards = on(desk).cards("n1")
    assert [(one.id, one.index, one.vendor, one.mode) for one in cards] == [
        ("DCU-TX7A01", 0, "DCU", "hami-core"),
        ("DCU-TX7A02", 1, "DCU", "hami-core"),
    ]


def test_case_2_nine_fields_name_the_index(desk: Desk) -> None:
    (card,) = on(desk, "DCU-A,4,65520,100,DCU-Z100,1,true,5,hami-core:").cards("n1")
    assert (card.index, card.numa) == (5, 1)


@pytest.mark.parametrize(
    ("text", "error"), [("", DevicesMalformed), (":", DevicesAbsent), ("DCU-A,4:", DevicesMalformed)]
)
def test_case_3_texts_without_a_card(lab: Lab, text: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        node_devices(lab.vendor("DCU"), lab.node(annotations={REGISTER: text}))


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        pytest.param(dcu(1, 2000, 60), (1, 2000, 0, 60), id="4"),
        pytest.param(dcu(1), (1, 0, 100, 100), id="5"),
    ],
)
def test_what_a_container_asks(desk: Desk, asked: dict[str, Any], numbers: tuple[int, ...]) -> None:
    assert desk.numbers(pod(asked)) == numbers


def test_case_6_the_memory_factor_multiplies(lab: Lab) -> None:
    desk = Desk(lab.vendor("DCU", {"hygon/memoryFactor": 1024}))
    assert desk.numbers(pod(dcu(1, 4))) == (1, 4096, 0, 100)


def test_case_7_more_than_an_int32_of_memory_is_denied(lab: Lab) -> None:
    desk = Desk(lab.vendor("DCU", {"hygon/memoryFactor": 1024}))
    assert "invalid hygon.com/dcumem value" in desk.denied(pod(dcu(1, 3000000)))


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(dcu(0), id="8"),
        pytest.param(dcu(-1), id="8 negative"),
        pytest.param(dcu(2200000000), id="8 large"),
        pytest.param(dcu(1, None, -5), id="9"),
        pytest.param(dcu(1, "1.5"), id="memory that is no integer"),
    ],
)
def test_invalid_amounts_are_denied_and_fit_nowhere(desk: Desk, asked: dict[str, Any]) -> None:
    assert desk.denied(pod(asked)).startswith("invalid hygon.com/")
    with pytest.raises(AdmissionRejected):
        desk.numbers(pod(asked))


def test_case_10_shares_of_several_cards_are_denied(lab: Lab, desk: Desk) -> None:
    text = desk.denied(pod(dcu(2, 1000)))
    assert "shares of one card only" in text
    assert "hygon.com/dcumem" in text
    assert "shares of one card only" in desk.denied(pod(dcu(2, None, 50)))
    assert desk.review(pod(dcu(2))).allowed, "whole cards"
    allowing = Desk(lab.vendor("DCU", {"hygon/allowUnsupported": True}))
    assert allowing.review(pod(dcu(2, 1000))).allowed


def test_memory_without_cores_is_admitted_with_a_warning(desk: Desk) -> None:
    (warning,) = desk.review(pod(dcu(1, 1000))).warnings
    assert "hygon.com/dcumem without hygon.com/dcucores takes all cores" in warning
    assert not desk.review(pod(dcu(1, 1000, 30))).warnings
    assert not desk.review(pod(dcu(1))).warnings


def test_case_11_a_card_without_enough_memory(desk: Desk) -> None:
    on(desk, csv_cards(("a", 4, 65520, 100, "DCU-Z100", True)))
    desk.hold("x", "n1", "a,DCU,64000,10:;")
    assert desk.refused(pod(dcu(1, 2000, 10))) == "1/1 CardInsufficientMemory"


def test_case_12_a_card_without_slots(desk: Desk) -> None:
    on(desk, csv_cards(("a", 4, 65520, 100, "DCU-Z100", True)))
    for name in "wxyz":
        desk.hold(name, "n1", "a,DCU,1,1:;")
    assert desk.refused(pod(dcu(1, 1, 1))) == "1/1 CardTimeSlicingExhausted"


def test_case_13_more_than_100_cores_are_a_whole_card(desk: Desk) -> None:
    assert on(desk).allocated(pod(dcu(1, 2000, 120))) == "DCU-TX7A02,DCU,2000,100:;"


def test_case_14_a_type_is_part_of_the_registered_one_in_any_case(desk: Desk) -> None:
    cards = (("z", 4, 65520, 100, "DCU-Z100", True), ("k", 4, 65520, 100, "DCU-K100_AI", True))
    on(desk, csv_cards(*cards))
    asking = {"hygon.com/use-dcutype": "k100_ai"}
    assert desk.allocated(pod(dcu(), annotations=asking)).startswith("k,DCU,")
    assert desk.refused(pod(dcu(2), annotations=asking)) == (
        "1/2 AllocatedCardsInsufficientRequest, 1/2 CardTypeMismatch"
    )


def test_case_15_a_word_of_every_type_rejects_every_card(desk: Desk) -> None:
    assert on(desk).refused(pod(dcu(), annotations={"hygon.com/nouse-dcutype": "DCU"})) == (
        "2/2 CardTypeMismatch"
    )


def test_case_16_a_card_chosen_by_its_id(desk: Desk) -> None:
    for card in ("DCU-TX7A02", "DCU-TX7A01"):
        asking = {"hygon.com/use-gpuuuid": card}
        assert on(desk).allocated(pod(dcu(1, 1, 1), annotations=asking, name=card)).startswith(card)


def test_case_17_a_whole_card_takes_all_of_its_memory(desk: Desk) -> None:
    assert on(desk).allocated(pod(dcu())) == "DCU-TX7A02,DCU,65520,100:;"


def test_case_18_both_keys_carry_the_same_text(desk: Desk) -> None:
    asking = {"hygon.com/use-gpuuuid": "DCU-TX7A01"}
    written = on(desk).written(pod(dcu(1, 2000, 60), annotations=asking))
    for kind in ("to-allocate", "allocated"):
        assert written[f"hami.io/dcu-devices-{kind}"] == "DCU-TX7A01,DCU,2000,60:;"


def test_case_19_a_container_without_a_card_keeps_its_place(desk: Desk) -> None:
    assert on(desk).allocated(pod({}, dcu(1, 2000, 60))) == ";DCU-TX7A02,DCU,2000,60:;"


def test_case_20_the_erased_work_list_changes_no_account(desk: Desk) -> None:
    on(desk)
    for text in (";", "", ";;"):
        desk.hold(
            "x", "n1", "DCU-TX7A01,DCU,2000,60:;", annotations={"hami.io/dcu-devices-to-allocate": text}
        )
        used = desk.used("n1")["DCU-TX7A01"]
        assert (used.slots, used.mem, used.cores) == (1, 2000, 60)


def test_case_21_the_plugins_report_is_answered_in_utc(lab: Lab) -> None:
    p = lab.vendor("DCU")
    reported = "Reported 2026-08-22 10:00:00.123 +0800 CST m=+12"
    node = lab.node(annotations={REGISTER: REAL, HANDSHAKE: reported})
    machine = Handshake(p)
    _, actions = machine.step(machine.start(0)[0], seen(p, node), 1_787_392_800.0)
    asked = f"Requesting_{format_handshake(1_787_392_800.0)}"
    assert asked == "Requesting_2026-08-22 10:00:00"
    assert actions == (Refresh(), PatchNode({HANDSHAKE: asked}))


def test_case_22_a_dcu_pod_needs_the_node_lock(desk: Desk) -> None:
    obj = pod(dcu(), inits=[dcu(1, 1, 1)])
    on(desk).written(obj)
    reservation = desk.state.reservation("uid-p")
    assert reservation is not None
    assert reservation.locks == (("DCU", "hami"),)


def test_case_23_an_unhealthy_card(desk: Desk) -> None:
    on(desk, csv_cards(("a", 4, 65520, 100, "DCU-Z100", False)))
    assert desk.refused(pod(dcu())) == "1/1 CardNotHealth"


def test_case_24_more_cards_than_the_node_has(desk: Desk) -> None:
    on(desk, csv_cards(*[(name, 4, 65520, 100, "DCU-Z100", True) for name in "abc"]))
    assert desk.refused(pod(dcu(4))) == "NodeInsufficientDevice"


def test_case_25_how_many_did_fit_is_among_the_reasons(desk: Desk) -> None:
    on(desk, csv_cards(*[(name, 4, 65520, 100, "DCU-Z100", name in "ab") for name in "abcd"]))
    assert desk.refused(pod(dcu(3))) == "2/4 AllocatedCardsInsufficientRequest, 2/4 CardNotHealth"


def test_case_26_a_whole_card_over_the_quota(desk: Desk) -> None:
    on(desk)
    desk.quota({"hygon.com/dcumem": 60000})
    assert desk.refused(pod(dcu())) == "2/2 ResourceQuotaNotFit"


def test_case_27_a_bad_piece_costs_that_card_only(lab: Lab) -> None:
    text = (
        "DCU-A,4,65520,100,DCU-Z100,0,true:DCU-B,4,x,100,DCU-Z100,0,true:DCU-C,4,65520,100,DCU-Z100,0,true:"
    )
    inventory = read_inventory(lab.vendor("DCU"), lab.node(annotations={REGISTER: text}))
    assert [(one.id, one.index) for one in inventory.devices] == [("DCU-A", 0), ("DCU-C", 2)]
    assert len(inventory.warnings) == 1
    outcome = Desk(lab.vendor("DCU")).node("n1", annotations={REGISTER: text})
    assert [one.reason for one in outcome.notices] == ["RegistrationDoubtful"]


@pytest.mark.parametrize(("allocatable", "alive"), [(4, True), (0, False)])
def test_case_28_an_unreadable_request_counts_as_expired(lab: Lab, allocatable: int, alive: bool) -> None:
    machine = Handshake(lab.vendor("DCU"))
    state, _ = machine.step(machine.start(0)[0], Seen(REAL, "Reported_x", 4), 0)
    _, actions = machine.step(state, Seen(REAL, "Requesting_garbage", allocatable), 200)
    assert any(isinstance(one, Drop) for one in actions) is not alive
    assert (PatchNode({HANDSHAKE: None}) in actions) is not alive


def test_a_bad_amount_among_requests_alone_beside_another_container_is_denied(desk: Desk) -> None:
    odd = {
        "name": "b",
        "resources": {"requests": {name: str(value) for name, value in dcu(cores=-5).items()}},
    }
    assert "hygon.com/dcucores value -5 in container b" in desk.denied(pod(dcu(), odd))
