"""Lists that a plugin registers in a form of its own: what is read, left out, and said (README R4)."""

from typing import Any

import pytest

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.inventory import MAX_DEVICES, DeviceInfo
from hami.vendors.discovery import check_number, read_each, register_text

Lab = Any


def read(entry: str, position: int) -> DeviceInfo:
    if entry == "bad":
        raise ValueError("no card")
    return DeviceInfo(id=entry, index=position)


def test_bad_entries_and_repeated_ids_are_left_out_with_a_warning_each(lab: Lab) -> None:
    found = read_each(lab.node(), ["a", "bad", "a", "b"], read, "card")
    assert [(one.id, one.index) for one in found.devices] == [("a", 0), ("b", 3)]
    assert found.warnings == ("card 1: no card", "card 2: its id 'a' stands twice")


def test_a_list_without_a_good_entry_is_malformed(lab: Lab) -> None:
    with pytest.raises(DevicesMalformed, match="node n1: card 0: no card; card 1: no card"):
        read_each(lab.node(), ["bad", "bad"], read, "card")


def test_an_empty_list_is_no_devices_and_a_long_one_is_malformed(lab: Lab) -> None:
    check_number(lab.node(), range(MAX_DEVICES), "card")
    with pytest.raises(DevicesAbsent, match="the list of cards is empty"):
        check_number(lab.node(), (), "card")
    with pytest.raises(DevicesMalformed, match=f"at most {MAX_DEVICES}"):
        check_number(lab.node(), range(MAX_DEVICES + 1), "card")


def test_a_text_that_is_missing_or_too_long(lab: Lab) -> None:
    p = lab.vendor("Metax-SGPU")
    key = p.rules.register.key
    assert register_text(p, lab.node(annotations={key: "x" * 8}), 8) == "x" * 8
    with pytest.raises(DevicesAbsent, match=key):
        register_text(p, lab.node(), 8)
    with pytest.raises(DevicesMalformed, match="9 characters, at most 8"):
        register_text(p, lab.node(annotations={key: "x" * 9}), 8)
