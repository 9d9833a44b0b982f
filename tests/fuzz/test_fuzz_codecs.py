"""A short, repeatable part of the fuzzing of codecs and views; the long part runs by hand (README.md)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fuzz_codecs


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_changed_inputs_give_values_or_typed_errors(seed: int) -> None:
    fuzz_codecs.run_seeded(4000, seed)


def test_every_target_has_a_seed() -> None:
    used = {data[0] for data in fuzz_codecs.seed_inputs()}
    assert used == set(range(len(fuzz_codecs.TARGETS)))


def test_a_codec_that_lets_another_error_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(text: str) -> float:
        return float(text.partition(",")[0].removesuffix("Z")[-2:])

    monkeypatch.setattr(fuzz_codecs, "parse_lock", careless)
    with pytest.raises(Exception, match=r"float|attribute") as caught:
        fuzz_codecs.run_seeded(4000, 1)
    assert "of seed 1: b'" in "".join(caught.value.__notes__)
