"""Moore Threads: the acceptance cases of vendors/mthreads.md §10."""

from datetime import UTC, datetime
from typing import Any

import pytest
from vendor_desk import NOW, Desk, limits_of, pod, shares

from hami.protocol.errors import DevicesAbsent
from hami.vendors.engine import annotations, node_devices
from hami.vendors.types import AdmissionRejected, AnnotateContext, ContainerDevice

Lab = Any
COUNT, CORES, MEMORY = "mthreads.com/vgpu", "mthreads.com/sgpu-core", "mthreads.com/sgpu-memory"
ALLOCATED = "hami.io/mthreads-vgpu-devices-allocated"


def vgpu(num: Any = 1, mem: Any = None, cores: Any = None) -> dict[str, Any]:
    return shares(COUNT, MEMORY, CORES, num, mem, cores)


@pytest.fixture
def desk(lab: Lab) -> Desk:
    """Node mt-3 with two cards of 48 GiB."""
    desk = Desk(lab.vendor("Mthreads"))
    desk.node("mt-3", capacity={CORES: 32, MEMORY: 192})
    return desk


def test_case_1_the_cards_of_the_capacity(lab: Lab) -> None:
    desk = Desk(lab.vendor("Mthreads"))
    desk.node("mt-3", capacity={CORES: 128, MEMORY: 768})
    cards = desk.cards("mt-3")
    assert [one.id for one in cards] == [f"mt-3-mthreads-{index}" for index in range(8)]
    assert {(one.devmem, one.devcore, one.count, one.type) for one in cards} == {(49152, 16, 100, "Mthreads")}


def test_case_2_a_part_of_a_card_is_a_card(lab: Lab) -> None:
    (card,) = node_devices(lab.vendor("Mthreads"), lab.node(capacity={CORES: 1, MEMORY: 1}))
    assert card.devmem == 8192


def test_case_3_without_cores_there_is_no_card(lab: Lab, desk: Desk) -> None:
    with pytest.raises(DevicesAbsent):
        node_devices(lab.vendor("Mthreads"), lab.node(capacity={MEMORY: 768}))
    desk.node("mt-3", capacity={MEMORY: 768})
    assert desk.cards("mt-3") == []


def test_what_kubelet_can_give_out_counts(desk: Desk) -> None:
    desk.node("mt-3", capacity={CORES: 32, MEMORY: 192}, allocatable={CORES: 16, MEMORY: 96})
    assert [(one.devmem, one.health) for one in desk.cards("mt-3")] == [(49152, True)]
    desk.node("mt-3", capacity={CORES: 32, MEMORY: 192}, allocatable={CORES: 0, MEMORY: 0})
    assert [one.health for one in desk.cards("mt-3")] == [False, False]
    desk.node("mt-3", capacity={CORES: 32, MEMORY: 192})
    assert [one.health for one in desk.cards("mt-3")] == [True, True]


@pytest.mark.parametrize(
    ("resources", "limits", "number"),
    [
        pytest.param({"limits": vgpu("3")}, vgpu("3", "288", "48"), "3", id="4"),
        pytest.param({"limits": vgpu("2", "2", "1")}, vgpu("2", "192", "32"), "2", id="5"),
        pytest.param({"requests": vgpu("2")}, {CORES: "32", MEMORY: "192"}, "2", id="6"),
        pytest.param({"requests": vgpu("1")}, {CORES: "16", MEMORY: "96"}, None, id="7"),
        pytest.param(
            {"requests": vgpu("1"), "limits": {}}, {CORES: "16", MEMORY: "96"}, None, id="empty limits"
        ),
        pytest.param({"limits": vgpu("1", None, "4")}, vgpu("1", "96", "16"), None, id="8"),
        pytest.param({"limits": vgpu("1", "32", "8")}, vgpu("1", "32", "8"), None, id="10"),
    ],
)
def test_what_the_webhook_sets(
    desk: Desk, resources: dict[str, Any], limits: dict[str, str], number: str | None
) -> None:
    stored = desk.admitted(pod({"name": "a", "resources": resources}))
    assert limits_of(stored) == limits
    assert stored["metadata"]["annotations"].get("mthreads.com/request-gpu-num") == number
    again = desk.admitted(stored)
    assert again["spec"] == stored["spec"], "a second admission changes nothing"


