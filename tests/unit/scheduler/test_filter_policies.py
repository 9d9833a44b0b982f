"""Which node and which card a pod gets (scheduler.md §7, acceptance cases 11 to 19)."""

from typing import Any

import pytest

from hami.scheduler.core.answers import PlacementError
from hami.scheduler.core.policies import parse_weights

Lab = Any


def two_nodes(lab: Lab, node_policy: str, card_policy: str) -> Lab:
    """n1: a (2000 MiB, 25 % used), b idle; n2: c idle, d (6000 MiB, 75 % used); every card 8000 MiB."""
    lab = lab.fresh(node_policy=node_policy, card_policy=card_policy)
    lab.node("n1", lab.card("a"), lab.card("b"))
    lab.node("n2", lab.card("c"), lab.card("d"))
    lab.holder("h1", "n1", "a,NVIDIA,2000,25:;")
    lab.holder("h2", "n2", "d,NVIDIA,6000,75:;")
    return lab


@pytest.mark.parametrize(
    ("node_policy", "card_policy", "expected"),
    [
        pytest.param("binpack", "binpack", ("n2", "d"), id="11"),
        pytest.param("binpack", "spread", ("n2", "c"), id="12"),
        pytest.param("spread", "binpack", ("n1", "a"), id="13"),
        pytest.param("spread", "spread", ("n1", "b"), id="14"),
        pytest.param("fastest", "spread", ("n2", "c"), id="15"),  # an unknown node policy acts as binpack
        ("binpack", "fastest", ("n2", "c")),  # an unknown card policy acts as spread
    ],
)
def test_policies_choose_node_and_card(
    lab: Lab, node_policy: str, card_policy: str, expected: object
) -> None:
    lab = two_nodes(lab, node_policy, card_policy)
    node, slots = lab.placed(lab.pod("new", lab.container(mem=1000, cores=20)))
    assert (node, slots[0][0]) == expected


def test_annotations_override_the_flags(lab: Lab) -> None:
    lab = two_nodes(lab, "spread", "spread")
    wish = {"hami.io/node-scheduler-policy": "binpack", "hami.io/gpu-scheduler-policy": "binpack"}
    new = lab.pod("new", lab.container(mem=1000, cores=20), annotations=wish)
    assert lab.placed(new) == ("n2", [["d"]])


def test_an_empty_policy_annotation_means_spread_of_cards(lab: Lab) -> None:
    lab = two_nodes(lab, "binpack", "binpack")
    new = lab.pod("new", lab.container(mem=1000), annotations={"hami.io/gpu-scheduler-policy": ""})
    assert lab.placed(new) == ("n2", [["c"]])


def test_init_and_app_containers_share_a_card_that_has_room_for_the_larger(lab: Lab) -> None:
    lab = two_nodes(lab, "binpack", "binpack")
    new = lab.pod("new", lab.container(mem=4000), inits=[lab.container("init", mem=5000)])
    assert lab.placed(new) == ("n2", [["c"], ["c"]])


def test_mutex_takes_only_idle_cards_and_says_so(lab: Lab) -> None:
    lab = two_nodes(lab, "spread", "mutex")
    text = "1/2 AllocatedCardsInsufficientRequest, 1/2 ExclusiveDeviceAllocateConflict"
    assert lab.refused(lab.pod("new", lab.container(gpus=2, mem=1000))) == {"n1": text, "n2": text}


def test_mutex_in_a_list_filters_and_the_other_word_sorts(lab: Lab) -> None:
    lab = two_nodes(lab, "binpack", "mutex,binpack")
    assert lab.placed(lab.pod("new", lab.container(mem=1000))) == ("n2", [["c"]])


@pytest.mark.parametrize(("weights", "expected"), [({"slot": 1, "core": 1, "memory": 3}, "q"), (None, "p")])
def test_scoring_weights_change_the_order_of_cards(
    lab: Lab, weights: dict[str, int] | None, expected: str
) -> None:
    # p: 1 slot, 90 % cores, 10 of 100 MiB; q: 7 slots, 10 % cores, 20 of 100 MiB
    lab = lab.fresh(card_policy="binpack")
    lab.node("n1", lab.card("p", devmem=100), lab.card("q", devmem=100))
    lab.holder("hp", "n1", "p,NVIDIA,10,90:;")
    for at in range(7):
        lab.holder(f"hq{at}", "n1", f"q,NVIDIA,{(2, 3)[at > 0]},{(4, 1)[at > 0]}:;")
    text = ",".join(f"{key}={value}" for key, value in (weights or {}).items())
    annotations = {"hami.io/device-scoring-weights": text} if weights else {}
    new = lab.pod("new", lab.container(percent=40), annotations=annotations)
    assert lab.placed(new) == ("n1", [[expected]])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("slot=1,memory=3", "expected slot, core, and memory weights"),
        ("", "expected slot, core, and memory weights"),
        ("slot,core=1,memory=1", "expected key=value entries"),
        ("slot=1,slot=1,core=1", 'duplicate "slot" weight'),
        ("slot=x,core=1,memory=1", '"slot" weight must be an integer'),
        ("slot=a,core=1,memory=1", '"slot" weight must be an integer'),
        ("slot=-1,core=1,memory=1", '"slot" weight must not be negative'),
        ("slot=-9223372036854775808,core=1,memory=1", '"slot" weight must not be negative'),
        ("slot=-9223372036854775809,core=1,memory=1", '"slot" weight must be an integer'),
        ("speed=1,core=1,memory=1", 'unknown weight "speed"'),
        ("slot=0,core=0,memory=0", "at least one weight must be positive"),
    ],
)
def test_bad_weights_fail_the_pod_with_the_first_problem(text: str, problem: str) -> None:
    with pytest.raises(PlacementError) as caught:
        parse_weights({"hami.io/device-scoring-weights": text})
    assert str(caught.value) == f'invalid hami.io/device-scoring-weights annotation "{text}": {problem}'


