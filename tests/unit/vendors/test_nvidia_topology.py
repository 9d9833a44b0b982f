"""Choosing cards by pair scores (nvidia-scheduling.md §15.4). Cards stand in ascending preference."""

from collections.abc import Mapping
from itertools import combinations
from math import comb
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from hami.vendors import topology
from hami.vendors.topology import best_set
from hami.vendors.types import Card, FitResult, QuotaView


def scored(lab: Any, pairs: Mapping[tuple[str, str], int], *names: str) -> list[Card]:
    """Cards examined in the order of `names`; scores hold in both directions."""
    both = {**pairs, **{(b, a): score for (a, b), score in pairs.items()}}
    return [
        lab.card(name, custom={"pairScores": {other: both.get((name, other), 0) for other in names}})
        for name in reversed(names)
    ]


def chosen(result: FitResult) -> list[str]:
    assert result.devices is not None, result.text()
    return [device.uuid for device in result.devices]


T4 = {("d0", "d1"): 100, ("d0", "d2"): 200, ("d1", "d2"): 150}
T7 = {("d0", "d1"): -5, ("d0", "d2"): -3, ("d1", "d2"): -1}


@pytest.mark.parametrize(
    ("pairs", "nums", "expected"),
    [
        pytest.param(T4, 1, ["d1"], id="T4"),
        pytest.param(T4, 2, ["d0", "d2"], id="T5"),
        pytest.param(T4, 3, ["d0", "d1", "d2"], id="all of them"),
        pytest.param({}, 2, ["d0", "d1"], id="T6"),
        pytest.param(T7, 1, ["d0"], id="T7 one"),
        pytest.param(T7, 2, ["d1", "d2"], id="T7 two"),
    ],
)
def test_cards_are_chosen_by_pair_score(
    lab: Any, pairs: Mapping[tuple[str, str], int], nums: int, expected: list[str]
) -> None:
    cards = scored(lab, pairs, "d0", "d1", "d2")
    assert chosen(lab.fit(cards, lab.request(nums, 100), policy="topology-aware")) == expected


def six(strong: Mapping[tuple[str, str], int], other: int) -> dict[tuple[str, str], int]:
    """Scores of the cards a to f: the given pairs, `other` between the rest."""
    return {pair: strong.get(pair, other) for pair in combinations("abcdef", 2)}


@pytest.mark.parametrize(
    ("pairs", "nums", "expected"),
    [
        pytest.param(six({("a", "f"): 100, ("c", "f"): 100}, 1), 3, ["a", "c", "f"], id="28"),
        pytest.param(six({(one, "f"): 1 for one in "abcde"}, 100), 1, ["f"], id="29"),
    ],
)
def test_six_cards_are_chosen_by_pair_score(
    lab: Any, pairs: Mapping[tuple[str, str], int], nums: int, expected: list[str]
) -> None:
    cards = scored(lab, pairs, *"abcdef")
    assert sorted(chosen(lab.fit(cards, lab.request(nums, 100), policy="topology-aware"))) == expected


def test_cards_without_scores_are_taken_in_try_order(lab: Any) -> None:  # T8
    cards = [lab.card(f"d{n}") for n in (3, 2, 1, 0)]
    assert chosen(lab.fit(cards, lab.request(2, 100), policy="topology-aware")) == ["d0", "d1"]


def test_the_policy_needs_its_word(lab: Any) -> None:
    cards = scored(lab, T4, "d0", "d1", "d2")
    assert chosen(lab.fit(cards, lab.request(2, 100), policy="binpack")) == ["d0", "d1"]


def test_cards_that_cannot_serve_are_not_chosen(lab: Any) -> None:
    cards = scored(lab, T4, "d0", "d1", "d2")
    full = lab.card("d2", used=10)
    result = lab.fit([full, *cards[1:]], lab.request(2, 100), policy="topology-aware")
    assert chosen(result) == ["d0", "d1"]
    refused = lab.fit([full, *cards[1:]], lab.request(3, 100), policy="topology-aware")
    assert refused.text() == "1/3 CardTimeSlicingExhausted, 2/3 AllocatedCardsInsufficientRequest"


