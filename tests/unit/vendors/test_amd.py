"""AMD: the acceptance cases of vendors/amd.md §11."""

import json
from typing import Any

import pytest
from vendor_desk import Desk, limits_of, pod, shares

from hami.protocol.allocation import ContainerDevice
from hami.protocol.views import Node, Pod, decode
from hami.scheduler.core.answers import Placement
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.metric_texts import in_units, node_texts, pod_lines
from hami.vendors.types import ContainerRequest

Lab = Any
COUNT, MEMORY, CORES = "amd.com/gpu", "amd.com/gpumem", "amd.com/gpucores"
ALLOCATED = "hami.io/amd-devices-allocated"
MI300 = "AMD Instinct MI300X VF"


def card(number: int = 0, **values: Any) -> dict[str, Any]:
    plain = {"id": f"g{number}", "index": number + 1, "count": 10, "devmem": 196288, "devcore": 304}
    custom = {"pciBDF": "0000:83:00.0"}
    return {**plain, "type": MI300, "health": True, "devicevendor": "amd", "custominfo": custom, **values}


def gpu(num: Any = 1, mem: Any = None, cores: Any = None) -> dict[str, Any]:
    return shares(COUNT, MEMORY, CORES, num, mem, cores)


def with_cards(lab: Lab, *cards: dict[str, Any], **settings: Any) -> Desk:
    desk = Desk(lab.vendor("AMD"), **settings)
    desk.registered("n1", *cards, capacity={COUNT: 10 * len(cards)})
    return desk


@pytest.fixture
def desk(lab: Lab) -> Desk:
    """Node n1 with one card of 196288 MiB and 304 compute units."""
    return with_cards(lab, card())


def test_case_1_a_number_of_cards_is_taken_as_it_is(desk: Desk) -> None:
    stored = desk.admitted(pod(gpu("2")))
    assert stored["spec"]["schedulerName"] == "hami-scheduler"
    assert limits_of(stored) == gpu("2")


@pytest.mark.parametrize(
    "asked", [pytest.param({MEMORY: "1024"}, id="2"), pytest.param({CORES: "50"}, id="3")]
)
def test_a_share_without_a_count_is_of_one_card(desk: Desk, asked: dict[str, str]) -> None:
    stored = desk.admitted(pod(asked))
    assert limits_of(stored) == {**asked, COUNT: "1"}
    assert desk.admitted(stored)["spec"] == stored["spec"], "a second admission changes nothing"


def test_case_4_requests_alone_are_not_ours(desk: Desk) -> None:
    obj = pod({"name": "a", "resources": {"requests": gpu("1")}})
    assert not desk.review(obj).patch
    assert desk.numbers(obj) is None


@pytest.mark.parametrize("cores", [pytest.param(cores, id="5") for cores in (0, 101, "1.5")])
def test_cores_are_a_percentage(desk: Desk, cores: Any) -> None:
    text = "amd.com/gpucores must be an integer percentage between 1 and 100"
    assert desk.denied(pod(gpu(1, None, cores))) == text


def test_case_6_memory_without_cores_takes_all_cores(desk: Desk) -> None:
    assert desk.review(pod(gpu(1, 1024))).allowed
    assert desk.numbers(pod(gpu(1, 1024))) == (1, 1024, 0, 100)


def test_case_7_only_limits_are_read(desk: Desk) -> None:
    resources = {"limits": gpu("2", "4096", "33"), "requests": gpu("99", "99", "99")}
    assert desk.numbers(pod({"name": "a", "resources": resources})) == (2, 4096, 0, 33)


@pytest.mark.parametrize(
    "asked", [pytest.param(gpu(*pair), id="8") for pair in ((0,), (2147483648,), (1, -1), (1, 2147483648))]
)
def test_invalid_amounts_are_denied_and_fit_nowhere(desk: Desk, asked: dict[str, Any]) -> None:
    assert desk.denied(pod(asked)).startswith("invalid amd.com/gpu")
    assert desk.refused(pod(asked)).startswith("invalid amd.com/gpu")


def test_case_9_without_names_memory_and_cores_are_not_recognised(lab: Lab) -> None:
    desk = Desk(lab.vendor("AMD", {"amd/resourceMemoryName": "", "amd/resourceCoreName": ""}))
    assert desk.numbers(pod(gpu(1, 1024))) == (1, 0, 0, 100)


def test_case_10_the_registered_card(desk: Desk) -> None:
    (found,) = desk.cards("n1")
    assert (found.index, found.vendor, found.devcore, found.type) == (1, "AMD", 304, MI300)


def test_case_11_a_card_that_does_not_say_it_is_healthy(lab: Lab) -> None:
    plain = card()
    del plain["health"]
    assert with_cards(lab, plain).refused(pod(gpu())) == "1/1 CardNotHealth"


def test_case_12_the_model_and_compute_units_are_written(desk: Desk) -> None:
    written = desk.written(pod(gpu(1, 49152, 25)))
    assert written[ALLOCATED] == f"g0,{MI300},49152,76:;"
    assert written["hami.io/amd-devices-to-allocate"] == written[ALLOCATED]


