"""What a node registers for NVIDIA (nvidia-scheduling.md §15.5, N1-N5; T9)."""

import json
from typing import Any

import pytest

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.vendors.engine import node_devices, read_inventory, register_source
from hami.vendors.types import DeviceInfo

REGISTER = "hami.io/node-nvidia-register"
SCORES = "hami.io/node-nvidia-score"
GOOD = (
    '[{"id":"GPU-aa","count":10,"devmem":24576,"devcore":100,'
    '"type":"NVIDIA-T4","mode":"hami-core","health":true}]'
)


def devices(lab: Any, text: str, **more: str) -> list[DeviceInfo]:
    return node_devices(lab.nvidia(), lab.node(annotations={REGISTER: text, **more}))


def test_a_node_without_the_annotation_or_with_an_empty_list_has_no_devices(lab: Any) -> None:  # N1
    with pytest.raises(DevicesAbsent):
        node_devices(lab.nvidia(), lab.node())
    with pytest.raises(DevicesAbsent):
        devices(lab, "[]")


@pytest.mark.parametrize("text", ["", "{}", "null", "text", "[1]", '"a:b"'])
def test_an_unusable_annotation_keeps_the_cached_devices(lab: Any, text: str) -> None:
    with pytest.raises(DevicesMalformed):
        devices(lab, text)


def test_missing_members_are_zero_and_unhealthy(lab: Any) -> None:  # N2, N3
    (device,) = devices(lab, '[{"id":"GPU-aa","count":10}]')
    assert (device.health, device.index, device.numa, device.vendor) == (False, 0, 0, "NVIDIA")


def test_the_older_comma_form_is_read(lab: Any) -> None:  # N4
    (device,) = devices(lab, "GPU-aa,10,16384,100,NVIDIA-T4,1,true,0,hami-core:")
    assert (device.id, device.devmem, device.numa, device.health) == ("GPU-aa", 16384, 1, True)


def test_the_older_form_with_eight_fields_is_an_error(lab: Any) -> None:  # N5
    with pytest.raises(DevicesMalformed):
        devices(lab, "GPU-aa,10,16384,100,NVIDIA-T4,1,true,0:")


def test_pair_scores_travel_with_their_card(lab: Any) -> None:
    scores = '[{"uuid":"GPU-aa","score":{"GPU-bb":210}}]'
    (device,) = devices(lab, GOOD, **{SCORES: scores})
    assert device.custom["pairScores"] == {"GPU-bb": 210}


@pytest.mark.parametrize(
    "scores",
    [
        pytest.param("not json", id="T9"),
        pytest.param('[{"uuid":"GPU-aa","score":{"GPU-bb":"100"}}]', id="13"),
    ],
)
def test_bad_pair_scores_leave_the_cards_usable_and_are_told(lab: Any, scores: str) -> None:
    node = lab.node(annotations={REGISTER: GOOD, SCORES: scores})
    inventory = read_inventory(lab.nvidia(), node)
    assert [device.id for device in inventory.devices] == ["GPU-aa"]
    assert "pairScores" not in inventory.devices[0].custom
    assert len(inventory.warnings) == 1
    assert SCORES in inventory.warnings[0]


def test_a_bad_entry_is_dropped_alone(lab: Any) -> None:
    text = json.dumps([{"id": ""}, *json.loads(GOOD), {"id": "GPU-bb", "count": "x"}])
    inventory = read_inventory(lab.nvidia(), lab.node(annotations={REGISTER: text}))
    assert [device.id for device in inventory.devices] == ["GPU-aa"]
    assert len(inventory.warnings) == 2


def test_a_change_of_the_register_or_score_text_is_seen(lab: Any) -> None:
    profile = lab.nvidia()
    assert register_source(profile, lab.node()) is None
    plain = register_source(profile, lab.node(annotations={REGISTER: GOOD}))
    scored = register_source(profile, lab.node(annotations={REGISTER: GOOD, SCORES: "[]"}))
    other = register_source(profile, lab.node(annotations={REGISTER: "[]"}))
    assert len({plain, scored, other}) == 3
