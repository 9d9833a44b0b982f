"""MIG through nvidia-ml-py, in the plugin's one NVML session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from ctypes import byref, c_uint
from typing import Any, Final

import pynvml

from hami.node.errors import NvmlError
from hami.node.mig.driver import GpuProfile, LiveInstance, MigDevice, MigMode
from hami.node.nvml import GpuIdentity, NvmlSession
from hami.protocol.inventory import MAX_MIG_PARTS, MigPlacement

_MAX_DEVICES: Final = 64
"""More MIG devices than any card has."""
_MAX_INSTANCES: Final = 64
_NAME_START: Final = "MIG "
_ABSENT: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""What a driver says of a profile that a card does not have."""
_NO_DEVICE: Final = frozenset({pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT})
"""What a driver says of the number of a MIG device that is not there."""


class NvmlMig:
    """:class:`hami.node.mig.driver.MigDriver` on a session."""

    def __init__(self, session: NvmlSession) -> None:
        self._session = session

    def gpus(self) -> tuple[GpuIdentity, ...]:
        return self._session.gpus()

    def mode(self, gpu: GpuIdentity) -> MigMode:
        def query() -> MigMode:
            current, pending = pynvml.nvmlDeviceGetMigMode(self._handle(gpu))
            return MigMode(bool(current), bool(pending))

        return self._session.call(f"read the MIG mode of GPU {gpu.index}", query)

    def enable(self, gpu: GpuIdentity) -> None:
        what = f"divide GPU {gpu.index} by MIG"

        def change() -> int:
            return int(pynvml.nvmlDeviceSetMigMode(self._handle(gpu), pynvml.NVML_DEVICE_MIG_ENABLE))

        activation = self._session.call(what, change)
        if activation != pynvml.NVML_SUCCESS:
            raise NvmlError(f"cannot {what} now: {pynvml.NVMLError(activation)}", activation)

    def profiles(self, gpu: GpuIdentity) -> tuple[GpuProfile, ...]:
        return self._session.call(
            f"read the MIG profiles of GPU {gpu.index}", lambda: tuple(_profiles(self._handle(gpu)))
        )

    def placements(self, gpu: GpuIdentity, profile: GpuProfile) -> tuple[MigPlacement, ...]:
        def query() -> tuple[MigPlacement, ...]:
            handle, count = self._handle(gpu), c_uint(0)
            ask = pynvml.nvmlDeviceGetGpuInstancePossiblePlacements
            ask(handle, profile.id, None, byref(count))
            count.value = min(count.value, MAX_MIG_PARTS)
            found = (pynvml.c_nvmlGpuInstancePlacement_t * max(count.value, 1))()
            if count.value:
                ask(handle, profile.id, found, byref(count))
            return tuple(MigPlacement(item.start, item.size) for item in found[: count.value])

        return self._session.call(
            f"read the places of MIG profile {_label(profile)} on GPU {gpu.index}", query
        )

    def instances(self, gpu: GpuIdentity) -> tuple[LiveInstance, ...]:
        def query() -> tuple[LiveInstance, ...]:
            handle = self._handle(gpu)
            found: dict[int, LiveInstance] = {}
            for profile in _profiles(handle):
                for instance in _gpu_instances(handle, profile.id):
                    info = pynvml.nvmlGpuInstanceGetInfo(instance)
                    place = MigPlacement(int(info.placement.start), int(info.placement.size))
                    compute = tuple(sorted(_compute_instances(instance)))
                    found[int(info.id)] = LiveInstance(int(info.id), int(info.profileId), place, compute)
            return tuple(found[number] for number in sorted(found))

        return self._session.call(f"list the MIG instances of GPU {gpu.index}", query)

    def devices(self, gpu: GpuIdentity) -> tuple[MigDevice, ...]:
        return self._session.call(
            f"list the MIG devices of GPU {gpu.index}",
            lambda: tuple(_device(number, handle) for number, handle in self._mig_handles(gpu)),
        )

    def create(self, gpu: GpuIdentity, profile: GpuProfile, placement: MigPlacement) -> int:
        where = f"{placement.start}+{placement.size}"

        def change() -> int:
            place = pynvml.c_nvmlGpuInstancePlacement_t(placement.start, placement.size)
            instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(
                self._handle(gpu), profile.id, byref(place)
            )
            return int(pynvml.nvmlGpuInstanceGetInfo(instance).id)

        return self._session.call(
            f"make MIG instance {_label(profile)} at {where} of GPU {gpu.index}", change
        )

    def create_compute(self, gpu: GpuIdentity, instance: int, profile: GpuProfile) -> int:
        def change() -> int:
            parent = pynvml.nvmlDeviceGetGpuInstanceById(self._handle(gpu), instance)
            number = _compute_profile(parent, profile.number)
            made = pynvml.nvmlGpuInstanceCreateComputeInstance(parent, number)
            return int(pynvml.nvmlComputeInstanceGetInfo_v2(made).id)

        what = f"make the compute instance of MIG instance {instance} ({_label(profile)})"
        return self._session.call(f"{what} of GPU {gpu.index}", change)

    def destroy_compute(self, gpu: GpuIdentity, instance: int, compute: int) -> None:
        def change() -> None:
            parent = pynvml.nvmlDeviceGetGpuInstanceById(self._handle(gpu), instance)
            pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(parent, compute))

        what = f"destroy compute instance {compute} of MIG instance {instance} of GPU {gpu.index}"
        self._session.call(what, lambda: _unless_gone(change))

    def destroy(self, gpu: GpuIdentity, instance: int) -> None:
        def change() -> None:
            pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(self._handle(gpu), instance))

        self._session.call(
            f"destroy MIG instance {instance} of GPU {gpu.index}", lambda: _unless_gone(change)
        )

    def is_busy(self, gpu: GpuIdentity, instance: int | None = None) -> bool:
        def query() -> bool:
            card = self._handle(gpu)
            if instance is None and _has_processes(card):
                return True
            return any(
                _has_processes(handle)
                for _, handle in self._mig_handles(gpu)
                if instance is None or pynvml.nvmlDeviceGetGpuInstanceId(handle) == instance
            )

        try:
            return self._session.call(f"list the processes of GPU {gpu.index}", query)
        except NvmlError:
            return True

    def _mig_handles(self, gpu: GpuIdentity) -> Iterator[tuple[int, Any]]:
        card = self._handle(gpu)
        try:
            most = int(pynvml.nvmlDeviceGetMaxMigDeviceCount(card))
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return
            raise
        for number in range(min(most, _MAX_DEVICES)):
            try:
                yield number, pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, number)
            except pynvml.NVMLError as error:
                if error.value not in _NO_DEVICE:
                    raise

    def _handle(self, gpu: GpuIdentity) -> Any:
        return self._session.handle(gpu)


