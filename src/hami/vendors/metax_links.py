"""Link zones of MetaX cards: which cards go together, and what a choice leaves of the links
(vendors/metax.md §6.8, §6.9)."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

ZONE: Final = "LinkZone"
_LINK: Final = 10  # value of two cards in one zone


def zone_of(custom: Mapping[str, Any]) -> int:
    """The zone of a card; 0: not linked."""
    zone = custom.get(ZONE, 0)
    return zone if isinstance(zone, int) and zone > 0 else 0


def pick(zones: Sequence[int], count: int) -> list[int]:
    """Positions of `count` of these cards: out of the smallest zone that holds all, else zone by zone,
    smallest first, then cards without a zone. Ties: the zone that comes first.
    """
    groups: dict[int, list[int]] = {}
    for position, zone in enumerate(zones):
        groups.setdefault(zone, []).append(position)
    unlinked = groups.pop(0, [])
    linked = sorted(groups.values(), key=len)
    for group in linked:
        if len(group) >= count:
            return group[:count]
    return [*(position for group in linked for position in group), *unlinked][:count]


def score(free: Iterable[int], given: Iterable[int]) -> int:
    """Ten times the links among the given cards' zones, less the links that the free ones lose by it."""
    before, taken = _sizes(free), _sizes(given)
    left = {zone: before.get(zone, 0) - taken.get(zone, 0) for zone in before}
    loss = _value(before) - _value(taken) - _value(left)
    return 10 * _value(taken) - loss


@lru_cache(maxsize=4096)
def best_score(free: tuple[int, ...], others: tuple[int, ...], least: int, most: int) -> int:
    """The best `score` of `least` to `most` of these cards, free ones and others; 0 when there are none."""
    room, spare = _sizes(free), _sizes(others)
    best = {0: 0}  # number of cards -> the best of the zones so far
    for zone in {**room, **spare}:
        took: dict[int, int] = {}
        for count in range(room.get(zone, 0) + spare.get(zone, 0) + 1):
            value = score([zone] * room.get(zone, 0), [zone] * count)
            for before, total in best.items():
                if before + count <= most:
                    took[before + count] = max(took.get(before + count, total + value), total + value)
        best = took
    unlinked = (free + others).count(0)
    found = [total for count, total in best.items() if count + unlinked >= least]
    return max(found, default=0)


def _sizes(zones: Iterable[int]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for zone in zones:
        if zone:
            sizes[zone] = sizes.get(zone, 0) + 1
    return sizes


def _value(sizes: Mapping[int, int]) -> int:
    return sum(_LINK * size * (size - 1) // 2 for size in sizes.values())
