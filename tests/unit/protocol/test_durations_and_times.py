"""Go durations, RFC 3339 and handshake times, and the age rule (decisions, row 19)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.protocol.durations import format_duration, parse_duration
from hami.protocol.errors import DurationError, TimestampError
from hami.protocol.timestamps import (
    age,
    format_handshake,
    format_handshake_dotted,
    format_rfc3339,
    format_rfc3339_micro,
    is_skewed,
    parse_handshake,
    parse_rfc3339,
)

NOON = 1787313600.0  # 2026-08-21T12:00:00Z
YEARS = st.integers(0, 253402300799)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m0s", 300),
        ("10m", 600),
        ("90s", 90),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("100ms", 0.1),
        ("0", 0),
        ("-2s", -2),
    ],
)
def test_go_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(300, "5m0s"), (3600, "1h0m0s"), (0.1, "100ms"), (28, "28s"), (1.5, "1.5s"), (0, "0s"), (-90, "-1m30s")],
)
def test_durations_are_written_as_go_does(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize("text", ["", "5", "m", "5 m", "1d", "--1s", "1s1", "9" * 20 + "h", "s" * 100])
def test_bad_durations_are_refused(text: str) -> None:
    with pytest.raises(DurationError):
        parse_duration(text)


@given(st.integers(-(10**9), 10**9).map(lambda milliseconds: milliseconds / 1000))
def test_durations_come_back(seconds: float) -> None:
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.text(max_size=30), st.floats())
def test_duration_codec_raises_only_its_error(text: str, seconds: float) -> None:
    for attempt in (lambda: parse_duration(text), lambda: format_duration(seconds)):
        try:
            attempt()
        except DurationError:
            continue


@pytest.mark.parametrize(
    "text",
    [
        "2026-08-21T12:00:00Z",
        "2026-08-21T20:00:00+08:00",
        "2026-08-21T12:00:00.000Z",
        "2026-08-21T11:30:00-00:30",
    ],
)
def test_every_zone_and_fraction_names_the_same_moment(text: str) -> None:
    assert parse_rfc3339(text) == NOON


def test_fractions_of_seconds_are_kept() -> None:
    assert parse_rfc3339("2026-08-21T12:00:00.5Z") == NOON + 0.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "garbage",
        "2026-08-21",
        "2026-08-21 12:00:00Z",
        "2026-13-21T12:00:00Z",
        "2026-08-21T12:00:00",
        "2026-08-21T12:00:60Z",
    ],
)
def test_what_is_no_rfc3339_time_is_refused(text: str) -> None:
    with pytest.raises(TimestampError):
        parse_rfc3339(text)


def test_both_handshake_forms_are_read_as_utc() -> None:
    assert parse_handshake("2026-08-21 12:00:00") == parse_handshake("2026.08.21 12:00:00") == NOON
    with pytest.raises(TimestampError):
        parse_handshake("2026-08.21 12:00:00")


@given(YEARS)
def test_written_times_come_back(now: int) -> None:
    assert parse_rfc3339(format_rfc3339(now)) == now
    assert parse_rfc3339(format_rfc3339_micro(now)) == now
    assert parse_handshake(format_handshake(now)) == now
    assert parse_handshake(format_handshake_dotted(now)) == now


@given(st.text(max_size=40), st.floats())
def test_time_codecs_raise_only_their_error(text: str, now: float) -> None:
    for attempt in (
        lambda: parse_rfc3339(text),
        lambda: parse_handshake(text),
        lambda: format_rfc3339(now),
        lambda: format_handshake(now),
    ):
        try:
            attempt()
        except TimestampError:
            continue


def test_age_is_the_larger_of_both_views() -> None:
    assert age(NOON - 100, NOON - 20, NOON) == 100
    assert age(NOON - 5, NOON - 20, NOON) == 20


def test_a_time_far_ahead_ages_from_first_sight_only() -> None:
    ahead = NOON + 1200
    assert is_skewed(ahead, NOON)
    assert age(ahead, NOON - 30, NOON) == 30
    assert not is_skewed(NOON + 299, NOON)
