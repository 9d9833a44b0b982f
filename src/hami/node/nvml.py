"""NVML behind our own Protocol: one session, opened on demand and again after it was lost.

Every method blocks (call it in a thread) and raises :class:`NvmlError`. A simulated driver stands in at
the level of ``libnvidia-ml.so.1``, so the tests use this very module.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import pynvml

from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.pci import sysfs_folder

log = logging.getLogger(__name__)
T = TypeVar("T")
D = TypeVar("D")

LIBRARY_FOLDERS: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
)
LIBRARY: Final = "libnvidia-ml.so.1"
_GONE: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""Errors of the driver as a whole, after which a new session is opened. A lost card is none of them."""
_UNKNOWN: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""What a driver says of a question that it does not know."""
_NO_LINK: Final = _UNKNOWN | {pynvml.NVML_ERROR_INVALID_ARGUMENT}
"""What a driver says of a link that a card does not have."""
_NO_INSTANCE: Final = 0xFFFFFFFF
"""What an event says of a MIG instance that it does not name."""
_MAX_LINKS: Final = 64
"""More links than any card has; NVML refuses those beyond the last one."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """What does not change while the driver is loaded. ``bus_id`` as NVML writes it
    (``00000000:3B:00.0``).
    """

    index: int
    uuid: str
    name: str
    bus_id: str
    minor: int


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of device memory."""

    total: int
    used: int


@dataclass(frozen=True, slots=True)
class GpuUtilization:
    """Percent 0..100 of the last sample period."""

    gpu: int
    memory: int


@dataclass(frozen=True, slots=True)
class GpuSensors:
    """State of the hardware, None where a card does not tell: degrees Celsius, watts, errors since the driver
    was loaded.
    """

    temperature: int | None
    power_watts: float | None
    ecc_uncorrected: int | None


@dataclass(frozen=True, slots=True)
class NvLink:
    """One enabled NVLink of a card: PCI bus id at its other end (empty: the card does not tell), and whether
    that is a switch.
    """

    remote: str
    to_switch: bool = False


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One sample of a process: PID as NVML names it, time in microseconds, percent 0..100 of the SMs."""

    pid: int
    time_us: int
    sm: int


@dataclass(frozen=True, slots=True)
class XidEvent:
    """One XID of a card; ``uuid`` is empty where NVML did not say which card it was.

    ``gpu_instance`` and ``compute_instance`` name the MIG instance, None where the event names none.
    """

    uuid: str
    xid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


class Nvml(Protocol):
    """What the node components ask of NVML."""

    def gpus(self) -> tuple[GpuIdentity, ...]:
        """All cards, by index. A card that was lost is still listed as it was seen before."""
        ...

    def memory(self, gpu: GpuIdentity) -> GpuMemory:
        """Memory of a card; raises :class:`NvmlUnsupportedError` on unified-memory cards."""
        ...

    def utilization(self, gpu: GpuIdentity) -> GpuUtilization:
        """Utilisation of a card."""
        ...

    def sensors(self, gpu: GpuIdentity) -> GpuSensors:
        """Temperature, power and memory errors of a card."""
        ...

    def processes(self, gpu: GpuIdentity, since_us: int) -> tuple[ProcessUse, ...]:
        """Samples of the processes on a card that are younger than the time stamp ``since_us``."""
        ...

    def nvlinks(self, gpu: GpuIdentity) -> tuple[NvLink, ...]:
        """The enabled NVLinks of a card; none where it has no NVLink."""
        ...

    def common_ancestor(self, one: GpuIdentity, other: GpuIdentity) -> int | None:
        """NVML's number of the closest part of the machine that two cards share, None where it knows none."""
        ...

    def close(self) -> None:
        """End the session; a later call opens a new one."""
        ...


class EventSource(Protocol):
    """XID events of cards."""

    def wait(self, timeout_s: float) -> XidEvent | None:
        """The next event, None after ``timeout_s`` seconds."""
        ...

    def close(self) -> None:
        """Give the event set back."""
        ...


class EventOpener(Protocol):
    """Where event sources come from."""

    def watch(self, gpus: Sequence[GpuIdentity]) -> tuple[EventSource, tuple[str, ...]]:
        """A source for ``gpus`` and the UUIDs that cannot be watched; raises :class:`NvmlError`."""
        ...


class NvmlWithEvents(Nvml, EventOpener, Protocol):
    """NVML as the plugin and the monitor need it."""


