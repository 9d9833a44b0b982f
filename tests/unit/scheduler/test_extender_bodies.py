"""Any body gets an answer that kube-scheduler can read, and hostile ones change nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder
from hami.protocol import views
from hami.scheduler.core.answers import PlacementError, Simulated
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge import extender as extender_module
from hami.scheduler.edge import shares
from hami.scheduler.edge.binder import Binder
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.extender import Extender
from hami.scheduler.edge.leader import Leadership, SyncGate
from hami.scheduler.edge.node_locks import NodeLocks
from hami.scheduler.edge.pending import PendingPods
from hami.scheduler.edge.timing import Timings
from hami.vendors.config import decode_config, load_profiles

MEMBERS = ["Nodes", "NodeNames", "FailedNodes", "FailedAndUnresolvableNodes", "Error"]


def extender_of(state: ClusterState) -> Extender:
    """An extender whose API server cannot be reached."""
    client = Client(ClientConfig("http://127.0.0.1:1"), Limits(qps=0, timeout_s=0.5))
    leadership = Leadership("h", electing=False)
    recorder = EventRecorder(client, "test")
    events = SchedulerEvents(recorder)
    locks = NodeLocks(client, recorder)
    gate = SyncGate()
    gate.open()
    return Extender(
        state,
        gate,
        Binder(client, state, leadership, locks, events),
        events,
        PendingPods(client, state, leadership),
        Timings(),
    )


def ask(lab: Any, verb: str, body: bytes) -> Any:
    async def run() -> bytes:
        answer: bytes = await getattr(extender_of(lab.state), verb)(body)
        return answer

    return json.loads(asyncio.run(run()))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
POD_LIKE = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"name": JSON | st.just("p"), "namespace": JSON | st.just("d"), "uid": JSON | st.just("u")},
            optional={"annotations": JSON, "labels": JSON},
        ),
        "spec": st.fixed_dictionaries(
            {
                "containers": JSON
                | st.lists(
                    st.fixed_dictionaries(
                        {"name": JSON | st.just("a")},
                        optional={
                            "resources": JSON
                            | st.fixed_dictionaries(
                                {"limits": st.dictionaries(st.just("nvidia.com/gpu"), JSON | st.just("1"))}
                            )
                        },
                    ),
                    max_size=2,
                )
            }
        ),
    }
)


@settings(max_examples=200)
@given(st.binary(max_size=40))
def test_any_bytes_are_answered(data: bytes) -> None:
    state = ClusterState(())
    lab = type("Lab", (), {"state": state})
    answer = ask(lab, "filter", data)
    assert list(answer) == MEMBERS
    assert answer["Error"]
    assert "%" not in answer["Error"]
    assert ask(lab, "bind", data)["Error"]


@settings(max_examples=150, deadline=None)
@given(pod=JSON | POD_LIKE, names=JSON | st.lists(st.sampled_from(["n1", "n2"])), nodes=st.none() | JSON)
def test_any_json_is_answered_and_reserves_at_most_its_own_pod(pod: Any, names: Any, nodes: Any) -> None:
    from_profiles = _state()
    lab = type("Lab", (), {"state": from_profiles})
    answer = ask(lab, "filter", json.dumps({"Pod": pod, "NodeNames": names, "Nodes": nodes}).encode())
    assert list(answer) == MEMBERS
    assert "%" not in answer["Error"]
    if answer["Error"]:
        assert not from_profiles.reservations()


def _state() -> ClusterState:
    state = ClusterState(load_profiles(decode_config({"nvidia": {"resourceCountName": "nvidia.com/gpu"}})))
    card = {"id": "G", "count": 10, "devmem": 8000, "devcore": 100, "type": "NVIDIA T4", "health": True}
    node = {"metadata": {"name": "n1", "annotations": {"hami.io/node-nvidia-register": json.dumps([card])}}}
    state.upsert_node(msgspec.convert(node, views.Node), 0.0)
    return state


def test_keys_are_read_in_any_case(lab: Any) -> None:
    lab.node("n1", lab.card("a"))
    body = {"pod": lab.pod(), "NODENAMES": ["n1", "n1"], "nodes": None}
    assert ask(lab, "filter", json.dumps(body).encode())["NodeNames"] == ["n1"]


def test_bad_weights_are_an_error_with_an_event_and_no_reservation(lab: Any) -> None:
    lab.node("n1", lab.card("a"))
    pod = lab.pod(annotations={"hami.io/device-scoring-weights": "slot=1"})
    answer = ask(lab, "filter", json.dumps({"Pod": pod, "NodeNames": ["n1"]}).encode())
    assert "expected slot, core, and memory weights" in answer["Error"]
    assert not lab.state.reservations()


def test_a_bind_request_without_names_asks_nobody(lab: Any) -> None:
    for body in (b"{}", b'{"PodName":"p","Node":"n1"}', b'{"PodName":"p","PodNamespace":"d"}'):
        assert ask(lab, "bind", body) == {"Error": "extender binding args missing pod or node"}


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"NodeNames": ["n1"]}, "extender args missing nodes"),
        ({"Nodes": {"items": "none"}}, "invalid node list"),
        ({"Nodes": {"items": [5]}}, "Expected `object`"),
        ({"Nodes": []}, "invalid filter request"),
        ({"Nodes": {"items": []}, "weights": "slot=1"}, "expected slot, core, and memory weights"),
    ],
)
def test_a_dry_run_that_cannot_be_made_says_why(lab: Any, body: dict[str, Any], error: str) -> None:
    weights = body.pop("weights", None)
    pod = lab.pod(annotations={"hami.io/device-scoring-weights": weights} if weights else {})
    answer = ask(lab, "simulate", json.dumps({"Pod": pod, **body}).encode())
    assert error in answer["Error"]
    assert answer["Nodes"] is None


def test_a_dry_run_over_no_nodes_is_empty(lab: Any) -> None:
    answer = ask(lab, "simulate", json.dumps({"Pod": lab.pod(), "Nodes": {}}).encode())
    assert answer == {**dict.fromkeys(MEMBERS), "Error": ""}


def test_a_dry_run_over_many_nodes_answers_every_one(lab: Any) -> None:
    good = {"hami.io/node-nvidia-register": json.dumps([lab.card("a")])}
    items = [{"metadata": {"name": f"n{at}", "annotations": good if at % 2 else {}}} for at in range(100)]
    answer = ask(lab, "simulate", json.dumps({"Pod": lab.pod(), "Nodes": {"items": items}}).encode())
    assert answer["Nodes"]["items"] == items[1::2]
    assert len(answer["FailedNodes"]) == 50


def test_a_bound_pod_is_not_placed_again_and_hears_why(lab: Any) -> None:
    lab.node("n1", lab.card("a"))
    lab.holder("p", "n1", "a,NVIDIA,100,0:;")
    answer = ask(lab, "filter", json.dumps({"Pod": lab.pod("p"), "NodeNames": ["n1"]}).encode())
    assert "already bound to node n1" in answer["Error"]


def test_while_a_binding_is_not_settled_its_pod_is_not_placed_again(lab: Any) -> None:
    lab.node("n1", lab.card("a"))
    lab.placed(lab.pod("p"))
    lab.state.binding_started("uid-p")
    answer = ask(lab, "filter", json.dumps({"Pod": lab.pod("p"), "NodeNames": ["n1"]}).encode())
    assert answer["Error"] == "the outcome of an earlier Binding of pod default/p is unknown"
    assert lab.state.reservation("uid-p").node == "n1"


def test_before_the_state_can_be_trusted_nothing_is_placed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extender_module, "ANSWER_WITHIN_S", 0.01)
    monkeypatch.setattr(SyncGate, "open", lambda _self: None)
    lab.node("n1", lab.card("a"))
    answer = ask(lab, "filter", json.dumps({"Pod": lab.pod("p"), "NodeNames": ["n1"]}).encode())
    assert answer["Error"] == "context cancelled"
    assert not lab.state.reservations()


class Endless:
    """A search, or a dry run, that comes to no end unless it is closed."""

    def __init__(self) -> None:
        self.closed = ""

    @property
    def open(self) -> bool:
        return not self.closed

    def advance(self, _fits: int) -> None:
        if self.closed:
            raise PlacementError(self.closed)

    def close(self, why: str) -> None:
        self.closed = why


@pytest.mark.parametrize(
    ("method", "nodes"),
    [("search", {"NodeNames": ["n1"]}), ("simulate", {"Nodes": {"items": [{"metadata": {"name": "n1"}}]}})],
)
def test_a_decision_that_takes_too_long_is_given_up_before_kube_scheduler_hangs_up(
    lab: Any, monkeypatch: pytest.MonkeyPatch, method: str, nodes: dict[str, Any]
) -> None:
    monkeypatch.setattr(extender_module, "ANSWER_WITHIN_S", 0.05)
    monkeypatch.setattr(extender_module, "_SLICE_S", 0.0)
    monkeypatch.setattr(lab.state, method, lambda *_: Endless())
    answer = ask(lab, "filter", json.dumps({"Pod": lab.pod("p"), **nodes}).encode())
    assert answer["Error"] == "no decision within 50ms"
    assert lab.state.reservations() == []


@pytest.mark.parametrize("again", [False, True])
def test_a_decision_that_outlasts_the_leadership_reserves_nothing(
    lab: Any, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    monkeypatch.setattr(extender_module, "_SLICE_S", 0.0)
    lab.node("n1", lab.card("a"))
    search = lab.state.search
    extenders: list[Extender] = []

    class Slow:
        """The real search, which takes its time before it decides."""

        def __init__(self, *arguments: Any) -> None:
            self._search = search(*arguments)
            self._steps = 0

        def advance(self, fits: int) -> Any:
            self._steps += 1
            if self._steps == 1:
                extenders[0]._gate.close()
                if again:
                    extenders[0]._gate.open()
                return None
            return self._search.advance(fits)

        def close(self, why: str) -> None:
            self._search.close(why)

        @property
        def open(self) -> bool:
            return bool(self._search.open)

    monkeypatch.setattr(lab.state, "search", Slow)

    async def run() -> Any:
        extenders.append(extender_of(lab.state))
        body = {"Pod": lab.pod("p"), "NodeNames": ["n1"]}
        return json.loads(await extenders[0].filter(json.dumps(body).encode()))

    assert asyncio.run(run())["Error"] == "context cancelled"
    assert lab.state.reservations() == []
    assert extenders[0]._events._recorder._queued == 0, "it is the other's to tell"


def test_pods_that_are_costly_to_judge_use_up_the_share_of_their_namespace_only(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kube-scheduler asks about one pod after the other: it must not wait half a minute for each of these."""
    monkeypatch.setattr(extender_module, "_SLICE_S", 0.0)
    monkeypatch.setattr(shares, "FREE_S", 0.01)
    monkeypatch.setattr(shares, "BURST_S", 0.02)
    monkeypatch.setattr(shares, "RATE", 0.0)
    lab.node("n1", lab.card("a"))

    async def run() -> list[Any]:
        extender, answers = extender_of(lab.state), []
        extender._shares.seconds("team-c")
        search = lab.state.search
        for name, namespace, costly in (
            ("p", "team-a", True), ("q", "team-a", True), ("r", "team-b", True), ("s", "team-a", False),
        ):  # fmt: skip
            monkeypatch.setattr(lab.state, "search", (lambda *_: Endless()) if costly else search)
            body = {"Pod": lab.pod(name, namespace=namespace), "NodeNames": ["n1"]}
            answers.append(json.loads(await extender.filter(json.dumps(body).encode())))
            answers.append(extender._shares.seconds("team-a"))
        return answers

    p, after_p, q, _, r, _, s, _ = asyncio.run(run())
    for answer, namespace in ((p, "team-a"), (q, "team-a"), (r, "team-b")):
        assert f"pods of namespace {namespace} have used up their share" in answer["Error"]
        assert "%" not in answer["Error"]
    assert after_p == pytest.approx(0.01)
    assert s["NodeNames"] == ["n1"], "what is judged at once is placed"


def test_dry_runs_are_made_one_after_the_other(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the port may ask for them: however many do, a live request waits for one step."""
    going: list[int] = []

    class Counted:
        def __init__(self) -> None:
            self.left = 3
            going.append(1)

        def advance(self, _fits: int) -> Simulated | None:
            assert len(going) == 1
            self.left -= 1
            if self.left:
                return None
            going.pop()
            return Simulated((), {})

    monkeypatch.setattr(lab.state, "simulate", lambda *_: Counted())
    body = json.dumps({"Pod": lab.pod("p"), "Nodes": {"items": []}}).encode()

    async def run() -> list[bytes]:
        extender = extender_of(lab.state)
        return await asyncio.gather(*(extender.simulate(body) for _ in range(20)))

    assert {json.loads(answer)["Error"] for answer in asyncio.run(run())} == {""}


def test_a_pod_without_uid_gets_no_reservation(lab: Any) -> None:
    lab.node("n1", lab.card("a"))
    pod = lab.pod("new", lab.container())
    del pod["metadata"]["uid"]
    answer = ask(lab, "filter", msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": ["n1"]}))
    assert "metadata.uid" in answer["Error"]
    assert lab.state.reservations() == []
