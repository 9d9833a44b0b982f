"""Looks and probes of the device plugin at cards of the simulated driver (device-plugin.md §10.5)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakegpu_harness import Cards

from hami.node.plugin.checker import ChildChecker, Finding

SOUND = Finding()


@pytest.fixture
def two(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cards]:
    cards = Cards(short_path / "state", devices=2)
    for name, value in cards.environment().items():
        if name.startswith(("FAKEGPU_", "LD_")):
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield cards
    cards.close()


def uuids(cards: Cards) -> list[str]:
    return [card["uuid"] for card in cards.stat()["cards"]]


def test_a_card_that_is_lost_and_back_is_seen_as_that(two: Cards) -> None:
    first, second = uuids(two)
    checker = ChildChecker()
    assert asyncio.run(checker.look(first)) == SOUND
    two.run("set", "0", "lost", "1", program="fakegpud")
    assert "lost" in asyncio.run(checker.look(first)).problem.lower()
    assert asyncio.run(checker.look(second)) == SOUND
    two.run("set", "0", "lost", "0", program="fakegpud")
    assert asyncio.run(checker.look(first)) == SOUND


def test_a_card_that_is_not_there_is_a_problem(two: Cards) -> None:
    assert "not found" in asyncio.run(ChildChecker().look("GPU-0")).problem.lower()


def test_a_probe_uses_the_memory_of_its_card_and_leaves_nothing(two: Cards) -> None:
    _, second = uuids(two)
    assert asyncio.run(ChildChecker().probe(second)) == SOUND
    assert two.stat()["processes"] == []


@pytest.mark.parametrize("function", ["cuInit", "cuMemAlloc_v2", "cuMemcpyDtoH_v2", "cuMemFree_v2"])
def test_a_driver_that_refuses_fails_the_probe(
    two: Cards, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.setenv("FAKEGPU_FAULTS", f"{function}:*=719")
    assert asyncio.run(ChildChecker().probe(uuids(two)[0])) == Finding(f"{function} gives error 719")


def test_a_driver_that_hangs_fails_the_probe(two: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKEGPU_DELAY_US", "cuMemAlloc_v2=60000000")
    checker = ChildChecker(probe_s=1.0)
    assert asyncio.run(checker.probe(uuids(two)[0])) == Finding("no answer within 1 s")


def test_the_driver_s_libraries_are_found_below_its_root(
    two: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "usr/lib64"
    folder.mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (folder / name).symlink_to(two.programs / name)
    monkeypatch.delenv("LD_LIBRARY_PATH")
    checker = ChildChecker(str(tmp_path))
    card = uuids(two)[0]
    assert asyncio.run(checker.look(card)) == SOUND
    assert asyncio.run(checker.probe(card)) == SOUND
