"""Which devices every node has: inventory decoding and handshakes, per node and vendor (scheduler.md
§5.2)."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.scheduler.answers import NodeOutcome, Notice
from hami.scheduler.nodes import NodeFacts
from hami.vendors.engine import read_inventory
from hami.vendors.types import DeviceInfo, VendorProfile

Devices = Mapping[str, tuple[DeviceInfo, ...]]


@dataclass(frozen=True, slots=True)
class Seen:
    """Nodes whose placement facts changed, each with the devices that hold now, and what to tell the
    caller."""

    changed: tuple[tuple[NodeFacts, Devices], ...] = ()
    outcome: NodeOutcome = field(default_factory=NodeOutcome)


@dataclass(frozen=True, slots=True)
class RegistryMemory:
    """Last good devices, which outlive a register text that became unreadable."""

    devices: Mapping[str, Devices]


class Registry:
    """Devices of every node seen, registered or not."""

    def __init__(self, profiles: Mapping[str, VendorProfile]) -> None:
        self._profiles = profiles
        self._facts: dict[str, NodeFacts] = {}
        self._devices: dict[str, Devices] = {}

    def facts(self, name: str) -> NodeFacts | None:
        return self._facts.get(name)

    def see(self, facts: NodeFacts, now: float) -> Seen:
        if self._facts.get(facts.name) == facts:
            return Seen()
        before = self._devices.get(facts.name, {})
        devices: dict[str, tuple[DeviceInfo, ...]] = {}
        notices = []
        for word, profile in self._profiles.items():
            try:
                inventory = read_inventory(profile, facts)
            except DevicesAbsent:
                continue
            except DevicesMalformed as error:
                notices.append(
                    Notice("Node", "", facts.name, "", "RegistrationUnreadable", f"{word}: {error}")
                )
                if word in before:
                    devices[word] = before[word]
                continue
            devices[word] = tuple(inventory.devices)
        self._facts[facts.name] = facts
        self._devices[facts.name] = devices
        return Seen(((facts, devices),), NodeOutcome(notices=tuple(notices)))

    def forget(self, name: str) -> None:
        self._facts.pop(name, None)
        self._devices.pop(name, None)

    def tick(self, now: float) -> Seen:
        return Seen()

    def next_timer(self) -> float | None:
        return None

    def memory(self) -> RegistryMemory:
        return RegistryMemory(dict(self._devices))

    def adopt(self, memory: RegistryMemory) -> None:
        self._devices = dict(memory.devices)
