"""Kubernetes quantities: two readings and the canonical form (vendors/README.md R2).

A quantity is a decimal number with a decimal suffix (``500m``, ``1.5k``), a decimal exponent (``2e3``) or a
binary suffix (``16Gi``). The API server stores the canonical form; what did not pass through it (files, dry
runs) is made canonical first and read then, so that the answer never depends on the spelling.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, NamedTuple

from hami.protocol.errors import QuantityError

Quantity = str | int | float
"""A quantity as JSON has it: the API server always writes text, files and tests may hold numbers."""

INT64_MAX: Final = 2**63 - 1
INT64_MIN: Final = -(2**63)

_MAX_LENGTH: Final = 256
_MAX_EXPONENT: Final = 400
_NANO: Final = -9
_GRAMMAR: Final = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?"
    r"(?:(?P<binary>[KMGTPE]i)|(?P<decimal>[numkMGTPE])|[eE](?P<exponent>[+-]?[0-9]{1,19}))?"
)
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_SUFFIX: Final = {exponent: suffix for suffix, exponent in _DECIMAL.items()}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_BINARY_SUFFIX: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


def as_int64(quantity: Quantity) -> tuple[int, bool]:
    """``(value, True)`` when the text is an integer form whose value fits int64, else ``(0, False)``.

    Integer forms: decimal exponent or suffix minus the digits after the point is at least 0, or a binary
    suffix and no digits after the point. Raises :class:`QuantityError` when it is no quantity at all.
    """
    number = _parse(_text(quantity))
    if number.scale < 0 or (number.shift and number.part_digits):
        return 0, False
    if number.digits and number.scale > 20:
        return 0, False
    result = (number.digits * 10**number.scale) << number.shift if number.digits else 0
    return (result, True) if INT64_MIN <= result <= INT64_MAX else (0, False)


def value(quantity: Quantity) -> int:
    """The quantity as an integer, rounded away from zero and cut to int64. Raises :class:`QuantityError`."""
    number = _parse(_text(quantity))
    return max(-INT64_MAX, min(INT64_MAX, _rounded(number, 0)))


@lru_cache(maxsize=4096)
def milli(quantity: Quantity) -> int:
    """The quantity in thousandths, rounded up and cut to int64. Raises :class:`QuantityError`."""
    number = _parse(_text(quantity))
    return max(-INT64_MAX, min(INT64_MAX, _rounded(number, -3)))


@lru_cache(maxsize=4096)
def canonical(quantity: Quantity) -> str:
    """The text the API server would write: at most nano precision, the largest suffix without a fraction.

    A binary suffix stays binary unless the value is a fraction or below 1024; an exponent stays an exponent.
    Raises :class:`QuantityError`.
    """
    number = _parse(_text(quantity))
    if number.shift:
        exact = (abs(number.digits) << number.shift) % 10 ** max(0, -number.scale) == 0
        whole = max(-INT64_MAX, min(INT64_MAX, _rounded(number, 0)))
        if exact and abs(whole) >= 1024:
            return _binary_text(whole)
    return _decimal_text(number)


class _Number(NamedTuple):
    """``digits * 10**scale * 2**shift``; the other members remember how it was written."""

    digits: int
    scale: int
    shift: int
    part_digits: int
    written_digits: int
    exponent_form: bool


def _text(quantity: Quantity) -> str:
    if isinstance(quantity, bool) or not isinstance(quantity, str | int | float):
        raise QuantityError(f"{quantity!r} is no quantity")
    if isinstance(quantity, str):
        return quantity
    return str(quantity) if abs(quantity) < 10**_MAX_LENGTH else ""


def _parse(text: str) -> _Number:
    match = _GRAMMAR.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None or not (match["whole"] or match["part"]):
        raise QuantityError(f"{text[:40]!r} is no quantity")
    part = match["part"] or ""
    written = match["whole"].lstrip("0") + part
    digits = int(match["sign"] + match["whole"] + part)
    exponent_form = match["exponent"] is not None
    exponent = int(match["exponent"]) if exponent_form else _DECIMAL[match["decimal"] or ""]
    if digits == 0:
        return _Number(0, 0, 0, len(part), 1, False)
    if abs(exponent) > _MAX_EXPONENT:
        raise QuantityError(f"{text[:40]!r} has an exponent beyond {_MAX_EXPONENT}")
    shift = _BINARY[match["binary"]] if match["binary"] else 0
    return _Number(digits, exponent - len(part), shift, len(part), len(written), exponent_form)


def _rounded(number: _Number, exponent: int) -> int:
    """The number in units of ``10**exponent``, rounded away from zero."""
    magnitude = abs(number.digits) << number.shift
    power = number.scale - exponent
    magnitude = magnitude * int(10**power) if power >= 0 else -(-magnitude // int(10**-power))
    return magnitude if number.digits >= 0 else -magnitude


def _decimal_text(number: _Number) -> str:
    nanos = _rounded(number, _NANO)
    if number.shift or number.written_digits > 18:
        # Numbers too long for the API server's fast path are cut to what int64 holds.
        nanos = max(-INT64_MAX * 10**9, min(INT64_MAX * 10**9, nanos))
    if not nanos:
        return "0"
    exponent = _NANO
    while nanos % 10 == 0:
        nanos //= 10
        exponent += 1
    while exponent % 3:
        nanos *= 10
        exponent -= 1
    if exponent == 0:
        return str(nanos)
    if number.exponent_form or exponent not in _SUFFIX:
        return f"{nanos}e{exponent}"
    return f"{nanos}{_SUFFIX[exponent]}"


def _binary_text(whole: int) -> str:
    step = 0
    while whole % 1024 == 0:
        whole //= 1024
        step += 1
    return f"{whole}{_BINARY_SUFFIX[step]}"
