"""Cambricon: the acceptance cases of vendors/cambricon.md §11; those of the lock are integration tests."""

from typing import Any

import pytest
from vendor_desk import Desk, limits_of, pod, shares

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.vendors.engine import node_devices, read_inventory
from hami.vendors.types import AdmissionRejected

Lab = Any
COUNT = "cambricon.com/vmlu"
MEMORY, CORES = "cambricon.com/mlu.smlu.vmemory", "cambricon.com/mlu.smlu.vcore"
ALLOCATED = "hami.io/cambricon-mlu-devices-allocated"


def mlu(num: Any = 1, mem: Any = None, cores: Any = None) -> dict[str, Any]:
    return shares(COUNT, MEMORY, CORES, num, mem, cores)


@pytest.fixture
def desk(lab: Lab) -> Desk:
    """Node m1 with two cards of 24 GiB."""
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 200, MEMORY: 192})
    return desk


def test_case_1_the_cards_of_the_capacity(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 800, MEMORY: 768})
    cards = desk.cards("m1")
    assert [one.id for one in cards] == [f"m1-cambricon-mlu-{index}" for index in range(8)]
    assert [one.index for one in cards] == list(range(8))
    assert {(one.devmem, one.count, one.devcore, one.type, one.health) for one in cards} == {
        (24576, 100, 100, "MLU", True)
    }


def test_case_2_without_memory_the_card_has_none(lab: Lab) -> None:
    (card,) = node_devices(lab.vendor("MLU"), lab.node(capacity={CORES: 100}))
    assert card.devmem == 0


def test_case_3_without_cores_there_is_no_card(lab: Lab, desk: Desk) -> None:
    for capacity in ({CORES: 0, MEMORY: 1}, {MEMORY: 768}, {}):
        with pytest.raises(DevicesAbsent):
            node_devices(lab.vendor("MLU"), lab.node(capacity=capacity))
    outcome = desk.node("m1", capacity={CORES: 0})
    assert desk.cards("m1") == []
    assert [one.reason for one in outcome.notices] == ["DevicesDropped"]


def test_case_4_a_part_of_a_card_is_left_out_with_a_warning(lab: Lab) -> None:
    capacity = {CORES: 250, MEMORY: 192}
    inventory = read_inventory(lab.vendor("MLU"), lab.node(capacity=capacity))
    assert [(one.id, one.devmem) for one in inventory.devices] == [
        ("n1-cambricon-mlu-0", 19660),
        ("n1-cambricon-mlu-1", 19660),
    ]
    assert "no multiple of 100" in inventory.warnings[0]
    with pytest.raises(DevicesMalformed):
        node_devices(lab.vendor("MLU"), lab.node(capacity={CORES: 60, MEMORY: 60}))


def test_what_kubelet_can_give_out_counts(desk: Desk) -> None:
    desk.node("m1", capacity={CORES: 200, MEMORY: 192}, allocatable={CORES: 100, MEMORY: 96})
    assert [(one.devmem, one.health) for one in desk.cards("m1")] == [(24576, True)]
    desk.node("m1", capacity={CORES: 200, MEMORY: 192}, allocatable={CORES: 0, MEMORY: 0})
    assert [one.health for one in desk.cards("m1")] == [False, False]


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        pytest.param(mlu(1, 20, 10), (1, 5120, 0, 10), id="5"),
        pytest.param(mlu(1), (1, 0, 100, 100), id="6"),
        pytest.param(mlu(1, None, 30), (1, 0, 100, 30), id="7"),
        pytest.param(mlu(1, 8388607), (1, 2147483392, 0, 100), id="8"),
    ],
)
def test_what_a_container_asks(desk: Desk, asked: dict[str, Any], numbers: tuple[int, ...]) -> None:
    assert desk.numbers(pod(asked)) == numbers


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(mlu(1, 8388608), id="8 too much"),
        pytest.param(mlu(1, "1.5"), id="9"),
        pytest.param(mlu(1, -1), id="9 negative"),
        pytest.param(mlu("4294967297"), id="a count above int32"),
        pytest.param(mlu(1, 1, -1), id="negative cores"),
    ],
)
def test_invalid_amounts_are_denied_and_fit_nowhere(desk: Desk, asked: dict[str, Any]) -> None:
    with pytest.raises(AdmissionRejected):
        desk.numbers(pod(asked))
    assert "invalid cambricon.com/" in desk.denied(pod(asked))
    assert "invalid cambricon.com/" in desk.refused(pod(asked), "m1")


def test_case_10_the_last_card_is_tried_first(desk: Desk) -> None:
    assert desk.allocated(pod(mlu(1, 20, 25))) == "m1-cambricon-mlu-1,MLU,5120,25:;"


