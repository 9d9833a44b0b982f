"""Masks of NeuronCores and the usage algebra on them: who holds which core, so that removing a pod is exact.

`Usage.cores` is the mask of the cores in use, `Usage.payload` the number of holders per core.
"""

from typing import Final

from hami.vendors.types import ContainerDevice, Usage

Counts = tuple[int, ...]
"""Holders of core 0, 1, ...; without zeros at the end."""

_ZERO: Final = Usage(payload=())


class NeuronAlgebra:
    """Holders per core add up; one after the other takes the larger number of each core."""

    zero = _ZERO

    def of(self, device: ContainerDevice) -> Usage:
        return Usage(1, device.usedmem, device.usedcores, _counts_of_mask(device.usedcores))

    def add(self, a: Usage, b: Usage) -> Usage:
        return _usage(a.slots + b.slots, a.mem + b.mem, _zipped(a, b, 1))

    def remove(self, total: Usage, b: Usage) -> Usage:
        return _usage(total.slots - b.slots, total.mem - b.mem, _zipped(total, b, -1))

    def combine(self, a: Usage, b: Usage) -> Usage:
        ours, theirs = _padded(a, b)
        counts = [max(pair) for pair in zip(ours, theirs, strict=True)]
        return _usage(max(a.slots, b.slots), max(a.mem, b.mem), counts)


def lowest_free(total: int, used: int, number: int) -> int:
    """Mask of the `number` lowest cores of `total` that are not in `used`, or of all of them when there are
    fewer.
    """
    free, mask = total & ~used, 0
    for _ in range(min(number, free.bit_count())):
        lowest = free & -free
        mask |= lowest
        free ^= lowest
    return mask


def _usage(slots: int, mem: int, counts: list[int]) -> Usage:
    while counts and counts[-1] == 0:
        counts.pop()
    mask = sum(1 << core for core, holders in enumerate(counts) if holders > 0)
    return Usage(slots, mem, mask, tuple(counts))


def _zipped(a: Usage, b: Usage, sign: int) -> list[int]:
    ours, theirs = _padded(a, b)
    return [one + sign * other for one, other in zip(ours, theirs, strict=True)]


def _padded(a: Usage, b: Usage) -> tuple[Counts, Counts]:
    ours, theirs = _counts(a), _counts(b)
    width = max(len(ours), len(theirs))
    return ours + (0,) * (width - len(ours)), theirs + (0,) * (width - len(theirs))


def _counts(usage: Usage) -> Counts:
    return usage.payload if isinstance(usage.payload, tuple) else _counts_of_mask(usage.cores)


def _counts_of_mask(mask: int) -> Counts:
    return tuple(mask >> core & 1 for core in range(mask.bit_length()))
