"""Latency histograms of the two verbs, in the fixed buckets of Prometheus' text format."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts durations in seconds."""

    def __init__(self, name: str, what: str) -> None:
        self.name = name
        self.what = what
        self._counts = [0] * (len(_BOUNDS_S) + 1)
        self._sum_s = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time the block takes, whatever its end."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.observe(time.perf_counter() - started)

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def text(self) -> str:
        """The family in Prometheus' text format."""
        lines = [f"# HELP {self.name} {self.what}", f"# TYPE {self.name} histogram"]
        total = 0
        for bound, count in zip((*(f"{bound:g}" for bound in _BOUNDS_S), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{self.name}_bucket{{le="{bound}",zone="vGPU"}} {total}')
        lines.append(f'{self.name}_sum{{zone="vGPU"}} {self._sum_s:.6f}')
        lines.append(f'{self.name}_count{{zone="vGPU"}} {total}')
        return "\n".join(lines) + "\n"


class Timings:
    """The histograms of one scheduler process."""

    def __init__(self) -> None:
        self.filter = Histogram("hami_scheduler_filter_duration_seconds", "Time to answer a filter request")
        self.bind = Histogram("hami_scheduler_bind_duration_seconds", "Time to answer a bind request")
