"""Bodies of requests: JSON and YAML into plain JSON values, of bounded depth and size.

Only objects with text keys, lists, text, finite numbers, booleans and null come out.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any

import msgspec
import yaml

from hami.local.api.errors import bad_request

MAX_DEPTH = 100  # what Kubernetes' own objects need is below 20
_SURROGATE = re.compile("[\ud800-\udfff]")
MAX_VALUES = 500_000  # values in one document, those behind YAML aliases counted each time


def decode_json(data: bytes) -> Any:
    """Raises 400 for what is not JSON or is nested too deeply."""
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(f"the body of the request is not JSON: {error}") from error
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH:
        _check(found)
    return found


def decode_yaml(data: bytes) -> Any:
    """Raises 400 for what is not YAML, and for what YAML has and JSON has not."""
    if data.lstrip()[:1] in (b"{", b"[", b'"'):
        # Mostly JSON, which is decoded much faster and whose escapes YAML reads differently.
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            found = msgspec.json.decode(data)
            _check(found)
            return found
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise bad_request(f"the body of the request is not YAML: {error}") from error
    _check(found)
    return found


def _check(document: Any) -> None:
    """Raises 400 for a value that JSON does not have, or too many or too deeply nested values."""
    level: list[Any] = [document]
    count = 0
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                if not all(isinstance(key, str) for key in value):
                    raise bad_request("the body of the request has a key that is not text")
                below += value
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, float):
                if not math.isfinite(value):
                    raise bad_request(f"the body of the request has the number {value}")
            elif isinstance(value, str):
                if not value.isascii() and _SURROGATE.search(value):
                    raise bad_request("the body of the request has text that is not Unicode")
            elif value is not None and not isinstance(value, int):
                raise bad_request(
                    f"the body of the request has a value that JSON has not: {type(value).__name__}"
                )
            if len(below) > MAX_VALUES:
                break
        count += len(below)
        if count > MAX_VALUES:
            raise bad_request(f"the body of the request has more than {MAX_VALUES} values")
        if not below:
            return
        level = below
    raise bad_request(f"the body of the request is nested more than {MAX_DEPTH} levels deep")
