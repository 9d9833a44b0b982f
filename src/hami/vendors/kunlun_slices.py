"""Sizes of the slices on a Kunlunxin card, kept beside the sums (kunlun.md §7.4).

The sums alone do not tell sizes apart: an init container's slice of one size and an app's of another are
charged together while the pod starts.
"""

from collections.abc import Mapping

from hami.vendors.types import ContainerDevice, Usage

Sizes = tuple[tuple[int, int], ...]
"""(MiB, how many), ascending; None in a usage without slices."""


def sizes(used: Usage) -> tuple[int, ...]:
    """The distinct sizes in use, MiB."""
    return tuple(size for size, _ in _pairs(used))


class SliceAlgebra:
    """The standard algebra, plus a multiset of slice sizes per card."""

    zero = Usage()

    def of(self, device: ContainerDevice) -> Usage:
        return Usage(1, device.usedmem, device.usedcores, ((device.usedmem, 1),))

    def add(self, a: Usage, b: Usage) -> Usage:
        counts = dict(_pairs(a))
        for size, count in _pairs(b):
            counts[size] = counts.get(size, 0) + count
        return _use(a.slots + b.slots, a.mem + b.mem, a.cores + b.cores, counts)

    def remove(self, total: Usage, b: Usage) -> Usage:
        counts = dict(_pairs(total))
        for size, count in _pairs(b):
            counts[size] = counts.get(size, 0) - count
        return _use(total.slots - b.slots, total.mem - b.mem, total.cores - b.cores, counts)

    def combine(self, a: Usage, b: Usage) -> Usage:
        counts = dict(_pairs(a))
        for size, count in _pairs(b):
            counts[size] = max(counts.get(size, 0), count)
        return _use(max(a.slots, b.slots), max(a.mem, b.mem), max(a.cores, b.cores), counts)


def _pairs(used: Usage) -> Sizes:
    return used.payload if isinstance(used.payload, tuple) else ()


def _use(slots: int, mem: int, cores: int, counts: Mapping[int, int]) -> Usage:
    return Usage(slots, mem, cores, tuple(sorted((s, c) for s, c in counts.items() if c)) or None)
