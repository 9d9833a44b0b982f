"""Lists of the API: which parameters there are, and how rows are chosen, ordered and cut into pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from hami.protocol.errors import HamiError

DEFAULT_LIMIT: Final = 100
MAX_LIMIT: Final = 1000
MAX_QUERY: Final = 4096
_MAX_VALUE: Final = 256
_MAX_FIELDS: Final = 32
_PAGING: Final = frozenset({"sort", "order", "limit", "cursor"})

T = TypeVar("T")


class QueryError(HamiError):
    """A query that cannot be answered; the text names the parameter. HTTP 400."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What one list offers: filters by exact value, what `q` searches in, and what it can be sorted by."""

    name: str
    filters: Mapping[str, Callable[[Any], Iterable[str]]]
    text: Callable[[Any], str]
    sorts: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)


class _Page(msgspec.Struct, rename="camel"):
    generated_at: float
    total: int
    limit: int
    next_cursor: str | None
    items: Sequence[Any]


def parameters(query: bytes, known: Iterable[str]) -> dict[str, str]:
    """The parameters of a query string. Raises `QueryError` for unknown, repeated and overlong ones."""
    if len(query) > MAX_QUERY:
        raise QueryError(f"the query has {len(query)} bytes, at most {MAX_QUERY} are read")
    try:
        pairs = parse_qsl(
            query.decode("ascii"),
            keep_blank_values=True,
            encoding="utf-8",
            errors="strict",
            max_num_fields=_MAX_FIELDS,
        )
    except ValueError as error:
        raise QueryError(f"the query cannot be read: {error}") from None
    names = sorted(known)
    found: dict[str, str] = {}
    for name, value in pairs:
        if name not in names:
            raise QueryError(f"unknown parameter {name[:60]!r}: known are {', '.join(names) or 'none'}")
        if name in found:
            raise QueryError(f"parameter {name!r} is given twice")
        if len(value) > _MAX_VALUE:
            raise QueryError(f"parameter {name!r} has {len(value)} characters, at most {_MAX_VALUE} are read")
        found[name] = value
    return found


def page_of(listing: Listing, rows: Sequence[T], query: bytes, generated_at: float) -> _Page:
    """One page of the rows that a query asks for. Raises `QueryError`.

    Rows keep their order unless `sort` names another. `limit` above 1000 is capped and echoed.
    """
    asked = parameters(query, {*listing.filters, *_PAGING, "q"})
    limit = min(MAX_LIMIT, _number(asked, "limit", DEFAULT_LIMIT, least=1))
    start = _number(asked, "cursor", 0, least=0)
    chosen: Iterable[T] = rows
    for name, values in listing.filters.items():
        wanted = asked.get(name, "")
        if wanted:
            chosen = [row for row in chosen if wanted in values(row)]
    needle = asked.get("q", "").lower()
    if needle:
        chosen = [row for row in chosen if needle in listing.text(row).lower()]
    found = list(chosen)
    _sort(listing, found, asked)
    end = start + limit
    following = str(end) if end < len(found) else None
    return _Page(generated_at, len(found), limit, following, found[start:end])


def _sort(listing: Listing, rows: list[T], asked: Mapping[str, str]) -> None:
    order = asked.get("order", "asc") or "asc"
    if order not in ("asc", "desc"):
        raise QueryError(f"parameter 'order' is {order[:20]!r}: asc or desc")
    name = asked.get("sort", "")
    if not name:
        if order == "desc":
            rows.reverse()
        return
    key = listing.sorts.get(name)
    if key is None:
        raise QueryError(f"cannot sort by {name[:60]!r}: known are {', '.join(sorted(listing.sorts))}")
    rows.sort(key=key, reverse=order == "desc")


def _number(asked: Mapping[str, str], name: str, usual: int, *, least: int) -> int:
    text = asked.get(name, "")
    if not text:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) <= 9) or int(text) < least:
        raise QueryError(f"parameter {name!r} is {text[:20]!r}: it must be a whole number from {least}")
    return int(text)


# --- the lists --------------------------------------------------------------------------------------------


def _ratio(amount: Any) -> float:
    return amount.allocated / amount.total if amount.total else 0.0


_AMOUNTS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "slots": lambda row: _ratio(row.slots),
    "cores": lambda row: _ratio(row.cores),
    "memory": lambda row: _ratio(row.memory_mi_b),
    "memoryFree": lambda row: row.memory_mi_b.total - row.memory_mi_b.allocated,
}

NODES: Final = Listing(
    "nodes",
    {
        "node": lambda row: (row.name, row.ip),
        "vendor": lambda row: row.vendors,
        "status": lambda row: (row.status,),
    },
    lambda row: f"{row.name} {row.ip}",
    {
        "name": lambda row: row.name,
        "status": lambda row: row.status,
        "devices": lambda row: row.device_count,
        **_AMOUNTS,
    },
)
DEVICES: Final = Listing(
    "devices",
    {
        "node": lambda row: (row.node,),
        "type": lambda row: (row.type,),
        "vendor": lambda row: (row.vendor,),
        "status": lambda row: ("healthy" if row.healthy else "unhealthy",),
        "namespace": lambda row: {one.namespace for one in row.containers},
    },
    lambda row: f"{row.uuid} {row.type} {row.node}",
    {
        "uuid": lambda row: row.uuid,
        "node": lambda row: (row.node, row.index),
        "type": lambda row: row.type,
        "status": lambda row: row.healthy,
        **_AMOUNTS,
    },
)
WORKLOADS: Final = Listing(
    "workloads",
    {
        "namespace": lambda row: (row.namespace,),
        "node": lambda row: (row.node,),
        "type": lambda row: row.types,
        "vendor": lambda row: row.vendors,
        "status": lambda row: (row.status,),
    },
    lambda row: " ".join((row.namespace, row.pod, *(one.name for one in row.containers))),
    {
        "name": lambda row: (row.namespace, row.pod),
        "status": lambda row: row.status,
        "node": lambda row: row.node,
        "devices": lambda row: row.device_count,
        "cores": lambda row: row.cores,
        "memory": lambda row: row.memory_mi_b,
        "created": lambda row: row.created or 0.0,
    },
)
PENDING: Final = Listing(
    "pending",
    {"namespace": lambda row: (row.namespace,)},
    lambda row: f"{row.namespace} {row.pod}",
    {"name": lambda row: (row.namespace, row.pod), "created": lambda row: row.created or 0.0},
)
QUOTAS: Final = Listing(
    "quotas",
    {"namespace": lambda row: (row.namespace,)},
    lambda row: f"{row.namespace} {row.resource}",
    {
        "namespace": lambda row: (row.namespace, row.resource),
        "used": lambda row: row.used_percent or 0.0,
    },
)
