"""JSON patch (RFC 6902) between two plain JSON values, for admission answers."""

from __future__ import annotations

from typing import Any


def json_patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """Operations (add, remove, replace) that turn ``before`` into ``after``; ``[]`` when they are equal.

    Lists are compared position by position: a longer one is appended to, a shorter one is cut at its end.
    What both values share (the same object) is not looked into.
    """
    return _difference("", before, after)


def _difference(path: str, before: Any, after: Any) -> list[dict[str, Any]]:
    if before is after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        return _members(path, before, after)
    if isinstance(before, list) and isinstance(after, list):
        return _elements(path, before, after)
    if before == after and isinstance(before, bool) == isinstance(after, bool):
        return []
    return [{"op": "replace", "path": path, "value": after}]


def _members(path: str, before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    operations: list[dict[str, Any]] = []
    for key, value in before.items():
        if key not in after:
            operations.append({"op": "remove", "path": f"{path}/{_escape(key)}"})
        elif value is not after[key]:
            operations += _difference(f"{path}/{_escape(key)}", value, after[key])
    operations += [
        {"op": "add", "path": f"{path}/{_escape(key)}", "value": value}
        for key, value in after.items()
        if key not in before
    ]
    return operations


def _elements(path: str, before: list[Any], after: list[Any]) -> list[dict[str, Any]]:
    operations: list[dict[str, Any]] = []
    for position, (old, new) in enumerate(zip(before, after, strict=False)):
        if old is not new:
            operations += _difference(f"{path}/{position}", old, new)
    operations += [
        {"op": "remove", "path": f"{path}/{position}"}
        for position in range(len(before) - 1, len(after) - 1, -1)
    ]
    operations += [{"op": "add", "path": f"{path}/-", "value": value} for value in after[len(before) :]]
    return operations


def _escape(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
