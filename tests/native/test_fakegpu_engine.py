"""The time model: who gets how much of a card."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakegpu_harness import Cards, wait_until

SECOND = 1_000_000_000


@pytest.fixture(params=[2000, 0], ids=["turns", "at-once"])
def cards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cards]:
    made = Cards(tmp_path / "s", devices=2, slice_us=request.param, context_mib=0)
    yield made
    made.close()


def engine_ns(cards: Cards, card: int = 0) -> dict[str, int]:
    """Engine time of each container on a card."""
    return {entry["name"]: entry["engine_ns"][card] for entry in cards.stat()["containers"]}


def flood(cards: Cards, container: str, kernel_us: int, device: int = 0) -> None:
    """A process that always has work queued."""
    cards.start(
        "--device",
        str(device),
        "launch",
        "--kernel-us",
        str(kernel_us),
        "--count",
        "1000000",
        container=container,
    )


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before.get(name, 0) for name in after}


def test_two_busy_containers_share_a_card_evenly_whatever_their_kernels(cards: Cards) -> None:
    flood(cards, "long", 7000)
    flood(cards, "short", 300)
    wait_until(lambda: len(engine_ns(cards)) == 2 and min(engine_ns(cards).values()) > 0, "both running")
    before = engine_ns(cards)
    wait_until(lambda: sum(grown(before, engine_ns(cards)).values()) > SECOND // 2, "half a second of work")
    shares = grown(before, engine_ns(cards))
    assert 0.9 < shares["long"] / shares["short"] < 1.12


def test_cards_work_side_by_side(cards: Cards) -> None:
    flood(cards, "a", 5000, device=0)
    flood(cards, "b", 5000, device=1)
    wait_until(
        lambda: engine_ns(cards, 0).get("a", 0) > 0 and engine_ns(cards, 1).get("b", 0) > 0, "both running"
    )
    before = cards.stat()["cards"]
    wait_until(lambda: cards.stat()["cards"][0]["busy_ns"] - before[0]["busy_ns"] > SECOND // 5, "work")
    after = cards.stat()["cards"]
    for card in (0, 1):
        busy = after[card]["busy_ns"] - before[card]["busy_ns"]
        assert busy == after[card]["now_ns"] - before[card]["now_ns"]  # never idle, never overbooked


def test_engine_time_is_the_work_that_was_launched_and_outlives_the_process(cards: Cards) -> None:
    cards.run("launch", "--kernel-us", "250", "--count", "400", container="x")
    assert engine_ns(cards)["x"] == 400 * 250_000
    cards.run("launch", "--kernel-us", "1000", "--count", "3", container="x")
    assert engine_ns(cards)["x"] == 100_000_000 + 3_000_000


def test_the_queue_of_a_process_is_bounded(cards: Cards) -> None:
    flood(cards, "a", 50_000)
    wait_until(
        lambda: bool(cards.stat()["processes"]) and bool(cards.stat()["processes"][0]["on"]), "running"
    )
    wait_until(lambda: cards.stat()["processes"][0]["on"][0]["queued"] == 1024, "a full queue")


def test_work_of_a_killed_process_does_not_run_on(cards: Cards) -> None:
    process = cards.start("launch", "--kernel-us", "60000000", "--count", "1000", container="dead")
    wait_until(lambda: engine_ns(cards).get("dead", 0) > 0, "running")
    process.kill()
    process.wait()
    cards.stat()
    stopped = engine_ns(cards)["dead"]
    cards.run("launch", "--kernel-us", "20000", "--count", "5", container="next")
    assert engine_ns(cards) == {"dead": stopped, "next": 100_000_000}


def test_scaled_time_makes_kernels_shorter(tmp_path: Path) -> None:
    fast = Cards(tmp_path / "t", time_scale_milli=10_000)
    fast.run("launch", "--kernel-us", "1000", "--count", "50", container="x")
    assert engine_ns(fast)["x"] == 5_000_000
