"""What a document may consist of: plain JSON values, of bounded depth and number.

YAML has more: dates, sets, keys that are no text, and aliases, with which a short text stands for billions of
values or contains itself.
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

MAX_DEPTH: Final = 100  # what Kubernetes' own objects need is below 20
MAX_VALUES: Final = 500_000  # values in one document, those behind YAML aliases counted each time
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


def problem_of(document: Any, max_values: int = MAX_VALUES) -> str:
    """What is wrong with a decoded document, as the rest of a sentence ("has a key that is not text"), or "".

    Only objects with text keys, lists, text, finite numbers, booleans and null are right.
    """
    level: list[Any] = [document]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            problem = _append(value, below)
            if problem:
                return problem
            if len(below) > max_values:
                break
        count += len(below)
        if count > max_values:
            return f"has more than {max_values} values"
        if not below:
            return ""
        level = below
    return f"is nested more than {MAX_DEPTH} levels deep"


def _append(value: Any, below: list[Any]) -> str:
    """What is wrong with one value; what it contains is added to `below`."""
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            return "has a key that is not text"
        below += value
        below += value.values()
    elif isinstance(value, list):
        below += value
    elif isinstance(value, float):
        if not math.isfinite(value):
            return f"has the number {value}"
    elif isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            return "has text that is not Unicode"
    elif value is not None and not isinstance(value, int):
        return f"has a value that JSON has not: {type(value).__name__}"
    return ""
