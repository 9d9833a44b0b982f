"""From samples to Prometheus series, names and labels as monitor.md §6 (WIRE). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric

from hami.node.monitor.hostgpu import HostGpu, HostState
from hami.node.monitor.pods import PodInfo
from hami.node.monitor.region import DeviceUse, Region
from hami.node.nvml import GpuSensors
from hami.protocol.allocation import ContainerDevice, Slot

ZONE: Final = {"zone": "vGPU"}
FUTURE_S: Final = 300.0
_MIB: Final = 1 << 20

HELP: Final[Mapping[str, str]] = {
    "hami_host_gpu_memory_used_bytes": "Used memory of a card, bytes",
    "hami_host_gpu_memory_total_bytes": "Memory of a card, bytes",
    "hami_host_gpu_utilization_ratio": "Utilisation of a card, percent 0-100",
    "hami_host_gpu_memory_controller_utilization_ratio": "Memory controller utilisation, percent 0-100",
    "hami_host_gpu_temperature_celsius": "Temperature of a card, degrees Celsius",
    "hami_host_gpu_power_watts": "Power draw of a card, watts",
    "hami_host_gpu_ecc_uncorrected_errors": "Uncorrected memory errors of a card since the driver started",
    "hami_host_gpu_xid_errors": "XIDs that a card has reported since the monitor started",
    "hami_vgpu_memory_used_bytes": "Device memory used by a container, bytes",
    "hami_vgpu_memory_limit_bytes": "Device memory limit of a container, bytes, 0 = unlimited",
    "hami_container_device_memory_bytes": "Device memory used by a container, bytes",
    "hami_container_device_utilization_ratio": "SM utilisation of a container's processes, percent, summed",
    "hami_vgpu_memory_context_bytes": "Part of the used memory: CUDA contexts, bytes",
    "hami_vgpu_memory_module_bytes": "Part of the used memory: modules, bytes",
    "hami_vgpu_memory_buffer_bytes": "Part of the used memory: buffers, bytes",
    "hami_container_last_kernel_elapsed_seconds": "Seconds since the container's last kernel launch",
    "hami_mig_device_info": "A MIG instance of a container, always 1",
    "hami_vgpu_hook_active": "1 if the container's region is valid, 0 if nothing has used CUDA yet",
    "hami_vgpu_core_limit_ratio": "Core limit of a container, percent, 0 or 100 = unlimited",
    "hami_vgpu_process_count": "Processes of a container that use the library",
    "hami_vgpu_throttled_seconds": "Time that launches waited because of the core limit",
    "hami_vgpu_oom": "Memory requests that were refused because of the limit",
    "hami_vgpu_memory_peak_bytes": "Largest memory use of a container, bytes",
    "hami_vgpu_memory_residual_bytes": "Memory that the driver uses for the container beyond its allocations",
    "hami_vgpu_blocked": "1 while the container's launches wait for one of higher priority",
    "hami_vgpu_core_limit_enforced": "1 while the container's core limit is enforced",
    "hami_container_cache_directory_bytes": "Size of the container's cache directory, bytes",
    "hami_hostpid_broker_fallbacks": "Processes of a container that the host PID broker did not answer",
    "hami_monitor_nvml_up": "1 while NVML can be used",
    "hami_monitor_last_update_timestamp_seconds": "Unix time of the last completed tick",
    "hami_monitor_tracked_containers": "Containers whose region is being read",
    "hami_monitor_feedback_paused": "1 while the feedback loop is paused for a change of MIG",
    "hami_monitor_cache_errors": "Regions that could not be read, by reason",
    "hami_monitor_gc_removed": "Cache directories removed",
    "hami_monitor_duplicate_series": "Series dropped because another one had the same name and labels",
    "hami_monitor_foreign_hostpid": "Host PIDs in regions that do not belong to the pod",
    "hami_build_info": "Version of this program",
    "HostGPUMemoryUsage": "Legacy name of hami_host_gpu_memory_used_bytes",
    "HostCoreUtilization": "Legacy name of hami_host_gpu_utilization_ratio",
    "vGPU_device_memory_usage_in_bytes": "Legacy name of hami_vgpu_memory_used_bytes",
    "vGPU_device_memory_limit_in_bytes": "Legacy name of hami_vgpu_memory_limit_bytes",
    "Device_memory_desc_of_container": "Legacy: used memory with its parts as labels",
    "Device_utilization_desc_of_container": "Legacy name of hami_container_device_utilization_ratio",
    "Device_last_kernel_of_container": "Legacy name of hami_container_last_kernel_elapsed_seconds",
    "MigInfo": "Legacy name of hami_mig_device_info",
}
"""Every metric with its text; counters without their ``_total``."""


@dataclass(frozen=True, slots=True)
class ContainerSample:
    """One container at one moment. ``region`` is None before CUDA was used, flags and size where unknown."""

    namespace: str
    pod: str
    container: str
    allocated: Slot
    region: Region | None
    blocked: bool | None = None
    enforced: bool | None = None
    directory_bytes: int | None = None
    utilization: Mapping[int, float] = field(default_factory=dict)
    """Percent per device index, used where the library itself reports none."""

    @property
    def labels(self) -> dict[str, str]:
        return {"namespace": self.namespace, "pod": self.pod, "container": self.container}


@dataclass(frozen=True, slots=True)
class SelfState:
    """What the monitor says about itself."""

    last_update: float
    tracked: int
    paused: bool
    cache_errors: Mapping[str, int]
    removed: int
    duplicates: int
    foreign_host_pids: int


class SeriesBook:
    """Collects series; one that exists already is dropped and counted."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
        self.duplicates = 0

    def gauge(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """A gauge in zone ``vGPU``."""
        self._add(name, "gauge", {**ZONE, **labels}, value)

    def counter(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """A counter in zone ``vGPU``; ``_total`` is appended to its name."""
        self._add(name, "counter", {**ZONE, **labels}, value)

    def plain(self, name: str, labels: Mapping[str, str], value: float) -> None:
        """A gauge without a zone."""
        self._add(name, "gauge", labels, value)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(self._metrics.values())

    def _add(self, name: str, kind: str, labels: Mapping[str, str], value: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        if key in self._seen:
            self.duplicates += 1
            return
        self._seen.add(key)
        metric = self._metrics.get(name)
        if metric is None:
            metric = self._metrics[name] = Metric(name, HELP[name], kind)
        metric.add_sample(f"{name}_total" if kind == "counter" else name, dict(labels), float(value))


def add_host(book: SeriesBook, node: str, host: HostState, legacy: bool) -> None:
    """Series of the physical cards, and whether NVML is up."""
    book.gauge("hami_monitor_nvml_up", {}, host.up)
    for gpu in host.gpus:
        labels = {
            "node": node,
            "device_index": str(gpu.identity.index),
            "device_uuid": gpu.identity.uuid,
            "device_type": f"NVIDIA-{gpu.identity.name}",
        }
        if gpu.memory is not None:
            book.gauge("hami_host_gpu_memory_used_bytes", labels, gpu.memory.used)
            book.gauge("hami_host_gpu_memory_total_bytes", labels, gpu.memory.total)
        if gpu.utilization is not None:
            book.gauge("hami_host_gpu_utilization_ratio", labels, gpu.utilization.gpu)
            name = "hami_host_gpu_memory_controller_utilization_ratio"
            book.gauge(name, labels, gpu.utilization.memory)
        if gpu.identity.uuid in host.xids:
            book.counter("hami_host_gpu_xid_errors", labels, host.xids[gpu.identity.uuid])
        if gpu.sensors is not None:
            _add_sensors(book, labels, gpu.sensors)
        if legacy:
            _add_legacy_host(book, node, gpu)


def add_container(
    book: SeriesBook, sample: ContainerSample, now: float, *, emit_allocated: bool, legacy: bool
) -> None:
    """Series of one container; ``now`` is Unix seconds."""
    region = sample.region
    if region is not None:
        for device in region.devices:
            _add_device(book, sample, region, device, now)
            if legacy:
                _add_legacy_device(book, sample, region, device, now)
        if any(region.broker):  # nobody asks with the gate off
            book.counter("hami_hostpid_broker_fallbacks", sample.labels, region.broker[1])
    elif emit_allocated:
        for index, allocated in enumerate(sample.allocated):
            _add_allocated(book, sample, index, allocated)
    for name, value in (
        ("hami_vgpu_blocked", sample.blocked),
        ("hami_vgpu_core_limit_enforced", sample.enforced),
        ("hami_container_cache_directory_bytes", sample.directory_bytes),
    ):
        if value is not None:
            book.gauge(name, sample.labels, value)


def add_mig(book: SeriesBook, pod: PodInfo, legacy: bool) -> None:
    """One series per MIG instance of a pod."""
    for container, item in pod.mig:
        instance = str(item.gpu_instance_id)
        book.gauge(
            "hami_mig_device_info",
            {
                "namespace": pod.namespace,
                "pod": pod.name,
                "container": container,
                "vdevice_index": str(item.device_index),
                "device_uuid": item.gpu_uuid,
                "mig_uuid": item.mig_uuid,
                "profile": item.profile,
                "gpu_instance_id": instance,
                "compute_instance_id": str(item.compute_instance_id),
            },
            1,
        )
        if legacy:
            book.gauge(
                "MigInfo",
                {
                    "podnamespace": pod.namespace,
                    "podname": pod.name,
                    "ctrname": container,
                    "vdeviceid": str(item.device_index),
                    "deviceuuid": item.gpu_uuid,
                    "instanceid": instance,
                },
                1,
            )


def add_self(book: SeriesBook, state: SelfState) -> None:
    """Series about the monitor; the last ones to be added."""
    book.gauge("hami_monitor_last_update_timestamp_seconds", {}, state.last_update)
    book.gauge("hami_monitor_tracked_containers", {}, state.tracked)
    book.gauge("hami_monitor_feedback_paused", {}, state.paused)
    for reason, count in sorted(state.cache_errors.items()):
        book.counter("hami_monitor_cache_errors", {"reason": reason}, count)
    book.counter("hami_monitor_gc_removed", {}, state.removed)
    book.counter("hami_monitor_foreign_hostpid", {}, state.foreign_host_pids)
    book.counter("hami_monitor_duplicate_series", {}, state.duplicates + book.duplicates)


def elapsed_seconds(last_kernel: int, now: float) -> float | None:
    """Seconds since the last kernel, None when unknown or more than 5 min ahead of our clock."""
    if last_kernel <= 0 or is_ahead(last_kernel, now):
        return None
    return max(now - last_kernel, 0.0)


def is_ahead(last_kernel: int, now: float) -> bool:
    """Whether a time lies too far ahead of our clock to be believed."""
    return last_kernel > now + FUTURE_S


def _add_sensors(book: SeriesBook, labels: Mapping[str, str], sensors: GpuSensors) -> None:
    if sensors.temperature is not None:
        book.gauge("hami_host_gpu_temperature_celsius", labels, sensors.temperature)
    if sensors.power_watts is not None:
        book.gauge("hami_host_gpu_power_watts", labels, sensors.power_watts)
    if sensors.ecc_uncorrected is not None:
        book.counter("hami_host_gpu_ecc_uncorrected_errors", labels, sensors.ecc_uncorrected)


def _add_device(
    book: SeriesBook, sample: ContainerSample, region: Region, device: DeviceUse, now: float
) -> None:
    labels = _device_labels(sample, device.index, device.uuid)
    values: Iterable[tuple[str, float]] = (
        ("hami_vgpu_memory_used_bytes", device.total),
        ("hami_vgpu_memory_limit_bytes", device.memory_limit),
        ("hami_container_device_memory_bytes", device.total),
        ("hami_container_device_utilization_ratio", _utilization(sample, device)),
        ("hami_vgpu_memory_context_bytes", device.context),
        ("hami_vgpu_memory_module_bytes", device.module),
        ("hami_vgpu_memory_buffer_bytes", device.buffer),
        ("hami_vgpu_hook_active", 1),
        ("hami_vgpu_core_limit_ratio", device.core_limit),
        ("hami_vgpu_process_count", region.processes),
    )
    for name, value in values:
        book.gauge(name, labels, value)
    elapsed = elapsed_seconds(region.last_kernel, now)
    if elapsed is not None:
        book.gauge("hami_container_last_kernel_elapsed_seconds", labels, elapsed)
    if device.extra is not None:
        book.counter("hami_vgpu_throttled_seconds", labels, device.extra.throttled_seconds)
        book.counter("hami_vgpu_oom", labels, device.extra.refusals)
        book.gauge("hami_vgpu_memory_peak_bytes", labels, device.extra.peak)
        book.gauge("hami_vgpu_memory_residual_bytes", labels, device.extra.residual)


def _utilization(sample: ContainerSample, device: DeviceUse) -> float:
    return device.sm or sample.utilization.get(device.index, 0.0)


def _add_allocated(book: SeriesBook, sample: ContainerSample, index: int, device: ContainerDevice) -> None:
    labels = _device_labels(sample, index, device.uuid)
    book.gauge("hami_vgpu_memory_used_bytes", labels, 0)
    book.gauge("hami_vgpu_memory_limit_bytes", labels, device.usedmem * _MIB)
    book.gauge("hami_vgpu_core_limit_ratio", labels, device.usedcores)
    book.gauge("hami_vgpu_hook_active", labels, 0)


def _device_labels(sample: ContainerSample, index: int, uuid: str) -> dict[str, str]:
    return {**sample.labels, "vdevice_index": str(index), "device_uuid": uuid}


def _add_legacy_host(book: SeriesBook, node: str, gpu: HostGpu) -> None:
    labels = {
        "nodeid": node,
        "deviceidx": str(gpu.identity.index),
        "deviceuuid": gpu.identity.uuid,
        "devicetype": f"NVIDIA-{gpu.identity.name}",
    }
    if gpu.memory is not None:
        book.gauge("HostGPUMemoryUsage", labels, gpu.memory.used)
    if gpu.utilization is not None:
        book.gauge("HostCoreUtilization", labels, gpu.utilization.gpu)


def _add_legacy_device(
    book: SeriesBook, sample: ContainerSample, region: Region, device: DeviceUse, now: float
) -> None:
    labels = {
        "podnamespace": sample.namespace,
        "podname": sample.pod,
        "ctrname": sample.container,
        "vdeviceid": str(device.index),
        "deviceuuid": device.uuid,
    }
    parts: Sequence[tuple[str, int]] = (
        ("context", device.context),
        ("module", device.module),
        ("data", device.buffer),
        ("offset", max(device.total - device.context - device.module - device.buffer, 0)),
    )
    book.gauge("vGPU_device_memory_usage_in_bytes", labels, device.total)
    book.gauge("vGPU_device_memory_limit_in_bytes", labels, device.memory_limit)
    described = {**labels, **{name: str(value) for name, value in parts}}
    book.gauge("Device_memory_desc_of_container", described, device.total)
    book.gauge("Device_utilization_desc_of_container", labels, _utilization(sample, device))
    elapsed = elapsed_seconds(region.last_kernel, now)
    if elapsed is not None:
        book.gauge("Device_last_kernel_of_container", labels, elapsed)
