from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.kube.ratelimit import Backoff, TokenBucket


def test_a_burst_passes_at_once_and_the_next_waits_its_turn() -> None:
    bucket = TokenBucket(10.0, 3)
    assert [bucket.reserve(0.0) for _ in range(5)] == [0.0, 0.0, 0.0, pytest.approx(0.1), pytest.approx(0.2)]


def test_tokens_come_back_with_time_but_never_more_than_the_burst() -> None:
    bucket = TokenBucket(10.0, 3)
    for _ in range(3):
        bucket.reserve(0.0)
    assert bucket.available(0.1) == pytest.approx(1.0)
    assert bucket.available(1000.0) == 3.0


@pytest.mark.parametrize(("rate", "burst"), [(-1.0, 1), (1.0, 0)])
def test_a_limit_that_lets_nothing_through_is_refused(rate: float, burst: int) -> None:
    with pytest.raises(ValueError, match="rate must be >= 0 and burst >= 1"):
        TokenBucket(rate, burst)


@given(st.floats(0.5, 200), st.integers(1, 5), st.lists(st.floats(0, 0.5), max_size=20))
def test_the_wait_is_what_taking_the_token_would_take(rate: float, burst: int, gaps: list[float]) -> None:
    bucket, now = TokenBucket(rate, burst), 0.0
    for gap in gaps:
        now += gap
        assert bucket.wait(now) == pytest.approx(bucket.reserve(now))


def test_rate_zero_means_no_limit() -> None:
    bucket = TokenBucket(0.0, 1)
    assert bucket.wait(0.0) == 0.0
    assert {bucket.reserve(0.0) for _ in range(1000)} == {0.0}


@given(st.floats(0.5, 200), st.integers(1, 200), st.lists(st.floats(0, 0.5), max_size=300))
def test_no_window_exceeds_burst_plus_rate(rate: float, burst: int, gaps: list[float]) -> None:
    bucket = TokenBucket(rate, burst)
    now, starts = 0.0, []
    for gap in gaps:
        now += gap
        starts.append(now + bucket.reserve(now))
    assert starts == sorted(starts)
    for first, start in enumerate(starts):
        for last in range(first, len(starts)):
            assert last - first + 1 <= burst + rate * (starts[last] - start) + 1.001


def test_back_off_doubles_up_to_its_cap_and_starts_again_after_a_success() -> None:
    backoff = Backoff(1.0, 4.0, random.Random(1))
    delays = [backoff.next() for _ in range(5)]
    for delay, full in zip(delays, [1, 2, 4, 4, 4], strict=True):
        assert full / 2 <= delay <= full
    backoff.reset()
    assert backoff.next() <= 1.0
