"""A driver with MIG in memory, for tests of the plugin: cards of type A100-SXM4-40GB, failures on request."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from hami.node.errors import NvmlError, NvmlUnsupportedError
from hami.node.mig.driver import GpuProfile, LiveInstance, MigDevice, MigMode
from hami.node.nvml import GpuIdentity
from hami.protocol.allocation import ContainerDevice
from hami.protocol.inventory import MigPlacement

NOTE = "hami.io/vgpu-mig-allocations"
MODEL = "NVIDIA A100-SXM4-40GB"
PROFILES = (
    GpuProfile(0, 19, "1g.5gb", 1, 7, 14, 4864),
    GpuProfile(1, 14, "2g.10gb", 2, 3, 28, 9856),
    GpuProfile(2, 9, "3g.20gb", 3, 2, 42, 19968),
    GpuProfile(3, 5, "4g.20gb", 4, 1, 56, 19968),
    GpuProfile(4, 0, "7g.40gb", 7, 1, 98, 40192),
    GpuProfile(7, 20, "1g.5gb+me", 1, 1, 14, 4864),
)
PLACES = {
    0: [(start, 1) for start in range(7)],
    1: [(0, 2), (2, 2), (4, 2)],
    2: [(0, 4), (4, 4)],
    3: [(0, 4)],
    4: [(0, 8)],
    7: [(start, 1) for start in range(7)],
}


@dataclass
class Instance:
    """One GPU instance of the fake driver, with its compute instances and their UUIDs."""

    id: int
    profile: GpuProfile
    place: MigPlacement
    compute: dict[int, str] = field(default_factory=dict)
    processes: int = 0


@dataclass
class MigCard:
    """One card: MIG mode now and after a reset, instances, processes that use it undivided."""

    uuid: str
    name: str = MODEL
    current: bool = False
    pending: bool = False
    needs_reset: bool = False
    has_mig: bool = True
    processes: int = 0
    instances: dict[int, Instance] = field(default_factory=dict)


class FakeMig:
    """:class:`hami.node.mig.driver.MigDriver` in memory. ``fail[call]`` is raised by that call once each."""

    def __init__(self, *uuids: str, divided: bool = False) -> None:
        self.cards = [MigCard(uuid, current=divided, pending=divided) for uuid in uuids]
        self.fail: dict[str, list[NvmlError]] = {}
        self.calls: list[str] = []
        self.made = 0

    def card(self, uuid: str) -> MigCard:
        return next(card for card in self.cards if card.uuid == uuid)

    def add(self, uuid: str, number: int, start: int, *, id: int | None = None, compute: int = 1) -> Instance:
        """An instance that is there without the plugin."""
        card = self.card(uuid)
        size = next(size for first, size in PLACES[number] if first == start)
        profile = next(item for item in PROFILES if item.number == number)
        instance = Instance(self._free_id(card) if id is None else id, profile, MigPlacement(start, size))
        for each in range(compute):
            self.made += 1
            instance.compute[each] = f"MIG-{self.made:08d}-0000-0000-0000-000000000000"
        card.instances[instance.id] = instance
        return instance

    def places(self, uuid: str) -> list[tuple[str, int]]:
        """Profiles and starts of the instances on a card."""
        return sorted((item.profile.name, item.place.start) for item in self.card(uuid).instances.values())

    def gpus(self) -> tuple[GpuIdentity, ...]:
        self._step("gpus")
        return tuple(
            GpuIdentity(index, card.uuid, card.name, f"00000000:{index:02X}:00.0", index)
            for index, card in enumerate(self.cards)
        )

    def mode(self, gpu: GpuIdentity) -> MigMode:
        self._step("mode")
        card = self._mig(gpu)
        return MigMode(card.current, card.pending)

    def enable(self, gpu: GpuIdentity) -> None:
        self._step(f"enable {gpu.index}")
        card = self._mig(gpu)
        card.pending = True
        card.current = card.current or not card.needs_reset

    def profiles(self, gpu: GpuIdentity) -> tuple[GpuProfile, ...]:
        self._step("profiles")
        self._mig(gpu)
        return PROFILES

    def placements(self, gpu: GpuIdentity, profile: GpuProfile) -> tuple[MigPlacement, ...]:
        self._step("placements")
        if not self._mig(gpu).current:
            raise NvmlUnsupportedError("not divided", 3)
        return tuple(MigPlacement(*place) for place in PLACES[profile.number])

    def instances(self, gpu: GpuIdentity) -> tuple[LiveInstance, ...]:
        self._step("instances")
        found = self._mig(gpu).instances
        return tuple(
            LiveInstance(item.id, item.profile.id, item.place, tuple(sorted(item.compute)))
            for _, item in sorted(found.items())
        )

    def devices(self, gpu: GpuIdentity) -> tuple[MigDevice, ...]:
        self._step("devices")
        return tuple(
            MigDevice(
                number,
                uuid,
                item.id,
                compute,
                item.profile.slices,
                item.profile.slices,
                item.profile.memory_mib,
                item.profile.multiprocessors,
            )
            for number, (item, compute, uuid) in enumerate(self._devices(self._mig(gpu)))
        )

    def create(self, gpu: GpuIdentity, profile: GpuProfile, placement: MigPlacement) -> int:
        self._step(f"create {profile.name} at {placement.start}")
        card = self._mig(gpu)
        taken = [item.place for item in card.instances.values()]
        free = all(
            placement.start >= place.start + place.size or place.start >= placement.start + placement.size
            for place in taken
        )
        if not card.current or not free:
            raise NvmlError("Insufficient Resources", 23)
        instance = Instance(self._free_id(card), profile, placement)
        card.instances[instance.id] = instance
        return instance.id

    def create_compute(self, gpu: GpuIdentity, instance: int, profile: GpuProfile) -> int:
        self._step(f"create_compute {instance}")
        self.made += 1
        self._mig(gpu).instances[instance].compute[0] = f"MIG-{self.made:08d}-0000-0000-0000-000000000000"
        return 0

    def destroy_compute(self, gpu: GpuIdentity, instance: int, compute: int) -> None:
        self._step(f"destroy_compute {instance}")
        found = self._mig(gpu).instances.get(instance)
        if found is not None:
            self._refuse_in_use(found)
            found.compute.pop(compute, None)

    def destroy(self, gpu: GpuIdentity, instance: int) -> None:
        self._step(f"destroy {instance}")
        found = self._mig(gpu).instances.get(instance)
        if found is not None:
            self._refuse_in_use(found)
            assert not found.compute, "compute instances go first"
            del self._mig(gpu).instances[instance]

    def is_busy(self, gpu: GpuIdentity, instance: int | None = None) -> bool:
        self._step("is_busy")
        card = self.card(gpu.uuid)
        if instance is not None:
            return card.instances[instance].processes > 0
        return card.processes > 0 or any(item.processes for item in card.instances.values())

    def _step(self, call: str) -> None:
        self.calls.append(call)
        waiting = self.fail.get(call.partition(" ")[0])
        if waiting:
            raise waiting.pop(0)

    def _mig(self, gpu: GpuIdentity) -> MigCard:
        card = self.card(gpu.uuid)
        if not card.has_mig:
            raise NvmlUnsupportedError("Not Supported", 3)
        return card

    @staticmethod
    def _refuse_in_use(instance: Instance) -> None:
        if instance.processes:
            raise NvmlError("In use by another client", 19)

    @staticmethod
    def _free_id(card: MigCard) -> int:
        return next(number for number in range(1, 100) if number not in card.instances)

    @staticmethod
    def _devices(card: MigCard) -> Iterator[tuple[Instance, int, str]]:
        for _, item in sorted(card.instances.items()):
            for compute, uuid in sorted(item.compute.items()):
                yield item, compute, uuid


class FakeGiven:
    """What kubelet knows that pods were given: UIDs by MIG UUID."""

    def __init__(self) -> None:
        self.pods: dict[str, set[str]] = {}

    def owners(self, uuids: Collection[str]) -> dict[str, set[str]]:
        return {uuid: pods for uuid, pods in self.pods.items() if uuid in uuids}


def reservation(
    gpu: str,
    profile: str,
    start: int,
    size: int,
    *,
    container: int = 0,
    device: int = 0,
    ids: tuple[str, int, int] | None = None,
) -> dict[str, object]:
    """One element of ``hami.io/vgpu-mig-allocations``; ``ids``: MIG UUID, GPU and compute instance."""
    found: dict[str, object] = {
        "containerIndex": container,
        "deviceIndex": device,
        "gpuUUID": gpu,
        "profile": profile,
        "placement": {"start": start, "size": size},
    }
    if ids is not None:
        found |= {"migUUID": ids[0], "gpuInstanceID": ids[1], "computeInstanceID": ids[2]}
    return found


def mig_pod(
    make_pod: Callable[..., dict[str, Any]], name: str, *reservations: dict[str, object], **more: Any
) -> dict[str, Any]:
    """A pod bound by our scheduler with these reservations; its allocation names the same cards."""
    slots: dict[int, list[str]] = {}
    for item in reservations:
        container = item["containerIndex"]
        assert isinstance(container, int)
        slots.setdefault(container, []).append(f"{item['gpuUUID']},NVIDIA,4864,15:")
    containers = len(more.get("init", ())) + len(more.get("containers", ("app",)))
    text = "".join("".join(slots.get(slot, [])) + ";" for slot in range(containers))
    pod = make_pod(name, text, **more)
    pod["metadata"]["annotations"]["hami.io/vgpu-mig-allocations"] = json.dumps(list(reservations))
    return pod


def slot(*uuids: str) -> tuple[ContainerDevice, ...]:
    """Devices of one container as the allocation names them."""
    return tuple(ContainerDevice(uuid, "NVIDIA", 4864, 15) for uuid in uuids)
