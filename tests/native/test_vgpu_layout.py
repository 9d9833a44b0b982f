"""The C header and the Python module of the region, generated from one description, field by field (A84)."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import pytest

from hami.protocol import region_layout as layout

HEADER = (Path(__file__).resolve().parents[2] / "native/vgpu/generated/region_abi.h").read_text()
CLASSES: dict[str, Any] = {
    "region": layout.V1,
    "region_v0": layout.V0,
    "slot": layout.V1Slot,
    "slot_v0": layout.V0Slot,
    "extension": layout.Extension,
    "ext_device": layout.ExtensionDevice,
    "ext_slot": layout.ExtensionSlot,
    "ext_event": layout.ExtensionEvent,
}
FORMATS = {"uint8_t": "<B", "uint16_t": "<H", "int32_t": "<i", "uint32_t": "<I", "uint64_t": "<Q"}
FIELD = re.compile(
    r"^    (?:_Atomic )?(?P<type>struct \w+|unsigned char|\w+) (?P<name>\w+)(?P<sizes>(?:\[\d+\])*);", re.M
)


def fields(name: str) -> list[tuple[str, str, list[int]]]:
    """Type, name and array sizes of each member of a struct, without reserved bytes."""
    body = re.search(rf"^struct vg_{name} {{\n(.*?)^}};", HEADER, re.S | re.M)
    assert body is not None, name
    found = [
        (match["type"], match["name"], [int(size) for size in re.findall(r"\d+", match["sizes"])])
        for match in FIELD.finditer(body[1])
    ]
    return [row for row in found if not row[1].startswith("reserved")]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_field_of_the_header_is_the_field_of_the_python_module(name: str) -> None:
    module, checked = CLASSES[name], 0
    for kind, field, sizes in fields(name):
        described = getattr(module, field, None)
        if isinstance(described, layout.Number):
            assert described.format == FORMATS[kind], field
            assert described.count == (sizes[0] if sizes else 1) * (sizes[1] if len(sizes) > 1 else 1), field
            assert described.count == 1 or described.stride == struct.calcsize(FORMATS[kind]), field
            checked += 1
        elif isinstance(described, layout.Text):
            assert [described.count, described.length][-len(sizes) :] == sizes, field
            checked += 1
        elif isinstance(described, layout.Table):
            assert described.count == sizes[0], field
            inner = re.search(rf'sizeof\({re.escape(kind)}\) == (\d+), "size', HEADER)
            assert inner is not None
            assert described.stride == int(inner[1]), field
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_number_written_to_a_field_is_read_from_it_and_from_no_other(name: str) -> None:
    module = CLASSES[name]
    numbers = {key: item for key, item in vars(module).items() if isinstance(item, layout.Number)}
    for key, number in numbers.items():
        data = bytearray(module.SIZE)
        for index in (0, number.count - 1):
            number.write(data, 1, 0, index)
            assert number.read(data, 0, index) == 1
        touched = {offset for offset, byte in enumerate(data) if byte}
        for other, item in numbers.items():
            if other != key and item.count == 1:
                assert not touched & set(range(item.offset, item.offset + struct.calcsize(item.format))), (
                    key,
                    other,
                )