def test_requests_follow_the_limits_that_are_set(desk: Desk) -> None:
    resources = {"limits": vgpu("2", "2", "1"), "requests": vgpu("2", "2", "1")}
    stored = desk.admitted(pod({"name": "a", "resources": resources}))
    assert stored["spec"]["containers"][0]["resources"]["requests"] == vgpu("2", "192", "32")


def test_case_9_a_size_that_no_slice_has(desk: Desk) -> None:
    text = "sGPU memory request value is invalid, valid values are [2, 4, 8, 16, 32, 64, 96]"
    assert desk.denied(pod(vgpu(1, 3))) == text
    assert desk.denied(pod(vgpu(1, "1500m"))) == text


@pytest.mark.parametrize("cores", [0, 17, "1.5"])
def test_cores_of_a_slice_are_at_most_a_card(desk: Desk, cores: Any) -> None:
    assert "must be an integer between 1 and 16" in desk.denied(pod(vgpu(1, 32, cores)))


def test_a_slice_without_cores_is_admitted_with_a_warning(desk: Desk) -> None:
    (warning,) = desk.review(pod(vgpu(1, 32))).warnings
    assert "reserves no compute" in warning
    assert not desk.review(pod(vgpu(1, 32, 8))).warnings


def test_case_11_memory_alone_is_not_ours(desk: Desk) -> None:
    answer = desk.review(pod({MEMORY: 32}))
    assert answer.allowed
    assert not answer.patch


@pytest.mark.parametrize(
    "resources",
    [
        pytest.param({"limits": vgpu("0")}, id="12"),
        pytest.param({"limits": vgpu("-1")}, id="12 negative"),
        pytest.param({"requests": vgpu("0")}, id="12 requests"),
    ],
)
def test_no_card_is_denied(desk: Desk, resources: dict[str, Any]) -> None:
    assert (
        desk.denied(pod({"name": "a", "resources": resources})) == "mthreads.com/vgpu must be greater than 0"
    )


def test_case_13_the_annotations_of_a_pod_are_made(lab: Lab) -> None:
    obj = pod(vgpu("2"))
    del obj["metadata"]["annotations"]
    assert lab.admit(lab.vendor("Mthreads"), obj)
    assert obj["metadata"]["annotations"] == {"mthreads.com/request-gpu-num": "2"}


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        pytest.param(vgpu(1, 32, 8), (1, 16384, 0, 8), id="14"),
        pytest.param(vgpu(3, 288, 48), (3, 49152, 0, 16), id="15"),
        pytest.param(vgpu(1), (1, 0, 100, 0), id="16"),
    ],
)
def test_what_a_container_asks(desk: Desk, asked: dict[str, Any], numbers: tuple[int, ...]) -> None:
    assert desk.numbers(pod(asked)) == numbers


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(vgpu(1, 4194304), id="17"),
        pytest.param(vgpu(1, "2.5"), id="17 fraction"),
        pytest.param(vgpu(2, 32, 17), id="cores that cannot be divided"),
        pytest.param(vgpu(1, 2, -1), id="negative cores"),
    ],
)
def test_invalid_amounts_fit_nowhere(desk: Desk, asked: dict[str, Any]) -> None:
    with pytest.raises(AdmissionRejected):
        desk.numbers(pod(asked))
    assert desk.refused(pod(asked), "mt-3").startswith("invalid mthreads.com/")


def test_case_18_a_whole_card_beside_a_slice(lab: Lab) -> None:
    desk = Desk(lab.vendor("Mthreads"))
    desk.node("n1", capacity={CORES: 16, MEMORY: 96})
    desk.hold("x", "n1", "n1-mthreads-0,Mthreads,1024,0:;")
    assert desk.refused(pod(vgpu(1, 96, 16))) == "1/1 CardInsufficientMemory"


@pytest.mark.parametrize(
    ("used", "asked", "reason"),
    [
        pytest.param(16, vgpu(1, 2), "CardComputeUnitsExhausted", id="19"),
        pytest.param(10, vgpu(1, 2, 8), "CardInsufficientCore", id="20"),
    ],
)
def test_cores_in_use(lab: Lab, used: int, asked: dict[str, Any], reason: str) -> None:
    desk = Desk(lab.vendor("Mthreads"))
    desk.node("n1", capacity={CORES: 16, MEMORY: 96})
    desk.hold("x", "n1", f"n1-mthreads-0,Mthreads,1024,{used}:;")
    assert desk.refused(pod(asked)) == f"1/1 {reason}"


