"""History from a Prometheus server: a fixed query per number, a step that keeps every answer small."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import aiohttp
import msgspec

from hami.dashboard.history import MAX_ANSWER, Points
from hami.protocol.errors import HamiError

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 4 << 20
_STEPS: Final = (30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
# scheduler replicas and monitors may be scraped twice: the larger of each card counts once
_QUERIES: Final[Mapping[str, str]] = {
    "memoryAllocatedMiB": "sum(max by (node, device_uuid) (hami_gpu_memory_allocated_bytes{%s})) / 1048576",
    "memoryUsedMiB": "sum(max by (node, device_uuid) (hami_host_gpu_memory_used_bytes{%s})) / 1048576",
    "coresAllocated": "sum(max by (node, device_uuid) (hami_gpu_core_allocated_ratio{%s}))",
    "coresUsedPercent": "avg(max by (node, device_uuid) (hami_host_gpu_utilization_ratio{%s}))",
    "temperatureCelsius": "max(hami_host_gpu_temperature_celsius{%s})",
    "powerWatts": "sum(max by (node, device_uuid) (hami_host_gpu_power_watts{%s}))",
}


class PrometheusError(HamiError):
    """The server does not give the history."""


class _Series(msgspec.Struct):
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Series] = []


class _Answer(msgspec.Struct):
    status: str = ""
    error: str = ""
    data: _Data = msgspec.field(default_factory=_Data)


def query_of(metric: str, scope: str) -> str:
    """The PromQL for a number of the cluster, a node or a card; names are quoted, never taken as PromQL."""
    kind, _, name = scope.partition("/")
    label = {"node": "node", "device": "device_uuid"}.get(kind, "")
    if not label:
        return _QUERIES[metric] % ""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return _QUERIES[metric].replace("%s", f'{label}="{quoted}"')


def step_of(span: float) -> int:
    """Seconds between points, so that no range has more than 1000."""
    least = span / (MAX_ANSWER - 1)
    return next((step for step in _STEPS if step >= least), math.ceil(least))


def on_grid(values: Mapping[int, float], since: int, until: int, step: int) -> Points:
    """Every step of the range, None where there is no value."""
    return [(float(at), values.get(at)) for at in range(since, until + 1, step)]


class Prometheus:
    """Reads ranges from a server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url.rstrip("/") + "/api/v1/query_range"
        self._session = session

    async def points(self, scope: str, metric: str, since: float, until: float) -> Points:
        """At most 1000 points. Raises `PrometheusError`."""
        step = step_of(max(0.0, until - since))
        start = int(since) // step * step
        end = max(start, int(until) // step * step)
        start = max(start, end - (MAX_ANSWER - 1) * step)
        query = {"query": query_of(metric, scope), "start": str(start), "end": str(end), "step": str(step)}
        answer = await self._ask(query)
        if answer.status != "success":
            raise PrometheusError(f"the query was refused: {answer.error[:200] or 'no reason given'}")
        found: dict[int, float] = {}
        for at, text in answer.data.result[0].values if answer.data.result else ():
            try:
                value = float(text)
            except ValueError:
                continue
            if math.isfinite(value):
                found[round(at)] = round(value, 2)
        return on_grid(found, start, end, step)

    async def _ask(self, query: Mapping[str, str]) -> _Answer:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with self._session.get(
                self._url, params=query, timeout=timeout, allow_redirects=False
            ) as answer:
                body = await answer.content.read(_MAX_BYTES + 1)
                while len(body) <= _MAX_BYTES and (more := await answer.content.read(_MAX_BYTES)):
                    body += more
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PrometheusError(f"no answer: {str(error) or type(error).__name__}") from error
        if len(body) > _MAX_BYTES:
            raise PrometheusError(f"an answer of more than {_MAX_BYTES} bytes")
        try:
            return msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise PrometheusError(f"HTTP {answer.status}, not what Prometheus answers: {error}") from error