@pytest.mark.parametrize(
    ("used", "cores", "reason"),
    [
        pytest.param(80, 30, "CardInsufficientCore", id="11"),
        pytest.param(1, 100, "CardInsufficientCore", id="12"),
        pytest.param(0, 100, "ExclusiveDeviceAllocateConflict", id="12 no cores in use"),
        pytest.param(100, 0, "CardComputeUnitsExhausted", id="13"),
    ],
)
def test_cores_in_use(lab: Lab, used: int, cores: int, reason: str) -> None:
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 100, MEMORY: 96})
    desk.hold("x", "m1", f"m1-cambricon-mlu-0,MLU,256,{used}:;")
    assert desk.refused(pod(mlu(1, 1, cores)), "m1") == f"1/1 {reason}"


def test_case_14_a_whole_card_over_the_quota(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 100, MEMORY: 160})
    desk.quota({MEMORY: 50})
    assert desk.refused(pod(mlu()), "m1") == "1/1 ResourceQuotaNotFit"


def test_case_15_an_init_container_and_an_app_count_once(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 100, MEMORY: 160})
    desk.quota({MEMORY: 200})  # 51200 MiB
    assert desk.allocated(pod(mlu(1, 40, 10), inits=[mlu(1, 20, 10)]))
    desk.quota({MEMORY: 40})  # exactly the app's
    assert desk.allocated(pod(mlu(1, 40, 10), inits=[mlu(1, 20, 10)]))
    desk.quota({MEMORY: 39})
    assert desk.refused(pod(mlu(1, 40, 10), inits=[mlu(1, 20, 10)]), "m1") == "1/1 ResourceQuotaNotFit"


def test_case_16_what_the_plugin_reads(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 400, MEMORY: 384})
    written = desk.written(pod(mlu(1, 20, 25)))
    assert written["CAMBRICON_DSMLU_PROFILE"] == "3_25_20"
    assert written["CAMBRICON_DSMLU_ASSIGNED"] == "false"
    assert written["CAMBRICON_DSMLU_ASSIGHED"] == "false"


def test_the_profile_counts_in_the_units_of_the_plugin(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU", {"cambricon/memoryFactor": 1024}))
    desk.node("m1", capacity={CORES: 100, MEMORY: 24})
    assert [one.devmem for one in desk.cards("m1")] == [24576]
    written = desk.written(pod(mlu(1, 20, 25)))
    assert written[ALLOCATED] == "m1-cambricon-mlu-0,MLU,20480,25:;"
    assert written["CAMBRICON_DSMLU_PROFILE"] == "0_25_20"


def test_case_17_a_container_without_a_card_keeps_its_place(desk: Desk) -> None:
    written = desk.written(pod({}, mlu(1, 20, 25)))
    for kind in ("to-allocate", "allocated"):
        assert written[f"hami.io/cambricon-mlu-devices-{kind}"] == ";m1-cambricon-mlu-1,MLU,5120,25:;"
    assert written["CAMBRICON_DSMLU_PROFILE"] == "1_25_20"


def test_case_18_the_profile_is_the_first_devices(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU", {"cambricon/allowUnsupported": True}))
    desk.node("m1", capacity={CORES: 200, MEMORY: 192})
    written = desk.written(pod(mlu(2, 20, 25)))
    assert written[ALLOCATED].count("MLU") == 2
    assert written["CAMBRICON_DSMLU_PROFILE"] == "1_25_20"


def test_case_19_nothing_is_written_for_other_pods(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 100, MEMORY: 96})
    assert desk.state.parse(pod({"cpu": 1})) is None


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        pytest.param(mlu("1", "20"), mlu("1", "20", "100"), id="28"),
        pytest.param(mlu("1", "20", "10"), mlu("1", "20", "10"), id="both given"),
        pytest.param(mlu("1"), mlu("1"), id="neither given"),
    ],
)
def test_the_webhook_adds_what_the_plugin_needs(
    desk: Desk, asked: dict[str, Any], limits: dict[str, str]
) -> None:
    stored = desk.admitted(pod(asked))
    assert limits_of(stored) == limits
    assert desk.admitted(stored)["spec"] == stored["spec"], "a second admission changes nothing"


@pytest.mark.parametrize(
    ("asked", "limits"),
    [
        pytest.param(mlu("1"), mlu("1", "96", "100"), id="whole card"),
        pytest.param(mlu("1", None, "30"), mlu("1", "96", "30"), id="cores only"),
        pytest.param(mlu("2"), mlu("2"), id="several cards"),
    ],
)
def test_the_size_of_a_card_fills_in_the_memory(
    lab: Lab, asked: dict[str, Any], limits: dict[str, str]
) -> None:
    desk = Desk(lab.vendor("MLU", {"cambricon/wholeCardMemoryUnits": 96}))
    stored = desk.admitted(pod(asked))
    assert limits_of(stored) == limits
    assert desk.admitted(stored)["spec"] == stored["spec"]


