"""Biren: the acceptance cases of vendors/biren.md §10."""

import json
from typing import Any

import pytest
from vendor_desk import NOW, Desk, pod

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.timestamps import format_handshake
from hami.vendors.engine import node_devices, read_inventory

Lab = Any
REGISTER = "hami.io/node-biren-register"
HANDSHAKE = "hami.io/node-handshake-biren"
GPU, HALF, QUARTER = "birentech.com/gpu", "birentech.com/1-2-gpu", "birentech.com/1-4-gpu"


def card(number: int, **values: Any) -> dict[str, Any]:
    plain = {"id": f"card_{number}", "index": number, "count": 1, "devmem": 65024, "type": "Biren166M"}
    return {**plain, "health": True, "devicepairscore": {}, **values}


def gpu(number: int = 1, name: str = GPU) -> dict[str, Any]:
    return {name: number}


@pytest.fixture
def desk(lab: Lab) -> Desk:
    desk = Desk(lab.vendor("Biren"))
    desk.registered("n1", card(0), card(1), allocatable={GPU: 2})
    return desk


def asked(seconds_ago: float) -> str:
    return f"Requesting_{format_handshake(NOW - seconds_ago)}"


def test_case_1_the_registered_cards(desk: Desk) -> None:
    assert [(one.id, one.devcore, one.vendor, one.type) for one in desk.cards("n1")] == [
        ("card_0", 100, "Biren", "Biren166M"),
        ("card_1", 100, "Biren", "Biren166M"),
    ]


@pytest.mark.parametrize(
    ("text", "error"), [(None, DevicesAbsent), ("[]", DevicesAbsent), ("", DevicesMalformed)]
)
def test_case_2_texts_without_a_card(lab: Lab, text: str | None, error: type[Exception]) -> None:
    annotations = {} if text is None else {REGISTER: text}
    with pytest.raises(error):
        node_devices(lab.vendor("Biren"), lab.node(annotations=annotations))


def test_case_3_parts_of_one_card_share_its_index(lab: Lab) -> None:
    desk = Desk(lab.vendor("Biren"))
    desk.registered("n1", card(0), card(1, index=0), allocatable={HALF: 2})
    assert [(one.id, one.index) for one in desk.cards("n1")] == [("card_0", 0), ("card_1", 0)]
    assert desk.allocated(pod(gpu(2, HALF))) == "card_1,Biren,0,0:card_0,Biren,0,0:;"


def test_case_4_a_null_element_is_skipped(lab: Lab) -> None:
    text = json.dumps([None, card(1)])
    inventory = read_inventory(lab.vendor("Biren"), lab.node(annotations={REGISTER: text}))
    assert [one.id for one in inventory.devices] == ["card_1"]
    assert len(inventory.warnings) == 1


def test_case_5_a_number_of_cards_is_all_there_is_to_ask(desk: Desk) -> None:
    stored = desk.admitted(pod(gpu(1)))
    assert stored["spec"]["schedulerName"] == "hami-scheduler"
    assert desk.numbers(pod(gpu(1))) == (1, 0, 100, 0)


def test_case_6_none_is_claimed_but_asks_for_nothing(desk: Desk) -> None:
    assert desk.admitted(pod(gpu(0)))["spec"]["schedulerName"] == "hami-scheduler"
    assert desk.numbers(pod(gpu(0))) is None
    assert desk.state.parse(pod(gpu(0))) is None


@pytest.mark.parametrize("number", ["1500m", "-1", "2147483648"])
def test_what_is_no_number_of_cards_is_denied(desk: Desk, number: str) -> None:
    assert f"invalid {GPU} value {number}" in desk.denied(pod({GPU: number}))


def test_case_7_the_last_card_in_both_keys(desk: Desk) -> None:
    written = desk.written(pod(gpu()))
    assert written["hami.io/Biren-devices-allocated"] == "card_1,Biren,0,0:;"
    assert written["hami.io/Biren-devices-to-allocate"] == "card_1,Biren,0,0:;"


def test_case_8_too_few_cards_are_free(desk: Desk) -> None:
    desk.hold("x", "n1", "card_0,Biren,0,0:;")
    desk.registered("n1", card(0), card(1))  # nothing counted by kubelet
    assert desk.refused(pod(gpu(2))) == "1/2 AllocatedCardsInsufficientRequest, 1/2 CardTimeSlicingExhausted"


def test_case_9_more_cards_than_the_node_has(desk: Desk) -> None:
    assert desk.refused(pod(gpu(3))) == "NodeInsufficientDevice"


def test_case_10_an_id_that_no_card_has(desk: Desk) -> None:
    asking = {"birentech.com/use-gpuuuid": "card_7"}
    assert desk.refused(pod(gpu(), annotations=asking)) == "2/2 CardUuidMismatch"


def test_case_11_an_unhealthy_card(lab: Lab) -> None:
    desk = Desk(lab.vendor("Biren"))
    desk.registered("n1", card(0, health=False))
    assert desk.refused(pod(gpu())) == "1/1 CardNotHealth"


def test_case_12_mutex_wants_an_unused_card(lab: Lab) -> None:
    desk = Desk(lab.vendor("Biren"))
    desk.registered("n1", card(0, count=2))
    desk.hold("x", "n1", "card_0,Biren,0,0:;")
    asking = {"hami.io/gpu-scheduler-policy": "mutex"}
    assert desk.refused(pod(gpu(), annotations=asking)) == "1/1 ExclusiveDeviceAllocateConflict"


