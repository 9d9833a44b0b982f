"""The broker's counters as Prometheus series (host-pid-broker.md §6.5). Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hami.node.hostpid.counters import BUCKETS_S, Totals

_NAME: Final = "hami_hostpid_broker"


def broker_metrics(totals: Totals) -> tuple[Metric, ...]:
    """The series of one reading."""
    requests = CounterMetricFamily(
        f"{_NAME}_requests", "Connections to the host PID broker by how they ended", labels=["result"]
    )
    for result, count in totals.results.items():
        requests.add_metric([result.name.lower()], count)
    failures = CounterMetricFamily(
        f"{_NAME}_accept_failures", "Failed accept calls because descriptors or memory were used up"
    )
    failures.add_metric([], totals.accept_failures)
    active = GaugeMetricFamily(f"{_NAME}_active_handlers", "Transactions under way", totals.active)
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    seconds = HistogramMetricFamily(
        f"{_NAME}_request_seconds",
        "Seconds from the start of a transaction to its end",
        buckets=list(zip(bounds, accumulate(totals.buckets), strict=True)),
        sum_value=totals.seconds,
    )
    return requests, failures, active, seconds
