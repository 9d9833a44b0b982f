"""The best bonus of a node spares judging every node and never changes the answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_desk import Desk, pod
from vendor_pools import every_profile

from hami.scheduler.core.answers import Placement
from hami.vendors.types import VendorProfile

PROFILES = {one.common_word: one for one in every_profile()}
NODES = 70  # more than are judged in any case
APP_CLASS, QOS = "metax-tech.com/sgpu-app-class", "metax-tech.com/sgpu-qos-policy"


def put_vastai(desk: Desk, name: str, kind: str) -> None:
    """`4` and `22` are dies on one and two AICs, `f` whole cards, one per digit."""
    aics = [(0, n) for n in range(4)] if kind == "f" else []
    aics += [(aic, n) for aic, size in enumerate(kind) if kind != "f" for n in range(int(size))]
    plain = {"count": 1, "devmem": 32768, "type": "Vastai", "health": True}
    customs = [{} if kind == "f" else {"DeviceStrategy": "die", "AIC": str(aic)} for aic, _ in aics]
    desk.registered(
        name, *({**plain, "id": f"c{at}", "custominfo": custom} for at, custom in enumerate(customs))
    )


def put_ascend(desk: Desk, name: str, kind: str) -> None:
    """A digit per card: its network; `x` one without a number."""
    plain = {"count": 4, "devmem": 65536, "devcore": 20, "type": "Ascend910B3", "health": True}
    customs = [{"NetworkID": int(one) if one.isdigit() else one} for one in kind] or [{}] * 4
    desk.registered(
        name, *({**plain, "id": f"c{at}", "custominfo": custom} for at, custom in enumerate(customs))
    )


def put_kunlun(desk: Desk, name: str, kind: str) -> None:
    desk.node(name, capacity={"kunlunxin.com/xpu": kind})


def put_metax(desk: Desk, name: str, kind: str) -> None:
    """Losses, and scores, of one card and of two."""
    tables = {"losses": {"1": int(kind[0]), "2": int(kind[1])}, "scores": {"1": int(kind[1])}}
    annotations = {f"metax-tech.com/gpu.topology.{key}": json.dumps(table) for key, table in tables.items()}
    desk.node(name, capacity={"metax-tech.com/gpu": 4}, annotations=annotations if kind != "00" else {})


def put_shares(desk: Desk, name: str, kind: str) -> None:
    """A digit per card: its link zone."""
    plain = {"totalDevCount": 16, "totalCompute": 100, "totalVRam": 65536, "healthy": True}
    desk.registered(name, *({**plain, "uuid": f"c{at}", "linkZone": int(z)} for at, z in enumerate(kind)))


@dataclass(frozen=True)
class Trial:
    """A vendor, its kinds of nodes, what running pods hold of card N, and pods."""

    word: str
    put: Callable[[Desk, str, str], None]
    kinds: Sequence[str]
    held: Callable[[str, int], str]
    asks: Sequence[Mapping[str, Any]]
    classes: Sequence[str] = ("",)
    annotations: Sequence[Mapping[str, str]] = ({},)


def share(cores: int | None = None, count: int = 1) -> dict[str, Any]:
    limits = {"metax-tech.com/sgpu": count, "metax-tech.com/vmemory": "4"}
    return limits if cores is None else {**limits, "metax-tech.com/vcore": cores}


TRIALS = [
    Trial(
        "Vastai",
        put_vastai,
        ["4", "22", "211", "f"],
        lambda _node, at: f"c{at},Vastai,0,0:;",
        [{"vastaitech.com/va": count} for count in (1, 2, 3, 4)],
    ),
    Trial(
        "Ascend910B3",
        put_ascend,
        ["0000", "0011", "0123", "x0x0", ""],
        lambda _node, at: f"c{at},Ascend910B3,65536,20:;",
        [{"huawei.com/Ascend910B3": count} for count in (1, 2, 3)],
    ),
    Trial(
        "kunlun",
        put_kunlun,
        ["8", "4"],
        lambda node, at: f"{node}-kunlun-{at},kunlun,98304,100:;",
        [{"kunlunxin.com/xpu": count} for count in (1, 2, 4)],
    ),
    Trial(
        "Metax-GPU",
        put_metax,
        ["19", "91", "55", "00"],
        lambda node, at: f"{node}-metax-{at},Metax-GPU,65536,100:;",
        [{"metax-tech.com/gpu": count} for count in (1, 2, 3)],
    ),
    Trial(
        "Metax-SGPU",
        put_shares,
        ["1111", "1122", "1233", "0000", "0011"],
        lambda _node, at: f"c{at},Metax-SGPU,4096,10:;",
        [share(), share(50), share(count=2), share(count=3), share(0)],
        classes=("online", "offline", ""),
        annotations=[
            {"metax-tech.com/sgpu-topology-aware": "true"},
            {APP_CLASS: "online"},
            {APP_CLASS: "offline"},
            {},
        ],
    ),
]


def unlimited(p: VendorProfile) -> VendorProfile:
    return replace(p, hooks=replace(p.hooks, best_bonus=None))


@settings(max_examples=12)
@given(st.data())
@pytest.mark.parametrize("policy", ["binpack", "spread"])
@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: str(trial.word))
def test_the_answer_is_that_of_judging_every_node(trial: Trial, policy: str, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(trial.kinds), min_size=1, max_size=7))
    kinds = (kinds * NODES)[:NODES]
    some = st.tuples(st.integers(0, NODES - 1), st.integers(0, 3), st.sampled_from(trial.classes))
    held = data.draw(st.lists(some, max_size=20))
    pods = st.tuples(
        st.lists(st.sampled_from(trial.asks), min_size=1, max_size=2),
        st.lists(st.sampled_from(trial.asks), max_size=1),
        st.sampled_from(trial.annotations),
    )
    asked = data.draw(st.lists(pods, min_size=1, max_size=2))
    chosen = []
    for profile in (PROFILES[trial.word], unlimited(PROFILES[trial.word])):
        desk = Desk(profile, node_policy=policy)
        for number, kind in enumerate(kinds):
            trial.put(desk, f"n{number}", kind)
        for at, (number, position, app_class) in enumerate(held):
            keys = {APP_CLASS: app_class, QOS: "best-effort"} if app_class else {}
            desk.hold(f"h{at}", f"n{number}", trial.held(f"n{number}", position), annotations=keys)
        answers: list[tuple[str, Any, float]] = []
        for number, (apps, inits, annotations) in enumerate(asked * 2):
            answer = desk.place(pod(*apps, inits=inits, annotations=annotations, name=f"p{number}"))
            if isinstance(answer, Placement):
                score = dict(answer.scores)[answer.node]
                answers.append((answer.node, answer.reservation.allocations, score))
            else:
                answers.append(("", answer.failed, 0.0))
        chosen.append(answers)
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("trial", TRIALS, ids=lambda trial: str(trial.word))
@pytest.mark.parametrize("policy", ["binpack", "spread"])
def test_only_as_many_nodes_are_judged_as_may_win(trial: Trial, policy: str) -> None:
    desk = Desk(PROFILES[trial.word], node_policy=policy)
    for number in range(NODES):
        trial.put(desk, f"n{number}", trial.kinds[0])
    for ask in trial.asks:
        request = desk.state.parse(pod(ask, annotations=trial.annotations[0]))
        assert request is not None
        search = desk.state.search(request, desk.state.candidates(sorted(desk.state.node_names())), 0)
        answer = search.advance(1)
        assert isinstance(answer, Placement), f"{ask}: one exact fit was enough"
        assert answer.node == "n0"
        desk.state.release(answer.reservation.uid)
