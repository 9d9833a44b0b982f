"""MIG reservations (protocol.md §9, acceptance cases 42-45)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol.errors import MigReservationError
from hami.protocol.inventory import MigPlacement
from hami.protocol.mig import (
    MigReservation,
    decode_mig_reservations,
    encode_mig_reservations,
    overlap,
)

PLAIN = {
    "containerIndex": 0,
    "deviceIndex": 0,
    "gpuUUID": "G",
    "profile": "1g.5gb",
    "placement": {"start": 6, "size": 1},
}
RUNTIME = {"migUUID": "M", "gpuInstanceID": 0, "computeInstanceID": 0}


def test_case_42_a_reservation_is_valid_before_it_is_realised() -> None:
    (reservation,) = decode_mig_reservations(json.dumps([PLAIN]))
    assert reservation == MigReservation(0, 0, "G", "1g.5gb", MigPlacement(6, 1))
    assert not reservation.realised


@pytest.mark.parametrize(
    "partial",
    [
        pytest.param({"migUUID": "M"}, id="43"),
        *({key: value for key, value in RUNTIME.items() if key != missing} for missing in RUNTIME),
    ],
)
def test_a_partial_runtime_identity_is_invalid(partial: dict[str, object]) -> None:
    with pytest.raises(MigReservationError, match="partial runtime identity"):
        decode_mig_reservations(json.dumps([PLAIN | partial]))


@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param(RUNTIME, id="44"),
        pytest.param({"migUUID": "MIG-x", "gpuInstanceID": 4, "computeInstanceID": 0}, id="M11"),
    ],
)
def test_instance_id_0_is_a_legal_identity_and_is_written(runtime: dict[str, object]) -> None:
    (reservation,) = decode_mig_reservations(json.dumps([PLAIN | runtime]))
    assert reservation.realised
    assert (reservation.gpu_instance_id, reservation.compute_instance_id) == (
        runtime["gpuInstanceID"],
        runtime["computeInstanceID"],
    )
    assert json.loads(encode_mig_reservations([reservation])) == [PLAIN | runtime]


def test_case_45_two_elements_at_one_position_are_invalid() -> None:
    with pytest.raises(MigReservationError, match="duplicate"):
        decode_mig_reservations(json.dumps([PLAIN, PLAIN | {"profile": "2g.10gb"}]))


@pytest.mark.parametrize(
    "change",
    [
        {"gpuUUID": ""},
        {"profile": ""},
        {"placement": {"start": 0, "size": 0}},
        {"placement": {"start": -1, "size": 1}},
        {"placement": None},
        {"containerIndex": -1},
        {"deviceIndex": "0"},
        {"gpuInstanceID": -1, "migUUID": "M", "computeInstanceID": 0},
    ],
)
def test_incomplete_or_negative_elements_reject_the_whole_value(change: dict[str, object]) -> None:
    second = PLAIN | {"deviceIndex": 1}
    with pytest.raises(MigReservationError):
        decode_mig_reservations(json.dumps([PLAIN | change, second]))


@pytest.mark.parametrize("text", ["", "[]", "null"])
def test_no_reservations_have_three_spellings(text: str) -> None:
    assert decode_mig_reservations(text) == ()
    assert encode_mig_reservations(()) == "[]"


def test_the_scheduler_writes_no_runtime_members_but_every_zero() -> None:
    text = encode_mig_reservations([MigReservation(0, 0, "G", "1g.5gb", MigPlacement(0, 1))])
    assert text == (
        '[{"containerIndex":0,"deviceIndex":0,"gpuUUID":"G","profile":"1g.5gb","placement":{"start":0,"size":1}}]'
    )


@pytest.mark.parametrize("text", ["{}", "5", "[5]", '"x"', "{"])
def test_what_is_no_list_of_reservations_is_refused(text: str) -> None:
    with pytest.raises(MigReservationError):
        decode_mig_reservations(text)


def test_placements_overlap_when_they_share_a_slice() -> None:
    assert overlap(MigPlacement(0, 2), MigPlacement(1, 1))
    assert not overlap(MigPlacement(0, 2), MigPlacement(2, 2))


SMALL = st.integers(0, 8)
WORD = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@given(
    st.lists(
        st.builds(
            MigReservation, SMALL, SMALL, WORD, WORD, st.builds(MigPlacement, SMALL, st.integers(1, 8))
        ),
        unique_by=lambda each: (each.container_index, each.device_index),
        max_size=5,
    )
)
def test_reservations_come_back(reservations: list[MigReservation]) -> None:
    assert decode_mig_reservations(encode_mig_reservations(reservations)) == tuple(reservations)


@given(
    st.one_of(
        st.text(max_size=50),
        st.lists(
            st.dictionaries(
                st.sampled_from([*PLAIN, *RUNTIME]),
                st.none() | st.integers(-2, 2) | st.text(max_size=3) | st.just({"start": 0, "size": 1}),
            )
        ).map(json.dumps),
    )
)
def test_the_reservation_decoder_raises_only_its_error(text: str) -> None:
    try:
        decode_mig_reservations(text)
    except MigReservationError:
        return
