"""`hami explain`: reasons with numbers, and changes that really help."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.answers.changes import with_at_most
from hami.answers.errors import AnswerError
from hami.answers.explain import ADVICE, explain
from hami.answers.render import explanation_lines
from hami.scheduler.core.answers import Placement
from hami.vendors import reasons

Builder = Any


def test_nodes_that_share_a_reason_are_one_group_with_the_range_of_what_is_left(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.node("n2")
    cluster.node("n3", memory=2000)
    cluster.holder("a", "n1", "n1-0,NVIDIA,5000,0")
    cluster.holder("b", "n2", "n2-0,NVIDIA,4000,0")
    cluster.pod("big", gpu=1, gpumem=6000)
    found = explain(cluster.replay(), "default", "big")
    (refusal,) = found.refusals
    assert refusal.reason == "1/1 CardInsufficientMemory"
    assert refusal.nodes == ("n1", "n2", "n3")
    (room,) = refusal.room
    assert (room.cards, room.free_slots, room.free_memory) == ((1, 1), (9, 10), (2000, 4000))
    text = "\n".join(explanation_lines(found))
    assert "3 nodes: 1/1 CardInsufficientMemory" in text
    assert "2000 to 4000 MiB" in text


def test_a_smaller_request_that_is_named_fits_and_one_more_does_not(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.holder("a", "n1", "n1-0,NVIDIA,5000,70")
    waiting = cluster.pod("big", gpu=1, gpumem=6000, gpucores=20)
    replay = cluster.replay()
    found = explain(replay, "default", "big")
    assert "ask for nvidia.com/gpumem: 3000 instead of 6000: fits on n1" in found.changes
    assert "once pod default/a has ended it fits on n1" in found.changes
    assert isinstance(replay.place(with_at_most(waiting, "nvidia.com/gpumem", 3000), ["n1"]), Placement)
    replay.state.release("uid-default-big")
    assert not isinstance(replay.place(with_at_most(waiting, "nvidia.com/gpumem", 3001), ["n1"]), Placement)


def test_several_pods_are_named_when_only_together_they_make_room(cluster: Builder) -> None:
    cluster.node("n1")
    for name in ("a", "b", "c"):
        cluster.holder(name, "n1", "n1-0,NVIDIA,2600,0")
    cluster.pod("big", gpu=1, gpumem=5000)
    found = explain(cluster.replay(), "default", "big")
    assert "once pods default/a, default/b have ended it fits on n1" in found.changes


def test_pods_of_low_priority_are_named_first(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.holder("a", "n1", "n1-0,NVIDIA,4000,0", spec={"priority": 1000})
    cluster.holder("b", "n1", "n1-0,NVIDIA,4000,0", spec={"priority": -1})
    cluster.pod("big", gpu=1, gpumem=4000)
    found = explain(cluster.replay(), "default", "big")
    ended = [line for line in found.changes if line.startswith("once")]
    assert ended[0] == "once pod default/b has ended it fits on n1"


def test_a_pod_too_large_for_every_card_is_told_so(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.pod("huge", gpu=1, gpumem=9000)
    found = explain(cluster.replay(), "default", "huge")
    assert (
        "it fits on no node of this cluster, not even on an empty one: the largest NVIDIA card has 8000 MiB"
        in (found.changes[-1])
    )


def test_the_annotation_that_keeps_cards_away_is_named(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.pod("picky", gpu=1, annotations={"nvidia.com/use-gputype": "H100"})
    found = explain(cluster.replay(), "default", "picky")
    assert found.refusals[0].reason == "1/1 CardTypeMismatch"
    assert "without the annotation nvidia.com/use-gputype: H100 it fits on n1" in found.changes


def test_a_full_quota_is_named_with_its_numbers(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.quota("team", gpumem=1000)
    cluster.pod("p", namespace="team", gpu=1, gpumem=1500)
    found = explain(cluster.replay(), "team", "p")
    assert found.refusals[0].reason == "1/1 ResourceQuotaNotFit"
    assert (
        "with a larger quota of namespace team (nvidia.com/gpumem: 1500 asked, 1000 left of the quota "
        "limits.nvidia.com/gpumem in namespace team) it fits on n1"
    ) in found.changes


def test_a_pod_that_only_a_quota_holds_back_is_not_told_that_no_card_is_large_enough(
    cluster: Builder,
) -> None:
    cluster.node("n1")
    cluster.quota("team", gpumem=1000)
    cluster.pod("p", namespace="team", gpu=1, gpumem=1500)
    found = explain(cluster.replay(), "team", "p")
    assert [line for line in found.changes if "fits on no node" in line] == []


def test_a_cordoned_card_is_named(cluster: Builder) -> None:
    cluster.node("n1", annotations={"hami.io/device-cordon": "n1-0"})
    cluster.pod("p", gpu=1)
    found = explain(cluster.replay(), "default", "p")
    assert found.refusals[0].room[0].healthy == (0, 0)
    assert "without the annotation hami.io/device-cordon of node n1 it fits there" in found.changes


def test_a_node_that_kube_scheduler_keeps_away_is_told_apart(cluster: Builder) -> None:
    taint = {"key": "gpu", "value": "yes", "effect": "NoSchedule"}
    cluster.node("n1", spec={"taints": [taint]})
    cluster.pod("p", gpu=1)
    found = explain(cluster.replay(), "default", "p")
    assert found.refusals[0].reason == "node(s) had untolerated taint {gpu: yes}"
    assert (
        "node n1 has the cards, but kube-scheduler keeps the pod away: "
        "node(s) had untolerated taint {gpu: yes}" in found.changes
    )


def test_a_waiting_pod_that_fits_now_gets_its_node_and_cards(cluster: Builder) -> None:
    cluster.node("n1", cards=2)
    cluster.holder("a", "n1", "n1-0,NVIDIA,5000,0")
    cluster.pod("p", gpu=1, gpumem=1000)
    found = explain(cluster.replay(), "default", "p")
    assert found.summary == "Fits now: the scheduler would take node n1."
    assert [(one.id, one.chosen, one.memory) for one in found.cards] == [
        ("n1-1", True, "0/8000"),
        ("n1-0", False, "5000/8000"),
    ]
    assert not found.placed


def test_a_placed_pod_shows_its_cards_without_its_own_use(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.node("n2")
    cluster.holder("other", "n2", "n2-0,NVIDIA,3000,0")
    cluster.holder("mine", "n1", "n1-0,NVIDIA,2000,30")
    found = explain(cluster.replay(), "default", "mine")
    (card,) = found.cards
    assert (card.id, card.memory, card.taken) == ("n1-0", "0/8000", "2000 MiB, 30 cores")
    assert found.placed
    assert "it would go to n2" in found.summary
    assert [one.node for one in found.scores] == ["n2", "n1"]


def test_a_pod_of_another_scheduler_is_told_that_hami_never_sees_it(cluster: Builder) -> None:
    cluster.node("n1")
    cluster.pod("p", gpu=1, scheduler="default-scheduler")
    found = explain(cluster.replay(), "default", "p")
    assert "schedulerName is default-scheduler, not hami-scheduler" in found.summary
    assert "create it again" in found.summary


@pytest.mark.parametrize(
    ("parts", "summary"),
    [
        ({"cpu": 1}, "The pod asks for no device that HAMi manages ("),
        ({"gpu": 0}, "No node can serve this request: invalid nvidia.com/gpu value 0"),
    ],
)
def test_pods_that_cannot_be_judged_are_told_why(
    cluster: Builder, parts: dict[str, int], summary: str
) -> None:
    cluster.node("n1")
    cluster.pod("p", **parts)
    assert explain(cluster.replay(), "default", "p").summary.startswith(summary)


def test_a_pod_that_has_ended_holds_nothing(cluster: Builder) -> None:
    cluster.pod("p", gpu=1)["status"] = {"phase": "Succeeded"}
    assert explain(cluster.replay(), "default", "p").summary == "The pod has ended: it holds no device."


def test_an_unknown_pod_is_refused_with_where_it_is(cluster: Builder) -> None:
    cluster.pod("p", namespace="team")
    with pytest.raises(AnswerError, match="no pod p in namespace default; there is one in team: add -n"):
        explain(cluster.replay(), "default", "p")


def test_the_last_word_of_kube_scheduler_is_repeated(cluster: Builder) -> None:
    cluster.pod("p", gpu=1)["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}
    ]
    lines = explanation_lines(explain(cluster.replay(), "default", "p"))
    assert "  kube-scheduler's last word: 0/1 nodes are available" in lines


def test_every_reason_code_but_an_internal_error_has_an_advice() -> None:
    known = {
        value
        for name, value in vars(reasons).items()
        if name.isupper() and isinstance(value, str) and not name.startswith("_")
    }
    assert known - ADVICE.keys() == {reasons.INTERNAL_ERROR}


@given(
    held=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8000), st.integers(0, 100)), max_size=6),
    gpus=st.integers(1, 3),
    memory=st.integers(1, 12_000),
    cores=st.integers(0, 100),
    quota=st.none() | st.integers(1, 20_000),
)
def test_explaining_changes_nothing_and_every_proposed_smaller_request_fits(
    make_cluster: Builder,
    held: list[tuple[int, int, int]],
    gpus: int,
    memory: int,
    cores: int,
    quota: int | None,
) -> None:
    cluster = make_cluster()
    for name in ("n0", "n1", "n2"):
        cluster.node(name, cards=2)
    for at, (node, mib, percent) in enumerate(held):
        cluster.holder(f"h{at}", f"n{node}", f"n{node}-{at % 2},NVIDIA,{mib},{percent}")
    if quota is not None:
        cluster.quota("default", gpumem=quota)
    waiting = cluster.pod("p", gpu=gpus, gpumem=memory, gpucores=cores)
    replay = cluster.replay()
    before = replay.state.fingerprint()
    found = explain(replay, "default", "p")
    assert replay.state.fingerprint() == before
    for change in found.changes:
        if change.startswith("ask for "):
            name, rest = change.removeprefix("ask for ").split(": ", 1)
            smaller = with_at_most(waiting, name, int(rest.split()[0]))
            answer = replay.place(smaller, replay.nodes)
            assert isinstance(answer, Placement), change
            replay.state.release(answer.reservation.uid)
    assert msgspec.json.decode(msgspec.json.encode(found))["pod"] == "default/p"
