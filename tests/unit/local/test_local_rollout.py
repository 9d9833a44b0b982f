"""The steps of a rolling update, and what the controllers compute without I/O."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.local.api.objects import rfc3339
from hami.local.controllers import daemonset, deployment, endpoints, job, replicaset
from hami.local.controllers.common import share_of, template_hash, without_label
from hami.local.controllers.rollout import Bounds, Size, next_new, next_old

NOW = 1_800_000_000.0
Object = dict[str, Any]


# --- rolling update ---

sizes = st.integers(0, 12).flatmap(lambda wanted: st.builds(Size, st.just(wanted), st.integers(0, wanted)))
bounds = st.integers(0, 12).flatmap(
    lambda replicas: st.builds(Bounds, st.just(replicas), st.integers(0, 6), st.integers(0, replicas))
)


@given(limits=bounds, new=sizes, old=st.lists(sizes, max_size=3))
def test_a_step_stays_within_surge_and_availability(limits: Bounds, new: Size, old: list[Size]) -> None:
    before = new.wanted + sum(size.wanted for size in old)
    grown = next_new(limits, new, old)
    assert 0 <= grown <= limits.replicas
    assert grown + sum(size.wanted for size in old) <= max(limits.most, before)
    shrunk = next_old(limits, new, old)
    assert all(0 <= left <= size.wanted for left, size in zip(shrunk, old, strict=True))
    available = new.available + sum(min(size.available, left) for size, left in zip(old, shrunk, strict=True))
    at_first = new.available + sum(size.available for size in old)
    assert available >= min(limits.least_available, at_first)


@given(limits=bounds, old=st.lists(st.integers(0, 8), max_size=3))
def test_a_rollout_ends_with_all_pods_of_the_new_template(limits: Bounds, old: list[int]) -> None:
    """With pods that become available after each step, and a step possible at all."""
    if limits.surge == 0 and limits.unavailable == 0:
        limits = Bounds(limits.replicas, 1, 0)
    new, olds = 0, list(old)
    for _ in range(100):
        new = next_new(limits, Size(new, new), [Size(count, count) for count in olds])
        olds = next_old(limits, Size(new, new), [Size(count, count) for count in olds])
    assert (new, sum(olds)) == (limits.replicas, 0)


def test_pods_that_never_become_available_stop_the_rollout() -> None:
    limits = Bounds(4, 1, 1)
    new, old = Size(0, 0), [Size(4, 4)]
    for _ in range(20):
        new = Size(next_new(limits, new, old), 0)
        old = [Size(count, count) for count in next_old(limits, new, old)]
    assert (new.wanted, old) == (2, [Size(3, 3)])


def test_unavailable_old_pods_go_first() -> None:
    assert next_old(Bounds(4, 1, 1), Size(1, 1), [Size(2, 0), Size(2, 2)]) == [0, 2]


@pytest.mark.parametrize(
    ("value", "total", "up", "result"),
    [("25%", 10, True, 3), ("25%", 10, False, 2), (3, 10, True, 3), ("0%", 10, True, 0),
     ("100%", 3, False, 3), ("x", 10, True, 0), (None, 10, True, 0), (True, 10, True, 0), (-2, 10, True, 0)],
)  # fmt: skip
def test_shares(value: Any, total: int, up: bool, result: int) -> None:
    assert share_of(value, total, round_up=up) == result


def test_equal_templates_have_equal_hashes_whatever_the_order_of_fields() -> None:
    one = {"metadata": {"labels": {"a": "1", "pod-template-hash": "x"}}, "spec": {"x": 1, "y": 2}}
    two = {"spec": {"y": 2, "x": 1}, "metadata": {"labels": {"a": "1"}}}
    assert template_hash(without_label(one, "pod-template-hash")) == template_hash(two)
    assert template_hash(one) != template_hash(two)


# --- replica sets ---


def pod(
    name: str,
    phase: str = "Running",
    ready: float | None = NOW - 60,
    node: str = "n1",
    created: float = NOW - 100,
    **more: Any,
) -> Object:
    conditions = []
    if ready is not None:
        conditions = [{"type": "Ready", "status": "True", "lastTransitionTime": rfc3339(ready)}]
    metadata = {"name": name, "namespace": "default", "uid": name, "creationTimestamp": rfc3339(created)}
    return {
        "metadata": {**metadata, **more},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, "conditions": conditions, "podIP": "10.0.0.1"},
    }


def test_the_cheapest_pods_are_deleted_first() -> None:
    cost = {"controller.kubernetes.io/pod-deletion-cost": "-5"}
    pods = [
        pod("old"), pod("young", created=NOW), pod("cheap", annotations=cost), pod("crowded", node="n2"),
        pod("not-ready", ready=None), pod("pending", "Pending", None), pod("unassigned", "Pending", None, ""),
        pod("neighbour", node="n2", created=NOW - 200), pod("third", node="n2", created=NOW - 300),
        pod("fourth", node="n2", created=NOW - 400), pod("fifth", node="n2", created=NOW - 500),
        pod("sixth", node="n2", created=NOW - 600), pod("seventh", node="n2", created=NOW - 700),
    ]  # fmt: skip
    names = [found["metadata"]["name"] for found in replicaset.deletion_order(pods)]
    assert names[:4] == ["unassigned", "pending", "not-ready", "cheap"]
    assert names[-2:] == ["young", "old"]


def test_replacements_for_failing_pods_come_later_and_later() -> None:
    failed = [pod(f"f{number}", "Failed", None, created=NOW) for number in range(3)]
    assert replicaset.pause_after_failures([], NOW) is None
    assert replicaset.pause_after_failures(failed[:1], NOW) == 1.0
    assert replicaset.pause_after_failures(failed, NOW) == 4.0
    assert replicaset.pause_after_failures(failed, NOW + 5) is None
    assert replicaset.pause_after_failures(failed * 20, NOW) == 60.0


def test_a_pod_is_available_after_min_ready_seconds() -> None:
    owner = {"metadata": {"generation": 3}, "spec": {"replicas": 2, "minReadySeconds": 30}}
    pods = [pod("a", ready=NOW - 40), pod("b", ready=NOW - 10), pod("c", "Failed", None)]
    status = replicaset.status_of(owner, pods, "", NOW)
    assert (status["replicas"], status["readyReplicas"], status["availableReplicas"]) == (2, 2, 1)
    assert status["observedGeneration"] == 3


# --- deployments ---


def deployed(replicas: int, wanted: int, available: int) -> tuple[Object, Object]:
    owner = {
        "metadata": {"name": "d", "generation": 1},
        "spec": {"replicas": replicas, "progressDeadlineSeconds": 60,
                 "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}},
    }  # fmt: skip
    found = {
        "metadata": {"name": "d-1"}, "spec": {"replicas": wanted},
        "status": {"replicas": wanted, "readyReplicas": available, "availableReplicas": available},
    }  # fmt: skip
    return owner, found


def condition(status: Object, kind: str) -> tuple[str, str]:
    found = next(item for item in status["conditions"] if item["type"] == kind)
    return found["status"], found["reason"]


def test_a_deployment_is_progressing_then_complete() -> None:
    owner, current = deployed(2, 2, 0)
    status = deployment.status_of(owner, current, [], NOW)
    assert condition(status, "Progressing") == ("True", "ReplicaSetUpdated")
    assert condition(status, "Available") == ("False", "MinimumReplicasUnavailable")
    _, current = deployed(2, 2, 2)
    status = deployment.status_of({**owner, "status": status}, current, [], NOW + 5)
    assert condition(status, "Progressing") == ("True", "NewReplicaSetAvailable")
    assert condition(status, "Available") == ("True", "MinimumReplicasAvailable")
    assert deployment.is_complete(owner, status)


def test_a_rollout_that_does_not_move_is_late() -> None:
    owner, current = deployed(2, 2, 0)
    first = deployment.status_of(owner, current, [], NOW)
    waiting = deployment.status_of({**owner, "status": first}, current, [], NOW + 59)
    assert condition(waiting, "Progressing") == ("True", "ReplicaSetUpdated")
    late = deployment.status_of({**owner, "status": waiting}, current, [], NOW + 61)
    assert condition(late, "Progressing") == ("False", "ProgressDeadlineExceeded")


# --- daemon sets ---


def daemon(**spec: Any) -> Object:
    return {
        "kind": "DaemonSet", "metadata": {"name": "ds", "namespace": "default", "uid": "u"},
        "spec": {"template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c"}]}},
                 "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}, **spec},
    }  # fmt: skip


def node(name: str, **spec: Any) -> Object:
    return {"metadata": {"name": name, "labels": {"on": name}}, "spec": spec}


def plan(owner: Object, nodes: list[Object], pods: list[Object]) -> tuple[list[str], list[str]]:
    steps = daemonset.plan(owner, nodes, pods, "new", NOW)
    return steps.create, [found["metadata"]["name"] for found in steps.delete]


def on(name: str, where: str, digest: str = "new", **more: Any) -> Object:
    return pod(name, node=where, labels={daemonset.HASH_LABEL: digest}, **more)


def test_every_node_gets_one_pod_and_a_surplus_goes() -> None:
    pods = [on("a", "n1"), on("b", "n1"), on("stray", "gone")]
    assert plan(daemon(), [node("n1"), node("n2")], pods) == (["n2"], ["stray", "b"])


def test_cordoned_nodes_keep_their_pod_and_tainted_ones_get_none() -> None:
    taint = {"key": "x", "effect": "NoSchedule"}
    nodes = [node("n1", unschedulable=True), node("n2", taints=[taint])]
    assert plan(daemon(), nodes, []) == (["n1"], [])


def test_a_node_selector_restricts_the_nodes() -> None:
    owner = daemon()
    owner["spec"]["template"]["spec"]["nodeSelector"] = {"on": "n2"}
    assert plan(owner, [node("n1"), node("n2")], []) == (["n2"], [])


def test_outdated_pods_are_replaced_one_at_a_time() -> None:
    nodes = [node("n1"), node("n2")]
    assert plan(daemon(), nodes, [on("a", "n1", "old"), on("b", "n2", "old")]) == ([], ["a"])
    assert plan(daemon(), nodes, [on("a", "n1"), on("b", "n2", "old")]) == ([], ["b"])
    fresh = on("a", "n1", ready=None)
    assert plan(daemon(), nodes, [fresh, on("b", "n2", "old")]) == ([], [])


def test_outdated_pods_stay_with_on_delete() -> None:
    owner = daemon(updateStrategy={"type": "OnDelete"})
    assert plan(owner, [node("n1")], [on("a", "n1", "old")]) == ([], [])


def test_a_failed_daemon_pod_is_replaced_after_a_pause() -> None:
    failed = on("a", "n1", phase="Failed", ready=None, created=NOW)
    assert plan(daemon(), [node("n1")], [failed]) == ([], [])
    failed = on("a", "n1", phase="Failed", ready=None, created=NOW - 60)
    assert plan(daemon(), [node("n1")], [failed]) == (["n1"], ["a"])


# --- jobs ---


def batch(**spec: Any) -> Object:
    return {
        "metadata": {"name": "j", "namespace": "default", "uid": "u"},
        "spec": {"parallelism": 2, "completions": 3, "backoffLimit": 1, "template": {"spec": {"containers": [
            {"name": "c"}]}}, **spec},
    }  # fmt: skip


def ended(name: str, phase: str, **more: Any) -> Object:
    return pod(name, phase, None, finalizers=[job.TRACKING], **more)


def test_ended_pods_are_counted_once() -> None:
    owner = {**batch(), "status": {"succeeded": 1}}
    counted = pod("old", "Succeeded", None)
    tally = job.count(owner, [counted, ended("a", "Succeeded"), ended("b", "Failed"), pod("c")])
    assert (tally.succeeded, tally.failed, len(tally.active)) == (2, 1, 1)
    assert [found["metadata"]["name"] for found in tally.uncounted] == ["a", "b"]


def test_no_more_pods_are_wanted_than_completions_are_missing() -> None:
    assert job.wanted_active(batch(), job.Tally(succeeded=0)) == 2
    assert job.wanted_active(batch(), job.Tally(succeeded=2)) == 1
    assert job.wanted_active(batch(), job.Tally(succeeded=3)) == 0


def test_a_work_queue_gets_no_new_pods_after_the_first_success() -> None:
    owner = batch(completions=None)
    assert job.wanted_active(owner, job.Tally()) == 2
    assert job.wanted_active(owner, job.Tally(succeeded=1, active=[pod("a")])) == 1
    assert job.judge(owner, job.Tally(succeeded=1, active=[pod("a")]), NOW) is None
    assert job.judge(owner, job.Tally(succeeded=1), NOW) == ("Complete", "", "")


def test_a_job_ends_complete_or_failed() -> None:
    assert job.judge(batch(), job.Tally(succeeded=2), NOW) is None
    assert job.judge(batch(), job.Tally(succeeded=3), NOW) == ("Complete", "", "")
    verdict = job.judge(batch(), job.Tally(failed=2), NOW)
    assert verdict is not None
    assert verdict[:2] == ("Failed", "BackoffLimitExceeded")
    late = {**batch(activeDeadlineSeconds=10), "status": {"startTime": rfc3339(NOW - 11)}}
    verdict = job.judge(late, job.Tally(), NOW)
    assert verdict is not None
    assert verdict[1] == "DeadlineExceeded"


def test_an_indexed_pod_knows_its_index() -> None:
    owner = batch(completionMode="Indexed")
    tally = job.Tally(indexes_done={0}, active=[pod("a", annotations={job.INDEX: "1"})])
    assert job.free_indexes(owner, tally, 2) == [2]
    made = job.job_pod(owner, 2)
    assert made["spec"]["hostname"] == "j-2"
    assert made["spec"]["containers"][0]["env"][0]["name"] == "JOB_COMPLETION_INDEX"
    assert job.TRACKING in made["metadata"]["finalizers"]


@given(indexes=st.sets(st.integers(0, 60)))
def test_index_lists_survive_their_short_form(indexes: set[int]) -> None:
    assert job.parse_indexes(job.format_indexes(indexes)) == indexes


def test_the_short_form_of_indexes() -> None:
    assert job.format_indexes({0, 1, 2, 5, 7, 8}) == "0-2,5,7-8"


# --- endpoints ---


def test_endpoints_hold_ready_and_other_addresses_under_the_port_of_each_pod() -> None:
    service = {"spec": {"ports": [{"port": 80, "targetPort": "http", "name": "web"}]}}
    ready, waiting, other = pod("a"), pod("b", ready=None), pod("c")
    for found, number in ((ready, 8080), (waiting, 8080), (other, 9090)):
        found["spec"]["containers"] = [{"ports": [{"name": "http", "containerPort": number}]}]
    first, second = endpoints.subsets(service, [ready, waiting, other])
    assert first["ports"] == [{"port": 8080, "protocol": "TCP", "name": "web"}]
    assert [item["targetRef"]["name"] for item in first["addresses"]] == ["a"]
    assert [item["targetRef"]["name"] for item in first["notReadyAddresses"]] == ["b"]
    assert second["ports"][0]["port"] == 9090


def test_a_pod_without_the_named_port_is_no_endpoint() -> None:
    service = {"spec": {"ports": [{"port": 80, "targetPort": "http"}]}}
    assert endpoints.subsets(service, [pod("a")]) == []
