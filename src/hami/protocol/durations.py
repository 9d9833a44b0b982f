"""Go durations (``5m0s``, ``1.5h``): flags and ``HAMI_NODELOCK_EXPIRE``."""

from __future__ import annotations


def parse_duration(text: str) -> float:
    """Seconds of a Go duration. Raises :class:`DurationError`."""
    ...


def format_duration(seconds: float) -> str:
    """The Go text of a duration (``5m0s``, ``1h0m0s``, ``100ms``, ``0s``)."""
    ...
