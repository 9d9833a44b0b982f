"""Bounded JSON reading for annotation values, with keys matched in any case as Go does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from hami.protocol.errors import ProtocolError

MAX_TEXT: Final = 256 * 1024
"""Kubernetes limits all annotations of one object to 256 KiB."""


def load(text: str, error: type[ProtocolError], what: str) -> Any:
    """The plain JSON value of ``text``; raises ``error`` when it is none or too long."""
    if len(text) > MAX_TEXT:
        raise error(f"{what} of {len(text)} characters is over the limit of {MAX_TEXT}")
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as cause:
        raise error(f"{what} is not JSON: {cause}") from None


def in_known_case(members: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """``members`` with keys as in ``names`` (lower case -> wanted), without nulls and unknown keys.

    The last of equal keys wins.
    """
    result: dict[str, Any] = {}
    for key, value in members.items():
        name = names.get(key.lower())
        if name is not None and value is not None:
            result[name] = value
    return result


def known_names(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Lower-case key -> wire key of every member of ``kind``."""
    return {field.encode_name.lower(): field.encode_name for field in msgspec.structs.fields(kind)}


def explain(error: msgspec.ValidationError) -> tuple[str, str]:
    """Message and path of a msgspec validation error."""
    message, _, path = str(error).partition(" - at `")
    return message, path.rstrip("`")
