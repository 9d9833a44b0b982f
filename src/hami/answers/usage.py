"""What is really used, out of the text that a node's monitor exports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from hami.answers.errors import MetricsError
from hami.answers.snapshot import CardUse, ContainerUse

_OF_CONTAINER = {
    "hami_vgpu_memory_used_bytes": "memory",
    "hami_container_device_utilization_ratio": "utilization",
}
_OF_CARD = {"hami_host_gpu_memory_used_bytes": "memory", "hami_host_gpu_utilization_ratio": "utilization"}


@dataclass(slots=True)
class _Sums:
    containers: dict[tuple[str, str, str, str], dict[str, float]] = field(default_factory=dict)
    cards: dict[str, dict[str, float]] = field(default_factory=dict)


def read_usage(texts: Iterable[str]) -> tuple[list[ContainerUse], list[CardUse]]:
    """Usage per container and card, and per card, of the texts of any number of monitors.

    Raises `MetricsError`.
    """
    sums = _Sums()
    for text in texts:
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    _take(sums, sample.name, sample.labels, sample.value)
        except (ValueError, KeyError, IndexError) as error:
            raise MetricsError(f"no metrics of a monitor: {error}") from error
    return (
        [
            ContainerUse(*key, values.get("memory", 0.0), values.get("utilization", 0.0))
            for key, values in sorted(sums.containers.items())
        ],
        [
            CardUse(card, values.get("memory", 0.0), values.get("utilization", 0.0))
            for card, values in sorted(sums.cards.items())
        ],
    )


def _take(sums: _Sums, name: str, labels: dict[str, str], value: float) -> None:
    if not math.isfinite(value):
        return
    card = labels.get("device_uuid", "")
    if name in _OF_CARD and card:
        sums.cards.setdefault(card, {})[_OF_CARD[name]] = value
    elif name in _OF_CONTAINER and card:
        key = (labels.get("namespace", ""), labels.get("pod", ""), labels.get("container", ""), card)
        sums.containers.setdefault(key, {})[_OF_CONTAINER[name]] = value