def resolve_library(driver_root: str, name: str = LIBRARY) -> str:
    """Path of a driver's library below the driver root as mounted in this container, else the bare soname."""
    if driver_root not in ("", "/"):
        for folder in LIBRARY_FOLDERS:
            candidate = Path(driver_root, folder, name)
            if candidate.is_file():
                return str(candidate)
    return name


class NvmlSession:
    """:class:`Nvml` on nvidia-ml-py; safe to use from several threads."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._library = library
        self._lock = threading.RLock()
        self._open = False
        self._known: dict[int, GpuIdentity] = {}

    def gpus(self) -> tuple[GpuIdentity, ...]:
        return self.call("list GPUs", self._gpus)

    def memory(self, gpu: GpuIdentity) -> GpuMemory:
        def query() -> GpuMemory:
            info = pynvml.nvmlDeviceGetMemoryInfo(self.handle(gpu))
            return GpuMemory(int(info.total), int(info.used))

        return self.call(f"read the memory of GPU {gpu.index}", query)

    def utilization(self, gpu: GpuIdentity) -> GpuUtilization:
        def query() -> GpuUtilization:
            rates = pynvml.nvmlDeviceGetUtilizationRates(self.handle(gpu))
            return GpuUtilization(int(rates.gpu), int(rates.memory))

        return self.call(f"read the utilisation of GPU {gpu.index}", query)

    def sensors(self, gpu: GpuIdentity) -> GpuSensors:
        def query() -> GpuSensors:
            handle = self.handle(gpu)
            return GpuSensors(
                _optional(
                    lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)), None
                ),
                _optional(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000, None),
                _optional(
                    lambda: int(
                        pynvml.nvmlDeviceGetTotalEccErrors(
                            handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
                        )
                    ),
                    None,
                ),
            )

        return self.call(f"read the sensors of GPU {gpu.index}", query)

    def processes(self, gpu: GpuIdentity, since_us: int) -> tuple[ProcessUse, ...]:
        def query() -> tuple[ProcessUse, ...]:
            try:
                found = pynvml.nvmlDeviceGetProcessUtilization(self.handle(gpu), since_us)
            except pynvml.NVMLError as error:
                # The binding raises success when there is no room to ask for, that is: no sample.
                if error.value in (pynvml.NVML_SUCCESS, pynvml.NVML_ERROR_NOT_FOUND):
                    return ()
                raise
            return tuple(
                ProcessUse(int(item.pid), int(item.timeStamp), min(int(item.smUtil), 100)) for item in found
            )

        return self.call(f"read the processes of GPU {gpu.index}", query)

    def nvlinks(self, gpu: GpuIdentity) -> tuple[NvLink, ...]:
        def query() -> tuple[NvLink, ...]:
            handle = self.handle(gpu)
            links = (_nvlink(handle, number) for number in range(_MAX_LINKS))
            return tuple(link for link in links if link is not None)

        return self.call(f"read the NVLinks of GPU {gpu.index}", query)

    def common_ancestor(self, one: GpuIdentity, other: GpuIdentity) -> int | None:
        def query() -> int | None:
            pair = self.handle(one), self.handle(other)
            return _answered(lambda: int(pynvml.nvmlDeviceGetTopologyCommonAncestor(*pair)), _UNKNOWN)

        return self.call(f"read the common ancestor of GPUs {one.index} and {other.index}", query)

    def watch(self, gpus: Sequence[GpuIdentity]) -> tuple[EventSource, tuple[str, ...]]:
        """A source of XID events of ``gpus``, and the UUIDs of those that cannot be watched at all.

        A card that does not support events is watched by nothing but is not reported either.
        """
        return self.call("watch for XID events", lambda: self._watch(gpus))

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()

    def _gpus(self) -> tuple[GpuIdentity, ...]:
        found = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                identity = self._identity(index, pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError as error:
                if error.value in _GONE:
                    raise
                log.warning("nvml.card_lost", extra={"index": index, "cause": str(error)})
                if index not in self._known:
                    continue
                identity = self._known[index]
            self._known[index] = identity
            found.append(identity)
        return tuple(found)

    def _identity(self, index: int, handle: Any) -> GpuIdentity:
        return GpuIdentity(
            index,
            _text(pynvml.nvmlDeviceGetUUID(handle)),
            _text(pynvml.nvmlDeviceGetName(handle)),
            _optional(lambda: _text(pynvml.nvmlDeviceGetPciInfo(handle).busId), ""),
            _optional(lambda: int(pynvml.nvmlDeviceGetMinorNumber(handle)), index),
        )

    def _watch(self, gpus: Sequence[GpuIdentity]) -> tuple[EventSource, tuple[str, ...]]:
        wanted = (
            pynvml.nvmlEventTypeXidCriticalError
            | pynvml.nvmlEventTypeDoubleBitEccError
            | pynvml.nvmlEventTypeSingleBitEccError
        )
        # NVML counts its users: the source holds the driver on its own, whatever happens to the session.
        pynvml.nvmlInit()
        try:
            events = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise
        unwatched = []
        for gpu in gpus:
            try:
                handle = self.handle(gpu)
                supported = pynvml.nvmlDeviceGetSupportedEventTypes(handle)
                pynvml.nvmlDeviceRegisterEvents(handle, wanted & supported, events)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                    log.warning("health.not_supported", extra={"gpu": gpu.uuid})
                else:
                    unwatched.append(gpu.uuid)
        return _NvmlEvents(events), tuple(unwatched)

    def handle(self, gpu: GpuIdentity) -> Any:
        """NVML's handle of a card, inside of :meth:`call`."""
        return pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid.encode())

    def call(self, what: str, query: Callable[[], T]) -> T:
        """Run ``query`` in the session, one at a time; ``what`` completes "cannot" in the error's text.

        Raises :class:`NvmlError`.
        """
        with self._lock:
            self._ensure_open()
            try:
                return query()
            except pynvml.NVMLError as error:
                if error.value in _GONE:
                    self.close()
                raise _typed(what, error) from error

    def _ensure_open(self) -> None:
        if self._open:
            return
        try:
            if self._library != LIBRARY:
                # The soname is then known to the loader, and nvidia-ml-py gets this very file.
                ctypes.CDLL(self._library, mode=ctypes.RTLD_GLOBAL)
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _typed("initialise NVML", error) from error
        except OSError as error:
            raise NvmlError(f"cannot load {self._library}: {error}") from error
        self._open = True


