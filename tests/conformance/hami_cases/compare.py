"""Comparing an answer with a record: masked times, quantities by value, and the first difference in words."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from hami.protocol.errors import QuantityError
from hami.protocol.quantity import canonical

_MASKS = {
    "<unix-seconds>": r"[0-9]{10}",
    "<unix-nanoseconds>": r"[0-9]{19}",
    "<rfc3339>": r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:.]{8,18}(?:Z|[+-][0-9]{2}:[0-9]{2})",
    "<time>": r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}",
}
_MASK = re.compile("|".join(re.escape(mask) for mask in _MASKS))


def difference(expected: Any, got: Any, path: str = "") -> str:
    """The first place where ``got`` is not what was recorded, or ``""``."""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted(expected.keys() | got.keys()):
            place = f"{path}.{key}" if path else str(key)
            if key not in got:
                return f"{place} is missing, expected {short(expected[key])}"
            if key not in expected:
                return f"{place} is {short(got[key])}, expected nothing"
            found = difference(expected[key], got[key], place)
            if found:
                return found
        return ""
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple):
        for position, (one, other) in enumerate(zip(expected, got, strict=False)):
            found = difference(one, other, f"{path}[{position}]")
            if found:
                return found
        if len(expected) != len(got):
            return (
                f"{path} has {len(got)} items, expected {len(expected)}: {short(got)} for {short(expected)}"
            )
        return ""
    if isinstance(expected, str) and isinstance(got, str) and text_matches(expected, got):
        return ""
    if type(expected) is type(got) and expected == got:
        return ""
    return f"{path or 'answer'} is {short(got)}, expected {short(expected)}"


def text_matches(expected: str, got: str) -> bool:
    """Whether ``got`` equals ``expected``, masks standing for any time of their form."""
    if "<" not in expected:
        return expected == got
    return _pattern(expected).fullmatch(got) is not None


@lru_cache(maxsize=1024)
def _pattern(expected: str) -> re.Pattern[str]:
    parts, last = [], 0
    for match in _MASK.finditer(expected):
        parts += [re.escape(expected[last : match.start()]), _MASKS[match[0]]]
        last = match.end()
    return re.compile("".join([*parts, re.escape(expected[last:])]), re.DOTALL)


def pruned(value: Any) -> Any:
    """``value`` without null members and empty objects, as records of objects are written."""
    if isinstance(value, dict):
        kept = {key: pruned(item) for key, item in value.items()}
        return {key: item for key, item in kept.items() if item is not None and item != {}}
    if isinstance(value, list):
        return [pruned(item) for item in value]
    return value


def canonical_quantities(value: Any) -> Any:
    """``value`` with the quantities of every ``limits`` and ``requests`` map in canonical form."""
    if isinstance(value, list):
        return [canonical_quantities(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: {name: _canonical(text) for name, text in item.items()}
        if key in ("limits", "requests") and isinstance(item, dict)
        else canonical_quantities(item)
        for key, item in value.items()
    }


def _canonical(text: Any) -> Any:
    try:
        return canonical(text)
    except QuantityError:
        return text


def short(value: Any) -> str:
    """A value for a report line, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:297]}..."
