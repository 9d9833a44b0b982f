"""Cards that a node's capacity stands for (README §4.1): by count, or by cores with memory in proportion."""

from dataclasses import replace
from typing import Any

import pytest

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.vendors.engine import node_devices
from hami.vendors.types import CapacityCards, Register, ResourceNames, VendorProfile

COUNTED = CapacityCards("gcu", 1, 100, mem=65536, numa_halves=True)
SHARED = CapacityCards("mlu", 100, 100, cores_per_card=100)


def profile_of(lab: Any, cards: CapacityCards) -> VendorProfile:
    plain: VendorProfile = lab.nvidia()
    names = ResourceNames("x/count", "x/memory", "x/cores", 256)
    return replace(plain, names=names, hooks=type(plain.hooks)(), rules=rules_of(plain, cards))


def rules_of(plain: VendorProfile, cards: CapacityCards) -> Any:
    return replace(plain.rules, register=Register("capacity", cards=cards))


def test_a_count_gives_as_many_equal_cards(lab: Any) -> None:
    devices = node_devices(profile_of(lab, COUNTED), lab.node(capacity={"x/count": 3}))
    assert [(d.id, d.index, d.count, d.devmem, d.devcore, d.numa, d.health) for d in devices] == [
        ("n1-gcu-0", 0, 1, 65536, 100, 0, True),
        ("n1-gcu-1", 1, 1, 65536, 100, 1, True),
        ("n1-gcu-2", 2, 1, 65536, 100, 1, True),
    ]


def test_cores_give_cards_and_memory_in_proportion(lab: Any) -> None:
    node = lab.node(capacity={"x/cores": 150, "x/memory": 1000})
    devices = node_devices(profile_of(lab, SHARED), node)
    assert [(d.id, d.devmem, d.devcore) for d in devices] == [
        ("n1-mlu-0", 1000 * 256 * 100 // 150, 100),
        ("n1-mlu-1", 1000 * 256 * 100 // 150, 100),
    ]


@pytest.mark.parametrize("capacity", [{}, {"x/count": 0}, {"x/count": -4}])
def test_without_capacity_the_vendor_is_absent(lab: Any, capacity: dict[str, int]) -> None:
    with pytest.raises(DevicesAbsent):
        node_devices(profile_of(lab, COUNTED), lab.node(capacity=capacity))


@pytest.mark.parametrize(
    ("cards", "capacity"),
    [(COUNTED, {"x/count": 10**12}), (SHARED, {"x/cores": 100, "x/memory": 2**40})],
)
def test_an_unbelievable_capacity_is_malformed(
    lab: Any, cards: CapacityCards, capacity: dict[str, int]
) -> None:
    with pytest.raises(DevicesMalformed):
        node_devices(profile_of(lab, cards), lab.node(capacity=capacity))