def test_case_21_all_containers_of_a_pod_get_the_same_card(desk: Desk) -> None:
    asked = vgpu(1, 32, 4)
    one = "mt-3-mthreads-1,Mthreads,16384,4:"
    assert desk.allocated(pod(asked, asked)) == f"{one};{one};"
    assert desk.allocated(pod(asked, inits=[asked])) == f"{one};{one};", "init containers too"
    whole = vgpu(1, 96, 16)
    assert desk.refused(pod(whole, asked), "mt-3") == (
        "1/2 CardInsufficientMemory, 1/2 CardNotFoundCustomFilterRule"
    )
    assert "CardNotFoundCustomFilterRule" in desk.refused(pod(vgpu(2, 64, 8), asked), "mt-3")


@pytest.mark.parametrize(
    "key",
    [
        pytest.param("mthreads.com/use-gpuuuid", id="22"),
        pytest.param("mthreads.ai/use-gpuuuid", id="23"),
    ],
)
def test_a_card_chosen_by_its_id(desk: Desk, key: str) -> None:
    for card in ("mt-3-mthreads-0", "mt-3-mthreads-1"):
        assert desk.allocated(pod(vgpu(1, 2, 1), annotations={key: card})).startswith(f"{card},")


def test_case_24_the_indices_of_the_cards_in_their_order(lab: Lab) -> None:
    first, second = (ContainerDevice(f"n1-mthreads-{at}", "Mthreads", 1, 1, at) for at in (5, 1))
    info = lab.info(slots=3)
    allocation = ((first, second), (), (second,))
    context = AnnotateContext(info, allocation, lab.node(name="mt-3"), datetime.fromtimestamp(NOW, UTC))
    written = annotations(lab.vendor("Mthreads"), context)
    assert written["mthreads.com/gpu-index"] == "5,1"
    assert written["mthreads.com/predicate-node"] == "mt-3"
    assert written["mthreads.com/predicate-time"] == f"{int(NOW)}000000000"


def test_case_25_there_is_no_work_list(desk: Desk) -> None:
    written = desk.written(pod(vgpu(1, 32, 8)))
    assert written[ALLOCATED] == "mt-3-mthreads-1,Mthreads,16384,8:;"
    assert not any("to-allocate" in key for key in written)


def test_case_26_no_node_lock(desk: Desk) -> None:
    desk.written(pod(vgpu(1, 32, 8)))
    reservation = desk.state.reservation("uid-p")
    assert reservation is not None
    assert reservation.locks == ()


def test_case_27_a_whole_card_over_the_quota_of_cores(desk: Desk) -> None:
    desk.quota({CORES: 8})
    assert desk.denied(pod(vgpu(1))) == "exceeding resource quota"
    assert desk.review(pod(vgpu(1, 32, 8))).allowed


def test_case_28_the_size_of_a_card_is_configurable(lab: Lab) -> None:
    for units, fits in ((96, False), (64, True)):
        desk = Desk(lab.vendor("Mthreads", {"mthreads/memoryUnitsPerDevice": units}))
        desk.node("s3000", capacity={CORES: 16, MEMORY: 64})
        stored = desk.admitted(pod(vgpu(1)))
        assert limits_of(stored)[MEMORY] == str(units)
        if fits:
            assert desk.allocated(stored) == "s3000-mthreads-0,Mthreads,32768,16:;"
        else:
            assert desk.refused(stored, "s3000") == "1/1 CardInsufficientMemory"


def test_case_29_amounts_without_a_count_are_no_request(desk: Desk) -> None:
    assert desk.numbers(pod({MEMORY: 32, CORES: 8})) is None
    assert desk.state.parse(pod({MEMORY: 32, CORES: 8})) is None


def test_case_30_all_keys_come_with_the_binding(desk: Desk) -> None:
    obj = pod(vgpu(1, 32, 8))
    desk.written(obj)
    assert "mthreads.com/predicate-time" not in obj["metadata"]["annotations"]
    stored = desk.bind(obj)
    assert stored["spec"]["nodeName"] == "mt-3"
    assert stored["metadata"]["annotations"]["mthreads.com/predicate-time"].isdigit()
