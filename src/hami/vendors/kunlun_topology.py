"""Which Kunlunxin cards of a server belong together (kunlun.md §5).

Cards 0-3 are group L, 4-7 group R. Inside a group every card is linked to every other; across groups card c
only to c + 4, its column. Cards are always told by their index, never by their place in a list.
"""

from collections.abc import Set
from functools import lru_cache
from itertools import combinations
from typing import Final

import numpy as np
from numpy.typing import NDArray

CARDS: Final = 8
SHAPES: Final = (1, 2, 4, 8)
"""Counts that the topology knows."""

_GROUP: Final = 4
_COLUMN_PAIRS: Final = ((0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2))
_ORDER_OF_ONE: Final = (1, 3, 2, 4)  # keeps pairs and full groups intact
_ORDER_OF_TWO: Final = (2, 3, 4)


def select(available: Set[int], count: int) -> tuple[int, ...]:
    """Indexes of `count` linked cards in group order; () when there are none."""
    groups = _groups(available)
    if count == 1:
        return _in_group(groups, 1, _ORDER_OF_ONE)
    if count == 2:
        return _in_group(groups, 2, _ORDER_OF_TWO) or _column(available)
    if count == 4:
        return _in_group(groups, 4, (4,)) or _two_columns(available)
    if count == CARDS and len(groups[0]) + len(groups[1]) == CARDS:
        return tuple(range(CARDS))
    return ()


def gather(available: Set[int], count: int) -> tuple[int, ...]:
    """Indexes of `count` cards without regard to links: the group with more cards first; () when too few."""
    larger, smaller = sorted(_groups(available), key=len, reverse=True)
    found = (*larger, *smaller)[:count]
    return tuple(found) if len(found) == count else ()


def select_within(
    opened: Set[int], idle: Set[int], most_idle: int, count: int, *, shaped: bool
) -> tuple[int, ...]:
    """Cards as `select` (`gather` where not `shaped`) with at most `most_idle` idle ones; () for none."""
    choose = select if shaped else gather
    if len(idle) <= most_idle:
        return choose(opened | idle, count)
    best = choose(opened | idle, count)
    if best and len(idle & set(best)) <= most_idle:
        return best
    for some in combinations(sorted(idle), max(most_idle, 0)):
        best = choose(opened | set(some), count)
        if best:
            return best
    return ()


def fragmentation(used: Set[int]) -> int:
    """The least number of further jobs (of 8, 4, 2 or 1 cards) that fill a server with these cards in use."""
    if not used:
        return 1
    return sum((1, 2, 1, 1, 0)[len(group)] for group in _groups(used))


@lru_cache(maxsize=CARDS)
def least_changes(count: int) -> NDArray[np.int64]:
    """By the set of used cards (bit i: card i) the least change of `fragmentation` that `count` of the others
    can make; 2 where there are not so many.
    """
    value = np.array([fragmentation(_indexes(used)) for used in range(1 << CARDS)])
    used = np.arange(1 << CARDS)
    least = np.full(1 << CARDS, 2)
    for more in (one for one in range(1 << CARDS) if one.bit_count() == count):
        change = value[used | more] - value
        least = np.where(used & more == 0, np.minimum(least, change), least)
    least.setflags(write=False)
    return least


def _indexes(bits: int) -> frozenset[int]:
    return frozenset(index for index in range(CARDS) if bits >> index & 1)


def _groups(cards: Set[int]) -> tuple[list[int], list[int]]:
    inside = sorted(index for index in cards if 0 <= index < CARDS)
    return [c for c in inside if c < _GROUP], [c for c in inside if c >= _GROUP]


def _in_group(groups: tuple[list[int], list[int]], count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The lowest cards of the first group with one of these sizes, in the order of the sizes."""
    for size in sizes:
        for group in groups:
            if len(group) == size:
                return tuple(group[:count])
    return ()


def _columns(available: Set[int]) -> list[int]:
    return [c for c in range(_GROUP) if {c, c + _GROUP} <= available]


def _column(available: Set[int]) -> tuple[int, ...]:
    columns = _columns(available)
    return (columns[0], columns[0] + _GROUP) if columns else ()


def _two_columns(available: Set[int]) -> tuple[int, ...]:
    """Two full columns; of six cards those that leave two linked ones behind."""
    columns = set(_columns(available))
    pairs = [(a, b, a + _GROUP, b + _GROUP) for a, b in _COLUMN_PAIRS if {a, b} <= columns]
    if not pairs:
        return ()
    inside = [c for c in available if 0 <= c < CARDS]
    if len(inside) != 6:
        return pairs[0]
    return next((pair for pair in pairs if _linked({*inside} - {*pair})), pairs[0])


def _linked(two: Set[int]) -> bool:
    a, b = sorted(two)
    return a // _GROUP == b // _GROUP or b - a == _GROUP