def test_case_13_three_of_four_pods_fit_on_a_card(desk: Desk) -> None:
    for name in "abc":
        obj = pod(gpu(1, 49152, 25), name=name)
        desk.written(obj)
        desk.bind(obj)
    used = desk.used("n1")["g0"]
    assert (used.mem, used.cores) == (147456, 228)
    assert desk.refused(pod(gpu(1, 49152, 25), name="d")) == "1/1 CardInsufficientMemory"


@pytest.mark.parametrize(
    ("total", "percent", "units"),
    [
        pytest.param(64, 1, 1, id="14"),
        pytest.param(304, 25, 76, id="a quarter"),
        pytest.param(304, 33, 100, id="a third"),
        pytest.param(304, 1, 3, id="one percent"),
        pytest.param(304, 100, 304, id="all"),
    ],
)
def test_percent_are_compute_units_of_the_card(lab: Lab, total: int, percent: int, units: int) -> None:
    desk = with_cards(lab, card(devcore=total))
    assert desk.allocated(pod(gpu(1, 1, percent))) == f"g0,{MI300},1,{units}:;"


def test_case_15_all_units_of_a_card_that_is_nearly_used_up(lab: Lab) -> None:
    desk = with_cards(lab, card(devcore=10))
    desk.hold("x", "n1", f"g0,{MI300},1,9:;")
    assert desk.refused(pod(gpu(1, 1, 100))) == "1/1 CardInsufficientCore"


def test_case_16_a_whole_card_of_which_memory_is_in_use(lab: Lab) -> None:
    desk = with_cards(lab, card(devmem=1000))
    desk.hold("x", "n1", f"g0,{MI300},900,1:;")
    assert desk.refused(pod(gpu(1, None, 1))) == "1/1 CardInsufficientMemory"


def test_case_17_a_card_without_units_serves_nobody(lab: Lab) -> None:
    desk = with_cards(lab, card(devcore=0))
    for percent in (1, 100):
        assert desk.refused(pod(gpu(1, 1, percent))) == "1/1 CardInsufficientCore"


def test_a_request_of_no_cores_takes_them_all_with_all_of_the_memory(lab: Lab) -> None:
    p = lab.vendor("AMD")
    cards = [lab.card(devmem=1000, devcore=304, vendor="AMD", type=MI300, usedcores=1, used=1)]
    for mem, fits in ((0, False), (1000, False), (999, True)):
        result = lab.fit(cards, ContainerRequest(1, "AMD", mem, 0, 0), profile=p)
        assert (result.devices is not None) is fits
    assert result.devices is not None
    assert result.devices[0].usedcores == 0


def test_case_18_memory_alone_beside_another_pod(desk: Desk) -> None:
    desk.hold("x", "n1", f"g0,{MI300},49152,76:;")
    assert desk.refused(pod(gpu(1, 1024))) == "1/1 CardInsufficientCore"


def test_case_19_two_whole_cards(lab: Lab) -> None:
    desk = with_cards(lab, card(0), card(1))
    assert desk.allocated(pod(gpu(2))) == f"g1,{MI300},196288,304:g0,{MI300},196288,304:;"


def test_whole_cards_of_one_size_are_preferred(lab: Lab) -> None:
    sizes = (1000, 2000, 1000, 3000)
    desk = with_cards(lab, *[card(at, devmem=size) for at, size in enumerate(sizes)])
    assert desk.allocated(pod(gpu(2))) == f"g2,{MI300},1000,304:g0,{MI300},1000,304:;"
    assert desk.allocated(pod(gpu(3))).count(MI300) == 3, "preferred, not required"


@pytest.mark.parametrize(
    ("annotation", "value", "model", "fits"),
    [
        pytest.param("use-gputype", "mi300", "AMD Instinct MI250X", False, id="20"),
        pytest.param("nouse-gputype", "MI250,", MI300, True, id="21"),
        pytest.param("use-gputype", ", ", MI300, False, id="22"),
    ],
)
def test_cards_chosen_by_model(lab: Lab, annotation: str, value: str, model: str, fits: bool) -> None:
    desk = with_cards(lab, card(type=model))
    obj = pod(gpu(), annotations={f"amd.com/{annotation}": value})
    if fits:
        assert desk.allocated(obj)
    else:
        assert desk.refused(obj) == "1/1 CardTypeMismatch"


def test_case_23_an_id_that_no_card_has(desk: Desk) -> None:
    asking = {"amd.com/use-gpu-uuid": "g7"}
    assert desk.refused(pod(gpu(), annotations=asking)) == "1/1 CardUuidMismatch"


def test_case_24_a_card_without_slots(desk: Desk) -> None:
    for name in range(10):
        desk.hold(f"x{name}", "n1", f"g0,{MI300},1,1:;")
    assert desk.refused(pod(gpu(1, 1, 1))) == "1/1 CardTimeSlicingExhausted"


