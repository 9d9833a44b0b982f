"""Node registration: JSON and both CSV forms (protocol.md §3 cases 1-13, vendors/README.md §5 cases 1-8, 41,
42).
"""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol.errors import DevicesAbsent, DevicesMalformed, PairScoreError, ProtocolError
from hami.protocol.inventory import (
    DeviceInfo,
    MigPlacement,
    MigProfile,
    decode_csv,
    decode_json,
    encode_csv,
    encode_json,
    read_csv,
    read_json,
)
from hami.protocol.keys import VENDOR_KEYS
from hami.protocol.pair_scores import decode_pair_scores, encode_pair_scores

SMALL = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
IDS = st.text(st.characters(exclude_characters=",:;", codec="utf-8"), min_size=1, max_size=20)
PROFILES = st.builds(
    MigProfile,
    TEXT,
    SMALL,
    SMALL,
    SMALL,
    st.lists(st.builds(MigPlacement, SMALL, SMALL), max_size=3).map(tuple),
)
DEVICES = st.builds(
    DeviceInfo,
    id=IDS,
    index=SMALL,
    count=SMALL,
    devmem=SMALL,
    devcore=SMALL,
    type=TEXT,
    numa=st.integers(-(2**31), 2**31 - 1),
    health=st.booleans(),
    mode=st.sampled_from(["", "hami-core", "mig"]),
    vendor=st.just("V"),
    mig_profiles=st.lists(PROFILES, max_size=2).map(tuple),
)
INVENTORIES = st.lists(DEVICES, min_size=1, max_size=6, unique_by=lambda device: device.id)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "ID", "count", "health", "migProfiles", "placements", "x"]), inner
        )
    ),
    max_leaves=12,
)


def test_case_1_seven_fields_give_index_0_and_hami_core() -> None:
    (device,) = decode_csv("DCU-1,4,16384,100,DCU-K100,0,true:", "DCU").devices
    assert device == DeviceInfo("DCU-1", 0, 4, 16384, 100, "DCU-K100", 0, True, "hami-core", "DCU")


def test_case_2_nine_fields_carry_index_and_mode() -> None:
    (device,) = decode_csv("DCU-1,4,16384,100,DCU-K100,1,false,2,hami-core:", "DCU").devices
    assert (device.index, device.numa, device.health, device.mode) == (2, 1, False, "hami-core")


@pytest.mark.parametrize("text", [pytest.param("::", id="3"), pytest.param(":", id="vendors 42")])
def test_only_separators_are_an_empty_list_and_absent_devices(text: str) -> None:
    assert read_csv(text).devices == ()
    with pytest.raises(DevicesAbsent):
        decode_csv(text, "DCU")


def test_vendor_case_4_devices_take_their_position_as_index() -> None:
    text = "a,4,65520,100,DCU-Z100,1,true:b,4,65520,100,DCU-Z100,1,false:"
    devices = decode_csv(text, "DCU").devices
    assert [(device.id, device.index, device.health) for device in devices] == [
        ("a", 0, True),
        ("b", 1, False),
    ]


def test_vendor_case_5_nine_fields_carry_index_and_mode() -> None:
    (device,) = decode_csv("a,4,65520,100,DCU-Z100,1,true,3,hami-core:", "DCU").devices
    assert (device.index, device.mode) == (3, "hami-core")


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="4"),
        pytest.param("DCU-1,4,16384,100,DCU-K100:", id="5"),
        pytest.param("DCU-1,4,16384,100,DCU-K100,0,true,-1,hami-core:", id="6"),
        pytest.param("A,1,99999999999,1,t,0,true:", id="8"),
        pytest.param("a,4,x,100,DCU-Z100,1,true:", id="vendors 6"),
        pytest.param("a,4,65520,100,DCU-Z100,1,true,-1,m:", id="vendors 7"),
        pytest.param("a,4,65520,100,DCU-Z100,1,true", id="vendors 8"),
        pytest.param("A,1,1,1,t,0,yes:", id="health"),
        pytest.param("A, 1,1,1,t,0,true:", id="blank"),
        pytest.param(",1,1,1,t,0,true:", id="no id"),
    ],
)
def test_a_text_without_one_good_piece_is_malformed(text: str) -> None:
    with pytest.raises(DevicesMalformed):
        decode_csv(text, "DCU")


