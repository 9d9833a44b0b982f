"""AI cores and AI CPUs of Ascend templates in use on a card (ascend.md §6, `checkTemplateUnits`)."""

from dataclasses import dataclass

from hami.vendors.types import ContainerDevice, Usage


@dataclass(frozen=True, slots=True)
class TemplateUnits:
    """Units of one template, or their sum on a card. Never both 0 in a usage: None stands for that."""

    ai_core: int
    ai_cpu: int


class UnitsAlgebra:
    """The standard algebra, plus the units of templates."""

    zero = Usage()

    def of(self, device: ContainerDevice) -> Usage:
        payload = device.payload if isinstance(device.payload, TemplateUnits) else None
        return _use(1, device.usedmem, device.usedcores, _units(payload))

    def add(self, a: Usage, b: Usage) -> Usage:
        (core, cpu), (more_core, more_cpu) = _units(a.payload), _units(b.payload)
        return _use(a.slots + b.slots, a.mem + b.mem, a.cores + b.cores, (core + more_core, cpu + more_cpu))

    def remove(self, total: Usage, b: Usage) -> Usage:
        (core, cpu), (less_core, less_cpu) = _units(total.payload), _units(b.payload)
        left = (core - less_core, cpu - less_cpu)
        return _use(total.slots - b.slots, total.mem - b.mem, total.cores - b.cores, left)

    def combine(self, a: Usage, b: Usage) -> Usage:
        (core, cpu), (other_core, other_cpu) = _units(a.payload), _units(b.payload)
        most = (max(core, other_core), max(cpu, other_cpu))
        return _use(max(a.slots, b.slots), max(a.mem, b.mem), max(a.cores, b.cores), most)


def _units(payload: object) -> tuple[int, int]:
    return (payload.ai_core, payload.ai_cpu) if isinstance(payload, TemplateUnits) else (0, 0)


def _use(slots: int, mem: int, cores: int, units: tuple[int, int]) -> Usage:
    return Usage(slots, mem, cores, TemplateUnits(*units) if any(units) else None)
