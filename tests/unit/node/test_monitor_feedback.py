"""Rules of the feedback loop (monitor.md §13 cases 32-41, 53)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.node.monitor.feedback import Activity, Verdict, judge

G0, G1 = frozenset({"g0"}), frozenset({"g1"})
NOW = 1_787_300_000.0


def act(
    uuids: frozenset[str] = G0, recent: int = 2, priority: int = 1, switch: int = 1, last: int = 0
) -> Activity:
    return Activity(uuids, recent, switch, priority, last)


def tick(from_last_kernel: bool = True, **containers: Activity) -> dict[str, tuple[int, int]]:
    verdicts = judge(containers, NOW, from_last_kernel)
    return {name: (verdict.recent_kernel, verdict.utilization_switch) for name, verdict in verdicts.items()}


def test_32_33_a_container_of_higher_priority_blocks_until_it_is_idle() -> None:
    assert tick(a=act(priority=0), b=act(priority=1)) == {"a": (1, 0), "b": (-1, 1)}
    assert tick(a=act(priority=0, recent=1, switch=0), b=act(recent=-1)) == {"a": (0, 0), "b": (0, 0)}


def test_34_35_equal_priorities_limit_each_other_on_one_card_only() -> None:
    assert tick(a=act(), b=act()) == {"a": (1, 1), "b": (1, 1)}
    assert tick(a=act(G0), b=act(G1)) == {"a": (1, 0), "b": (1, 0)}


def test_36_one_common_card_is_enough_to_block() -> None:
    assert tick(a=act(G0 | G1), b=act(G1, priority=0))["a"] == (-1, 1)


def test_37_two_active_containers_switch_an_idle_third_one_on() -> None:
    assert tick(a=act(), b=act(), c=act(recent=0, switch=0))["c"] == (0, 1)


def test_38_a_negative_priority_is_never_counted_and_never_blocked() -> None:
    assert tick(a=act(priority=-1), b=act(priority=0)) == {"a": (1, 0), "b": (1, 0)}


def test_39_any_priority_is_handled() -> None:
    assert tick(a=act(priority=2**31 - 1)) == {"a": (1, 0)}
    assert tick(a=act(priority=2**31 - 1), b=act(priority=2**31 - 2))["a"] == (-1, 1)


def test_40_only_smaller_priorities_block() -> None:
    assert tick(a=act(priority=1), b=act(priority=3))["b"] == (-1, 1)
    assert tick(a=act(G1, priority=1), b=act(priority=2)) == {"a": (1, 0), "b": (1, 0)}


@pytest.mark.parametrize(("enabled", "expected"), [(True, (-1, 1)), (False, (1, 0))])
def test_53_a_fresh_last_kernel_also_counts_as_activity(enabled: bool, expected: tuple[int, int]) -> None:
    foreign = act(recent=0, priority=0, last=int(NOW) - 3)
    assert tick(enabled, a=foreign, b=act())["b"] == expected


@pytest.mark.parametrize("last", [0, int(NOW) - 11, int(NOW) + 600])
def test_an_old_or_future_last_kernel_is_no_activity(last: int) -> None:
    assert tick(a=act(recent=0, priority=0, last=last), b=act())["b"] == (1, 0)


i32 = st.integers(-(2**31), 2**31 - 1)
activities = st.builds(
    Activity, st.frozensets(st.sampled_from(["g0", "g1", "g2"]), max_size=3), i32, i32, st.integers(-2, 3)
)


@given(st.dictionaries(st.sampled_from("abcdef"), activities, max_size=6))
def test_blocked_and_the_counter_always_agree(containers: dict[str, Activity]) -> None:
    for name, verdict in judge(containers, NOW, True).items():
        assert isinstance(verdict, Verdict)
        assert (verdict.recent_kernel < 0) == verdict.blocked
        assert not verdict.blocked or verdict.enforced
        assert verdict.recent_kernel <= max(containers[name].recent_kernel - 1, 0)
