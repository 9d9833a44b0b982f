"""The scheduling queue and the built-in node filters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.local.scheduling import node_fit
from hami.local.scheduling.amounts import milli, plain, pod_amounts
from hami.local.scheduling.scheduling_queue import MAX_BACKOFF_S, SchedulingQueue


def test_pods_come_by_priority_then_age() -> None:
    queue = SchedulingQueue()
    queue.add("old", 0, 1.0)
    queue.add("new", 0, 2.0)
    queue.add("important", 5, 3.0)
    assert [queue.pop(10.0) for _ in range(4)] == ["important", "old", "new", None]


def test_a_rejected_pod_waits_for_a_cluster_event() -> None:
    queue = SchedulingQueue(max_parked_s=100.0)
    queue.add("p", 0, 0.0)
    queue.pop(0.0)
    queue.failed("p", 0.0)
    assert queue.pop(50.0) is None
    queue.cluster_event()
    assert queue.pop(50.0) == "p"


def test_an_event_does_not_cut_the_backoff_short() -> None:
    queue = SchedulingQueue()
    queue.add("p", 0, 0.0)
    queue.pop(0.0)
    queue.failed("p", 0.0)
    queue.cluster_event()
    assert queue.pop(0.9) is None
    assert queue.next_ready() == 1.0
    assert queue.pop(1.0) == "p"


def test_the_backoff_doubles_up_to_ten_seconds() -> None:
    queue = SchedulingQueue()
    queue.add("p", 0, 0.0)
    now, waits = 0.0, []
    for _ in range(6):
        assert queue.pop(now) == "p"
        queue.failed("p", now)
        queue.cluster_event()
        ready = queue.next_ready()
        assert ready is not None
        waits.append(ready - now)
        now = ready
    assert waits == [1.0, 2.0, 4.0, 8.0, MAX_BACKOFF_S, MAX_BACKOFF_S]


def test_an_event_during_the_try_is_not_lost() -> None:
    queue = SchedulingQueue(max_parked_s=100.0)
    queue.add("p", 0, 0.0)
    queue.pop(0.0)
    queue.cluster_event()
    queue.failed("p", 0.0)
    assert queue.pop(1.0) == "p"


def test_without_events_a_parked_pod_comes_back_at_last() -> None:
    queue = SchedulingQueue(max_parked_s=20.0)
    queue.add("p", 0, 0.0)
    queue.pop(0.0)
    queue.failed("p", 0.0)
    assert queue.next_ready() == 20.0


def test_an_error_is_tried_again_without_an_event() -> None:
    queue = SchedulingQueue(max_parked_s=100.0)
    queue.add("p", 0, 0.0)
    queue.pop(0.0)
    queue.failed("p", 0.0, retry=True)
    assert queue.pop(1.0) == "p"


def test_a_pod_in_flight_is_not_given_twice() -> None:
    queue = SchedulingQueue()
    queue.add("p", 0, 0.0)
    assert queue.pop(0.0) == "p"
    queue.add("p", 0, 0.0)
    assert queue.pop(5.0) is None


def node(name: str = "n1", **allocatable: str) -> dict[str, Any]:
    resources = {"cpu": "4", "memory": "8Gi", "pods": "110", **allocatable}
    return {
        "metadata": {"name": name, "labels": {"zone": "a"}},
        "spec": {},
        "status": {"allocatable": resources},
    }


def pod(requests: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"resources": {"requests": requests or {}}}], **spec},
    }


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"affinity": {"nodeAffinity": required}}


def reasons(unfit: node_fit.Unfit | None) -> tuple[str, ...]:
    assert unfit is not None
    return unfit.reasons


def test_a_pod_that_fits_has_no_reasons_against_it() -> None:
    assert node_fit.check(pod({"cpu": "1"}), node(), [], ()) is None


def test_resources_of_placed_pods_are_counted() -> None:
    assert reasons(node_fit.check(pod({"cpu": "2"}), node(), [pod({"cpu": "2500m"})], ())) == (
        "Insufficient cpu",
    )


def test_resources_of_the_extender_are_not_looked_at() -> None:
    wanted = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    assert node_fit.check(pod(wanted), node(), [], frozenset(wanted)) is None
    assert reasons(node_fit.check(pod(wanted), node(), [], frozenset({"nvidia.com/gpu"}))) == (
        "Insufficient nvidia.com/gpumem",
    )


def test_a_request_above_the_node_is_unresolvable() -> None:
    unfit = node_fit.check(pod({"cpu": "5"}), node(), [], ())
    assert unfit is not None
    assert unfit.unresolvable


def test_a_full_node_takes_no_more_pods() -> None:
    assert reasons(node_fit.check(pod(), node(pods="1"), [pod()], ())) == ("Too many pods",)


def test_a_cordoned_node_needs_a_toleration() -> None:
    cordoned = {**node(), "spec": {"unschedulable": True}}
    assert reasons(node_fit.check(pod(), cordoned, [], ())) == ("node(s) were unschedulable",)
    tolerant = pod(tolerations=[{"operator": "Exists"}])
    assert node_fit.check(tolerant, cordoned, [], ()) is None


def test_a_taint_is_named() -> None:
    tainted = {**node(), "spec": {"taints": [{"key": "gpu", "value": "a", "effect": "NoSchedule"}]}}
    assert reasons(node_fit.check(pod(), tainted, [], ())) == ("node(s) had untolerated taint {gpu: a}",)
    tolerant = pod(tolerations=[{"key": "gpu", "value": "a", "effect": "NoSchedule"}])
    assert node_fit.check(tolerant, tainted, [], ()) is None


@pytest.mark.parametrize(
    ("spec", "fits"),
    [
        ({"nodeSelector": {"zone": "a"}}, True),
        ({"nodeSelector": {"zone": "b"}}, False),
        (affinity({"matchExpressions": [{"key": "zone", "operator": "In", "values": ["b"]}]},
                  {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}), True),
        (affinity({"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["a"]}]}), False),
    ],
)  # fmt: skip
def test_selectors_and_affinity(spec: dict[str, Any], fits: bool) -> None:
    assert (node_fit.check(pod(**spec), node(), [], ()) is None) is fits


def test_the_sentence_counts_equal_reasons() -> None:
    found = {"a": ("Insufficient cpu",), "b": ("Insufficient cpu", "Too many pods"), "c": ("CardNotHealth",)}
    assert node_fit.message(4, found) == (
        "0/4 nodes are available: 1 CardNotHealth, 1 Too many pods, 2 Insufficient cpu."
    )


@pytest.mark.parametrize(
    ("text", "thousandths"),
    [
        ("1", 1000),
        ("500m", 500),
        ("1Ki", 1024_000),
        ("0.1", 100),
        ("1e3", 1_000_000),
        ("1n", 1),
        ("-1", -1000),
    ],
)
def test_quantities_in_thousandths(text: str, thousandths: int) -> None:
    assert milli(text) == thousandths


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1KB", "--1", "1e9999"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        milli(text)


@given(st.integers(-(10**12), 10**12))
def test_plain_text_reads_back(amount: int) -> None:
    assert milli(plain(amount)) == amount


def container(cpu: str, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu}}, **more}


def test_sidecars_count_beside_all_that_start_after_them() -> None:
    always = {"restartPolicy": "Always"}
    spec = {
        "initContainers": [container("2"), container("1", **always), container("3")],
        "containers": [container("1"), container("1")],
    }
    assert pod_amounts({"spec": spec}) == {"cpu": 4000}
    spec["initContainers"] = [container("1", **always)]
    assert pod_amounts({"spec": spec}) == {"cpu": 3000}
