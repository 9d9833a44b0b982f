"""What a node's monitor says about its cards and containers, out of its metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from hami.answers.errors import MetricsError

MIB: Final = 1 << 20
MAX_SERIES: Final = 200_000

_OF_CARD: Final = {
    "hami_host_gpu_memory_used_bytes": "used_bytes",
    "hami_host_gpu_memory_total_bytes": "total_bytes",
    "hami_host_gpu_utilization_ratio": "utilization",
    "hami_host_gpu_temperature_celsius": "temperature",
    "hami_host_gpu_power_watts": "power",
}
_OF_SHARE: Final = {
    "hami_vgpu_memory_used_bytes": "used_bytes",
    "hami_container_device_utilization_ratio": "utilization",
    "hami_vgpu_hook_active": "hook",
    "hami_container_last_kernel_elapsed_seconds": "idle",
}
_OF_CONTAINER: Final = {"hami_vgpu_blocked": "blocked", "hami_vgpu_core_limit_enforced": "enforced"}

ShareKey = tuple[str, str, str, str]  # namespace, pod, container, card
ContainerKey = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Reading:
    """One scrape. A value that is not there was not measured; numbers are finite."""

    cards: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    shares: Mapping[ShareKey, Mapping[str, float]] = field(default_factory=dict)
    containers: Mapping[ContainerKey, Mapping[str, float]] = field(default_factory=dict)


NOTHING_READ: Final = Reading()


def read_monitor(text: str) -> Reading:
    """The series that the dashboard shows. Raises `MetricsError` for what are no metrics, or too many."""
    cards: dict[str, dict[str, float]] = {}
    shares: dict[ShareKey, dict[str, float]] = {}
    containers: dict[ContainerKey, dict[str, float]] = {}
    count = 0
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                count += 1
                if count > MAX_SERIES:
                    raise MetricsError(f"more than {MAX_SERIES} series")
                name, labels, value = sample.name, sample.labels, float(sample.value)
                if not math.isfinite(value):
                    continue
                card = labels.get("device_uuid", "")
                if name in _OF_CARD and card:
                    cards.setdefault(card, {})[_OF_CARD[name]] = value
                    continue
                who = (labels.get("namespace", ""), labels.get("pod", ""), labels.get("container", ""))
                if name in _OF_SHARE and card:
                    shares.setdefault((*who, card), {})[_OF_SHARE[name]] = value
                elif name in _OF_CONTAINER:
                    containers.setdefault(who, {})[_OF_CONTAINER[name]] = value
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise MetricsError(f"no metrics of a monitor: {error}") from error
    return Reading(cards, shares, containers)
