"""Times on the wire: RFC 3339 (locks, leases, metadata) and the handshake forms.

Times are Unix seconds; every time we write is UTC (decisions, row 19). Decoders raise :class:`TimestampError`
only.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

from hami.protocol.errors import TimestampError

CLOCK_SKEW_SECONDS: Final = 300.0
"""A foreign time further ahead of our clock than this is reported and not trusted."""

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_RFC3339: Final = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:[.,]([0-9]{1,30}))?"
    r"(?:Z|([+-])([0-9]{2}):([0-9]{2}))"
)
_HANDSHAKE: Final = re.compile(r"([0-9]{4})([-.])([0-9]{2})\2([0-9]{2}) ([0-9]{2}):([0-9]{2}):([0-9]{2})")


def format_rfc3339(now: float) -> str:
    """``2026-08-21T08:20:39Z``; fractions are cut."""
    return f"{_utc(now).replace(tzinfo=None).isoformat(timespec='seconds')}Z"


def format_rfc3339_micro(now: float) -> str:
    """``2026-08-21T08:20:39.123456Z``, as leases and events have it."""
    return f"{_utc(now).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"


def parse_rfc3339(text: str) -> float:
    """Unix seconds of an RFC 3339 time with any zone and any fraction."""
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise TimestampError(f"{text[:40]!r} is no RFC 3339 time")
    *date, fraction, sign, zone_hours, zone_minutes = match.groups()
    seconds = _seconds(text, *date)
    if fraction:
        seconds += float(f"0.{fraction}")
    if sign:
        if int(zone_hours) > 23 or int(zone_minutes) > 59:
            raise TimestampError(f"{text[:40]!r} has an impossible zone")
        offset = int(zone_hours) * 3600 + int(zone_minutes) * 60
        seconds -= offset if sign == "+" else -offset
    return seconds


def format_handshake(now: float) -> str:
    """``2026-08-21 08:20:39`` (UTC), as written behind ``Requesting_``."""
    return _utc(now).replace(tzinfo=None).isoformat(" ", "seconds")


def format_handshake_dotted(now: float) -> str:
    """``2026.08.21 08:20:39`` (UTC), the form of older schedulers and of the Ascend plugin."""
    return format_handshake(now).replace("-", ".")


def nanoseconds(moment: datetime) -> str:
    """Unix nanoseconds of an aware time, decimal, as several vendors' plugins read them."""
    return str((moment - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000)


def parse_handshake(text: str) -> float:
    """Unix seconds of ``YYYY-MM-DD HH:MM:SS`` or ``YYYY.MM.DD HH:MM:SS`` read as UTC."""
    match = _HANDSHAKE.fullmatch(text)
    if match is None:
        raise TimestampError(f"{text[:40]!r} is no handshake time")
    year, _, *rest = match.groups()
    return _seconds(text, year, *rest)


def is_skewed(written: float, now: float) -> bool:
    """Whether a foreign time lies more than :data:`CLOCK_SKEW_SECONDS` ahead of our clock."""
    return written - now > CLOCK_SKEW_SECONDS


def age(written: float, first_seen: float, now: float) -> float:
    """Age in seconds of a time written by somebody else and first seen by us at ``first_seen``.

    The larger of both views, so that a writer in another zone or a reader that was away cannot make it
    younger; by first sight alone when the written time is skewed. Never negative.
    """
    by_sight = now - first_seen
    if is_skewed(written, now):
        return max(0.0, by_sight)
    return max(0.0, by_sight, now - written)


def _utc(now: float) -> datetime:
    try:
        return _EPOCH + timedelta(seconds=now)
    except (OverflowError, ValueError) as error:
        raise TimestampError(f"{now} is no time: {error}") from None


def _seconds(text: str, *date: str) -> float:
    try:
        moment = datetime(*(int(part) for part in date), tzinfo=UTC)  # type: ignore[misc, arg-type]
    except ValueError as error:
        raise TimestampError(f"{text[:40]!r} is no time: {error}") from None
    return (moment - _EPOCH).total_seconds()
