"""Columns of tables and the cells that many kinds share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hami.local.api.objects import Object, dig, meta, parse_time


class Column(NamedTuple):
    """``priority`` 0 is always shown, 1 only with ``-o wide``."""

    name: str
    type: str
    priority: int
    cell: Callable[[Object, float], Any]


def human_duration(seconds: float) -> str:
    """kubectl's short form of an age: ``45s``, ``3m20s``, ``5h``, ``2d``."""
    total = max(0, int(seconds))
    if total < 120:
        return f"{total}s"
    minutes = total // 60
    if minutes < 10:
        return f"{minutes}m{total % 60}s" if total % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours = minutes // 60
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    days = hours // 24
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d"


def since(stamp: Any, now: float) -> str:
    parsed = parse_time(stamp) if isinstance(stamp, str) else None
    return "<unknown>" if parsed is None else human_duration(now - parsed)


def text(*path: str, default: str = "<none>") -> Callable[[Object, float], Any]:
    return lambda obj, _now: dig(obj, *path) or default


def count(*path: str) -> Callable[[Object, float], Any]:
    return lambda obj, _now: len(dig(obj, *path) or ())


def pairs(*path: str) -> Callable[[Object, float], str]:
    """``a=b,c=d`` of a map of strings."""
    return lambda obj, _now: _pairs(dig(obj, *path) or {})


def _pairs(found: Object) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(found.items())) or "<none>"


NAME = Column("Name", "string", 0, lambda obj, _now: meta(obj).get("name", ""))
AGE = Column("Age", "string", 0, lambda obj, now: since(meta(obj).get("creationTimestamp"), now))
