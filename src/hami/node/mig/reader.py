"""Reads the MIG devices that are on the cards (static MIG). Blocking."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hami.node.errors import NvmlUnsupportedError
from hami.node.mig.caps import Minors, instance_nodes, read_minors
from hami.node.mig.driver import MigDevice, MigDriver
from hami.node.mig.static import StaticCard, StaticDevice, profile_name
from hami.node.nvml import GpuIdentity, numa_node


def read_cards(
    driver: MigDriver,
    gpus: Sequence[GpuIdentity],
    memory_mib: Callable[[GpuIdentity], int],
    minors: Callable[[], Minors] = read_minors,
) -> tuple[StaticCard, ...]:
    """The cards with their MIG devices. ``memory_mib`` gives the memory of a whole card.

    Raises :class:`hami.node.errors.NvmlError`.
    """
    caps = minors()
    return tuple(_card(driver, gpu, memory_mib, caps) for gpu in gpus)


def _card(
    driver: MigDriver, gpu: GpuIdentity, memory_mib: Callable[[GpuIdentity], int], caps: Minors
) -> StaticCard:
    try:
        divided = driver.mode(gpu).current
    except NvmlUnsupportedError:
        divided = False
    if not divided:
        return StaticCard(gpu.uuid, gpu.index, False)
    names = {profile.id: profile.name for profile in driver.profiles(gpu)}
    profiles = {each.id: names.get(each.profile_id, "") for each in driver.instances(gpu)}
    numa = numa_node(gpu.bus_id)

    def described(device: MigDevice) -> StaticDevice:
        name = profiles.get(device.gpu_instance, "")
        return StaticDevice(
            device.uuid,
            gpu.uuid,
            f"{gpu.index}:{device.index}",
            device.gpu_instance,
            device.compute_instance,
            name or profile_name(device.slices, device.memory_mib, memory_mib(gpu)),
            (device.slices, device.compute_slices, device.memory_mib, device.multiprocessors),
            gpu.bus_id,
            numa,
            instance_nodes(gpu.minor, device.gpu_instance, device.compute_instance, caps),
        )

    return StaticCard(gpu.uuid, gpu.index, True, tuple(described(device) for device in driver.devices(gpu)))
