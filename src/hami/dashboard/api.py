"""The JSON API: paths to answers. Reads the current picture, never the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from hami.dashboard import listing
from hami.dashboard.errors import ApiError
from hami.dashboard.history import CLUSTER, History, Points
from hami.dashboard.listing import Listing, QueryError, page_of, parameters
from hami.dashboard.pending import Explained, narrowed
from hami.dashboard.scope import Scope, restricted
from hami.dashboard.shapes import Device, Node
from hami.dashboard.view import View
from hami.protocol.errors import HamiError

PREFIX: Final = "/api/v1"
_DEFAULT_RANGE_S: Final = 3600.0
_LONGEST_RANGE_S: Final = 366 * 86400.0
_LATEST: Final = 10.0**11  # Unix seconds; later is no time


class OlderHistory(Protocol):
    """History beyond what this process remembers."""

    async def points(self, scope: str, metric: str, since: float, until: float) -> Points:
        """As `History.points`. Raises `HamiError`."""
        ...


class NodeDetail(msgspec.Struct, frozen=True, rename="camel"):
    """A node with its cards."""

    node: Node
    devices: Sequence[Device]


class HistoryAnswer(msgspec.Struct, frozen=True, rename="camel"):
    """Points as [Unix seconds, value or null]."""

    metric: str
    scope: str
    source: str
    points: Points
    note: str = ""


@dataclass(slots=True)
class Api:
    """Answers from the picture that `view` gives; None: nothing is known yet."""

    view: Callable[[], View | None]
    history: History
    explain: Callable[[str, str], Awaitable[Explained]]
    clock: Callable[[], float]
    older: OlderHistory | None = None
    _narrow: tuple[View, Scope, View] | None = None

    async def answer(self, path: Sequence[str], query: bytes, scope: Scope) -> bytes:
        """The JSON text for a path below `/api/v1`, split and decoded.

        Raises `ApiError` and `QueryError`.
        """
        return msgspec.json.encode(await self._found(path, query, scope))

    async def _found(self, path: Sequence[str], query: bytes, scope: Scope) -> Any:
        view = self.seen(scope)
        match path:
            case ["summary"]:
                parameters(query, ())
                return view.summary
            case ["nodes"]:
                return self._page(listing.NODES, view.nodes, query, view)
            case ["devices"]:
                return self._page(listing.DEVICES, view.devices, query, view)
            case ["workloads"]:
                return self._page(listing.WORKLOADS, view.workloads, query, view)
            case ["pending"]:
                return self._page(listing.PENDING, view.pending, query, view)
            case ["quotas"]:
                return self._page(listing.QUOTAS, view.quotas, query, view)
            case ["history"]:
                return await self._history(view, query)
            case ["nodes", name]:
                parameters(query, ())
                node = _only((one for one in view.nodes if one.name == name), "node", name)
                return NodeDetail(node, [one for one in view.devices if one.node == name])
            case ["devices", uuid]:
                parameters(query, ())
                return _only((one for one in view.devices if one.uuid == uuid), "device", uuid)
            case ["workloads", namespace, pod]:
                parameters(query, ())
                mine = (one for one in view.workloads if (one.namespace, one.pod) == (namespace, pod))
                return _only(mine, "workload", f"{namespace}/{pod}")
            case ["pending", namespace, pod]:
                parameters(query, ())
                waiting = (one for one in view.pending if (one.namespace, one.pod) == (namespace, pod))
                _only(waiting, "pending pod", f"{namespace}/{pod}")
                explained = await self.explain(namespace, pod)
                return explained if scope.namespaces is None else narrowed(explained)
        raise ApiError(404, "there is no such path in the API")

    def seen(self, scope: Scope) -> View:
        """The picture as a reader may see it. Raises `ApiError` before there is one."""
        view = self.view()
        if view is None:
            raise ApiError(503, "the cluster has not been read yet; try again")
        if self._narrow is None or self._narrow[0] is not view or self._narrow[1] != scope:
            self._narrow = (view, scope, restricted(view, scope))
        return self._narrow[2]

    def _page(self, what: Listing, rows: Sequence[Any], query: bytes, view: View) -> Any:
        return page_of(what, rows, query, view.summary.generated_at)

    async def _history(self, view: View, query: bytes) -> HistoryAnswer:
        asked = parameters(query, ("metric", "scope", "from", "to"))
        now = self.clock()
        scope = asked.get("scope", "") or CLUSTER
        metric = asked.get("metric", "") or "memoryAllocatedMiB"
        until = _time(asked, "to", now)
        since = _time(asked, "from", until - _DEFAULT_RANGE_S)
        if not 0 < until - since <= _LONGEST_RANGE_S:
            raise QueryError("'from' must be before 'to', by a year at most")
        if not _exists(view, scope):
            raise ApiError(404, f"there is no scope {scope[:80]!r}: cluster, node/<name> or device/<uuid>")
        points = self.history.points(scope, metric, since, until)
        begins = points[0][0] if points else until
        if self.older is None or begins - since < 600.0:
            return HistoryAnswer(metric, scope, "memory", points)
        try:
            return HistoryAnswer(
                metric, scope, "prometheus", await self.older.points(scope, metric, since, until)
            )
        except HamiError as error:
            return HistoryAnswer(metric, scope, "memory", points, f"Prometheus: {error}")


def _exists(view: View, scope: str) -> bool:
    kind, _, name = scope.partition("/")
    if kind == "node":
        return any(one.name == name for one in view.nodes)
    if kind == "device":
        return any(one.uuid == name for one in view.devices)
    return scope == CLUSTER


def _only(found: Any, kind: str, name: str) -> Any:
    one = next(found, None)
    if one is None:
        raise ApiError(404, f"there is no {kind} {name[:120]!r}")
    return one


def _time(asked: dict[str, str], name: str, usual: float) -> float:
    text = asked.get(name, "")
    if not text:
        return usual
    digits = text.replace(".", "", 1)
    if not (digits.isascii() and digits.isdigit() and len(text) <= 20) or float(text) > _LATEST:
        raise QueryError(f"parameter {name!r} is {text[:20]!r}: Unix seconds are wanted")
    return float(text)
