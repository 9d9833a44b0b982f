"""Pair scores from links between cards (nvidia-scheduling.md §13.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.node.errors import TopologyError
from hami.node.nvml import NvLink
from hami.node.plugin.topology import Links, asymmetry_text, pair_scores, same_bus
from hami.protocol.pair_scores import decode_pair_scores, encode_pair_scores

BUS = {"GPU-a": "00000000:10:00.0", "GPU-b": "00000000:15:00.0", "GPU-c": "00000000:8A:00.0"}
SWITCH = "00000000:C4:00.0"
Nvlinks = Mapping[str, Sequence[NvLink]]


def to(uuid: str, count: int) -> list[NvLink]:
    return [NvLink(BUS[uuid])] * count


def switch(count: int, remote: str = SWITCH) -> list[NvLink]:
    return [NvLink(remote, to_switch=True)] * count


def pair(nvlinks: Nvlinks, level: int | None = 40, back: int | None = 40) -> tuple[int, int, tuple[str, ...]]:
    """Scores of GPU-a to GPU-b and back, and what is told of them."""
    levels = {("GPU-a", "GPU-b"): level, ("GPU-b", "GPU-a"): back}
    links = Links(BUS, nvlinks, {key: number for key, number in levels.items() if number is not None})
    scores, told = pair_scores(["GPU-a", "GPU-b"], links)
    return scores["GPU-a"]["GPU-b"], scores["GPU-b"]["GPU-a"], told


def test_t1_same_cpu_and_four_nvlinks_both_ways() -> None:
    assert pair({"GPU-a": to("GPU-b", 4), "GPU-b": to("GPU-a", 4)}) == (420, 420, ())


def test_t2_nvlink_that_only_one_end_knows_scores_nothing_and_is_told() -> None:
    there, back, told = pair({"GPU-a": to("GPU-b", 4), "GPU-b": []})
    assert (there, back) == (0, 0)
    assert told == ("GPU-a sees 2 kinds of link to GPU-b, which sees 1 kind of link back",)


def test_t3_through_a_switch_the_card_with_fewer_links_counts() -> None:
    assert pair({"GPU-a": switch(18), "GPU-b": switch(12)}) == (1220, 1220, ())
    assert pair({"GPU-a": switch(18), "GPU-b": switch(12)}, 50, 50) == (1210, 1210, ())


@pytest.mark.parametrize(("level", "weight"), [(50, 10), (40, 20), (30, 30), (20, 40), (10, 50), (0, 60)])
def test_weights_of_the_common_ancestors(level: int, weight: int) -> None:
    assert pair({"GPU-a": [], "GPU-b": []}, level, level) == (weight, weight, ())


def test_an_unknown_common_ancestor_is_an_error() -> None:
    with pytest.raises(TopologyError, match="unknown common ancestor 45 of GPU-a and GPU-b"):
        pair({"GPU-a": [], "GPU-b": []}, 45)


def test_cards_without_any_link_score_nothing() -> None:
    assert pair({"GPU-a": [], "GPU-b": []}, None, None) == (0, 0, ())
    assert pair({"GPU-a": [], "GPU-b": []}, 10, None)[:2] == (0, 0)


def test_more_than_eighteen_nvlinks_count_all() -> None:
    assert pair({"GPU-a": to("GPU-b", 24), "GPU-b": to("GPU-a", 24)})[0] == 2420


def test_each_direction_counts_its_own_links() -> None:
    assert pair({"GPU-a": to("GPU-b", 4), "GPU-b": to("GPU-a", 3)}) == (420, 320, ())


def test_direct_links_come_before_the_switch() -> None:
    nvlinks = {"GPU-a": [*to("GPU-b", 2), *switch(6)], "GPU-b": [*to("GPU-a", 2), *switch(6)]}
    assert pair(nvlinks)[0] == 220


def test_the_switch_needs_both_cards_and_a_link_whose_end_is_known() -> None:
    assert pair({"GPU-a": switch(6), "GPU-b": to("GPU-c", 6)}) == (20, 20, ())
    assert pair({"GPU-a": switch(6, ""), "GPU-b": switch(6, "")}) == (20, 20, ())
    assert pair({"GPU-a": switch(6), "GPU-b": switch(6, "")})[:2] == (0, 0)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("00000000:8A:00.0", "00000000:8a:00.0", True),
        ("00000000:8A:00.0", "0000:8a:00.0", False),
        ("0000:8A:00.0", ":8a:00.0", True),
        ("00010000:8A:00.0", "00000000:8A:00.0", False),
        ("0000", "", False),
    ],
)
def test_bus_ids_differ_in_case_and_one_leading_0000(one: str, other: str, same: bool) -> None:
    assert same_bus(one, other) is same


def test_a_card_that_is_not_listed_is_an_error() -> None:
    with pytest.raises(TopologyError, match="NVML lists no GPU GPU-z"):
        pair_scores(["GPU-a", "GPU-z"], Links(BUS, {}))


def test_a_card_that_could_not_be_asked_has_an_entry_and_no_scores() -> None:
    levels = dict.fromkeys(permutations(BUS, 2), 20)
    links = Links(BUS, {"GPU-a": to("GPU-b", 4), "GPU-c": []}, levels)
    scores, told = pair_scores(BUS, links)
    assert scores == {"GPU-a": {"GPU-c": 40}, "GPU-b": {}, "GPU-c": {"GPU-a": 40}}
    assert told == ()


def test_the_annotation_of_three_cards() -> None:
    nvlinks = {"GPU-a": to("GPU-b", 2), "GPU-b": to("GPU-a", 2), "GPU-c": []}
    levels = dict.fromkeys(permutations(BUS, 2), 50) | {("GPU-a", "GPU-b"): 10, ("GPU-b", "GPU-a"): 10}
    scores, _ = pair_scores(BUS, Links(BUS, nvlinks, levels))
    assert encode_pair_scores(scores) == (
        '[{"uuid":"GPU-a","score":{"GPU-b":250,"GPU-c":10}},'
        '{"uuid":"GPU-b","score":{"GPU-a":250,"GPU-c":10}},'
        '{"uuid":"GPU-c","score":{"GPU-a":10,"GPU-b":10}}]'
    )


def test_the_annotation_of_one_card_and_of_none() -> None:
    assert encode_pair_scores(pair_scores(["GPU-a"], Links(BUS, {"GPU-a": []}))[0]) == (
        '[{"uuid":"GPU-a","score":{}}]'
    )
    assert encode_pair_scores(pair_scores([], Links({}, {}))[0]) == "[]"


def test_the_event_names_eight_pairs() -> None:
    assert asymmetry_text(["p", "q"]) == "asymmetric P2P link data, these pairs score 0: p; q"
    assert asymmetry_text(["p"] * 10).endswith("p; and 2 more")


@given(st.data())
def test_scores_are_whole_without_self_and_come_back_from_the_annotation(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 5))
    bus = {f"GPU-{index}": f"00000000:{16 + index:02X}:00.0" for index in range(count)}
    remote = st.sampled_from([*bus.values(), SWITCH, ""])
    link = st.builds(NvLink, remote, st.booleans())
    nvlinks = {uuid: data.draw(st.lists(link, max_size=20)) for uuid in bus}
    level = st.sampled_from([None, 0, 10, 20, 30, 40, 50])
    drawn = {key: data.draw(level) for key in permutations(bus, 2)}
    levels = {key: number for key, number in drawn.items() if number is not None}
    scores, told = pair_scores(bus, Links(bus, nvlinks, levels))
    assert {uuid: set(row) for uuid, row in scores.items()} == {uuid: set(bus) - {uuid} for uuid in bus}
    assert all(score >= 0 for row in scores.values() for score in row.values())
    # Both ends score, or none does; without a score there is no link at all or a line that tells why.
    for one, other in permutations(bus, 2):
        assert bool(scores[one][other]) == bool(scores[other][one])
        if not scores[one][other] and (one, other) in levels:
            assert any(line.startswith((f"{one} sees", f"{other} sees")) for line in told)
    assert decode_pair_scores(encode_pair_scores(scores)) == scores