def _profiles(handle: Any) -> Iterator[GpuProfile]:
    for number in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            info = _profile_info(handle, number)
        except pynvml.NVMLError as error:
            if error.value in _ABSENT:
                continue
            raise
        name = getattr(info, "name", b"")
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        yield GpuProfile(
            number,
            int(info.id),
            text.removeprefix(_NAME_START),
            int(info.sliceCount),
            int(info.instanceCount),
            int(info.multiprocessorCount),
            int(info.memorySizeMB),
        )


def _profile_info(handle: Any, number: int) -> Any:
    """With the name where the driver has that version of the question."""
    try:
        return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
    return pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, number, version=1)


def _gpu_instances(handle: Any, profile_id: int) -> list[Any]:
    count = c_uint(_MAX_INSTANCES)
    found = (pynvml.c_nvmlGpuInstance_t * _MAX_INSTANCES)()
    try:
        pynvml.nvmlDeviceGetGpuInstances(handle, profile_id, found, byref(count))
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:  # the card is not divided
            return []
        raise
    return list(found[: count.value])


def _compute_instances(instance: Any) -> Iterator[int]:
    for number in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            profile_id = _compute_profile(instance, number)
        except pynvml.NVMLError as error:
            if error.value in _ABSENT:
                continue
            raise
        count = c_uint(_MAX_INSTANCES)
        found = (pynvml.c_nvmlComputeInstance_t * _MAX_INSTANCES)()
        pynvml.nvmlGpuInstanceGetComputeInstances(instance, profile_id, found, byref(count))
        for item in found[: count.value]:
            yield int(pynvml.nvmlComputeInstanceGetInfo_v2(item).id)


def _compute_profile(instance: Any, number: int) -> int:
    engine = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    try:
        info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, engine)
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        info = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, number, engine, version=1)
    return int(info.id)


def _device(number: int, handle: Any) -> MigDevice:
    uuid = pynvml.nvmlDeviceGetUUID(handle)
    attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
    return MigDevice(
        number,
        uuid.decode("utf-8", "replace") if isinstance(uuid, bytes) else str(uuid),
        int(pynvml.nvmlDeviceGetGpuInstanceId(handle)),
        int(pynvml.nvmlDeviceGetComputeInstanceId(handle)),
        int(attributes.gpuInstanceSliceCount),
        int(attributes.computeInstanceSliceCount),
        int(attributes.memorySizeMB),
        int(attributes.multiprocessorCount),
    )


def _has_processes(handle: Any) -> bool:
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            if ask(handle):
                return True
        except pynvml.NVMLError as error:
            graphics = ask is pynvml.nvmlDeviceGetGraphicsRunningProcesses
            if not (graphics and error.value == pynvml.NVML_ERROR_NOT_SUPPORTED):
                raise
    return False


def _unless_gone(change: Callable[[], None]) -> None:
    try:
        change()
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_FOUND:
            raise


def _label(profile: GpuProfile) -> str:
    return profile.name or f"{profile.slices}g"
