"""Which Kunlunxin cards belong together (kunlun.md §5, §6.4)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.vendors.kunlun_topology import fragmentation, gather, least_changes, select, select_within

ALL = frozenset(range(8))
CARDS = st.frozensets(st.integers(0, 7))


@pytest.mark.parametrize(
    ("unavailable", "count", "chosen"),
    [
        (set(), 1, (0,)),
        ({5}, 1, (4,)),
        ({5}, 2, (4, 6)),
        ({0, 1, 2}, 1, (3,)),
        ({0, 1, 2, 4, 5, 6}, 2, (3, 7)),
        ({0, 1, 2, 5, 6, 7}, 2, ()),
        ({0, 4}, 4, (2, 3, 6, 7)),
        ({3, 6}, 4, (0, 1, 4, 5)),
        ({0, 1, 4}, 4, (2, 3, 6, 7)),
        ({0, 1, 2, 4}, 4, ()),
        ({1, 2, 6, 7}, 4, ()),
        ({6}, 4, (0, 1, 2, 3)),
        ({0}, 4, (4, 5, 6, 7)),
        (set(), 8, (0, 1, 2, 3, 4, 5, 6, 7)),
        ({2}, 8, ()),
        (set(), 3, ()),
        (set(), 16, ()),
    ],
)
def test_the_worked_examples(unavailable: set[int], count: int, chosen: tuple[int, ...]) -> None:
    assert select(ALL - unavailable, count) == chosen


def linked(a: int, b: int) -> bool:
    return a // 4 == b // 4 or abs(a - b) == 4


@given(available=CARDS, count=st.sampled_from([1, 2, 4, 8]))
def test_chosen_cards_are_available_and_linked(available: frozenset[int], count: int) -> None:
    chosen = select(available, count)
    assert set(chosen) <= available
    if chosen:
        assert len(chosen) == count
        assert all(sum(linked(a, b) for b in chosen if b != a) >= count // 2 for a in chosen)
    elif count == 1:
        assert not available
    elif count == 2:
        assert not any(linked(a, b) for a in available for b in available if a < b)


@given(available=CARDS, count=st.integers(1, 8))
def test_gathering_takes_any_cards_of_the_fuller_group_first(available: frozenset[int], count: int) -> None:
    chosen = gather(available, count)
    assert len(chosen) == (count if count <= len(available) else 0)
    assert set(chosen) <= available
    left, right = (sum(lowest <= index < lowest + 4 for index in available) for lowest in (0, 4))
    if chosen and count <= max(left, right):
        assert len({index // 4 for index in chosen}) == 1


@given(opened=CARDS, idle=CARDS, most=st.integers(0, 8), count=st.sampled_from([1, 2, 3, 4, 8]))
def test_no_more_idle_cards_are_opened_than_there_are_handles(
    opened: frozenset[int], idle: frozenset[int], most: int, count: int
) -> None:
    opened -= idle
    chosen = select_within(opened, idle, most, count, shaped=count != 3)
    assert len(idle.intersection(chosen)) <= most
    if not chosen and most >= len(idle) and count != 3:
        assert not select(opened | idle, count)
    if count != 3 and select(opened, count):
        assert chosen


@pytest.mark.parametrize(
    ("used", "value"),
    [
        (set(), 1),
        ({0}, 3),
        ({0, 1}, 2),
        ({0, 1, 2}, 2),
        ({0, 4}, 4),
        ({0, 1, 4, 5}, 2),
        ({0, 1, 2, 3}, 1),
        (set(ALL), 0),
    ],
)
def test_the_fragmentation_of_used_cards(used: set[int], value: int) -> None:
    assert fragmentation(used) == value


@given(used=CARDS, excluded=CARDS, count=st.sampled_from([1, 2, 4, 8]))
def test_no_choice_changes_the_fragmentation_by_less_than_the_least(
    used: frozenset[int], excluded: frozenset[int], count: int
) -> None:
    chosen = select(ALL - used - excluded, count)
    least = least_changes(count)[sum(1 << index for index in used)]
    if chosen:
        assert fragmentation(used.union(chosen)) - fragmentation(used) >= least
