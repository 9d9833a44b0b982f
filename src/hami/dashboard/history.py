"""The last hours of a few numbers per cluster, node and card, in a ring of fixed size. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from hami.dashboard.listing import QueryError
from hami.dashboard.shapes import Amount
from hami.dashboard.view import View

METRICS: Final = (
    "memoryAllocatedMiB",
    "memoryUsedMiB",
    "coresAllocated",
    "coresUsedPercent",
    "temperatureCelsius",
    "powerWatts",
)
CLUSTER: Final = "cluster"
STEP_S: Final = 30.0
POINTS: Final = 720  # 6 hours
MAX_BYTES: Final = 64 << 20
MAX_ANSWER: Final = 1000

Key = tuple[str, str]  # scope, metric
Points = list[tuple[float, float | None]]


class History:
    """Series by scope and metric. What was not measured is a gap, which stays one."""

    def __init__(self, points: int = POINTS, max_bytes: int = MAX_BYTES) -> None:
        self._points = points
        self._most = max(1, max_bytes // (4 * points))
        self._times: npt.NDArray[np.float64] = np.full(points, np.nan)
        self._series: dict[Key, npt.NDArray[np.float32]] = {}  # the longest unused first
        self._at = -1

    def __len__(self) -> int:
        return len(self._series)

    def note(self, now: float, values: Mapping[Key, float]) -> None:
        """One more point of every series that has a value now; over the limit the longest unused ones go."""
        self._at = (self._at + 1) % self._points
        self._times[self._at] = now
        for series in self._series.values():
            series[self._at] = np.nan
        for key, value in values.items():
            if key in self._series:
                series = self._series.pop(key)
            else:
                if len(self._series) >= self._most:
                    del self._series[next(iter(self._series))]
                series = np.full(self._points, np.nan, np.float32)
            self._series[key] = series
            series[self._at] = value

    def points(self, scope: str, metric: str, since: float, until: float) -> Points:
        """Times and values in order, at most 1000; None where there was no sample.

        More points are averaged over equal steps. Raises `QueryError` for an unknown metric.
        """
        if metric not in METRICS:
            raise QueryError(f"unknown metric {metric[:60]!r}: known are {', '.join(METRICS)}")
        series = self._series.get((scope, metric))
        order = np.roll(np.arange(self._points), -(self._at + 1))
        times = self._times[order]
        kept = (times >= since) & (times <= until)  # nan is neither
        values = np.full(self._points, np.nan, np.float32) if series is None else series[order]
        found = [
            (float(time), None if math.isnan(value) else round(float(value), 2))
            for time, value in zip(times[kept].tolist(), values[kept].tolist(), strict=True)
        ]
        return thinned(with_gaps(found))


def with_gaps(points: Points, step: float = STEP_S) -> Points:
    """A point without a value wherever more than two steps are missing."""
    made: Points = []
    for time, value in points:
        if made and time - made[-1][0] > 2.5 * step:
            made.append((made[-1][0] + step, None))
        made.append((time, value))
    return made


def thinned(points: Points, most: int = MAX_ANSWER) -> Points:
    """At most so many points: neighbours are averaged, a group without any value stays a gap."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    made: Points = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        values = [value for _, value in group if value is not None]
        made.append((group[0][0], round(sum(values) / len(values), 2) if values else None))
    return made


def samples(view: View) -> dict[Key, float]:
    """What is to be remembered of a picture."""
    found: dict[Key, float] = {}
    _take(found, CLUSTER, view.summary.memory_mi_b, view.summary.cores)
    for node in view.nodes:
        _take(found, f"node/{node.name}", node.memory_mi_b, node.cores)
    for card in view.devices:
        scope = f"device/{card.uuid}"
        _take(found, scope, card.memory_mi_b, card.cores)
        extra = (("temperatureCelsius", card.temperature_celsius), ("powerWatts", card.power_watts))
        _some(found, scope, extra)
    return found


def _take(found: dict[Key, float], scope: str, memory: Amount, cores: Amount) -> None:
    _some(
        found,
        scope,
        (
            ("memoryAllocatedMiB", memory.allocated),
            ("memoryUsedMiB", memory.used),
            ("coresAllocated", cores.allocated),
            ("coresUsedPercent", cores.used),
        ),
    )


def _some(found: dict[Key, float], scope: str, values: Iterable[tuple[str, float | None]]) -> None:
    for metric, value in values:
        if value is not None:
            found[scope, metric] = float(value)
