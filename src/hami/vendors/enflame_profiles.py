"""Sizes of Enflame DRS slices: profiles such as `3g.24gb`, and the one that serves a request
(vendors/enflame.md §5)."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hami.vendors.types import INT32_MAX, ContainerDevice, ContainerRequest, Usage

DIRECT: Final = "direct"
"""Mode of a request for a number of slices."""
BY_SPEC: Final = "spec"
"""Mode of a request for memory, cores or both."""

_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,10}")


@dataclass(frozen=True, slots=True)
class Size:
    """One named size: slices of a card and GB."""

    slices: int
    gb: int
    name: str


@dataclass(frozen=True, slots=True)
class DrsSlice:
    """What a container holds: part of the request once a node is known, payload of an allocated device."""

    name: str  # profile name as the node writes it; "" when only the number of slices is known
    id: str
    slices: int
    minor: str = field(default="", compare=False)  # of the card, for the plugin's annotations; not read back
    index: str = field(default="", compare=False)
    guessed_mib: int = 0  # recorded memory where `slices` is a guess: the sizes of the card may say more


Guesses = tuple[tuple[int, int], ...]
"""Payload of a usage: (MiB, slots booked) of each slice whose number of slices is a guess, sorted."""


class SlicesAlgebra:
    """The standard algebra, but a device takes as many slots as its slice has slices."""

    zero = Usage()

    def of(self, device: ContainerDevice) -> Usage:
        held = device.payload
        if not isinstance(held, DrsSlice):
            return Usage(1, device.usedmem, device.usedcores)
        guesses = ((held.guessed_mib, held.slices),) if held.guessed_mib else None
        return Usage(held.slices, device.usedmem, device.usedcores, guesses)

    def add(self, a: Usage, b: Usage) -> Usage:
        guesses = _guesses(a) + _guesses(b)
        return Usage(a.slots + b.slots, a.mem + b.mem, a.cores + b.cores, _payload(guesses))

    def remove(self, total: Usage, b: Usage) -> Usage:
        guesses = _guesses(total) - _guesses(b)
        return Usage(total.slots - b.slots, total.mem - b.mem, total.cores - b.cores, _payload(guesses))

    def combine(self, a: Usage, b: Usage) -> Usage:
        guesses = _guesses(a) | _guesses(b)
        return Usage(max(a.slots, b.slots), max(a.mem, b.mem), max(a.cores, b.cores), _payload(guesses))


def _guesses(use: Usage) -> Counter[tuple[int, int]]:
    return Counter(use.payload if isinstance(use.payload, tuple) else ())


def _payload(guesses: Counter[tuple[int, int]]) -> Guesses | None:
    return tuple(sorted(guesses.elements())) or None


def more_slices(card: Mapping[str, Any], use: Usage) -> int:
    """Slices in use of a card beyond the slots booked: of each guess, those of the largest size of the card
    (its `custom`) that has just the recorded memory.
    """
    guesses = _guesses(use)
    if not guesses:
        return 0
    slices = {size.gb * 1024: size.slices for size in sizes_of([card])}
    return sum((slices.get(mib, booked) - booked) * times for (mib, booked), times in guesses.items())


def size_of(name: str) -> Size:
    """Slices and GB of a profile name, 0 for what it does not say."""
    parts = name.strip().lower().split(".")
    if len(parts) < 2:
        return Size(0, 0, name)
    slices = _integer(parts[0].removesuffix("g"))
    if slices is None:
        return Size(0, 0, name)
    return Size(slices, _integer(parts[1].removesuffix("gb")) or 0, name)


def sizes_of(cards: Iterable[Mapping[str, Any]]) -> list[Size]:
    """The usable sizes of these cards (their `custom`), ascending by slices, then GB."""
    names = {name for card in cards for name in card.get("profiles", ())}
    found = (size_of(name) for name in names)
    usable = [size for size in found if size.slices > 0 and size.gb > 0]
    return sorted(usable, key=lambda size: (size.slices, size.gb, size.name))


def max_slices(cards: Iterable[Mapping[str, Any]], sizes: Iterable[Size]) -> int:
    """Slices of a whole card."""
    known = max((card.get("maxSlice", 0) for card in cards), default=0)
    return known or max((size.slices for size in sizes), default=0)


def share(slices: int, whole: int) -> int:
    """Percent of a card's cores that come with so many of its slices, rounded down."""
    return 100 * slices // whole if whole else 0


def choose(request: ContainerRequest, sizes: list[Size], whole: int) -> Size | None:
    """The first size that serves the request, as `parse` wrote it; None: none does."""
    if request.mode == DIRECT:
        found = next((size for size in sizes if size.slices == request.memreq), None)
    else:
        gb = wanted_gb(request.memreq, sizes[-1].gb) if sizes else 0
        found = next(
            (size for size in sizes if size.gb >= gb and share(size.slices, whole) >= request.cores), None
        )
    if found is None or found.gb * 1024 > INT32_MAX:
        return None
    return found


def wanted_gb(memory: int, largest_gb: int) -> int:
    """GB of a memory request: read as GB up to twice the largest size there is, as MiB beyond."""
    return -(-memory // 1024) if memory > 2 * largest_gb else memory


def _integer(text: str) -> int | None:
    number = int(text) if _INTEGER.fullmatch(text) else None
    return number if number is not None and abs(number) <= INT32_MAX else None