def test_case_13_a_container_without_a_card_keeps_its_place(desk: Desk) -> None:
    assert desk.allocated(pod({}, gpu())) == ";card_1,Biren,0,0:;"


def test_case_14_what_the_plugin_has_erased_still_counts(desk: Desk) -> None:
    left = {"hami.io/Biren-devices-to-allocate": "card_0,Biren,0,0:;"}
    desk.hold("x", "n1", ";", annotations=left)
    assert desk.used("n1")["card_0"].slots == 1


def test_erased_work_of_a_pod_with_init_containers_still_counts(desk: Desk) -> None:
    left = {"hami.io/Biren-devices-to-allocate": ";card_0,Biren,0,0:;"}
    desk.hold("x", "n1", ";", annotations=left, slots=2, inits=1)
    assert desk.used("n1")["card_0"].slots == 1


def test_case_15_a_finished_pod_holds_nothing(desk: Desk) -> None:
    left = {"hami.io/Biren-devices-to-allocate": "card_0,Biren,0,0:;"}
    desk.hold("x", "n1", ";", annotations=left, status={"phase": "Succeeded"})
    assert desk.used("n1")["card_0"].slots == 0


def test_case_16_a_garbled_report_is_a_report(lab: Lab) -> None:
    desk = Desk(lab.vendor("Biren"))
    reported = {HANDSHAKE: "Reported_8026.08.18 77:99"}
    outcome = desk.registered("n1", card(0), annotations=reported, allocatable={GPU: 1})
    assert outcome.patches == (("n1", {HANDSHAKE: "Requesting_2026-08-22 10:00:00"}),)
    assert len(desk.cards("n1")) == 1


@pytest.mark.parametrize(
    ("allocatable", "value", "alive"),
    [
        pytest.param({GPU: 2}, asked(200), True, id="17"),
        pytest.param({GPU: 0, HALF: 4}, asked(200), True, id="18"),
        pytest.param({GPU: 0, HALF: 0, QUARTER: 0}, asked(200), False, id="19"),
        pytest.param({GPU: 0, HALF: 0}, "Requesting_garbage", False, id="23"),
    ],
)
def test_an_unanswered_request_matters_when_nothing_is_allocatable(
    desk: Desk, allocatable: dict[str, int], value: str, alive: bool
) -> None:
    outcome = desk.registered("n1", card(0), card(1), annotations={HANDSHAKE: value}, allocatable=allocatable)
    assert bool(desk.cards("n1")) is alive
    assert outcome.patches == (() if alive else (("n1", {HANDSHAKE: None}),))


@pytest.mark.parametrize(
    ("served", "asking", "fits"),
    [
        pytest.param(QUARTER, GPU, False, id="20"),
        pytest.param(QUARTER, HALF, False, id="another part"),
        pytest.param(GPU, HALF, False, id="whole cards"),
        pytest.param(QUARTER, QUARTER, True, id="the part it serves"),
        pytest.param(GPU, GPU, True, id="the cards it serves"),
    ],
)
def test_a_node_serves_one_name(lab: Lab, served: str, asking: str, fits: bool) -> None:
    desk = Desk(lab.vendor("Biren"))
    desk.registered("n1", card(0), card(1), allocatable={GPU: 0, served: 2})
    if fits:
        assert desk.allocated(pod(gpu(1, asking))) == "card_1,Biren,0,0:;"
    else:
        assert desk.refused(pod(gpu(1, asking))) == "2/2 CardTypeMismatch"


def test_a_node_that_is_split_serves_its_parts_from_then_on(desk: Desk) -> None:
    desk.registered("n1", card(0), card(1), allocatable={GPU: 0, HALF: 2})
    assert {one.mode for one in desk.cards("n1")} == {HALF}
    assert desk.allocated(pod(gpu(1, HALF))) == "card_1,Biren,0,0:;"


def test_two_names_in_one_container_are_denied(desk: Desk) -> None:
    assert "a node serves one of them" in desk.denied(pod({GPU: 1, HALF: 1}))


def test_two_names_that_are_both_allocatable_are_told(lab: Lab) -> None:
    outcome = Desk(lab.vendor("Biren")).registered("n1", card(0), allocatable={GPU: 1, HALF: 1})
    assert any("both allocatable" in one.message for one in outcome.notices)


def test_kubelet_counts_parts_under_their_own_name(lab: Lab) -> None:
    desk = Desk(lab.vendor("Biren"))
    desk.registered("n1", card(0), card(1), allocatable={GPU: 0, HALF: 1})
    assert desk.refused(pod(gpu(2, HALF))) == "2/2 CardTimeSlicingExhausted"


def test_case_21_a_biren_pod_needs_the_node_lock(desk: Desk) -> None:
    desk.written(pod(gpu()))
    reservation = desk.state.reservation("uid-p")
    assert reservation is not None
    assert reservation.locks == (("Biren", "hami"),)


def test_case_22_a_phase_that_stays_at_allocating_changes_nothing(desk: Desk) -> None:
    phase = {"hami.io/bind-phase": "allocating", "hami.io/bind-time": str(int(NOW) - 600)}
    desk.hold("x", "n1", "card_0,Biren,0,0:;", annotations=phase)
    assert desk.state.tick(NOW + 600).notices == ()
    assert desk.used("n1")["card_0"].slots == 1
