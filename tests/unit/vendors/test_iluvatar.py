"""Iluvatar: the acceptance cases of vendors/iluvatar.md §9."""

from typing import Any

import pytest
from vendor_desk import NOW, Desk, csv_cards, limits_of, pod

from hami.protocol.allocation import encode_allocation
from hami.protocol.errors import DevicesAbsent
from hami.protocol.timestamps import format_handshake
from hami.vendors.config import ConfigError, decode_config, load_profiles
from hami.vendors.engine import node_devices, read_inventory
from hami.vendors.types import ContainerDevice

Lab = Any
WORD = "BI-V150"
REGISTER = "hami.io/node-BI-V150-register"
HANDSHAKE = "hami.io/node-handshake-BI-V150"
COUNT, CORES, MEMORY = f"iluvatar.ai/{WORD}-vgpu", f"iluvatar.ai/{WORD}.vCore", f"iluvatar.ai/{WORD}.vMem"
TWO = csv_cards(("GPU-1", 10, 32768, 100, WORD, True), ("GPU-2", 10, 32768, 100, WORD, True))
AT = 2  # place of the chip in the chart's list


def vgpu(num: Any = 1, cores: Any = None, mem: Any = None) -> dict[str, Any]:
    names = {COUNT: num, CORES: cores, MEMORY: mem}
    return {name: value for name, value in names.items() if value is not None}


@pytest.fixture
def desk(lab: Lab) -> Desk:
    desk = Desk(lab.vendor(WORD))
    desk.node("n1", annotations={REGISTER: TWO})
    return desk


