"""Whether a pod fits, and why not (scheduler.md §6, §8, acceptance cases 7, 8, 20 to 34, 61 to 66)."""

from typing import Any

import pytest

from hami.scheduler.core import search
from hami.scheduler.core.answers import NoFit, Placement, PlacementError

Lab = Any


def test_a_node_with_too_few_cards_is_refused_and_unresolvable(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    answer = lab.filter(lab.pod("new", lab.container(gpus=2)))
    assert (answer.failed, answer.unresolvable) == ({}, {"n1": "NodeInsufficientDevice"})


def test_an_exclusive_request_needs_an_unused_card(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    lab.holder("h", "n1", "a,NVIDIA,100,0:;")
    assert lab.refused(lab.pod("new", lab.container(mem=100, cores=100))) == {
        "n1": "1/1 ExclusiveDeviceAllocateConflict"
    }


def test_a_card_without_compute_left_takes_no_pod_without_cores(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    lab.holder("h", "n1", "a,NVIDIA,100,100:;")
    assert lab.refused(lab.pod("new", lab.container(mem=100))) == {"n1": "1/1 CardComputeUnitsExhausted"}


def test_cores_over_100_are_a_whole_card(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    lab.placed(lab.pod("new", lab.container(mem=100, cores=150)))
    assert lab.used("n1") == {"a": (1, 100, 100)}


def test_a_full_card_is_skipped_and_reported(lab: Lab) -> None:
    lab.node("n1", lab.card("a", count=1), lab.card("b", count=1))
    lab.holder("h", "n1", "a,NVIDIA,100,0:;")
    assert lab.placed(lab.pod("first", lab.container(mem=100))) == ("n1", [["b"]])
    answer = lab.filter(lab.pod("second", lab.container(mem=100)))
    assert answer.failed == {"n1": "2/2 CardTimeSlicingExhausted"}


def test_a_cordoned_card_comes_back_when_the_cordon_is_lifted(lab: Lab) -> None:
    lab.node("n1", lab.card("a"), annotations={"hami.io/device-cordon": " a ,"})
    new = lab.pod("new", lab.container(mem=100))
    assert lab.refused(new) == {"n1": "1/1 CardCordoned"}
    lab.node("n1", lab.card("a"))
    assert lab.placed(new) == ("n1", [["a"]])


def test_an_unknown_node_fails_alone(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    answer = lab.filter(lab.pod("new"), "n1", "n3")
    assert answer.node == "n1"
    assert answer.message == "find fit node(n1), 1 nodes not fit, 1 nodes fit(n1:0.00)"


def test_only_unknown_nodes_are_unresolvable(lab: Lab) -> None:
    answer = lab.filter(lab.pod("new"), "n3")
    assert (answer.failed, answer.unresolvable) == ({}, {"n3": "node unregistered"})
    assert answer.messages() == ("no available node, 1 nodes do not meet",)


def test_containers_of_a_pod_add_up(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    two = [lab.container("c1", mem=5000), lab.container("c2", mem=5000)]
    assert lab.refused(lab.pod("new", *two)) == {"n1": "1/1 CardInsufficientMemory"}
    assert lab.placed(lab.pod("ok", lab.container("c1", mem=4000), lab.container("c2", mem=4000)))[0] == "n1"


def test_init_containers_are_fitted_each_on_its_own(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    inits = [lab.container("i1", mem=7000), lab.container("i2", mem=7000)]
    lab.placed(lab.pod("new", lab.container(mem=8000), inits=inits))
    assert lab.used("n1") == {"a": (1, 8000, 0)}


def test_an_init_container_runs_beside_the_sidecars_declared_before_it(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    before = [lab.sidecar("s", mem=2000), lab.container("i", mem=7000)]
    assert lab.refused(lab.pod("new", lab.container(mem=1000), inits=before)) == {
        "n1": "1/1 CardInsufficientMemory"
    }
    after = [lab.container("i", mem=7000), lab.sidecar("s", mem=2000)]
    lab.placed(lab.pod("ok", lab.container(mem=1000), inits=after))
    assert lab.used("n1") == {"a": (2, 7000, 0)}


def test_an_invalid_request_fails_every_node_with_the_reason(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    reasons = lab.refused(lab.pod("new", lab.container(mem="1500m")))
    assert "nvidia.com/gpumem" in reasons["n1"]


def test_a_pod_without_device_requests_is_none_of_our_business(lab: Lab) -> None:
    assert lab.state.parse(lab.pod("plain", lab.container(gpus=None))) is None


# --- kubelet counts slots per node (cases 61, 62) ------------------------------


def test_a_node_out_of_slots_counts_every_card(lab: Lab) -> None:
    lab.node("n1", lab.card("a"), lab.card("b"), allocatable=10)
    for at in range(10):
        lab.holder(f"h{at}", "n1", "a,NVIDIA,10,0:;")
    answer = lab.filter(lab.pod("new", lab.container(mem=10)))
    assert answer.failed == {"n1": "2/2 CardTimeSlicingExhausted"}


def test_a_node_that_does_not_report_the_resource_is_not_limited(lab: Lab) -> None:
    lab.node("n1", lab.card("a"), lab.card("b"))
    for at in range(10):
        lab.holder(f"h{at}", "n1", "a,NVIDIA,10,0:;")
    assert lab.placed(lab.pod("new", lab.container(mem=10))) == ("n1", [["b"]])


def test_the_slots_of_the_whole_pod_must_be_left(lab: Lab) -> None:
    lab.node("n1", lab.card("a"), lab.card("b"), allocatable=3)
    lab.holder("h", "n1", "a,NVIDIA,10,0:;")
    three = [lab.container(f"c{at}", mem=10) for at in range(3)]
    assert lab.refused(lab.pod("new", *three)) == {"n1": "2/2 CardTimeSlicingExhausted"}
    assert lab.placed(lab.pod("ok", *three[:2]))[0] == "n1"


def test_cards_that_fail_earlier_checks_keep_their_reason_on_a_full_node(lab: Lab) -> None:
    lab.node("n1", lab.card("a", health=False), lab.card("b"), allocatable=1)
    lab.holder("h", "n1", "b,NVIDIA,10,0:;")
    assert lab.refused(lab.pod("new", lab.container(mem=10))) == {
        "n1": "1/2 CardNotHealth, 1/2 CardTimeSlicingExhausted"
    }


# --- many candidates (cases 63, 64, 66) ------------------------------


def many_nodes(lab: Lab, count: int, fitting: int) -> None:
    """`count` nodes with one card, of which only the last `fitting` have room for 4000 MiB."""
    for at in range(count):
        lab.node(f"n{at:04d}", lab.card(f"c{at}", devmem=8000 if at >= count - fitting else 1000))


def test_up_to_64_candidates_are_counted_exactly(lab: Lab) -> None:
    many_nodes(lab, 64, 3)
    answer = lab.filter(lab.pod("new", lab.container(mem=4000)))
    assert answer.exact
    text = "find fit node(n0061), 61 nodes not fit, 3 nodes fit(n0063:0.00,n0062:0.00,n0061:0.00)"
    assert answer.message == text


def test_above_64_candidates_the_counts_are_bounds(lab: Lab) -> None:
    many_nodes(lab, 65, 3)
    answer = lab.filter(lab.pod("new", lab.container(mem=4000)))
    assert not answer.exact
    text = (
        "find fit node(n0062), at least 62 nodes not fit, up to 3 nodes fit(n0064:0.00,n0063:0.00,n0062:0.00)"
    )
    assert answer.message == text


def test_at_most_20_scores_are_shown_and_the_chosen_node_is_the_last(lab: Lab) -> None:
    many_nodes(lab, 200, 50)
    lab.holder("h", "n0170", "c170,NVIDIA,1000,0:;")
    answer = lab.filter(lab.pod("new", lab.container(mem=4000)))
    assert answer.node == "n0170"
    assert len(answer.scores) == 20
    assert answer.scores[-1][0] == "n0170"


def test_above_64_candidates_the_choice_is_the_same_as_with_all_fitted(lab: Lab) -> None:
    # Pods of two containers pass the mask on nodes whose cards take only one of them.
    for at in range(100):
        lab.node(f"n{at:04d}", lab.card(f"c{at}", devmem=6000 if at % 3 else 8000))
        if at % 5:
            lab.holder(f"h{at}", f"n{at:04d}", f"c{at},NVIDIA,{at},0:;")
    new = lab.pod("new", lab.container("c1", mem=3500), lab.container("c2", mem=3500))
    node, _ = lab.placed(new)
    assert node == "n0099"
    lab.state.release("uid-new")
    scores = [lab.filter(new, f"n{at:04d}") for at in range(100)]
    fitting = [(one.scores[0][1], one.node) for one in scores if isinstance(one, Placement)]
    assert max(fitting)[1] == node


def test_of_5000_candidates_the_choice_is_the_same_as_with_all_fitted(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 500 nodes pass the mask; on the fullest of them only one of the two containers fits.
    many_nodes(lab, 5000, 500)
    for at in range(4500, 5000):
        lab.holder(f"h{at}", f"n{at:04d}", f"c{at},NVIDIA,{at - 4000},0:;")
    new = lab.pod("new", lab.container("c1", mem=3600), lab.container("c2", mem=3600))
    few = lab.filter(new)
    assert len(few.scores) == 20
    assert not few.exact
    lab.state.release("uid-new")
    monkeypatch.setattr(search, "ALL_FITTED", 5000)
    every = lab.filter(new)
    assert (few.node, few.reservation.annotations) == (every.node, every.reservation.annotations)
    assert (every.node, every.fits) == ("n4800", 301)


def test_reasons_are_computed_in_slices_and_hold_for_the_newest_version(lab: Lab) -> None:
    many_nodes(lab, 80, 0)
    # The first container fits everywhere, so only exact fits know why the pod does not.
    new = lab.pod("new", lab.container("c1", mem=400), lab.container("c2", mem=4000))
    search = lab.state.search(lab.request(new), lab.state.candidates(sorted(lab.state.node_names())), lab.now)
    assert search.advance(10) is None
    lab.node("n0007", lab.card("c7", devmem=500))
    while (answer := search.advance(10)) is None:
        pass
    assert isinstance(answer, NoFit)
    assert answer.version == lab.state.version
    assert set(answer.failed.values()) == {"1/1 CardInsufficientMemory"}
    assert len(answer.failed) == 80


def test_nodes_that_refuse_the_first_container_need_no_exact_fit(lab: Lab) -> None:
    many_nodes(lab, 80, 0)
    new = lab.pod("new", *(lab.container(f"c{at}", mem=4000) for at in range(3)))
    search = lab.state.search(lab.request(new), lab.state.candidates(sorted(lab.state.node_names())), lab.now)
    answer = search.advance(1)
    assert isinstance(answer, NoFit)
    assert set(answer.failed.values()) == {"1/1 CardInsufficientMemory"}


def test_a_card_freed_while_reasons_are_computed_is_taken(lab: Lab) -> None:
    many_nodes(lab, 80, 1)
    lab.holder("h", "n0079", "c79,NVIDIA,8000,0:;")
    new = lab.pod("new", lab.container("c0", mem=400), lab.container("c1", mem=4000))
    search = lab.state.search(lab.request(new), lab.state.candidates(sorted(lab.state.node_names())), lab.now)
    assert search.advance(10) is None
    lab.state.delete_pod("uid-h")
    answer = search.advance(10)
    assert isinstance(answer, Placement)
    assert answer.node == "n0079"


def test_a_node_taken_between_slices_is_not_given_twice(lab: Lab) -> None:
    for at in range(80):
        lab.node(f"n{at:04d}", lab.card(f"c{at}", devmem=8000))
        lab.holder(f"h{at}", f"n{at:04d}", f"c{at},NVIDIA,{2000 if at == 79 else 4000},0:;")
    names = sorted(lab.state.node_names())
    pair = [lab.container("c1", mem=3000), lab.container("c2", mem=3000)]
    search = lab.state.search(lab.request(lab.pod("slow", *pair)), lab.state.candidates(names), lab.now)
    assert search.advance(2) is None
    assert lab.placed(lab.pod("fast", *pair))[0] == "n0079"
    while (answer := search.advance(50)) is None:
        pass
    assert isinstance(answer, NoFit)


def test_a_pod_deleted_while_it_is_placed_reserves_nothing(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    search = lab.state.search(lab.request(lab.pod("new")), lab.state.candidates(["n1"]), lab.now)
    lab.state.delete_pod("uid-new")
    with pytest.raises(PlacementError, match="deleted"):
        search.advance(1)
    assert lab.state.reservation("uid-new") is None


def test_a_newer_filter_of_the_same_pod_takes_over(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    request, mask = lab.request(lab.pod("new")), lab.state.candidates(["n1"])
    first = lab.state.search(request, mask, lab.now)
    second = lab.state.search(request, mask, lab.now)
    with pytest.raises(PlacementError, match="newer request"):
        first.advance(1)
    assert isinstance(second.advance(1), Placement)


def test_events_name_at_most_20_nodes_per_reason(lab: Lab) -> None:
    many_nodes(lab, 30, 0)
    messages = lab.filter(lab.pod("new", lab.container(mem=4000))).messages()
    assert messages[-1] == "no available node, 30 nodes do not meet"
    assert messages[0].startswith("30 nodes CardInsufficientMemory(n0000,n0001,")
    assert messages[0].endswith("n0019,…and 10 more)")


# --- candidate lists ------------------------------


def test_an_identical_list_of_names_gives_the_same_mask(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    assert lab.state.candidates(["n1", "n2"]) is lab.state.candidates(["n1", "n2"])
    assert lab.state.candidates_json(b'["n1"]') is lab.state.candidates_json(b'["n1"]')


def test_a_kept_mask_follows_nodes_that_come_and_go(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    mask = lab.state.candidates(["n1", "n2"])
    request = lab.request(lab.pod("new", lab.container(mem=8000)))
    assert lab.state.place(request, mask, lab.now).node == "n1"
    lab.state.delete_node("n1")
    assert set(lab.state.place(request, mask, lab.now).unresolvable) == {"n1", "n2"}
    lab.node("n3", lab.card("c"))  # takes the row of n1, but is no candidate
    lab.node("n2", lab.card("b"))
    assert lab.state.place(request, mask, lab.now).node == "n2"


def test_a_name_given_twice_counts_once(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    assert lab.filter(lab.pod("new"), "n1", "n1").fits == 1