def test_case_7_a_bad_piece_costs_that_piece_and_is_reported() -> None:
    inventory = decode_csv("A,1,1,1,t,0,true:junk:", "DCU")
    assert [device.id for device in inventory.devices] == ["A"]
    assert len(inventory.warnings) == 1


def test_vendor_case_41_dropped_pieces_count_for_the_position() -> None:
    text = "a,4,9,100,Z,1,true:b,4,x,100,Z,1,true:c,4,9,100,Z,1,true:"
    inventory = decode_csv(text, "DCU")
    assert [(device.id, device.index) for device in inventory.devices] == [("a", 0), ("c", 2)]
    assert "device 1" in inventory.warnings[0]


def test_cases_9_and_10_a_missing_member_is_zero_and_missing_health_is_unhealthy() -> None:
    members = '"id":"G0","count":10,"devmem":8192,"devcore":100,"type":"NVIDIA A10","mode":"hami-core"'
    (device,) = decode_json(f'[{{{members},"health":true}}]', "NVIDIA").devices
    assert (device.index, device.numa, device.health) == (0, 0, True)
    (device,) = decode_json(f"[{{{members}}}]", "NVIDIA").devices
    assert not device.health


@pytest.mark.parametrize("vendor", sorted(VENDOR_KEYS))
def test_case_11_an_empty_array_is_absent_for_any_vendor(vendor: str) -> None:
    with pytest.raises(DevicesAbsent):
        decode_json("[]", vendor)


def test_the_reader_tells_absent_devices_from_none_at_all() -> None:
    assert read_json("null").devices == read_json("[]").devices == ()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('{"id":"G0"}', id="12"),
        pytest.param("", id="vendors 3 empty"),
        pytest.param("{}", id="vendors 3 object"),
        pytest.param("null", id="vendors 3 null"),
        pytest.param("x", id="text"),
        pytest.param("[1,null]", id="all bad"),
    ],
)
def test_what_is_no_list_of_devices_is_malformed(text: str) -> None:
    with pytest.raises(DevicesMalformed):
        decode_json(text, "NVIDIA")


def test_vendor_case_1_keys_match_in_any_case_and_the_last_wins() -> None:
    sizes = '"count":1,"Count":2,"Devmem":100,"Devcore":10'
    text = f'[{{"ID":"x",{sizes},"Type":"T","Health":true,"migProfiles":[{{"NAME":"p"}}]}}]'
    (device,) = decode_json(text, "V").devices
    assert (device.id, device.count, device.devmem, device.health) == ("x", 2, 100, True)
    assert device.mig_profiles == (MigProfile("p"),)


def test_vendor_case_1_a_device_in_other_spelling_is_whole() -> None:
    text = '[{"ID":"x","Count":2,"Devmem":100,"Devcore":10,"Type":"T","Health":true}]'
    assert decode_json(text, "V").devices == (DeviceInfo("x", 0, 2, 100, 10, "T", 0, True, "", "V"),)


def test_vendor_case_2_a_device_without_health_is_unhealthy() -> None:
    (device,) = decode_json('[{"id":"x","count":2}]', "V").devices
    assert (device.id, device.count, device.health) == ("x", 2, False)


def test_odd_elements_are_dropped_one_by_one_with_a_warning_each() -> None:
    dropped = '{"id":"A"},{"count":1},{"id":"B","count":1.5}'
    text = f'[null,{{"id":"A","health":true}},{dropped},{{"id":"C","devmem":-5,"health":true}}]'
    inventory = decode_json(text, "V")
    assert [(device.id, device.health) for device in inventory.devices] == [("A", True), ("C", False)]
    assert len(inventory.warnings) == 5


def test_the_register_text_is_what_the_nvidia_plugin_writes() -> None:
    devices = [
        DeviceInfo("GPU-bb22", 1, 10, 40960, 100, "NVIDIA A100-SXM4-40GB", 1, True, "hami-core"),
        DeviceInfo("GPU-aa11", 0, 10, 40960, 100, "a<b>&", 0, True, "hami-core", custom={"x": 1}),
    ]
    assert encode_json(devices) == (
        '[{"id":"GPU-aa11","count":10,"devmem":40960,"devcore":100,"type":"a\\u003cb\\u003e\\u0026",'
        '"mode":"hami-core","health":true},'
        '{"id":"GPU-bb22","index":1,"count":10,"devmem":40960,"devcore":100,"type":"NVIDIA A100-SXM4-40GB",'
        '"numa":1,"mode":"hami-core","health":true}]'
    )


