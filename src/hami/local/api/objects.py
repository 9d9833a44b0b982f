"""Small helpers on Kubernetes objects as plain dicts: copies, metadata, time stamps."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


def clone(value: Any) -> Any:
    """A deep copy of a JSON value; scalars are shared."""
    if isinstance(value, dict):
        return {key: clone(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clone(item) for item in value]
    return value


def without_nulls(value: Any) -> Any:
    """A deep copy of a JSON value without the fields that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def meta(obj: Object) -> Object:
    """``obj.metadata`` as a dict that belongs to ``obj`` (made if it is missing)."""
    found = obj.get("metadata")
    if not isinstance(found, dict):
        found = obj["metadata"] = {}
    return found


def name_of(obj: Object) -> str:
    return str((obj.get("metadata") or {}).get("name") or "")


def namespace_of(obj: Object) -> str:
    return str((obj.get("metadata") or {}).get("namespace") or "")


def labels_of(obj: Object) -> dict[str, str]:
    return (obj.get("metadata") or {}).get("labels") or {}


def annotations_of(obj: Object) -> dict[str, str]:
    return (obj.get("metadata") or {}).get("annotations") or {}


def dig(obj: Any, *path: str) -> Any:
    """The value at ``path`` or None where any step is missing or not an object."""
    for step in path:
        if not isinstance(obj, dict):
            return None
        obj = obj.get(step)
    return obj


def rfc3339(now: float) -> str:
    """``metav1.Time``: UTC, whole seconds."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def rfc3339_micro(now: float) -> str:
    """``metav1.MicroTime``: UTC, microseconds."""
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_time(text: str) -> float | None:
    """Seconds since the epoch of an RFC 3339 time, None if it is not one."""
    try:
        parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    if parsed.tzinfo is None:
        return None
    return parsed.timestamp()