def test_a_whole_card_of_unknown_size_is_admitted_with_a_warning(desk: Desk) -> None:
    (warning,) = desk.review(pod(mlu())).warnings
    assert "mounts a card only for" in warning
    assert not desk.review(pod(mlu(1, 20, 10))).warnings


@pytest.mark.parametrize(
    ("obj", "text"),
    [
        pytest.param(pod(mlu(2, 20)), "gives shares of one card only", id="29"),
        pytest.param(pod(mlu(1, 20, 10), mlu(1, 20, 10)), "serves one container of a pod", id="30"),
        pytest.param(pod({}, inits=[mlu(1, 20, 10)]), "serves regular containers only", id="init container"),
        pytest.param(pod(mlu(1, None, 30)), "the device plugin needs both", id="cores only"),
    ],
)
def test_what_the_plugin_cannot_serve_is_denied(lab: Lab, desk: Desk, obj: dict[str, Any], text: str) -> None:
    assert text in desk.denied(obj)
    allowing = Desk(lab.vendor("MLU", {"cambricon/allowUnsupported": True}))
    stored = allowing.admitted(obj)
    stored["spec"].pop("schedulerName")
    assert stored["spec"] == obj["spec"], "case 33: unchanged"


def test_case_31_a_card_chosen_by_its_id(desk: Desk) -> None:
    asking = {"cambricon.com/use-gpuuuid": "m1-cambricon-mlu-0"}
    assert desk.allocated(pod(mlu(1, 20, 25), annotations=asking)).startswith("m1-cambricon-mlu-0,")
    asking = {"cambricon.com/use-gpuuuid": "m1-cambricon-mlu-2"}
    assert desk.refused(pod(mlu(1, 20, 25), annotations=asking), "m1") == "2/2 CardUuidMismatch"


def test_case_32_the_model_of_a_labelled_node_is_selectable(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU"))
    desk.node("m1", capacity={CORES: 200, MEMORY: 192}, labels={"cambricon.com/mlu.product": "MLU370-X8"})
    assert {one.type for one in desk.cards("m1")} == {"MLU370"}
    asking = {"cambricon.com/use-mlutype": "MLU590"}
    assert desk.refused(pod(mlu(1, 20, 25), annotations=asking), "m1") == "2/2 CardTypeMismatch"
    refusing = {"cambricon.com/nouse-mlutype": "mlu370"}
    assert desk.refused(pod(mlu(1, 20, 25), annotations=refusing), "m1") == "2/2 CardTypeMismatch"
    asking = {"cambricon.com/use-mlutype": "MLU590,MLU370"}
    assert desk.allocated(pod(mlu(1, 20, 25), annotations=asking)).startswith("m1-cambricon-mlu-1,MLU,")


def test_a_node_of_unknown_model_serves_every_selection(desk: Desk) -> None:
    asking = {"cambricon.com/use-mlutype": "MLU590"}
    assert desk.allocated(pod(mlu(1, 20, 25), annotations=asking))


def test_a_label_that_names_the_model_later_is_noticed(desk: Desk) -> None:
    labels = {"cambricon.com/mlu.product": "MLU590"}
    desk.node("m1", capacity={CORES: 200, MEMORY: 192}, labels=labels)
    assert {one.type for one in desk.cards("m1")} == {"MLU590"}


def test_the_resource_names_of_one_model_name_it(lab: Lab) -> None:
    changes = {"cambricon/resourceCoreName": "cambricon.com/mlu370.smlu.vcore"}
    (card,) = node_devices(
        lab.vendor("MLU", changes), lab.node(capacity={"cambricon.com/mlu370.smlu.vcore": 100})
    )
    assert card.type == "MLU370"


def test_equal_pods_use_different_cards_under_spread(lab: Lab) -> None:
    desk = Desk(lab.vendor("MLU"), card_policy="spread")
    desk.node("m1", capacity={CORES: 800, MEMORY: 768})
    chosen = {desk.allocated(pod(mlu(1, 20, 25), name=name)) for name in "abcd"}
    assert len(chosen) == 4


def test_an_mlu_pod_needs_cambricons_lock(desk: Desk) -> None:
    desk.written(pod(mlu(1, 20, 25)))
    reservation = desk.state.reservation("uid-p")
    assert reservation is not None
    assert reservation.locks == (("MLU", "dsmlu"),)
