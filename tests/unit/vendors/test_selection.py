"""Lists that users write (README R10, §5 cases 13-18) and the text of reasons."""

from typing import Any

import pytest

from hami.vendors.engine import cordoned_ids, policy_words
from hami.vendors.reasons import reasons_text
from hami.vendors.selection import select

USE, NO_USE = "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"
TYPE, NO_TYPE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"


@pytest.mark.parametrize(
    ("annotations", "card", "allowed"),
    [
        pytest.param({USE: " a , b "}, "b", True, id="13"),
        pytest.param({USE: "", NO_USE: "   "}, "b", True, id="14"),
        pytest.param({USE: "a,b", NO_USE: "b"}, "b", False, id="both"),
        pytest.param({USE: ","}, "b", False, id="a list of nothing"),
        pytest.param({NO_USE: ","}, "b", True, id="all but nothing"),
    ],
)
def test_ids_match_exactly(lab: Any, annotations: dict[str, str], card: str, allowed: bool) -> None:
    assert select(lab.nvidia().rules, annotations).allows_id(card) is allowed


@pytest.mark.parametrize(
    ("annotations", "model", "allowed"),
    [
        pytest.param({TYPE: "k100,"}, "DCU-K100_AI", True, id="15"),
        pytest.param({TYPE: "k100,"}, "DCU-Z100", False, id="15 other"),
        pytest.param({NO_TYPE: ",MI250"}, "AMD Instinct MI300X", True, id="16"),
        pytest.param({TYPE: "A10"}, "NVIDIA A100", True, id="substring"),
        pytest.param({TYPE: "=NVIDIA A10"}, "NVIDIA A100", False, id="exact form"),
        pytest.param({TYPE: "=nvidia a10"}, "NVIDIA A10", True, id="exact form, any case"),
    ],
)
def test_types_match_as_substrings(lab: Any, annotations: dict[str, str], model: str, allowed: bool) -> None:
    assert select(lab.nvidia().rules, annotations).allows_model(model, "") is allowed


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_numa_binding_takes_the_spellings_of_true(lab: Any, text: str) -> None:
    assert select(lab.nvidia().rules, {"nvidia.com/numa-bind": text}).numa_bound


@pytest.mark.parametrize("text", ["", "0", "false", "yes", "tRUE", " true"])
def test_numa_binding_takes_nothing_else(lab: Any, text: str) -> None:
    assert not select(lab.nvidia().rules, {"nvidia.com/numa-bind": text}).numa_bound


def test_cordoned_ids_are_trimmed_and_blanks_skipped() -> None:  # 35
    assert cordoned_ids({"hami.io/device-cordon": " id1 ,, id2 "}) == {"id1", "id2"}
    assert cordoned_ids({}) == frozenset()


def test_policy_words_are_trimmed() -> None:  # 34
    assert policy_words("binpack, mutex,") == {"binpack", "mutex"}


@pytest.mark.parametrize(
    ("reasons", "total", "text"),
    [
        pytest.param(
            {"CardInsufficientMemory": 3, "CardNotHealth": 1},
            4,
            "1/4 CardNotHealth, 3/4 CardInsufficientMemory",
            id="17",
        ),
        pytest.param(
            {"CardTypeMismatch": 10, "CardNotHealth": 2},
            12,
            "10/12 CardTypeMismatch, 2/12 CardNotHealth",
            id="18",
        ),
        ({"NodeInsufficientDevice": 2}, 2, "NodeInsufficientDevice"),
        ({}, 3, ""),
    ],
)
def test_reasons_are_sorted_as_text(reasons: dict[str, int], total: int, text: str) -> None:
    assert reasons_text(reasons, total) == text
