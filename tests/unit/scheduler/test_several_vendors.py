"""Vendors beside NVIDIA: several in one pod, and nodes whose score depends on the cards (scheduler.md §7.4;
D3)."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from hami.protocol import views
from hami.scheduler.core.answers import NoFit, Placement
from hami.scheduler.core.state import ClusterState
from hami.vendors.types import (
    FitContext,
    Hooks,
    NodeBonus,
    NodeRefuses,
    Refused,
    Register,
    ResourceNames,
    Rules,
    ScoreContext,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, never_exact, standard_needs

Lab = Any
REGISTER = "example.com/register"


def close_together(context: ScoreContext) -> NodeBonus:
    """A topology bonus that prefers the node labelled `close`."""
    return NodeBonus(100.0 if "close" in context.node.labels else 0.0)


def other_vendor(**hooks: Any) -> VendorProfile:
    """A made-up vendor with the standard fit."""
    return VendorProfile(
        common_word="Alt",
        names=ResourceNames("example.com/alt", "example.com/altmem", "example.com/altcores"),
        rules=Rules(
            register=Register("json", REGISTER),
            to_allocate="example.com/to-allocate",
            allocated="example.com/allocated",
            health="always",
            lock="none",
        ),
        vector_checks=STANDARD_CHECKS,
        vector_needs=standard_needs,
        vector_exact=never_exact,
        algebra=STANDARD,
        hooks=Hooks(**hooks),
    )


def alt_node(lab: Lab, name: str, *cards: str, close: bool = False, also: tuple[str, ...] = ()) -> None:
    """A node with cards of the made-up vendor, and NVIDIA cards in `also`."""
    annotations = {REGISTER: json.dumps([lab.card(one, type="Alt") for one in cards])}
    if also:
        annotations["hami.io/node-nvidia-register"] = json.dumps([lab.card(one) for one in also])
        annotations["hami.io/node-handshake"] = "Reported_now"
    labels = {"close": "yes"} if close else {}
    obj = {"metadata": {"name": name, "annotations": annotations, "labels": labels}}
    lab.state.upsert_node(msgspec.convert(obj, views.Node), lab.now)


def alt(lab: Lab, name: str = "main", count: int = 1, mem: int = 100, gpus: int | None = None) -> Any:
    container = lab.container(name, gpus=gpus, mem=100 if gpus else None)
    container["resources"]["limits"].update({"example.com/alt": str(count), "example.com/altmem": str(mem)})
    return container


def cluster(lab: Lab, profile: VendorProfile, **settings: Any) -> Lab:
    return type(lab)(ClusterState((*lab.profiles(), profile), **settings))


def test_each_vendor_of_a_container_gets_its_own_cards_and_annotation(lab: Lab) -> None:
    lab = cluster(lab, other_vendor())
    alt_node(lab, "n1", "x", also=("a",))
    lab.filter(lab.pod("new", alt(lab, gpus=1), lab.container("plain", gpus=None)))
    reservation = lab.state.reservation("uid-new")
    assert reservation.annotations["hami.io/vgpu-devices-allocated"] == "a,NVIDIA,100,0:;;"
    assert reservation.annotations["example.com/allocated"] == "x,Alt,100,0:;;"
    assert reservation.locks == (("NVIDIA", "hami"),)


def test_a_node_without_one_of_the_vendors_is_refused(lab: Lab) -> None:
    lab = cluster(lab, other_vendor())
    alt_node(lab, "n1", "x")
    lab.node("n2", lab.card("a"))
    answer = lab.filter(lab.pod("new", alt(lab, gpus=1)))
    assert answer.unresolvable == {"n1": "NodeInsufficientDevice", "n2": "NodeInsufficientDevice"}


def test_the_base_score_is_over_all_cards_of_the_node(lab: Lab) -> None:
    lab = cluster(lab, other_vendor())
    alt_node(lab, "n1", "x", also=("a",))
    lab.holder("h", "n1", "a,NVIDIA,4000,50:;")
    answer = lab.filter(lab.pod("new", alt(lab)))
    # (1/20 + 50/200 + 4000/16000) x 10
    assert answer.scores == (("n1", pytest.approx(5.5)),)


@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("extra", [0, 100])
def test_the_better_topology_wins_under_either_policy(lab: Lab, policy: str, extra: int) -> None:
    lab = cluster(lab, other_vendor(node_bonus=close_together), node_policy=policy)
    alt_node(lab, "far", "x")
    alt_node(lab, "near", "y", close=True)
    for at in range(extra):  # above 64 candidates too
        alt_node(lab, f"far{at}", f"z{at}")
    assert lab.filter(lab.pod("new", alt(lab))).node == "near"


def test_a_bonus_that_ignores_the_policy_keeps_its_sign(lab: Lab) -> None:
    def neutral(context: ScoreContext) -> NodeBonus:
        return NodeBonus(100.0 if "close" in context.node.labels else 0.0, higher_is_better=False)

    lab = cluster(lab, other_vendor(node_bonus=neutral), node_policy="spread")
    alt_node(lab, "far", "x")
    alt_node(lab, "near", "y", close=True)
    assert lab.filter(lab.pod("new", alt(lab))).node == "far"


def test_fits_are_remembered_until_their_node_changes(lab: Lab) -> None:
    asked: list[str] = []

    def counting(context: ScoreContext) -> NodeBonus:
        asked.append(context.node.name)
        return NodeBonus(0.0)

    lab = cluster(lab, other_vendor(node_bonus=counting))
    for at in range(5):
        alt_node(lab, f"n{at}", f"x{at}")
    first = lab.filter(lab.pod("a", alt(lab)))
    assert sorted(asked) == ["n0", "n1", "n2", "n3", "n4"]
    asked.clear()
    lab.filter(lab.pod("b", alt(lab)))
    assert asked == [first.node]


def test_a_slice_of_remembered_fits_is_bounded(lab: Lab) -> None:
    lab = cluster(lab, other_vendor(node_bonus=close_together))
    for at in range(100):
        alt_node(lab, f"n{at}", f"x{at}")
    names = sorted(lab.state.node_names())
    lab.filter(lab.pod("a", alt(lab)))
    search = lab.state.search(lab.request(lab.pod("b", alt(lab))), lab.state.candidates(names), lab.now)
    turns = 1
    while search.advance(1) is None:
        turns += 1
    assert turns > 1


def test_a_node_may_refuse_a_request_it_cannot_translate(lab: Lab) -> None:
    def refuse(request: Any, node: Any, _devices: Any) -> Any:
        if node.name == "n1":
            raise NodeRefuses("CardNotFoundCustomFilterRule", 1)
        return request

    lab = cluster(lab, replace(other_vendor(), resolve=refuse))
    alt_node(lab, "n1", "x")
    assert lab.refused(lab.pod("new", alt(lab))) == {"n1": "1/1 CardNotFoundCustomFilterRule"}
    alt_node(lab, "n2", "y")
    assert lab.filter(lab.pod("new", alt(lab))).node == "n2"


@pytest.mark.parametrize("extra", [0, 100])
def test_nodes_that_pass_the_mask_and_fail_the_exact_fit_say_why(lab: Lab, extra: int) -> None:
    def never(context: FitContext, _cards: Any, _reasons: Any) -> Refused:
        return Refused({"CardNotFoundCustomFilterRule": 1}, len(context.candidates))

    lab = cluster(lab, other_vendor(choose=never))
    for at in range(1 + extra):
        alt_node(lab, f"n{at}", f"x{at}")
    answer = lab.filter(lab.pod("new", alt(lab)))
    assert isinstance(answer, NoFit)
    assert set(answer.failed.values()) == {"1/1 CardNotFoundCustomFilterRule"}
    assert len(answer.failed) == 1 + extra


def test_a_mask_that_is_wrong_about_a_node_refuses_no_pod(lab: Lab) -> None:
    def blind(*_: Any) -> Any:
        needs = standard_needs(*_)
        return replace(needs, mem=10**9)

    lab = cluster(lab, replace(other_vendor(), vector_needs=blind))
    alt_node(lab, "n1", "x")
    assert isinstance(lab.filter(lab.pod("new", alt(lab))), Placement)


def test_quota_of_another_vendor_is_checked_at_fit(lab: Lab) -> None:
    lab = cluster(lab, other_vendor())
    alt_node(lab, "n1", "x")
    obj = {
        "metadata": {"name": "q", "namespace": "default"},
        "spec": {"hard": {"limits.example.com/altmem": "99"}},
    }
    lab.state.upsert_quota(msgspec.convert(obj, views.ResourceQuota))
    request = lab.request(lab.pod("new", alt(lab)))
    assert not lab.state.quota_allows(request)
    assert lab.refused(lab.pod("new", alt(lab))) == {"n1": "1/1 ResourceQuotaNotFit"}
    assert lab.filter(lab.pod("gpu", alt(lab, mem=99))).node == "n1"


def test_annotations_of_placed_pods_reach_the_fit_of_others(lab: Lab) -> None:
    def same_class(context: FitContext, card: Any) -> str | None:
        mine = context.pod.annotations.get("example.com/class")
        theirs = {holder.annotations.get("example.com/class") for holder in card.holders}
        return None if theirs <= {mine} else "CardAppClassMismatch"

    profile = replace(other_vendor(card_rule=same_class), placed_annotations=("example.com/class",))
    lab = cluster(lab, profile)
    alt_node(lab, "n1", "x")

    def of_class(name: str, word: str) -> Any:
        return lab.pod(name, alt(lab, "c1"), alt(lab, "c2"), annotations={"example.com/class": word})

    assert isinstance(lab.filter(of_class("a", "gold")), Placement)
    assert lab.refused(of_class("b", "iron")) == {"n1": "1/1 CardAppClassMismatch"}
    assert isinstance(lab.filter(of_class("c", "gold")), Placement)
    lab.see(lab.bound(of_class("a", "gold")))
    assert lab.refused(of_class("b", "iron")) == {"n1": "1/1 CardAppClassMismatch"}
    lab.state.delete_pod("uid-a")
    lab.state.delete_pod("uid-c")
    assert isinstance(lab.filter(of_class("b", "iron")), Placement)


def test_a_vendor_may_charge_quota_in_its_own_measure(lab: Lab) -> None:
    def percent_of_total(used: Any, total_cores: int) -> tuple[int, int]:
        return used.mem, used.cores * 100 // total_cores if total_cores else 0

    lab = cluster(lab, other_vendor(quota_use=percent_of_total))
    lab.see(
        lab.pod(
            "h",
            annotations={"hami.io/vgpu-node": "n1", "example.com/allocated": "x,Alt,7,50:;"},
            node="n1",
        )
    )

    def cores() -> int:
        return sum(one.used for one in lab.state.quota_usage() if one.resource == "example.com/altcores")

    assert cores() == 0  # the card is not known yet
    annotations = {REGISTER: json.dumps([lab.card("x", devcore=200)])}
    obj = {"metadata": {"name": "n1", "annotations": annotations}}
    lab.state.upsert_node(msgspec.convert(obj, views.Node), lab.now)
    assert cores() == 25
    lab.state.delete_node("n1")
    assert cores() == 0
    lab.state.delete_pod("uid-h")
    assert list(lab.state.quota_usage()) == []


def test_a_count_the_node_does_not_really_have_limits_nothing(lab: Lab) -> None:
    profile = other_vendor()
    lab = cluster(lab, replace(profile, rules=replace(profile.rules, real_count=False)))
    annotations = {REGISTER: json.dumps([lab.card("x")])}
    status = {"allocatable": {"example.com/alt": "0", "example.com/altmem": "one"}}
    obj = {"metadata": {"name": "n1", "annotations": annotations}, "status": status}
    lab.state.upsert_node(msgspec.convert(obj, views.Node), lab.now)
    assert isinstance(lab.filter(lab.pod("new", alt(lab))), Placement)


def test_unreadable_quantities_count_as_not_reported(lab: Lab) -> None:
    lab = cluster(lab, other_vendor())
    annotations = {REGISTER: json.dumps([lab.card("x")])}
    obj = {
        "metadata": {"name": "n1", "annotations": annotations},
        "status": {"allocatable": {"example.com/alt": "one"}},
    }
    lab.state.upsert_node(msgspec.convert(obj, views.Node), lab.now)
    assert isinstance(lab.filter(lab.pod("new", alt(lab))), Placement)
