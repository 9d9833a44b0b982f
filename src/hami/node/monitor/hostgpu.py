"""What NVML says about the host's cards; a card that fails never hides another. Blocking."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.nvml import EventSource, GpuIdentity, GpuMemory, GpuSensors, GpuUtilization, NvmlWithEvents

RETRY_S: Final = 30.0
LOCK_OLD_S: Final = 600.0
LOCK_TOLD_EVERY_S: Final = 60.0

_EVENTS_AT_ONCE: Final = 64
_MISSES: Final = 3
"""Waits in a row without an XID after which there is none: one may have met another kind of event."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostGpu:
    """One card; ``memory`` or ``utilization`` is None where the card does not tell."""

    identity: GpuIdentity
    memory: GpuMemory | None
    utilization: GpuUtilization | None
    sensors: GpuSensors | None = None


@dataclass(frozen=True, slots=True)
class HostState:
    """All readable cards; ``up`` is false while NVML cannot be used, ``paused`` while MIG changes."""

    gpus: tuple[HostGpu, ...] = ()
    up: bool = False
    paused: bool = False
    xids: Mapping[str, int] = field(default_factory=dict)
    """XIDs by UUID since this process watches; a card that cannot be watched is not in it."""


class HostReader:
    """Reads the cards; after a failure NVML is left alone for 30 s."""

    def __init__(
        self,
        nvml: NvmlWithEvents,
        mig_lock: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        self._nvml = nvml
        self._mig_lock = Path(mig_lock)
        self._clock = clock
        self._retry_s = retry_s
        self._not_before = float("-inf")
        self._told_at = float("-inf")
        self._samples_until: dict[str, int] = {}
        self._watching = threading.Lock()  # a scrape may end the watch while a tick counts
        self._events: EventSource | None = None
        self._watch_not_before = float("-inf")
        self._xids: Counter[str] = Counter()

    @property
    def paused(self) -> bool:
        """Whether the device plugin is changing MIG, so that nobody may hold NVML open."""
        return self._mig_lock.exists()

    def stand_aside(self) -> bool:
        """:attr:`paused`; then NVML is closed here too. A lock older than 10 min is told once a minute."""
        try:
            age = time.time() - self._mig_lock.stat().st_mtime
        except OSError:
            return False
        with self._watching:
            self._end_watch()
        self._nvml.close()
        now = self._clock()
        if age > LOCK_OLD_S and now - self._told_at >= LOCK_TOLD_EVERY_S:
            self._told_at = now
            advice = "if no device plugin is changing MIG, remove the file"
            log.warning(
                "mig_lock.old", extra={"path": str(self._mig_lock), "age_s": int(age), "advice": advice}
            )
        return True

    def read(self) -> HostState:
        """The cards by index; never raises."""
        if self.stand_aside():
            return HostState(paused=True)
        if self._clock() < self._not_before:
            return HostState()
        try:
            identities = self._nvml.gpus()
        except NvmlError as error:
            log.warning("nvml.down", extra={"cause": str(error)})
            self._not_before = self._clock() + self._retry_s
            return HostState()
        found = (self._gpu(identity) for identity in identities)
        return HostState(tuple(gpu for gpu in found if gpu is not None), up=True, xids=dict(self._xids))

    def watch_xids(self) -> None:
        """Count the XIDs since the last call; never raises. After a failure 30 s pass."""
        if self.paused or self._clock() < max(self._not_before, self._watch_not_before):
            return
        with self._watching:
            if self.paused:  # since then: who stood aside meanwhile has closed NVML already
                return
            try:
                self._count(self._events or self._begin_watch())
            except NvmlError as error:
                log.debug("nvml.no_events", extra={"cause": str(error)})
                self._end_watch()
                self._watch_not_before = self._clock() + self._retry_s

    def _begin_watch(self) -> EventSource:
        gpus = self._nvml.gpus()
        self._events, unwatched = self._nvml.watch(gpus)
        self._xids.update({gpu.uuid: 0 for gpu in gpus if gpu.uuid not in unwatched})
        return self._events

    def _count(self, events: EventSource) -> None:
        misses = 0
        for _ in range(_EVENTS_AT_ONCE):
            event = events.wait(0)
            misses = 0 if event is not None else misses + 1
            if event is not None and event.uuid:
                self._xids[event.uuid] += 1
            if misses == _MISSES:
                return

    def _end_watch(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def process_use(self) -> dict[str, dict[int, int]]:
        """Percent of the SMs by card UUID and host PID since the last call; never raises.

        The newest sample of each process counts. Cards that do not tell are left out.
        """
        if self.paused or self._clock() < self._not_before:
            return {}
        use: dict[str, dict[int, int]] = {}
        try:
            for gpu in self._nvml.gpus():
                try:
                    samples = self._nvml.processes(gpu, self._samples_until.get(gpu.uuid, 0))
                except NvmlError as error:
                    log.debug("nvml.no_processes", extra={"gpu": gpu.uuid, "cause": str(error)})
                    continue
                ordered = sorted(samples, key=lambda sample: sample.time_us)
                use[gpu.uuid] = {sample.pid: sample.sm for sample in ordered}
                if ordered:
                    self._samples_until[gpu.uuid] = ordered[-1].time_us
        except NvmlError as error:
            log.debug("nvml.down", extra={"cause": str(error)})
        return use

    def _gpu(self, identity: GpuIdentity) -> HostGpu | None:
        memory: GpuMemory | None = None
        utilization: GpuUtilization | None = None
        try:
            memory = self._nvml.memory(identity)
        except NvmlUnsupportedError:
            pass
        except NvmlError as error:
            log.warning("nvml.card_failed", extra={"gpu": identity.uuid, "cause": str(error)})
            return None
        try:
            utilization = self._nvml.utilization(identity)
        except NvmlError as error:
            log.debug("nvml.no_utilization", extra={"gpu": identity.uuid, "cause": str(error)})
        sensors: GpuSensors | None = None
        try:
            sensors = self._nvml.sensors(identity)
        except NvmlError as error:
            log.debug("nvml.no_sensors", extra={"gpu": identity.uuid, "cause": str(error)})
        return HostGpu(identity, memory, utilization, sensors)
