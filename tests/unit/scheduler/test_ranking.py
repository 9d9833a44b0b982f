"""Nodes in the order of preference: kept in order by every change, equal to sorting them anew (D2)."""

import json
import random
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from hami.protocol import views
from hami.scheduler.core import ranking
from hami.scheduler.core.nodes import NodeTable, facts_of
from hami.scheduler.core.ranking import Ranking
from hami.vendors.engine import node_devices
from hami.vendors.types import Holder, Usage

Lab = Any

SCORES = st.floats(-100, 100, width=32) | st.sampled_from([0.0, -0.0, 10.0, 29.5])


@given(
    first=st.lists(SCORES, min_size=1, max_size=60),
    changes=st.lists(st.lists(st.tuples(st.integers(0, 59), SCORES), max_size=30), max_size=6),
    most=st.integers(1, 70),
    lowest=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_any_changes_leave_the_order_of_sorting_anew(
    first: list[float],
    changes: list[list[tuple[int, float]]],
    most: int,
    lowest: bool,
    rng: random.Random,
) -> None:
    scores = np.array(first)
    ties = np.array(rng.sample(range(len(first)), len(first)), np.int64)
    registered = np.array(sorted(rng.sample(range(len(first)), rng.randint(1, len(first)))), np.int64)
    ranked = Ranking(lowest=lowest)
    for change in [[], *changes]:
        for row, score in change:
            if row in registered:
                scores[row] = score
                ranked.note(row)
        ranked.refresh(scores, ties, registered)
        mask = np.array([rng.random() < 0.7 for _ in first])
        expected = sorted(
            (row for row in registered.tolist() if mask[row]),
            key=lambda row: (scores[row] if lowest else -scores[row], -ties[row]),
        )
        assert ranked.among(mask, most) == expected[:most]


def test_rows_far_down_are_found_where_the_best_ones_are_no_candidates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "_AT_ONCE", 4)
    ranked = Ranking(lowest=False)
    ranked.refresh(np.arange(20.0), np.arange(20), np.arange(20))
    mask = np.zeros(20, np.bool_)
    mask[[1, 2, 3, 17]] = True
    assert ranked.among(mask, 3) == [17, 3, 2]
    assert ranked.among(mask, 9) == [17, 3, 2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_the_table_ranks_what_is_registered_by_score_cards_and_name(lab: Lab, seed: int) -> None:
    """Nodes come, change, and go; usage comes and goes."""
    rng = random.Random(seed)
    profiles = {profile.common_word: profile for profile in lab.profiles()}
    table = NodeTable(profiles)
    for version in range(1, 120):
        name = f"n{rng.randrange(8)}"
        held = {f"{name}-0": Usage(1, rng.choice([0, 2000]), rng.choice([0, 25]))}
        holder = Holder("u", "s", "h", {}, Usage())
        node = table.by_name.get(name)
        if node is None or rng.random() < 0.2:
            cards = [lab.card(f"{name}-{at}") for at in range(rng.choice([1, 1, 2]))]
            obj = {
                "metadata": {
                    "name": name,
                    "annotations": {"hami.io/node-nvidia-register": json.dumps(cards)},
                }
            }
            facts = facts_of(msgspec.convert(obj, views.Node), frozenset())
            table.register(facts, {"NVIDIA": tuple(node_devices(profiles["NVIDIA"], facts))}, version)
        elif rng.random() < 0.2:
            table.remove(name)
        else:
            table.add_usage(node, "NVIDIA", held, holder, version)
        for lowest in (False, True):
            everyone = np.ones(len(table.by_row), np.bool_)
            expected = sorted(
                table.by_name.values(),
                key=lambda node: (
                    node.sums.base_score() * (1 if lowest else -1),
                    node.sums.cards,
                    node.name,
                ),
            )
            assert table.ranking(lowest=lowest).among(everyone, 99) == [node.row for node in expected]
            alive = np.array([node is not None for node in table.by_row])
            for most in (1, 3, 99):
                best = table.best(alive, table.base, most, lowest=lowest)
                assert best == [node.row for node in expected[:most]]
