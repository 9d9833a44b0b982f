"""Kubernetes quantities: two readings and the canonical form (vendors/README.md R2)."""

from __future__ import annotations

Quantity = str | int | float
"""A quantity as JSON has it: the API server always writes text, files and tests may hold numbers."""


def as_int64(quantity: Quantity) -> tuple[int, bool]:
    """``(value, True)`` when the text is an integer form that fits int64, else ``(0, False)``.

    Raises :class:`QuantityError` when it is no quantity at all.
    """
    ...


def value(quantity: Quantity) -> int:
    """The quantity as an integer, rounded up away from zero, cut to int64. Raises :class:`QuantityError`."""
    ...


def canonical(quantity: Quantity) -> str:
    """The text the API server would write. Raises :class:`QuantityError`."""
    ...
