"""JSON patch (RFC 6902) between two plain JSON values, for admission answers."""

from __future__ import annotations

from typing import Any


def json_patch(before: Any, after: Any) -> list[dict[str, Any]]:
    """Operations (add, remove, replace) that turn ``before`` into ``after``; ``[]`` when they are equal."""
    ...
