"""What NVML says about the host's cards; a card that fails never hides another. Blocking."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.nvml import GpuIdentity, GpuMemory, GpuSensors, GpuUtilization, Nvml

RETRY_S: Final = 30.0

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


class HostReader:
    """Reads the cards; after a failure NVML is left alone for 30 s."""

    def __init__(
        self,
        nvml: Nvml,
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
        self._samples_until: dict[str, int] = {}

    @property
    def paused(self) -> bool:
        """Whether the device plugin is changing MIG, so that nobody may hold NVML open."""
        return self._mig_lock.exists()

    def read(self) -> HostState:
        """The cards by index; never raises."""
        if self.paused:
            self._nvml.close()
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
        return HostState(tuple(gpu for gpu in found if gpu is not None), up=True)

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