def test_case_25_a_model_with_signs_of_the_text_is_written_without_them(lab: Lab) -> None:
    assert with_cards(lab, card(type="X,Y:Z")).allocated(pod(gpu(1, 1, 1))) == "g0,X_Y_Z,1,3:;"


def test_case_26_a_container_without_a_card_keeps_its_place(desk: Desk) -> None:
    assert desk.allocated(pod({}, gpu(1, 1, 1))).startswith(";g0,")


def test_case_27_a_node_without_the_resource_loses_the_cards(desk: Desk) -> None:
    outcome = desk.registered("n1", card(), capacity={})
    assert desk.cards("n1") == []
    assert outcome.patches == ()
    desk.registered("n1", card(), capacity={COUNT: 10})
    assert len(desk.cards("n1")) == 1


def test_case_28_the_quota_counts_percent(lab: Lab) -> None:
    desk = with_cards(lab, card(0), card(1), card_policy="binpack")
    desk.quota({CORES: 100})
    for name in "abcd":
        obj = pod(gpu(1, 40000, 25), name=name)
        assert desk.written(obj)
        desk.bind(obj)
    assert desk.refused(pod(gpu(1, 40000, 25), name="e")) == "2/2 ResourceQuotaNotFit"


@pytest.mark.parametrize(("used", "percent"), [pytest.param(76, 25, id="29"), pytest.param(77, 26, id="30")])
def test_metrics_show_percent(desk: Desk, used: int, percent: int) -> None:
    desk.hold("x", "n1", f"g0,{MI300},1,{used}:;")
    text = "".join(node_texts(desk.state.node_usage("n1"), legacy=True))
    values = dict(line.rsplit(" ", 1) for line in text.splitlines())
    by_name = {key.partition("{")[0]: value for key, value in values.items()}
    assert by_name["hami_gpu_core_limit_ratio"] == "100"
    assert by_name["hami_gpu_core_allocated_ratio"] == str(percent)
    assert (by_name["GPUDeviceCoreLimit"], by_name["GPUDeviceCoreAllocated"]) == ("304", str(used))
    (holder,) = desk.state.pods()
    for position, value in ((1, percent), (3, used)):
        (line,) = pod_lines(holder, "cores", position, {"g0": 304})
        assert line.endswith(f" {value}\n")
    assert not in_units("NVIDIA A100", 100)


@pytest.mark.parametrize("obj", [pytest.param(pod(gpu(1, 1, 1), gpu(1, 1, 1)), id="31")])
def test_a_second_container_with_a_card_is_denied(lab: Lab, desk: Desk, obj: dict[str, Any]) -> None:
    assert "serves one container of a pod" in desk.denied(obj)
    init = pod(gpu(1, 1, 1), inits=[{CORES: 5}])
    assert "serves one container of a pod" in desk.denied(init)
    requested = {"name": "r", "resources": {"requests": {COUNT: "1"}}}
    assert desk.review(pod(requested, gpu(1, 1, 1))).allowed, "requests alone are not ours"
    allowing = Desk(lab.vendor("AMD", {"amd/allowUnsupported": True}))
    assert allowing.review(obj).allowed


def test_case_32_the_vendor_not_the_model_decides(lab: Lab) -> None:
    desk = with_cards(lab, card(type="Radeon PRO W7900"))
    assert desk.allocated(pod(gpu(1, 1, 1))) == "g0,Radeon PRO W7900,1,3:;"


def test_case_33_an_empty_list_drops_the_cards_and_nothing_else(desk: Desk) -> None:
    outcome = desk.registered("n1", capacity={COUNT: 10})
    assert desk.cards("n1") == []
    assert outcome.patches == ()


def test_case_34_the_base_score_sums_over_all_cards(lab: Lab) -> None:
    state = ClusterState((lab.nvidia(), lab.vendor("AMD")))
    nvidia = {"id": "G", "count": 10, "devmem": 3712, "devcore": 96, "type": "NVIDIA T4", "health": True}
    node = {
        "metadata": {
            "name": "n1",
            "annotations": {
                "hami.io/node-amd-register": json.dumps([card()]),
                "hami.io/node-nvidia-register": json.dumps([{**nvidia, "mode": "hami-core"}]),
            },
        },
        "status": {"allocatable": {COUNT: "10", "nvidia.com/gpu": "10"}},
    }
    state.upsert_node(decode(json.dumps(node), Node), 0)
    held = ContainerDevice("g0", MI300, 50000, 100)
    holder = pod({}, annotations={"hami.io/vgpu-node": "n1", ALLOCATED: f"{held.uuid},{MI300},50000,100:;"})
    state.upsert_pod(decode(json.dumps(holder), Pod))
    score = 10 * (1 / 20 + 100 / 400 + 50000 / 200000)
    request = state.parse(pod(gpu(1, 1, 1), name="q"))
    assert request is not None
    answer = state.place(request, state.candidates(["n1"]), 0)
    assert isinstance(answer, Placement)
    assert dict(answer.scores)["n1"] == pytest.approx(score, rel=1e-6)