def test_weights_are_read_in_any_order_and_trimmed() -> None:
    weights = parse_weights({"hami.io/device-scoring-weights": "slot=1, memory=3,core=0"})
    assert weights is not None
    assert (weights.slot, weights.core, weights.memory) == (1, 0, 3)


def test_bad_weights_name_the_pod_in_the_filter_error(lab: Lab) -> None:
    new = lab.pod("new", annotations={"hami.io/device-scoring-weights": "slot=1"})
    with pytest.raises(PlacementError, match=r"^calcScore failed invalid .* for pod new$"):
        lab.state.parse(new)


def test_equal_nodes_the_smaller_wins_then_the_name(lab: Lab) -> None:
    lab.node("n3", lab.card("c"), lab.card("d"))
    lab.node("n2", lab.card("b"))
    lab.node("n1", lab.card("a1"), lab.card("a2"))
    assert lab.placed(lab.pod("first")) == ("n2", [["b"]])
    lab.state.delete_node("n2")
    assert lab.placed(lab.pod("second"))[0] == "n1"


def test_equal_cards_the_later_inventory_position_wins(lab: Lab) -> None:
    lab.node("n1", *(lab.card(f"c{at}") for at in range(16)))
    assert lab.placed(lab.pod("new", lab.container(gpus=2))) == ("n1", [["c15", "c14"]])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("numa", "z"),  # highest NUMA, then highest index
        ("numa,binpack", "x"),  # highest NUMA group, highest score in it
        ("spread,numa", "z"),
        ("binpack, unknown ,binpack", "w"),
    ],
)
def test_comma_lists_chain_the_sort_keys(lab: Lab, policy: str, expected: str) -> None:
    lab = lab.fresh(card_policy=policy)
    lab.node("n1", lab.card("w"), lab.card("x", numa=1), lab.card("y", numa=0), lab.card("z", numa=1))
    lab.holder("h1", "n1", "w,NVIDIA,3000,0:;")
    lab.holder("h2", "n1", "x,NVIDIA,2000,0:;")
    assert lab.placed(lab.pod("new", lab.container(mem=100)))[1] == [[expected]]


def test_numa_binding_keeps_a_container_on_one_numa_node(lab: Lab) -> None:
    # Scores x > z > y: without binding, spread would take y and z.
    lab.node("n1", lab.card("x"), lab.card("y"), lab.card("z", numa=1))
    lab.holder("hx", "n1", "x,NVIDIA,5000,0:;")
    lab.holder("hy", "n1", "y,NVIDIA,1000,0:;")
    lab.holder("hz", "n1", "z,NVIDIA,3000,0:;")
    free = lab.pod("free", lab.container(gpus=2, mem=100))
    assert lab.placed(free) == ("n1", [["y", "z"]])
    lab.state.release("uid-free")
    new = lab.pod("new", lab.container(gpus=2, mem=100), annotations={"nvidia.com/numa-bind": "true"})
    assert lab.placed(new) == ("n1", [["y", "x"]])


def test_numa_binding_that_no_group_can_serve_is_refused(lab: Lab) -> None:
    lab.node("n1", lab.card("x"), lab.card("z", numa=1))
    new = lab.pod("new", lab.container(gpus=2, mem=100), annotations={"nvidia.com/numa-bind": "true"})
    assert lab.refused(new) == {"n1": "1/2 AllocatedCardsInsufficientRequest, 1/2 NumaNotFit"}


def test_binpack_takes_the_card_that_the_request_fills_most(lab: Lab) -> None:
    # By use alone d1 is fuller (29 % against 24 %); with the request d0 is (57 % against 49 %).
    lab = lab.fresh(card_policy="binpack")
    lab.node("n1", lab.card("d0", devmem=24576), lab.card("d1", devmem=40960))
    lab.holder("h0", "n1", "d0,NVIDIA,6000,0:;")
    lab.holder("h1", "n1", "d1,NVIDIA,12000,0:;")
    assert lab.placed(lab.pod("new", lab.container(mem=8000))) == ("n1", [["d0"]])


def test_the_request_is_part_of_the_card_score(lab: Lab) -> None:
    # Empty cards of different size: the request fills the small one more, so spread takes the large one.
    lab.node("n1", lab.card("large", devmem=80000), lab.card("small", devmem=8000))
    assert lab.placed(lab.pod("new", lab.container(mem=4000))) == ("n1", [["large"]])
