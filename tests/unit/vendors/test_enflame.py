"""Enflame: the acceptance cases of vendors/enflame.md §8."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vendor_desk import NOW, Desk, limits_of, pod

from hami.protocol.errors import ProtocolError
from hami.vendors.enflame_profiles import size_of
from hami.vendors.engine import node_devices, read_inventory
from hami.vendors.types import ContainerRequest

Lab = Any
DRS, MEMORY, CORES = "enflame.com/drs-gcu", "enflame.com/gcu-memory", "enflame.com/gcu-core"
REGISTER = "enflame.com/gcu-drs-capacity"
PROFILES = {"1g.8gb": "0", "2g.16gb": "1", "3g.24gb": "2", "6g.48gb": "3"}
TWO_CARDS = [
    {"index": "0", "minor": "4", "capacity": 6},
    {"index": "1", "minor": "5", "capacity": "6"},
]
MUTEX = {"hami.io/gpu-scheduler-policy": "mutex"}


class Slices(Desk):
    """Nodes with cards in DRS mode."""

    def drs(self, name: str = "gcu-a", devices: Any = None, profiles: Any = None) -> None:
        """A node whose plugin has registered these devices and profiles (default: two cards)."""
        text = json.dumps({"devices": devices or TWO_CARDS, "profiles": profiles or PROFILES})
        self.node(name, annotations={REGISTER: text})

    def one_card(self, name: str = "gcu-a", **parts: Any) -> None:
        self.drs(name, TWO_CARDS[:1], **parts)

    def held(self, name: str, size: str, slices: int, *, card: str = "gcu-a-enflame-drs-0") -> None:
        """A running pod with one slice."""
        entry = {"allocated": True, "request": slices, "profileName": size, "instanceID": "7"}
        written = {"assigned-containers": json.dumps({"app0": entry})}
        mib = {1: 8192, 2: 16384, 3: 24576, 6: 49152}[slices]
        share = 100 * slices // 6
        self.hold(
            name, card.rpartition("-enflame")[0], f"{card},Enflame,{mib},{share}:;", annotations=written
        )


@pytest.fixture
def desk(lab: Lab) -> Slices:
    return Slices(lab.vendor("Enflame"))


@pytest.fixture
def gcu_a(desk: Slices) -> Slices:
    desk.drs()
    return desk


@pytest.mark.parametrize("odd", [None, "x", 5, [], {"index": "1", "minor": "5", "capacity": {}}])
def test_a_device_that_is_none_is_left_out_alone(desk: Slices, odd: Any) -> None:
    desk.drs(devices=[odd, TWO_CARDS[0]])
    assert [one.id for one in desk.cards("gcu-a")] == ["gcu-a-enflame-drs-0"]


def test_the_plugin_is_told_nothing_that_is_no_word_of_its_own(desk: Slices) -> None:
    desk.drs(devices=[{"index": None, "minor": {"a": 1}, "capacity": 6}], profiles={"1g.8gb": None})
    written = desk.written(pod(drs(1)))
    assert written["enflame.com/gcu-assigned-minor"] == written["enflame.com/gcu-assigned-index"] == "0"
    assert written["assigned-containers"] == '{"app0":{"allocated":false,"request":1,"profileName":"1g.8gb"}}'


@pytest.mark.parametrize("size", ["2147483648", "9223372036854775807", "99999999999999999999"])
def test_sizes_that_no_card_has_do_not_count(gcu_a: Slices, size: str) -> None:
    for name in ("p", "q"):
        written = {"enflame.com/gcu-request-size": size}
        gcu_a.hold(name, "gcu-a", "gcu-a-enflame-drs-0,Enflame,8192,16:;", annotations=written)
    assert gcu_a.used("gcu-a")["gcu-a-enflame-drs-0"].slots == 2


def drs(number: Any) -> dict[str, Any]:
    return {DRS: number}


# --- nodes ------------------------------------------------------------------------------------------------


def test_case_1_the_cards_of_the_annotation(gcu_a: Slices) -> None:
    found = gcu_a.cards("gcu-a")
    assert [one.id for one in found] == ["gcu-a-enflame-drs-0", "gcu-a-enflame-drs-1"]
    assert {(one.count, one.devmem, one.devcore, one.type) for one in found} == {(6, 49152, 100, "Enflame")}
    assert [one.custom["minor"] for one in found] == ["4", "5"]
    assert found[0].custom["maxSlice"] == 6


@pytest.mark.parametrize("capacity", ["x", 0, -1, None, "", True, 1e12, "0", [6]])
def test_case_2_a_card_without_slices_is_left_out(desk: Slices, capacity: Any) -> None:
    desk.drs(devices=[{"index": "0", "minor": "4", "capacity": capacity}, TWO_CARDS[1]])
    assert [one.id for one in desk.cards("gcu-a")] == ["gcu-a-enflame-drs-1"]


def test_case_3_without_a_size_there_are_no_cards(desk: Slices) -> None:
    desk.drs(profiles={"big": "0"})
    assert desk.cards("gcu-a") == []


@pytest.mark.parametrize(
    ("name", "slices", "gb"),
    [
        (" 3G.24GB ", 3, 24),
        ("4g", 0, 0),
        ("g.8gb", 0, 0),
        ("2g.xgb", 2, 0),
        ("1g.8gb.extra", 1, 8),
        ("9999999999999g.8gb", 0, 0),
        ("", 0, 0),
    ],
)
def test_case_4_sizes_are_read_from_names(name: str, slices: int, gb: int) -> None:
    found = size_of(name)
    assert (found.slices, found.gb) == (slices, gb)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(None, id="20"),
        pytest.param('{"devices":[],"profiles":{"1g.8gb":"0"}}', id="24"),
    ],
)
def test_without_cards_the_vendor_leaves_the_node(gcu_a: Slices, text: str | None) -> None:
    gcu_a.node("gcu-a", annotations={} if text is None else {REGISTER: text})
    assert gcu_a.cards("gcu-a") == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"devices": 5}', '{"devices":[{}],"profiles":[]}'])
def test_a_broken_annotation_keeps_the_last_good_cards(gcu_a: Slices, text: str) -> None:
    gcu_a.node("gcu-a", annotations={REGISTER: text})
    assert len(gcu_a.cards("gcu-a")) == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=8,
    ).map(json.dumps)
    | st.fixed_dictionaries(
        {
            "devices": st.lists(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "index": st.text(max_size=3) | st.integers(),
                        "minor": st.none(),
                        "capacity": st.integers() | st.text(max_size=3),
                    },
                ),
                max_size=3,
            ),
            "profiles": st.dictionaries(st.sampled_from(["1g.8gb", "x", "2g.", "-3g.5gb"]), st.integers()),
        }
    ).map(json.dumps)
)
def test_no_annotation_breaks_the_reader(lab: Lab, text: str) -> None:
    try:
        found = node_devices(lab.vendor("Enflame"), lab.node(annotations={REGISTER: text}))
    except ProtocolError:
        return
    assert len({one.id for one in found}) == len(found) > 0
    assert all(one.count > 0 and one.devmem > 0 for one in found)


# --- admission --------------------------------------------------------------------------------------------


def test_case_5_requests_follow_the_limits(gcu_a: Slices) -> None:
    stored = gcu_a.admitted(pod(drs(3)))
    assert stored["spec"]["containers"][0]["resources"]["requests"] == {DRS: "3"}


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        pytest.param({DRS: 0}, f"{DRS} must be greater than 0", id="6"),
        pytest.param({CORES: 120}, f"{CORES} must be in range (0,100]", id="7"),
        pytest.param({MEMORY: -1}, f"{MEMORY} must be greater than 0", id="memory"),
        pytest.param({CORES: 0}, f"{CORES} must be in range (0,100]", id="cores"),
    ],
)
def test_invalid_amounts_are_denied(gcu_a: Slices, limits: dict[str, Any], text: str) -> None:
    assert gcu_a.denied(pod(limits)) == text


def test_case_8_limits_follow_the_requests(gcu_a: Slices) -> None:
    stored = gcu_a.admitted(pod({"name": "a", "resources": {"requests": {MEMORY: "8192"}}}))
    assert limits_of(stored) == {MEMORY: "8192"}


def test_small_amounts_of_memory_get_a_warning(gcu_a: Slices) -> None:
    assert "read as GB" in gcu_a.review(pod({MEMORY: 24})).warnings[0]
    assert list(gcu_a.review(pod({MEMORY: 24576})).warnings) == []


# --- sizes and fit ----------------------------------------------------------------------------------------


def test_case_9_slices_of_the_last_idle_card(gcu_a: Slices) -> None:
    written = gcu_a.written(pod(drs(3)))
    assert written["hami.io/enflame-vgpu-devices-allocated"] == "gcu-a-enflame-drs-1,Enflame,24576,50:;"
    assert written["enflame.com/gcu-request-size"] == "3"
    assert written["enflame.com/gcu-assigned"] == "false"
    assert written["enflame.com/gcu-assigned-time"] == f"{int(NOW)}000000000"
    assert written["enflame.com/gcu-assigned-index"] == written["enflame.com/gcu-assigned-id"] == "1"
    assert written["enflame.com/gcu-assigned-minor"] == "5"
    assert written["assigned-containers"] == (
        '{"app0":{"allocated":false,"request":3,"profileID":"2","profileName":"3g.24gb"}}'
    )


@pytest.mark.parametrize(
    ("limits", "size"),
    [
        pytest.param({MEMORY: 20480, CORES: 40}, "3g.24gb", id="11"),
        pytest.param({MEMORY: 97}, "1g.8gb", id="12"),
        pytest.param({MEMORY: 24}, "3g.24gb", id="GB"),
        pytest.param({CORES: 17}, "2g.16gb", id="core share rounded down"),
        pytest.param({CORES: 34}, "3g.24gb", id="two slices are 33"),
        pytest.param({MEMORY: 49152}, "6g.48gb", id="all of it"),
    ],
)
def test_the_smallest_size_that_serves_is_taken(gcu_a: Slices, limits: dict[str, int], size: str) -> None:
    containers = json.loads(gcu_a.written(pod(limits))["assigned-containers"])
    assert containers["app0"]["profileName"] == size
    assert containers["app0"]["profileID"] == PROFILES[size]


@pytest.mark.parametrize(
    "limits",
    [
        pytest.param({DRS: 4}, id="10"),
        pytest.param({MEMORY: 96}, id="13"),
        pytest.param({MEMORY: 49153}, id="49 GB"),
    ],
)
def test_without_a_size_that_serves_no_card_fits(gcu_a: Slices, limits: dict[str, int]) -> None:
    assert gcu_a.refused(pod(limits), "gcu-a") == "1/2 ModeNotFit"


def test_case_14_a_card_gives_away_all_its_slices(desk: Slices) -> None:
    desk.one_card()
    for number in range(6):
        obj = pod(drs(1), name=f"p{number}")
        assert desk.allocated(obj) == "gcu-a-enflame-drs-0,Enflame,8192,16:;"
        desk.bind(obj)
    assert desk.refused(pod(drs(1), name="late"), "gcu-a") == "1/1 CardTimeSlicingExhausted"


def test_case_15_free_slices_must_suffice(desk: Slices) -> None:
    desk.one_card()
    desk.held("a", "3g.24gb", 3)
    desk.held("b", "2g.16gb", 2)
    assert desk.refused(pod(drs(3)), "gcu-a") == "1/1 CardTimeSlicingExhausted"
    assert desk.allocated(pod(drs(1))) == "gcu-a-enflame-drs-0,Enflame,8192,16:;"


def test_case_16_slices_of_running_pods_count(desk: Slices) -> None:
    desk.one_card()
    desk.held("a", "3g.24gb", 3)
    desk.held("b", "3g.24gb", 3)
    assert desk.used("gcu-a")["gcu-a-enflame-drs-0"].slots == 6
    assert desk.refused(pod(drs(1)), "gcu-a") == "1/1 CardTimeSlicingExhausted"


def test_case_17_mutex_wants_an_unused_card(desk: Slices) -> None:
    desk.one_card()
    desk.held("a", "1g.8gb", 1)
    assert desk.refused(pod(drs(1), annotations=MUTEX), "gcu-a") == "1/1 ExclusiveDeviceAllocateConflict"


def test_case_18_a_pod_may_exclude_cards(desk: Slices) -> None:
    desk.one_card()
    asking = {"enflame.com/nouse-gpuuuid": "gcu-a-enflame-drs-0"}
    assert desk.refused(pod(drs(1), annotations=asking), "gcu-a") == "1/1 CardUuidMismatch"


def test_case_19_only_containers_with_slices_are_assigned(gcu_a: Slices) -> None:
    written = gcu_a.written(pod({"name": "web"}, {"name": "train", "resources": {"limits": {DRS: "3"}}}))
    assert list(json.loads(written["assigned-containers"])) == ["train"]
    assert written["hami.io/enflame-vgpu-devices-allocated"] == ";gcu-a-enflame-drs-1,Enflame,24576,50:;"


def test_all_containers_of_a_pod_share_one_card(gcu_a: Slices) -> None:
    obj = pod(drs(3), drs(2))
    text = "gcu-a-enflame-drs-1,Enflame,24576,50:;gcu-a-enflame-drs-1,Enflame,16384,33:;"
    assert gcu_a.allocated(obj) == text
    gcu_a.held("a", "3g.24gb", 3, card="gcu-a-enflame-drs-0")
    gcu_a.held("b", "3g.24gb", 3, card="gcu-a-enflame-drs-1")
    reason = "1/2 CardNotFoundCustomFilterRule, 1/2 CardTimeSlicingExhausted"
    assert gcu_a.refused(pod(drs(3), drs(2), name="q"), "gcu-a") == reason


def test_a_card_without_the_size_is_passed_over(desk: Slices) -> None:
    desk.drs(profiles={"1g.8gb": "0", "6g.48gb": "3"})
    assert desk.refused(pod(drs(2)), "gcu-a") == "1/2 ModeNotFit"
    assert desk.allocated(pod({CORES: 20})).endswith(",Enflame,49152,100:;")


@pytest.mark.parametrize(
    ("written", "slices"),
    [
        pytest.param(
            {"assigned-containers": '{"app0":{"request":3,"allocated":true,"instanceUUID":"x"}}'}, 3, id="25"
        ),
        pytest.param({"assigned-containers": "gone", "enflame.com/gcu-request-size": "3"}, 3, id="size"),
        pytest.param({"assigned-containers": '{"app0":{"request":-1}}'}, 1, id="nonsense"),
        pytest.param({}, 1, id="nothing"),
    ],
)
def test_slices_of_a_placed_pod_survive_a_restart(desk: Slices, written: dict[str, str], slices: int) -> None:
    desk.one_card()
    desk.hold("a", "gcu-a", "gcu-a-enflame-drs-0,Enflame,24576,50:;", annotations=written)
    used = desk.used("gcu-a")["gcu-a-enflame-drs-0"]
    assert (used.slots, used.mem, used.cores) == (slices, 24576, 50)


@pytest.mark.parametrize("size", [{}, {"enflame.com/gcu-request-size": "1"}])
def test_slices_that_no_annotation_counts_are_those_of_the_size_with_the_recorded_memory(
    desk: Slices, size: dict[str, str]
) -> None:
    """§5.6: more memory per slice than usual, so that only slices run out."""
    desk.one_card(profiles={"1g.8gb": "0", "3g.12gb": "1", "6g.96gb": "2"})
    desk.hold("a", "gcu-a", "gcu-a-enflame-drs-0,Enflame,12288,0:;", annotations=size)
    desk.hold("b", "gcu-a", "gcu-a-enflame-drs-0,Enflame,12288,0:;", annotations=size)
    assert desk.refused(pod(drs(1)), "gcu-a") == "1/1 CardTimeSlicingExhausted"
    desk.state.delete_pod("uid-a")
    assert desk.allocated(pod(drs(3))) == "gcu-a-enflame-drs-0,Enflame,12288,50:;"
    assert desk.refused(pod(drs(1), name="q"), "gcu-a") == "1/1 CardTimeSlicingExhausted"


def test_a_recorded_memory_that_no_size_has_says_nothing(desk: Slices) -> None:
    desk.one_card(profiles={"1g.8gb": "0", "6g.96gb": "2"})
    desk.hold("a", "gcu-a", "gcu-a-enflame-drs-0,Enflame,1000,0:;")
    assert desk.allocated(pod(drs(1))) == "gcu-a-enflame-drs-0,Enflame,8192,16:;"


def test_case_25_a_binding_is_read_back_as_it_was_placed(desk: Slices) -> None:
    desk.one_card()
    obj = pod(drs(3))
    desk.allocated(obj)
    before = desk.used("gcu-a")
    desk.bind(obj)
    assert desk.used("gcu-a") == before


def test_case_26_the_share_of_a_slice_is_the_nodes(desk: Slices) -> None:
    small = {"1g.8gb": "0", "2g.16gb": "1", "4g.32gb": "2"}
    desk.one_card("six")
    asking = pod({CORES: 50})
    assert desk.allocated(asking) == "six-enflame-drs-0,Enflame,24576,50:;"
    desk.state.release("uid-p")
    desk.state.delete_node("six")
    desk.drs("four", [{"index": "0", "minor": "1", "capacity": 4}], small)
    assert desk.allocated(asking) == "four-enflame-drs-0,Enflame,16384,50:;"


def test_the_quota_counts_mib_and_percent(gcu_a: Slices) -> None:
    gcu_a.quota({MEMORY: 30000, CORES: 60})
    assert gcu_a.review(pod(drs(3))).allowed
    assert gcu_a.denied(pod(drs(6))) == "exceeding resource quota"
    first = pod(drs(3), name="a")
    gcu_a.written(first)
    gcu_a.bind(first)
    assert gcu_a.refused(pod(drs(1), name="b"), "gcu-a") == "2/2 ResourceQuotaNotFit"


# --- whole cards ------------------------------------------------------------------------------------------


@pytest.fixture
def whole(lab: Lab) -> Desk:
    found = Desk(lab.vendor("GCU"))
    found.node("gcu-a", capacity={"enflame.com/gcu": 2})
    return found


def test_whole_cards_are_taken_from_the_last(whole: Desk) -> None:
    written = whole.written(pod({"enflame.com/gcu": 2}))
    text = "gcu-a-GCU-1,GCU,100,100:gcu-a-GCU-0,GCU,100,100:;"
    assert written["hami.io/enflame-gcu-devices-allocated"] == text
    assert written["hami.io/enflame-gcu-devices-to-allocate"] == text


def test_case_21_a_card_in_use_is_not_given_again(whole: Desk) -> None:
    whole.hold("a", "gcu-a", "gcu-a-GCU-0,GCU,100,100:;")
    reason = "1/2 AllocatedCardsInsufficientRequest, 1/2 ExclusiveDeviceAllocateConflict"
    assert whole.refused(pod({"enflame.com/gcu": 2}), "gcu-a") == reason


def test_case_22_more_cards_than_the_node_has(whole: Desk) -> None:
    assert whole.refused(pod({"enflame.com/gcu": 3}), "gcu-a") == "NodeInsufficientDevice"


def test_case_23_an_unhealthy_card_is_passed_over(lab: Lab) -> None:
    card = lab.card("c0", count=1, devmem=100, type="GCU", vendor="GCU", mode="", health=False)
    request = ContainerRequest(1, "GCU", 100, 100, 100)
    assert lab.fit([card], request, profile=lab.vendor("GCU")).text() == "1/1 CardNotHealth"


def test_a_node_that_reports_slices_too_gets_a_warning(lab: Lab) -> None:
    node = lab.node(capacity={"enflame.com/gcu": 2, DRS: 6})
    (warning,) = read_inventory(lab.vendor("GCU"), node).warnings
    assert "cards may be given away twice" in warning
