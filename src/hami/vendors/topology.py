"""Choosing cards by pair scores (policy word `topology-aware`, nvidia-scheduling.md §13.4).

One card: the one least connected to the other eligible ones, to keep good groups for larger jobs. Several:
the set with the largest sum of pair scores. Ties go to the cards tried first, so equal inputs give equal
answers.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hami.vendors.mig import repeatable
from hami.vendors.types import Card, DeviceInfo, FitContext

WORD: Final = "topology-aware"
SCORES: Final = "pairScores"
"""Key of a card's scores (other card's id -> score) in `DeviceInfo.custom`."""

MAX_SUBSETS: Final = 20_000
_MAX_CARDS_EXACT: Final = 32


def wanted(ctx: FitContext) -> bool:
    """Whether the pod asks for topology."""
    return WORD in ctx.policy


def choose(ctx: FitContext, eligible: Sequence[Card], _reasons: Mapping[str, int]) -> Sequence[int]:
    """Positions to take in turn: the best set of distinct cards, then again where one serves several
    devices.
    """
    if not eligible:
        return ()
    wanted_cards = min(ctx.request.nums, len(eligible))
    chosen = best_set(_pair_scores([card.info for card in eligible]), wanted_cards)
    if ctx.request.nums == wanted_cards:
        return chosen
    again = [n for n in chosen if repeatable(eligible[n].info)]
    places = (sum(len(one.placements) for one in eligible[n].info.mig_profiles) for n in again)
    return [*chosen, *again * min(max(places, default=0), ctx.request.nums)]


def best_set(scores: NDArray[np.int64], size: int) -> list[int]:
    """Positions (ascending) of the best `size` of n >= size cards; `scores[i, j]` for i < j, 1 card: all
    others.
    """
    n = len(scores)
    if size == n:
        return list(range(n))
    if size == 1:
        return [int(np.argmin(scores.sum(axis=1)))]
    upper = np.triu(scores, 1)
    if n <= _MAX_CARDS_EXACT and comb(n, size) <= MAX_SUBSETS:
        sets = _subsets(n, size)
        totals = np.zeros(len(sets), dtype=np.int64)
        for a, b in combinations(range(size), 2):
            totals += upper[sets[:, a], sets[:, b]]
        return [int(position) for position in sets[int(np.argmax(totals))]]
    return _grown(upper + upper.T, size)


def _grown(pairs: NDArray[np.int64], size: int) -> list[int]:
    """The best pair, grown card by card, then improved by swaps until none gains."""
    n = len(pairs)
    masked = np.where(np.triu(np.ones((n, n), dtype=np.bool_), 1), pairs, np.iinfo(np.int64).min)
    first = int(np.argmax(masked))
    chosen = [first // n, first % n]
    links = pairs[chosen].sum(axis=0)
    inside = np.zeros(n, dtype=np.bool_)
    inside[chosen] = True
    while len(chosen) < size:
        best = int(np.argmax(np.where(inside, np.iinfo(np.int64).min, links)))
        chosen.append(best)
        inside[best] = True
        links = links + pairs[best]
    for _ in range(n * size):
        members, others = np.flatnonzero(inside), np.flatnonzero(~inside)
        gains = links[others][None, :] - links[members][:, None] - pairs[np.ix_(members, others)]
        best = int(np.argmax(gains))
        row, column = divmod(best, len(others))
        if gains[row, column] <= 0:
            break
        out, into = members[row], others[column]
        inside[out], inside[into] = False, True
        links = links - pairs[out] + pairs[into]
    return [int(position) for position in np.flatnonzero(inside)]


def _pair_scores(cards: Sequence[DeviceInfo]) -> NDArray[np.int64]:
    rows: list[Mapping[str, Any]] = [card.custom.get(SCORES) or {} for card in cards]
    ids = [card.id for card in cards]
    if not any(rows):
        return np.zeros((len(cards), len(cards)), dtype=np.int64)
    table = [
        [0 if i == j else row.get(other, 0) for j, other in enumerate(ids)] for i, row in enumerate(rows)
    ]
    return np.array(table, dtype=np.int64)


@lru_cache(maxsize=64)
def _subsets(n: int, size: int) -> NDArray[np.intp]:
    sets = np.array(list(combinations(range(n), size)), dtype=np.intp)
    sets.setflags(write=False)
    return sets