class _NvmlEvents:
    def __init__(self, events: Any) -> None:
        self._events = events

    def wait(self, timeout_s: float) -> XidEvent | None:
        try:
            data = pynvml.nvmlEventSetWait_v2(self._events, int(timeout_s * 1000))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise _typed("wait for XID events", error) from error
        if data.eventType != pynvml.nvmlEventTypeXidCriticalError:
            log.info("health.other_event", extra={"type": int(data.eventType)})
            return None
        uuid = _optional(lambda: _text(pynvml.nvmlDeviceGetUUID(data.device)), "")
        instances = (_instance_of(data, "gpuInstanceId"), _instance_of(data, "computeInstanceId"))
        return XidEvent(uuid, int(data.eventData), *instances)

    def close(self) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self._events)
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def numa_node(bus_id: str, sysfs: str = "/sys") -> int:
    """NUMA node of a PCI device; 0 when unknown."""
    try:
        return max(int(Path(sysfs_folder(bus_id, sysfs), "numa_node").read_text()), 0)
    except (OSError, ValueError):
        return 0


def _nvlink(handle: Any, number: int) -> NvLink | None:
    """An enabled link, None where it is not enabled or not there."""
    state = _answered(lambda: int(pynvml.nvmlDeviceGetNvLinkState(handle, number)), _NO_LINK)
    if state != pynvml.NVML_FEATURE_ENABLED:
        return None
    remote = _answered(lambda: _text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, number).busId), _NO_LINK)
    kind = _answered(lambda: int(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, number)), _NO_LINK)
    return NvLink(remote or "", kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)


def _instance_of(data: Any, field: str) -> int | None:
    """The id of a MIG instance in an event, None for none."""
    value = int(getattr(data, field, _NO_INSTANCE))
    return None if value == _NO_INSTANCE else value


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _optional(query: Callable[[], T], default: D) -> T | D:
    try:
        return query()
    except pynvml.NVMLError:
        return default


def _answered(query: Callable[[], T], no_answer: frozenset[int]) -> T | None:
    """The answer, None for these errors."""
    try:
        return query()
    except pynvml.NVMLError as error:
        if error.value in no_answer:
            return None
        raise


def _typed(what: str, error: pynvml.NVMLError) -> NvmlError:
    code = int(error.value)
    kind = NvmlUnsupportedError if code == pynvml.NVML_ERROR_NOT_SUPPORTED else NvmlError
    return kind(f"cannot {what}: {error}", code)
