"""Bodies of requests: JSON and YAML into plain JSON values, of bounded depth and size.

Only objects with text keys, lists, text, finite numbers, booleans and null come out.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import yaml

from hami.local.api.errors import bad_request
from hami.protocol.plain import MAX_DEPTH, problem_of


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
    problem = problem_of(document)
    if problem:
        raise bad_request(f"the body of the request {problem}")
