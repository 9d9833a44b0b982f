"""Go durations (``5m0s``, ``1.5h``): command-line flags and ``HAMI_NODELOCK_EXPIRE``."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from hami.protocol.errors import DurationError

_MAX_LENGTH: Final = 64
_NANOSECONDS: Final = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_PART: Final = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_WHOLE: Final = re.compile(rf"[+-]?(?:0|(?:{_PART.pattern})+)")


def parse_duration(text: str) -> float:
    """Seconds of a Go duration; ``0`` needs no unit. Raises :class:`DurationError`."""
    if len(text) > _MAX_LENGTH or not _WHOLE.fullmatch(text):
        raise DurationError(f"invalid duration {text[:40]!r}: write it like 5m0s, 1.5h or 100ms")
    total = sum(int(Fraction(number) * _NANOSECONDS[unit]) for number, unit in _PART.findall(text))
    if total >= 2**63:
        raise DurationError(f"duration {text!r} is too long")
    return (-total if text[0] == "-" else total) / 10**9


def format_duration(seconds: float) -> str:
    """The Go text of a duration (``5m0s``, ``1h0m0s``, ``100ms``, ``0s``), exact to the nanosecond.

    Raises :class:`DurationError` outside the range of int64 nanoseconds.
    """
    if not abs(seconds) < 2**63 / 10**9:
        raise DurationError(f"{seconds} seconds is outside the range of a duration")
    total = round(Fraction(seconds) * 10**9)
    sign, total = ("-", -total) if total < 0 else ("", total)
    if total == 0:
        return "0s"
    for unit, size in (("ns", 1), ("µs", 10**3), ("ms", 10**6)):
        if total < size * 1000:
            return f"{sign}{_number(total, size)}{unit}"
    minutes, rest = divmod(total, _NANOSECONDS["m"])
    hours, minutes = divmod(minutes, 60)
    text = f"{_number(rest, 10**9)}s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{sign}{hours}h{text}" if hours else sign + text


def _number(total: int, size: int) -> str:
    whole, rest = divmod(total, size)
    if not rest:
        return str(whole)
    return f"{whole}.{str(rest).zfill(len(str(size)) - 1).rstrip('0')}"