@given(INVENTORIES)
def test_json_registrations_come_back_sorted(devices: list[DeviceInfo]) -> None:
    inventory = decode_json(encode_json(devices), "V")
    assert list(inventory.devices) == sorted(devices, key=lambda device: (device.index, device.id))
    assert inventory.warnings == ()


@given(INVENTORIES)
def test_csv_registrations_come_back_sorted(devices: list[DeviceInfo]) -> None:
    plain = [
        msgspec.structs.replace(device, mig_profiles=(), type=device.type.replace(",", "").replace(":", ""))
        for device in devices
    ]
    assert list(decode_csv(encode_csv(plain), "V").devices) == sorted(
        plain, key=lambda device: (device.index, device.id)
    )


_USUAL = ("id", "index", "count", "devmem", "devcore", "type", "numa", "mode", "health")
_VALUES: st.SearchStrategy[object] = st.sampled_from(
    [0, 1, 8, -1, 2**31 - 1, 2**31, -(2**31) - 1, 1.0, 1.5, True, None, "", "a", "b", [], {}]
)


@given(st.lists(st.dictionaries(st.sampled_from(_USUAL), _VALUES), max_size=3))
def test_a_key_that_nobody_knows_changes_nothing(devices: list[dict[str, object]]) -> None:
    usual = _decoded(json.dumps(devices))
    assert _decoded(json.dumps([{**device, "unknown": 1} for device in devices])) == usual


def _decoded(text: str) -> object:
    try:
        return decode_json(text, "V")
    except (DevicesAbsent, DevicesMalformed) as error:
        return type(error), str(error)


@given(st.one_of(st.text(max_size=60), JSON_VALUES.map(json.dumps), st.lists(JSON_VALUES).map(json.dumps)))
def test_decoders_raise_only_typed_errors(text: str) -> None:
    for attempt in (
        lambda: decode_json(text, "V"),
        lambda: decode_csv(text, "V"),
        lambda: decode_pair_scores(text),
    ):
        try:
            attempt()
        except ProtocolError:
            continue


@pytest.mark.parametrize("text", ["[" * 200_000, "[" * 5000, '"\ud800"', "[" + "{}," * 200_000])
def test_hostile_texts_are_malformed(text: str) -> None:
    with pytest.raises(DevicesMalformed):
        decode_json(text, "V")


def test_case_13_scores_given_as_text_are_a_score_error_of_their_own() -> None:
    with pytest.raises(PairScoreError):
        decode_pair_scores('[{"uuid":"G0","score":{"G1":"100"}}]')


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[1]", "$[0]"),
        ('[{"uuid":5}]', "$[0].uuid"),
        ('[{"uuid":"G0","score":[]}]', "$[0].score"),
        ('[{"uuid":"G0","score":{"G1":1.5}}]', "$[0].score.G1"),
        ('[{"uuid":"G0","score":{"G1":9223372036854775808}}]', "$[0].score.G1"),
    ],
)
def test_a_bad_pair_score_is_named_with_its_place(text: str, where: str) -> None:
    with pytest.raises(PairScoreError) as refused:
        decode_pair_scores(text)
    assert where in str(refused.value)


def test_pair_scores_come_back() -> None:
    scores = {"G1": {"G0": 210}, "G0": {"G1": 210, "G2": -3}}
    assert decode_pair_scores(encode_pair_scores(scores)) == scores
    assert decode_pair_scores('[{"UUID":"G0","Score":null},{"uuid":"G1"}]') == {"G0": {}, "G1": {}}


def test_null_counts_as_no_scores_and_as_a_score_of_nothing() -> None:
    assert decode_pair_scores("null") == {}
    assert decode_pair_scores('[{"uuid":"G0","score":{"G1":null,"G2":5}}]') == {"G0": {"G1": 0, "G2": 5}}
