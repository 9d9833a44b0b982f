"""What the device plugin shows to Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from hami.node.hostpid.counters import Totals
from hami.node.hostpid.errors import BrokerError
from hami.node.hostpid.metrics import broker_metrics
from hami.node.plugin.counters import BUCKETS_S, PluginCounters

_NAME: Final = "hami_device_plugin"


class PluginMetrics:
    """A source for the metrics server. ``broker`` reads the broker's counters, None without one."""

    is_alive = True
    is_ready = True

    def __init__(self, broker: Callable[[], Totals] | None, counters: PluginCounters | None = None) -> None:
        self._broker = broker
        self._counters = counters

    async def collect(self) -> tuple[Metric, ...]:
        """All series now."""
        own = plugin_metrics(self._counters) if self._counters is not None else ()
        return (*own, *self._broker_metrics())

    def _broker_metrics(self) -> tuple[Metric, ...]:
        if self._broker is None:
            return ()
        try:
            return broker_metrics(self._broker())
        except BrokerError:  # it is only about to start, and may wait for another one to end
            return ()


def plugin_metrics(counters: PluginCounters) -> tuple[Metric, ...]:
    """The series of one reading."""
    allocations = CounterMetricFamily(
        f"{_NAME}_allocations", "Containers' allocations by how they ended", labels=["result", "reason"]
    )
    for (result, reason), count in sorted(counters.allocations.items()):
        allocations.add_metric([result, reason], count)
    seconds = HistogramMetricFamily(
        f"{_NAME}_allocation_seconds",
        "Seconds from kubelet's call to its answer",
        buckets=list(zip([*map(str, BUCKETS_S), "+Inf"], accumulate(counters.buckets), strict=True)),
        sum_value=counters.seconds,
    )
    unhealthy = GaugeMetricFamily(
        f"{_NAME}_unhealthy_card", "1 for each unhealthy card", labels=["device_uuid", "reason"]
    )
    for uuid, reason in sorted(counters.faults.items()):
        unhealthy.add_metric([uuid, reason[:128]], 1)
    transitions = CounterMetricFamily(
        f"{_NAME}_health_transitions", "Changes of a card's health", labels=["device_uuid", "to"]
    )
    for (uuid, to), count in sorted(counters.transitions.items()):
        transitions.add_metric([uuid, to], count)
    age = GaugeMetricFamily(
        f"{_NAME}_registration_age_seconds", "Seconds since the node's registration was last seen right"
    )
    if counters.registration_age_s is not None:
        age.add_metric([], counters.registration_age_s)
    return allocations, seconds, unhealthy, transitions, age
