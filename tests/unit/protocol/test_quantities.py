"""Kubernetes quantities: the two readings and the canonical text (vendors/README.md R2)."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hami.protocol.errors import QuantityError
from hami.protocol.quantity import INT64_MAX, INT64_MIN, Quantity, as_int64, canonical, value

GRAMMAR_LIKE = st.from_regex(
    re.compile(r"[+-]?[0-9]{0,20}(\.[0-9]{0,12})?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,3})?"),
    fullmatch=True,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16", (16, True)),
        ("16Gi", (17179869184, True)),
        ("1.5k", (1500, True)),
        ("-3", (-3, True)),
        ("2e3", (2000, True)),
        ("3k", (3000, True)),
        ("16.0", (0, False)),
        ("16.0Gi", (0, False)),
        ("500m", (0, False)),
        ("9223372036854775807", (INT64_MAX, True)),
        ("9223372036854775808", (0, False)),
        ("1e30", (0, False)),
        ("16Ei", (0, False)),
    ],
)
def test_integer_forms_are_read_exactly_and_others_are_not_ok(text: str, expected: tuple[int, bool]) -> None:
    assert as_int64(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1500m", 2),
        ("16.2Gi", 17394617549),
        ("-1500m", -2),
        ("1n", 1),
        ("1e30", INT64_MAX),
        ("-1e30", -INT64_MAX),
    ],
)
def test_value_rounds_away_from_zero_and_stays_in_int64(text: str, expected: int) -> None:
    assert value(text) == expected


@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("16.0Gi", "16Gi"),
        ("1000m", "1"),
        ("1000", "1k"),
        ("0.5Gi", "512Mi"),
        ("0.5Ki", "512"),
        ("1.1Gi", "1181116006400m"),
        ("1.5", "1500m"),
        ("2e3", "2e3"),
        ("1e-12", "1e-9"),
        ("100Ei", "9223372036854775807"),
        ("-0", "0"),
        (3000, "3k"),
        (1.5, "1500m"),
    ],
)
def test_canonical_is_what_the_api_server_stores(typed: Quantity, stored: str) -> None:
    assert canonical(typed) == stored


@pytest.mark.parametrize(
    "text", ["", ".", "-", "1 ", " 1", "1Gib", "Gi", "1KB", "0x10", "1_000", "١", "1e", "1" * 300]
)
def test_what_is_no_quantity_is_refused(text: str) -> None:
    for read in (as_int64, value, canonical):
        with pytest.raises(QuantityError):
            read(text)


@given(GRAMMAR_LIKE)
@example("1000000.0000000001E")
def test_canonical_text_is_a_fixed_point_and_keeps_the_value(text: str) -> None:
    try:
        stored = canonical(text)
    except QuantityError:
        return
    assert value(stored) == value(text)
    if abs(value(text)) < INT64_MAX:  # the API server cuts larger ones to int64 once they have 19 digits
        assert canonical(stored) == stored


@given(st.integers(INT64_MIN + 1, INT64_MAX))
def test_every_int64_reads_back_from_its_canonical_text(number: int) -> None:
    assert as_int64(canonical(str(number))) == (number, True)


@given(st.one_of(st.text(max_size=40), GRAMMAR_LIKE, st.integers(), st.floats(), st.booleans()))
def test_readers_raise_nothing_but_quantity_errors(anything: Quantity) -> None:
    for read in (as_int64, value, canonical):
        try:
            read(anything)
        except QuantityError:
            continue
