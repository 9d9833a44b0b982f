"""The mix of requests forgets the lightest kinds: the same ones as looking through all of them."""

import random

import pytest

from hami.scheduler.core import mix
from hami.scheduler.core.hosts import HostAmount
from hami.scheduler.core.mix import RequestKind, VendorMix


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fading", [1.0, 1.07, 2.5])
def test_the_lightest_and_of_these_the_oldest_kind_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, seed: int, fading: float
) -> None:
    """Weights tie where nothing fades, and are brought down to size many times."""
    monkeypatch.setattr(mix, "_KINDS", 6)
    monkeypatch.setattr(mix, "_FADING", fading)
    monkeypatch.setattr(mix, "_RENORMALISED", 50.0)
    rng = random.Random(seed)
    found = VendorMix()
    expected: dict[RequestKind, float] = {}
    unit = 1.0
    for _ in range(400):
        kind = RequestKind(1, rng.choice([1000, 2000, rng.randrange(20)]), 0, 10, HostAmount(1000, 10))
        found.add(kind)
        expected[kind] = expected.get(kind, 0.0) + unit
        unit *= fading
        if len(expected) > 6:
            del expected[min(expected, key=expected.__getitem__)]
        if unit > 50.0:
            expected = {one: weight / unit for one, weight in expected.items()}
            unit = 1.0
        total = sum(expected.values())
        assert found.shares() == {one: weight / total for one, weight in expected.items()}
