"""Utilisation of containers from the GPU time that our library charges them. Pure.

HAMi's library samples utilisation only while a core limit is in force, and only if NVML names the processes.
Ours keeps the GPU time of each device in its extension block; its growth between two ticks, times the factor
that the library has learned, is the share of the device that the container used. For a
region without that block NVML's samples of its processes are summed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hami.node.monitor.region import Region

_NS = 1e9


@dataclass(frozen=True, slots=True)
class _Reading:
    at: float
    charged: dict[int, int]
    percent: dict[int, float]


def process_shares(
    region: Region, host_pids: Collection[int], use: Mapping[str, Mapping[int, int]]
) -> dict[int, float]:
    """Percent of each device that the verified processes ``host_pids`` use, by NVML's samples (``use``)."""
    return {
        device.index: float(sum(use[device.uuid].get(pid, 0) for pid in host_pids))
        for device in region.devices
        if device.uuid in use
    }


class UtilizationMeter:
    """Remembers one reading per container."""

    def __init__(self) -> None:
        self._readings: dict[str, _Reading] = {}

    def observe(self, name: str, region: Region, now: float) -> None:
        """Take the reading of a tick; ``now`` is a clock in seconds that never goes back."""
        charged = {
            device.index: device.extra.charged_ns for device in region.devices if device.extra is not None
        }
        factors = {device.index: device.extra.factor for device in region.devices if device.extra is not None}
        last = self._readings.get(name)
        percent: dict[int, float] = {}
        if last is not None and now > last.at:
            for index, value in charged.items():
                grown = value - last.charged.get(index, value)
                share = 100 * grown * factors[index] / _NS / (now - last.at)
                percent[index] = min(max(share, 0.0), 100.0)
        self._readings[name] = _Reading(now, charged, percent)

    def percent(self, name: str, index: int) -> float:
        """Percent 0..100 of device ``index`` over the last tick, 0 when unknown."""
        reading = self._readings.get(name)
        return reading.percent.get(index, 0.0) if reading is not None else 0.0

    def retain(self, names: Iterable[str]) -> None:
        """Forget all containers but these."""
        kept = set(names)
        self._readings = {name: reading for name, reading in self._readings.items() if name in kept}