def env_of(obj: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = obj["spec"]["containers"][0].get("env", [])
    return found


def test_case_1_without_the_flag_there_is_no_adapter(lab: Lab) -> None:
    profiles = load_profiles(decode_config(lab.config()), enable_ascend=True, enable_iluvatar=False)
    assert not {"MR-V100", "MR-V50", "BI-V150", "BI-V100"} & {one.common_word for one in profiles}
    profiles = load_profiles(decode_config(lab.config()), enable_ascend=False, enable_iluvatar=True)
    assert [one.common_word for one in profiles][-4:] == ["MR-V100", "MR-V50", "BI-V150", "BI-V100"]


def test_case_2_the_registered_cards(desk: Desk) -> None:
    assert [(one.id, one.vendor, one.index) for one in desk.cards("n1")] == [
        ("GPU-1", WORD, 0),
        ("GPU-2", WORD, 1),
    ]


def test_case_3_without_the_annotation_the_capacity_says_what_there_is(lab: Lab) -> None:
    desk = Desk(lab.vendor(WORD))
    outcome = desk.node("n1", capacity={CORES: 1600, MEMORY: 2048})
    assert outcome.patches == (), "no handshake where no plugin reads it"
    cards = desk.cards("n1")
    assert [one.id for one in cards] == [f"n1-iluvatar-{index}" for index in range(16)]
    assert {(one.devmem, one.devcore, one.count, one.type, one.health) for one in cards} == {
        (32768, 100, 100, WORD, True)
    }


def test_in_capacity_mode_the_keys_of_that_plugin_generation_are_written(lab: Lab) -> None:
    desk = Desk(lab.vendor(WORD))
    desk.node("n1", capacity={CORES: 1600, MEMORY: 2048})
    written = desk.written(pod({}, vgpu(2)))
    assert written["iluvatar.ai/gpu-assigned"] == "false"
    assert written["iluvatar.ai/predicate-time"] == f"{int(NOW)}000000000"
    assert written["iluvatar.ai/predicate-gpu-idx-1"] == "15,14"
    assert "iluvatar.ai/predicate-gpu-idx-0" not in written


def test_those_keys_cannot_be_brought_along(lab: Lab) -> None:
    forged = {
        "iluvatar.ai/gpu-assigned": "false",
        "iluvatar.ai/predicate-gpu-idx-0": "0",
        "iluvatar.ai/x": "y",
    }
    stored = Desk(lab.vendor(WORD)).admitted(pod({}, vgpu(), annotations=forged))
    assert stored["metadata"]["annotations"] == {"iluvatar.ai/x": "y"}


def test_in_capacity_mode_nothing_allocatable_is_unhealthy_and_a_half_card_is_left_out(lab: Lab) -> None:
    p = lab.vendor(WORD)
    capacity = {CORES: 250, MEMORY: 320}
    inventory = read_inventory(p, lab.node(capacity=capacity, allocatable=capacity))
    assert [one.devmem for one in inventory.devices] == [32768, 32768]
    assert len(inventory.warnings) == 1
    off = read_inventory(p, lab.node(capacity=capacity, allocatable={CORES: 0, MEMORY: 0}))
    assert [one.health for one in off.devices] == [False, False]


@pytest.mark.parametrize(
    ("discovery", "cards"),
    [
        ("auto", ["GPU-1", "GPU-2"]),
        ("annotation", ["GPU-1", "GPU-2"]),
        ("capacity", ["n1-iluvatar-0"]),
    ],
)
def test_where_the_cards_are_read_from(lab: Lab, discovery: str, cards: list[str]) -> None:
    p = lab.vendor(WORD, {f"iluvatars/{AT}/discovery": discovery})
    node = lab.node(annotations={REGISTER: TWO}, capacity={CORES: 100, MEMORY: 128})
    assert [one.id for one in node_devices(p, node)] == cards


def test_without_annotation_only_capacity_is_left(lab: Lab) -> None:
    p = lab.vendor(WORD, {f"iluvatars/{AT}/discovery": "annotation"})
    with pytest.raises(DevicesAbsent):
        node_devices(p, lab.node(capacity={CORES: 100, MEMORY: 128}))


@pytest.mark.parametrize(
    ("asked", "numbers"),
    [
        pytest.param(vgpu(1, 50, 64), (1, 16384, 0, 50), id="4"),
        pytest.param(vgpu(1), (1, 0, 100, 0), id="5"),
    ],
)
def test_what_a_container_asks(desk: Desk, asked: dict[str, Any], numbers: tuple[int, ...]) -> None:
    assert desk.numbers(pod(asked)) == numbers


def test_case_6_several_cards_are_whole_ones(desk: Desk) -> None:
    stored = desk.admitted(pod(vgpu(2, 1)))
    assert limits_of(stored)[CORES] == "200"
    assert desk.numbers(stored) == (2, 0, 100, 200)


def test_requests_follow_the_limits_that_are_set(desk: Desk) -> None:
    resources = {
        "limits": {COUNT: "2", CORES: "1"},
        "requests": {COUNT: "2", CORES: "1"},
    }
    stored = desk.admitted(pod({"name": "a", "resources": resources}))
    assert stored["spec"]["containers"][0]["resources"]["requests"][CORES] == "200"


def test_case_7_each_of_several_cards_is_taken_whole(desk: Desk) -> None:
    assert desk.allocated(pod(vgpu(2, 200))) == f"GPU-2,{WORD},32768,100:GPU-1,{WORD},32768,100:;"


@pytest.mark.parametrize("memory", [pytest.param("16Gi", id="8"), pytest.param("16.0Gi", id="9")])
def test_memory_in_bytes_is_denied_with_the_unit(desk: Desk, memory: str) -> None:
    text = desk.denied(pod(vgpu(1, None, memory)))
    assert "the unit is 256 MiB" in text
    assert "write 64" in text


def test_case_10_the_runtime_is_told_the_name_of_the_container(desk: Desk) -> None:
    stored = desk.admitted(pod({"name": "trainer", "resources": {"limits": vgpu()}}))
    assert env_of(stored) == [{"name": "SOL_CONTINER_NAME", "value": "trainer"}]


def test_case_11_a_name_that_is_set_stays(desk: Desk) -> None:
    env = [{"name": "SOL_CONTINER_NAME", "value": "mine"}]
    once = desk.admitted(pod({"name": "a", "env": env, "resources": {"limits": vgpu()}}))
    assert env_of(once) == env
    assert env_of(desk.admitted(once)) == env


def test_case_12_a_container_without_a_name_gets_none(lab: Lab) -> None:
    p, obj = lab.vendor(WORD), pod({"name": "", "resources": {"limits": vgpu()}})
    assert lab.admit(p, obj)
    assert env_of(obj) == []


def test_case_13_other_containers_are_left_alone(desk: Desk) -> None:
    stored = desk.admitted(pod({"name": "a"}, vgpu()))
    assert stored["spec"]["containers"][0] == {"name": "a"}


def test_case_14_a_node_of_another_chip_has_no_device_for_the_pod(lab: Lab) -> None:
    profiles = load_profiles(decode_config(lab.config()), enable_iluvatar=True)
    by_word = {one.common_word: one for one in profiles}
    desk = Desk(by_word["MR-V100"])
    desk.state = type(desk.state)((by_word["MR-V100"], by_word["MR-V50"]))
    desk.node("n1", annotations={"hami.io/node-MR-V50-register": TWO})
    assert desk.refused(pod({"iluvatar.ai/MR-V100-vgpu": 1})) == "NodeInsufficientDevice"


def test_case_15_an_id_that_no_card_has(desk: Desk) -> None:
    asking = {"hami.io/use-BI-V150-uuid": "GPU-9"}
    assert desk.refused(pod(vgpu(), annotations=asking)) == "2/2 CardUuidMismatch"
    asking = {"hami.io/no-use-BI-V150-uuid": "GPU-2"}
    assert desk.allocated(pod(vgpu(), annotations=asking)).startswith("GPU-1,")


def test_case_16_mutex_wants_an_unused_card(desk: Desk) -> None:
    for name in ("1", "2"):
        desk.hold(name, "n1", f"GPU-{name},{WORD},1,0:;")
    asking = {"hami.io/gpu-scheduler-policy": "mutex"}
    assert desk.refused(pod(vgpu(1, 1, 1), annotations=asking)) == "2/2 ExclusiveDeviceAllocateConflict"


def test_case_17_an_unhealthy_card(lab: Lab) -> None:
    desk = Desk(lab.vendor(WORD))
    desk.node("n1", annotations={REGISTER: csv_cards(("GPU-1", 10, 32768, 100, WORD, False))})
    assert desk.refused(pod(vgpu())) == "1/1 CardNotHealth"


def test_case_18_a_card_without_enough_memory(desk: Desk) -> None:
    for name in ("1", "2"):
        desk.hold(name, "n1", f"GPU-{name},{WORD},32512,0:;")
    assert desk.refused(pod(vgpu(1, 1, 3))) == "2/2 CardInsufficientMemory"
    assert desk.allocated(pod(vgpu(1, 1, 1)))


def test_case_19_the_allocation_text() -> None:
    assert encode_allocation([[ContainerDevice("GPU-1", "MR-V100", 0, 0)]]) == "GPU-1,MR-V100,0,0:;"


def test_case_20_two_containers_may_share_a_card(lab: Lab) -> None:
    desk = Desk(lab.vendor(WORD), card_policy="binpack")
    desk.node("n1", annotations={REGISTER: TWO})
    asked = vgpu(1, 10, 64)
    assert desk.allocated(pod(asked, asked)) == f"GPU-2,{WORD},16384,10:;GPU-2,{WORD},16384,10:;"


def test_case_21_a_dead_plugin_stays_out_without_a_write(desk: Desk) -> None:
    stale = {REGISTER: TWO, HANDSHAKE: f"Requesting_{format_handshake(NOW - 3600)}"}
    for later in (0, 15, 75):
        outcome = desk.node("n1", annotations=stale, now=NOW + later)
        assert desk.cards("n1") == []
        assert outcome.patches == ()


def test_case_22_an_old_request_does_not_keep_a_restarted_scheduler_from_the_cards(lab: Lab) -> None:
    desk = Desk(lab.vendor(WORD))
    stale = {REGISTER: TWO, HANDSHAKE: f"Requesting_{format_handshake(NOW - 3600)}"}
    desk.node("n1", annotations=stale, allocatable={COUNT: 8})
    assert len(desk.cards("n1")) == 2


def test_case_23_a_whole_card_over_the_quota(desk: Desk) -> None:
    desk.quota({MEMORY: 64})
    assert desk.refused(pod(vgpu())) == "2/2 ResourceQuotaNotFit"


def test_case_24_no_card_is_denied(desk: Desk) -> None:
    assert f"invalid {COUNT} value 0" in desk.denied(pod(vgpu(0)))


def test_case_25_a_word_that_makes_no_annotation_key_is_refused(lab: Lab) -> None:
    with pytest.raises(ConfigError, match=r"iluvatars\[2\]\.commonWord"):
        decode_config(lab.config({f"iluvatars/{AT}/commonWord": "BI V150"}))
    with pytest.raises(ConfigError, match=r"iluvatars\[2\]\.discovery"):
        decode_config(lab.config({f"iluvatars/{AT}/discovery": "both"}))


def test_case_26_memory_of_several_cards_is_denied(lab: Lab, desk: Desk) -> None:
    assert "shares of one card only" in desk.denied(pod(vgpu(2, None, 64)))
    allowing = Desk(lab.vendor(WORD, {f"iluvatars/{AT}/allowUnsupported": True}))
    allowing.node("n1", annotations={REGISTER: TWO})
    stored = allowing.admitted(pod(vgpu(2, None, 64)))
    assert allowing.allocated(stored) == f"GPU-2,{WORD},16384,100:GPU-1,{WORD},16384,100:;"


def test_case_27_an_empty_list_and_a_bad_piece(lab: Lab) -> None:
    p = lab.vendor(WORD)
    with pytest.raises(DevicesAbsent):
        node_devices(p, lab.node(annotations={REGISTER: ":"}))
    pieces = TWO.split(":")
    text = f"{pieces[0]}:GPU-x,10,x,100,{WORD},0,true:{pieces[1]}:"
    inventory = read_inventory(p, lab.node(annotations={REGISTER: text}))
    assert [(one.id, one.index) for one in inventory.devices] == [("GPU-1", 0), ("GPU-2", 2)]
    assert len(inventory.warnings) == 1


def test_memory_and_cores_that_seem_exchanged_are_warned_about(lab: Lab) -> None:
    changes = {f"iluvatars/{AT}/resourceMemoryName": CORES, f"iluvatars/{AT}/resourceCoreName": MEMORY}
    warnings = decode_config(lab.config(changes)).warnings
    assert any("iluvatars[2]" in one and "exchanged" in one for one in warnings)
    assert not any("exchanged" in one for one in decode_config(lab.config()).warnings)
