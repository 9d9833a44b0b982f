"""Memory and cores of cards as people are shown them: MiB, cores, and nothing where a vendor counts none."""

from __future__ import annotations

from dataclasses import dataclass

from hami.protocol.allocation import ContainerDevice
from hami.protocol.inventory import DeviceInfo
from hami.vendors.types import NO_PERCENT, ContainerRequest, Usage, VendorProfile


@dataclass(frozen=True, slots=True)
class Share:
    """Granted of a total, in the unit of the column; a total of 0: not counted."""

    granted: int
    total: int

    @property
    def left(self) -> int:
        """What is not granted."""
        return self.total - self.granted


UNCOUNTED = Share(0, 0)


def memory_share(p: VendorProfile, info: DeviceInfo, used: Usage) -> Share:
    """MiB of a card that are granted by this use of it."""
    return Share(used.mem, info.devmem) if p.rules.shows_memory else UNCOUNTED


def cores_share(p: VendorProfile, info: DeviceInfo, used: Usage) -> Share:
    """Cores of a card that are granted by this use of it: percent, or the vendor's own (docs/answers.md)."""
    if not p.rules.shows_cores:
        return UNCOUNTED
    if p.hooks.shown_cores is not None:
        return Share(*p.hooks.shown_cores(info, used))
    return Share(used.cores, info.devcore)


def unregistered(card: str, used: Usage) -> DeviceInfo:
    """What stands for a card that is held but that no node registers now: as large as its use."""
    return DeviceInfo(card, devmem=used.mem, devcore=used.cores)


def taken_text(p: VendorProfile, info: DeviceInfo, device: ContainerDevice) -> str:
    """What a container takes of a card: "4096 MiB, 30 cores", or slots where nothing else is counted."""
    used = p.algebra.of(device)
    memory, cores = memory_share(p, info, used), cores_share(p, info, used)
    parts = [f"{memory.granted} MiB"] if memory.total else []
    parts += [f"{cores.granted} cores"] if cores.total else []
    return ", ".join(parts) or ("1 slot" if used.slots == 1 else f"{used.slots} slots")


def asked_text(p: VendorProfile, wanted: ContainerRequest) -> str:
    """What a container asks of this vendor."""
    if p.hooks.in_words is not None:
        return p.hooks.in_words(wanted)
    parts = []
    if p.names.memory:
        percent = min(wanted.mem_percent, NO_PERCENT - 1)
        parts.append(f"{wanted.memreq} MiB" if wanted.memreq else f"{percent} % of the memory")
    if p.names.cores:
        parts.append(f"{wanted.cores} cores")
    each = f", each {', '.join(parts)}" if parts else ""
    return f"{wanted.nums} x {p.common_word}{each}"
