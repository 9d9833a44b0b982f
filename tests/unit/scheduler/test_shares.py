"""What each namespace may use of the loop's time."""

from __future__ import annotations

import math

import pytest

from hami.scheduler.edge import shares
from hami.scheduler.edge.shares import BURST_S, FREE_S, OTHERS_S, RATE, Shares


def shared(clock: list[float]) -> Shares:
    """With pods of another namespace coming all the time."""
    made = Shares(lambda: clock[0])
    seconds = made.seconds

    def after_another(namespace: str) -> float:
        seconds("other")
        return seconds(namespace)

    made.seconds = after_another  # type: ignore[method-assign]
    return made


def test_cheap_decisions_cost_nothing() -> None:
    one = shared([0.0])
    for _ in range(100_000):
        one.used("a", FREE_S)
    assert one.seconds("a") == FREE_S + BURST_S


def test_what_is_used_comes_back_with_time_and_every_decision_has_its_free_part() -> None:
    now = [100.0]
    one = shared(now)
    one.used("a", FREE_S + BURST_S + 5.0)
    assert one.seconds("a") == FREE_S
    assert one.seconds("b") == FREE_S + BURST_S
    now[0] += 5.0 / RATE
    assert one.seconds("a") == FREE_S
    now[0] += 1.0 / RATE
    assert one.seconds("a") == pytest.approx(FREE_S + 1.0)
    now[0] += 3600.0
    assert one.seconds("a") == FREE_S + BURST_S


def test_a_namespace_whose_pods_alone_come_takes_from_nobody() -> None:
    now = [100.0]
    one = Shares(lambda: now[0])
    one.used("a", 600.0)
    assert one.seconds("a") == math.inf
    one.seconds("b")
    assert one.seconds("a") == FREE_S
    now[0] += OTHERS_S + 1.0
    assert one.seconds("a") == math.inf


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "_NAMESPACES", 3)
    one = Shares(lambda: 0.0)
    for number in range(5):
        one.used(f"n{number}", 60.0)
        one.seconds(f"n{number}")
    assert (len(one._left), len(one._asked)) == (3, 3)
