"""What `hami snapshot` keeps is all that the vendors read: a replay of it decides as the cluster would."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_pools import CONFIG_TEXT, every_profile, pools

from hami.answers.hashing import hash_names
from hami.answers.redact import Redaction
from hami.answers.replay import Replay
from hami.answers.simulate import simulate
from hami.answers.snapshot import Settings, Snapshot
from hami.scheduler.core.answers import NoFit, Placement

PROFILES = every_profile()
POOLS = pools(PROFILES)
WORDS = [word for word, pool in POOLS.items() if pool.nodes and len(pool.asks) >= 12]
REDACTION = Redaction(PROFILES)
SETTINGS = Settings(enable_ascend=True, enable_iluvatar=True)
few = settings(max_examples=5)  # each vendor draws for itself
FOREIGN = {"example.com/token": "hunter2", "kubectl.kubernetes.io/last-applied-configuration": "hunter2"}


@st.composite
def questions(draw: st.DrawFn, word: str) -> tuple[Snapshot, list[dict[str, Any]]]:
    """Recorded nodes of a vendor and of a second one, and pods like the recorded ones."""
    words = [word, draw(st.sampled_from(WORDS))]
    nodes: dict[str, dict[str, Any]] = {}
    for one in words:
        for plain in draw(st.lists(st.sampled_from(POOLS[one].nodes), min_size=1, max_size=3)):
            name = f"{plain.name}-{len(nodes)}.example"
            amounts = {key: str(amount) for key, amount in {**plain.capacity, **plain.allocatable}.items()}
            status = {**amounts, "pods": "110"}
            nodes[name] = {
                "metadata": {
                    "name": name,
                    "annotations": {**FOREIGN, **plain.annotations},
                    "labels": dict(plain.labels),
                },
                "status": {"capacity": status, "allocatable": status},
            }
    pods = [_pod(draw, number, draw(st.sampled_from(words))) for number in range(draw(st.integers(1, 5)))]
    return Snapshot(1_787_400_000.0, SETTINGS, CONFIG_TEXT, list(nodes.values()), [], []), pods


@st.composite
def clusters(draw: st.DrawFn, word: str) -> Snapshot:
    """The nodes with as many of the pods as fit, and a pod that waits."""
    empty, pods = draw(questions(word))
    replay = Replay(empty)
    simulate(replay, pods)
    placed = [dict(pod) for pod in replay.pods.values()]
    return msgspec.structs.replace(empty, pods=[*placed, _pod(draw, 99, word)])


def _pod(draw: st.DrawFn, number: int, word: str) -> dict[str, Any]:
    container, annotations = draw(st.sampled_from(POOLS[word].asks))
    kinds = draw(st.sampled_from(["c", "c", "ic", "cc", "icc", "s"]))  # init, regular, sidecar
    spec: dict[str, Any] = {"schedulerName": "hami-scheduler", "initContainers": [], "containers": []}
    for at, kind in enumerate(kinds):
        asked = container if at == 0 else draw(st.sampled_from(POOLS[word].asks))[0]
        one = {**json.loads(json.dumps(asked)), "name": f"{kind}{at}"}
        if kind == "s":
            one["restartPolicy"] = "Always"
        spec["containers" if kind == "c" else "initContainers"].append(one)
    if not spec["containers"]:
        spec["containers"] = [{"name": "plain"}]
    return {
        "metadata": {
            "name": f"pod-{number}-of-ours",
            "namespace": "default",
            "uid": f"uid-{number}",
            "annotations": {**FOREIGN, **annotations},
        },
        "spec": spec,
        "status": {"phase": "Pending"},
    }


def redacted(whole: Snapshot) -> Snapshot:
    """As `hami snapshot` would write it."""
    return msgspec.structs.replace(
        whole,
        nodes=[REDACTION.node(node) for node in whole.nodes],
        pods=[REDACTION.pod(pod) for pod in whole.pods],
    )


def usage(replay: Replay) -> list[Any]:
    """Every card with its use and health."""
    return [(node.name, node.cards) for node in replay.state.usage()]


def books(replay: Replay) -> list[Any]:
    """Every card with its use and health, and what the pods hold."""
    held = sorted(
        (pod.uid, pod.node, repr(pod.effective), repr(pod.allocations)) for pod in replay.state.pods()
    )
    return [usage(replay), held]


def decision(replay: Replay, whole: Snapshot) -> Any:
    """What becomes of the waiting pod: node, scores and keys, or the reasons."""
    answer = replay.place(whole.pods[-1], replay.nodes)
    if isinstance(answer, Placement):
        return answer.node, answer.scores, dict(answer.reservation.annotations)
    assert isinstance(answer, NoFit)
    return {**answer.failed, **answer.unresolvable}


class Lived(Replay):
    """Notes where the books change when a reservation becomes a pod that carries what its Binding wrote."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.changes: list[Any] = []
        super().__init__(snapshot)

    def take(self, pod: Any) -> None:
        before = usage(self)
        super().take(pod)
        if usage(self) != before:
            self.changes.append(pod)


@pytest.mark.parametrize("word", WORDS)
@few
@given(data=st.data())
def test_books_of_reservations_bindings_and_a_restart_are_the_same(word: str, data: st.DataObject) -> None:
    empty, pods = data.draw(questions(word))
    lived = Lived(empty)
    found = simulate(lived, pods)
    assert lived.changes == []
    again = Replay(msgspec.structs.replace(empty, pods=[dict(pod) for pod in lived.pods.values()]))
    assert usage(again) == usage(lived)
    assert sum(bool(one.node) for one in found.pods) == len(lived.pods)


@pytest.mark.parametrize("word", WORDS)
@few
@given(data=st.data())
def test_a_redacted_snapshot_has_the_same_books_and_decisions(word: str, data: st.DataObject) -> None:
    whole = data.draw(clusters(word))
    kept = redacted(whole)
    assert b"hunter2" not in msgspec.json.encode(kept)
    before, after = Replay(whole), Replay(kept)
    assert books(after) == books(before)
    assert decision(after, kept) == decision(before, whole)


@pytest.mark.parametrize("word", WORDS)
@few
@given(data=st.data())
def test_a_snapshot_with_hashed_names_grants_the_same_and_names_no_node(
    word: str, data: st.DataObject
) -> None:
    whole = data.draw(clusters(word))
    hashed = hash_names(redacted(whole), b"salt")
    text = msgspec.json.encode([hashed.nodes, hashed.pods]).decode()
    for node in whole.nodes:
        assert node["metadata"]["name"] not in text
    assert "of-ours" not in text
    amounts = [
        sorted(
            (card.vendor, card.info.index, repr(card.used))
            for node in one.state.usage()
            for card in node.cards
        )
        for one in (Replay(whole), Replay(hashed))
    ]
    assert amounts[0] == amounts[1]
