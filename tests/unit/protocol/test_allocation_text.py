"""Device assignments as text (protocol.md §8, acceptance cases 14-23)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol.allocation import (
    INT32_MAX,
    INT32_MIN,
    Allocation,
    ContainerDevice,
    decode_allocation,
    decode_container,
    encode_allocation,
    fit_slots,
    is_consumed,
    pop_first,
)
from hami.protocol.errors import AllocationError

WORDS = st.text(st.characters(exclude_characters=",:;", codec="utf-8"), min_size=1, max_size=20)
INT32 = st.integers(INT32_MIN, INT32_MAX)
DEVICES = st.builds(ContainerDevice, WORDS, WORDS, INT32, INT32)
ALLOCATIONS = st.lists(st.lists(DEVICES, max_size=4).map(tuple), max_size=6).map(tuple)


def gpu(uuid: str, memory: int, core: int) -> ContainerDevice:
    return ContainerDevice(uuid, "NVIDIA", memory, core)


@pytest.mark.parametrize(
    ("slots", "text"),
    [
        pytest.param(((), (gpu("G0", 2048, 25),)), ";G0,NVIDIA,2048,25:;", id="14"),
        pytest.param(
            ((), (gpu("G0", 1000, 10),), (gpu("G1", 500, 5),)),
            ";G0,NVIDIA,1000,10:;G1,NVIDIA,500,5:;",
            id="15",
        ),
        pytest.param(((gpu("G0", 1, 0), gpu("G1", 1, 0)),), "G0,NVIDIA,1,0:G1,NVIDIA,1,0:;", id="16"),
        pytest.param(
            ((), (ContainerDevice("u1", "MLU", 5120, 25),), ()), ";u1,MLU,5120,25:;;", id="vendors 9"
        ),
        pytest.param((), "", id="none"),
    ],
)
def test_slots_are_written_in_order_and_padded(slots: Allocation, text: str) -> None:
    assert encode_allocation(slots) == text
    assert decode_allocation(text) == slots


@pytest.mark.parametrize("text", ["G0,NVIDIA,100,5:;;", "G0,NVIDIA,100,5:;;;"])
def test_case_18_a_third_empty_slot_of_a_two_container_pod_is_ignored(text: str) -> None:
    assert fit_slots(decode_allocation(text), 2) == ((gpu("G0", 100, 5),), ())


def test_vendor_case_10_an_empty_tail_is_allowed() -> None:
    u1 = ContainerDevice("u1", "MLU", 5120, 25)
    slots = decode_allocation(";u1,MLU,5120,25:;;")
    assert slots == ((), (u1,), ())
    assert fit_slots(slots, 4) == ((), (u1,), (), ())


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("G0,NVIDIA,100:;", id="19"),
        pytest.param("G0,NVIDIA,3000000000,5:;", id="21"),
        pytest.param("u1,MLU,5120:;", id="vendors 11"),
        pytest.param("G0,NVIDIA,1,x:;", id="core"),
        pytest.param("G0,NVIDIA,1.0,1:;", id="point"),
        pytest.param("G0,NVIDIA, 1,1:;", id="blank"),
        pytest.param("G0,NVIDIA,1_0,1:;", id="underscore"),
        pytest.param(",:;", id="comma"),
    ],
)
def test_one_bad_piece_fails_the_whole_value(text: str) -> None:
    with pytest.raises(AllocationError):
        decode_allocation(text)


def test_case_20_an_empty_piece_of_older_schedulers_is_an_empty_slot() -> None:
    assert decode_allocation(",,0,0:;G0,NVIDIA,100,5:;") == ((), (gpu("G0", 100, 5),))


def test_pieces_without_comma_are_ignored_and_extra_fields_too() -> None:
    assert decode_container("junk:G0,NVIDIA,1,1,9,9:") == (gpu("G0", 1, 1),)


def test_a_shortened_to_allocate_text_is_padded_and_a_longer_one_with_devices_refused() -> None:
    assert fit_slots(decode_allocation("A,NVIDIA,1,1:;"), 3) == ((gpu("A", 1, 1),), (), ())
    with pytest.raises(AllocationError):
        fit_slots(decode_allocation(";;A,NVIDIA,1,1:;"), 2)


def test_cases_22_and_23_pops_take_the_first_slot_and_keep_positions() -> None:
    allocation = decode_allocation(";A,NVIDIA,1,1:;B,NVIDIA,2,2:;")
    position, devices, rest = pop_first(allocation)
    assert (position, devices, encode_allocation(rest)) == (1, (gpu("A", 1, 1),), ";;B,NVIDIA,2,2:;")
    assert not is_consumed(rest)
    position, devices, rest = pop_first(rest)
    assert (position, devices, encode_allocation(rest)) == (2, (gpu("B", 2, 2),), ";;;")
    assert is_consumed(rest)
    with pytest.raises(AllocationError):
        pop_first(rest)


@pytest.mark.parametrize("uuid", ["", "a,b", "a:b", "a;b"])
def test_ids_that_would_break_the_text_are_not_written(uuid: str) -> None:
    with pytest.raises(AllocationError):
        encode_allocation(((gpu(uuid, 1, 1),),))


def test_numbers_beyond_int32_are_not_written() -> None:
    with pytest.raises(AllocationError):
        encode_allocation(((gpu("G", INT32_MAX + 1, 1),),))


@given(ALLOCATIONS)
def test_every_allocation_comes_back(allocation: Allocation) -> None:
    text = encode_allocation(allocation)
    assert decode_allocation(text) == allocation
    assert text.count(";") == len(allocation)


@given(st.text(st.sampled_from("GA,:;10-+x \n²"), max_size=60))
def test_the_decoder_raises_only_its_error_and_its_result_can_be_written(text: str) -> None:
    try:
        allocation = decode_allocation(text)
    except AllocationError:
        return
    assert decode_allocation(encode_allocation(allocation)) == allocation


def test_a_huge_text_is_refused_unread() -> None:
    with pytest.raises(AllocationError):
        decode_allocation(";" * 300_000)
