"""What a placed pod's annotations say it holds (README R5, §5 cases 10-12)."""

import dataclasses
from typing import Any

import pytest

from hami.protocol.allocation import ContainerDevice
from hami.protocol.errors import AllocationError
from hami.vendors.engine import read_allocation

KEY = "hami.io/vgpu-devices-allocated"
TO_DO = "hami.io/vgpu-devices-to-allocate"
D = ContainerDevice("u1", "NVIDIA", 5120, 25)


def test_positions_are_kept_and_the_empty_tail_is_dropped(lab: Any) -> None:
    pod = lab.info({KEY: ";u1,NVIDIA,5120,25:;;;"}, slots=3)
    assert read_allocation(lab.nvidia(), pod) == ((), (D,), ())


def test_a_short_text_is_padded(lab: Any) -> None:
    assert read_allocation(lab.nvidia(), lab.info({KEY: "u1,NVIDIA,5120,25:;"}, slots=2)) == ((D,), ())


@pytest.mark.parametrize("annotations", [{}, {KEY: ""}, {KEY: ";;"}, {TO_DO: "u1,NVIDIA,5120,25:;"}])
def test_a_pod_without_the_permanent_record_holds_nothing(lab: Any, annotations: dict[str, str]) -> None:
    assert read_allocation(lab.nvidia(), lab.info(annotations)) == ()


def test_devices_beyond_the_containers_are_not_lost(lab: Any) -> None:
    pod = lab.info({KEY: ";;u1,NVIDIA,5120,25:;"}, slots=1)
    assert read_allocation(lab.nvidia(), pod) == ((), (), (D,))


def test_three_fields_are_an_error(lab: Any) -> None:
    with pytest.raises(AllocationError):
        read_allocation(lab.nvidia(), lab.info({KEY: "u1,NVIDIA,5120:;"}))


def test_a_vendor_whose_plugin_erases_a_key_is_read_from_the_longer_one(lab: Any) -> None:
    profile = lab.nvidia()
    rules = dataclasses.replace(profile.rules, rebuild="longer_of_both_keys")
    profile = dataclasses.replace(profile, rules=rules)
    pod = lab.info({KEY: ";", TO_DO: "u1,NVIDIA,5120,25:;"})
    assert read_allocation(profile, pod) == ((D,),)
