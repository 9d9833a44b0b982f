"""Times on the wire: RFC 3339 (locks) and the two handshake forms. Times are Unix seconds; written times are UTC."""

from __future__ import annotations

from typing import Final

CLOCK_SKEW_SECONDS: Final = 300.0
"""A foreign time further ahead of our clock than this is reported and not trusted."""


def format_rfc3339(now: float) -> str:
    """``2026-08-21T08:20:39Z``."""
    ...


def parse_rfc3339(text: str) -> float:
    """Unix seconds of an RFC 3339 time with any zone and any fraction. Raises :class:`TimestampError`."""
    ...


def format_handshake(now: float) -> str:
    """``2026-08-21 08:20:39`` (UTC), as written behind ``Requesting_``."""
    ...


def parse_handshake(text: str) -> float:
    """Unix seconds of ``YYYY-MM-DD HH:MM:SS`` or ``YYYY.MM.DD HH:MM:SS`` read as UTC. Raises :class:`TimestampError`."""
    ...


def age(written: float | None, first_seen: float, now: float) -> float:
    """Age in seconds of a foreign time: the larger of both views, by first sight alone when it is not trusted."""
    ...


def is_skewed(written: float, now: float) -> bool:
    """Whether a foreign time lies more than :data:`CLOCK_SKEW_SECONDS` ahead of our clock."""
    return written - now > CLOCK_SKEW_SECONDS