def test_instances_are_spread_over_different_mig_cards(lab: Any) -> None:  # T10
    cards = [lab.mig_card(f"d{n}") for n in range(8)]
    result = lab.fit(cards, lab.request(8, 4000), policy="topology-aware")
    assert sorted(chosen(result)) == [f"d{n}" for n in range(8)]


def test_further_instances_go_round_the_chosen_mig_cards(lab: Any) -> None:
    cards = [lab.mig_card("d1"), lab.mig_card("d0")]
    result = lab.fit(cards, lab.request(5, 4000), policy="topology-aware")
    assert chosen(result) == ["d0", "d1", "d0", "d1", "d0"]
    assert lab.fit(cards, lab.request(15, 4000), policy="topology-aware").text() == (
        "14/2 AllocatedCardsInsufficientRequest, 2/2 CardTimeSlicingExhausted"
    )


@pytest.mark.parametrize(("n", "size"), [(56, 8), (25, 6), (40, 2)])
def test_no_more_than_20000_subsets_are_looked_at(monkeypatch: pytest.MonkeyPatch, n: int, size: int) -> None:
    looked_at: list[int] = []

    def subsets(cards: int, chosen_size: int) -> NDArray[np.intp]:
        looked_at.append(comb(cards, chosen_size))
        return real(cards, chosen_size)

    real = topology._subsets
    monkeypatch.setattr(topology, "_subsets", subsets)
    assert len(set(best_set(np.ones((n, n), dtype=np.int64), size))) == size
    assert sum(looked_at) <= topology.MAX_SUBSETS


@given(st.integers(2, 7), st.data())
def test_small_sets_are_as_good_as_any(n: int, data: st.DataObject) -> None:
    scores = np.zeros((n, n), dtype=np.int64)
    for i, j in combinations(range(n), 2):
        scores[i, j] = scores[j, i] = data.draw(st.integers(-300, 600))
    size = data.draw(st.integers(2, n))
    found = best_set(scores, size)
    totals = {s: sum(scores[a, b] for a, b in combinations(s, 2)) for s in combinations(range(n), size)}
    assert tuple(found) == max(totals, key=lambda each: totals[each])


@given(st.integers(20, 40), st.integers(0, 2**32 - 1))
def test_a_large_pool_gives_a_set_no_swap_improves(n: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, 600, (n, n))
    scores = np.triu(drawn, 1) + np.triu(drawn, 1).T
    found = best_set(scores, 9)
    assert len(set(found)) == 9
    total = scores[np.ix_(found, found)].sum()
    for position, new in ((p, c) for p in range(9) for c in range(n) if c not in found):
        swapped = [*found[:position], new, *found[position + 1 :]]
        assert scores[np.ix_(swapped, swapped)].sum() <= total


class TestQuota:
    def test_the_best_set_is_taken_where_the_quota_has_room_for_it(self, lab: Any) -> None:
        cards = scored(lab, T4, "d0", "d1", "d2")
        result = lab.fit(cards, lab.request(2, 500), policy="topology-aware", quota=QuotaView(mem_left=1000))
        assert chosen(result) == ["d0", "d2"]

    def test_cards_that_fit_into_the_quota_together_are_found_when_the_best_set_does_not(
        self, lab: Any
    ) -> None:
        scores = {"pairScores": {"l0": 400, "l1": 400}}
        large = [lab.card(name, devmem=8000, custom=scores) for name in ("l1", "l0")]
        cards = [*large, lab.card("s1", devmem=1000), lab.card("s0", devmem=1000)]
        request = lab.request(2, 0, 50)
        assert chosen(lab.fit(cards, request, policy="topology-aware")) == ["l0", "l1"]
        limited = lab.fit(cards, request, policy="topology-aware", quota=QuotaView(mem_left=4500))
        assert chosen(limited) == ["s0", "s1"]

    def test_cards_beyond_the_quota_are_counted_each(self, lab: Any) -> None:
        cards = scored(lab, T4, "d0", "d1", "d2")
        result = lab.fit(cards, lab.request(2, 600), policy="topology-aware", quota=QuotaView(mem_left=1000))
        assert result.text() == "1/3 AllocatedCardsInsufficientRequest, 2/3 ResourceQuotaNotFit"
