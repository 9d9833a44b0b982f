"""The instrumented driver under an instrumented program: any report ends it with a status of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakegpu_harness import Cards, wait_until


@pytest.fixture(params=["-asan", "-tsan"])
def cards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cards]:
    made = Cards(tmp_path / "s", request.param, devices=2)
    assert (made.programs / "gpuprog").is_file(), f"{made.programs} is not built; run make sanitized"
    yield made
    made.close()


@pytest.mark.parametrize("via", ["symbol", "dlsym", "procaddr"])
@pytest.mark.parametrize(
    "words",
    [
        ("info",),
        ("meminfo",),
        ("alloc", "64", "--touch"),
        ("alloc", "1"),
        ("launch", "--kernel-us", "100", "--count", "3000"),
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_programs_run_without_a_report(cards: Cards, via: str, words: tuple[str, ...]) -> None:
    done = cards.attempt("--via", via, *words)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_refusal_a_worker_and_the_daemon_run_without_a_report(cards: Cards) -> None:
    daemon = cards.start("serve", program="fakegpud")
    assert cards.first(daemon)["ready"] is True
    worker = cards.start("worker", "--mib", "32", "--kernel-us", "50", "--heartbeat", "60")
    assert cards.attempt("alloc", "50000").returncode == 1
    wait_until(lambda: len(cards.stat()["processes"]) == 1, "the worker alone")
    for process in (worker, daemon):
        process.terminate()
        assert process.wait() == 0
