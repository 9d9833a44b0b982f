"""What kubectl prints."""

from __future__ import annotations

from typing import Any

import pytest

from hami.local.api.columns import human_duration
from hami.local.api.objects import rfc3339
from hami.local.api.resources import (
    CONFIGMAPS,
    DAEMONSETS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    EVENTS,
    EVENTS_V1,
    JOBS,
    NODES,
    PODS,
    REPLICASETS,
    ROLEBINDINGS,
)
from hami.local.api.tables import pod_status, table

NOW = 1_800_000_000.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (200, "3m20s"), (600, "10m"), (10_799, "179m"), (10_800, "3h"),
     (5 * 3600 + 60, "5h1m"), (9 * 3600 + 60, "9h"), (48 * 3600, "2d"),
     (50 * 3600, "2d2h"), (9 * 86400, "9d")],
)  # fmt: skip
def test_ages_are_short(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def cells(resource: Any, obj: Any) -> dict[str, Any]:
    found = table(resource, [obj], NOW, include="None", metadata={})
    names = [column["name"] for column in found["columnDefinitions"]]
    return dict(zip(names, found["rows"][0]["cells"], strict=True))


def test_a_pod_row_shows_ready_containers_restarts_and_node() -> None:
    pod = {
        "metadata": {"name": "p", "creationTimestamp": rfc3339(NOW - 90)},
        "spec": {"containers": [{}, {}], "nodeName": "n1"},
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"ready": True, "restartCount": 1, "state": {"running": {}}},
                {"ready": False, "restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
            ],
        },
    }
    row = cells(PODS, pod)
    assert (row["Ready"], row["Status"], row["Restarts"], row["Age"], row["Node"]) == (
        "1/2", "CrashLoopBackOff", "3", "90s", "n1",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("status", "word"),
    [
        ({"phase": "Pending"}, "Pending"),
        ({"phase": "Failed", "reason": "UnexpectedAdmissionError"}, "UnexpectedAdmissionError"),
        ({"phase": "Succeeded", "containerStatuses": [
            {"state": {"terminated": {"reason": "Completed", "exitCode": 0}}}]}, "Completed"),
        ({"phase": "Failed", "containerStatuses": [
            {"state": {"terminated": {"exitCode": 3}}}]}, "ExitCode:3"),
        ({"phase": "Pending", "initContainerStatuses": [
            {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}}]}, "Init:Error"),
        ({"phase": "Pending", "initContainerStatuses": [
            {"state": {"terminated": {"exitCode": 0}}}, {"state": {"running": {}}}]}, "Init:1/2"),
        ({"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "reason": "SchedulingGated"}]}, "SchedulingGated"),
    ],
)  # fmt: skip
def test_the_status_word_of_a_pod(status: Any, word: str) -> None:
    assert pod_status({"metadata": {}, "spec": {}, "status": status}) == word


def test_a_pod_that_is_deleted_is_terminating() -> None:
    pod = {"metadata": {"deletionTimestamp": rfc3339(NOW)}, "status": {"phase": "Running"}}
    assert pod_status(pod) == "Terminating"


def test_a_cordoned_node_says_so() -> None:
    node = {
        "metadata": {"name": "n"},
        "spec": {"unschedulable": True},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert cells(NODES, node)["Status"] == "Ready,SchedulingDisabled"


def test_rows_carry_metadata_unless_the_object_is_asked_for() -> None:
    obj = {"kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "b"}}
    by_include = {
        include: table(CONFIGMAPS, [obj], NOW, include=include, metadata={})["rows"][0]["object"]
        for include in ("Metadata", "Object", "None")
    }
    assert by_include["Metadata"]["kind"] == "PartialObjectMetadata"
    assert by_include["Object"] is obj
    assert by_include["None"] is None


def workload(**status: Any) -> Any:
    template = {"spec": {"containers": [{"name": "a", "image": "x"}, {"name": "b", "image": "y"}],
                         "nodeSelector": {"gpu": "on"}}}  # fmt: skip
    return {
        "metadata": {"name": "w", "creationTimestamp": rfc3339(NOW - 60)},
        "spec": {"replicas": 3, "template": template, "selector": {"matchLabels": {"app": "w"}}},
        "status": status,
    }


def test_a_deployment_row_counts_its_pods() -> None:
    row = cells(DEPLOYMENTS, workload(readyReplicas=2, updatedReplicas=1, availableReplicas=2))
    assert (row["Ready"], row["Up-to-date"], row["Available"], row["Age"]) == ("2/3", 1, 2, "60s")
    assert (row["Containers"], row["Images"], row["Selector"]) == ("a,b", "x,y", "app=w")
    assert cells(REPLICASETS, workload(replicas=3))["Current"] == 3


def test_a_daemon_set_row_counts_nodes() -> None:
    row = cells(DAEMONSETS, workload(desiredNumberScheduled=4, numberReady=3))
    assert (row["Desired"], row["Ready"], row["Available"], row["Node Selector"]) == (4, 3, 0, "gpu=on")


@pytest.mark.parametrize(
    ("spec", "status", "shown"),
    [
        ({"completions": 3}, {"succeeded": 1, "startTime": rfc3339(NOW - 30)}, ("Running", "1/3", "30s")),
        ({"parallelism": 4}, {"startTime": rfc3339(NOW - 30)}, ("Running", "0/1 of 4", "30s")),
        ({"parallelism": 1}, {}, ("Running", "0/1", "")),
        (
            {"completions": 1},
            {"succeeded": 1, "startTime": rfc3339(NOW - 30), "completionTime": rfc3339(NOW - 20),
             "conditions": [{"type": "Complete", "status": "True"}]},
            ("Complete", "1/1", "10s"),
        ),
        ({"completions": 1}, {"conditions": [{"type": "Failed", "status": "True"}]}, ("Failed", "0/1", "")),
    ],
)  # fmt: skip
def test_a_job_row_shows_how_far_it_is(spec: Any, status: Any, shown: tuple[str, str, str]) -> None:
    row = cells(JOBS, {"metadata": {"name": "j"}, "spec": spec, "status": status})
    assert (row["Status"], row["Completions"], row["Duration"]) == shown


def test_a_disruption_budget_row_shows_its_limit() -> None:
    row = cells(DISRUPTION_BUDGETS, {"metadata": {"name": "b"}, "spec": {"minAvailable": 0}})
    assert (row["Min Available"], row["Max Unavailable"]) == ("0", "N/A")


def test_a_role_binding_row_names_the_role() -> None:
    binding = {"metadata": {"name": "b"}, "roleRef": {"kind": "Role", "name": "edit"}}
    assert cells(ROLEBINDINGS, binding)["Role"] == "Role/edit"


@pytest.mark.parametrize(
    ("resource", "event"),
    [
        (
            EVENTS,
            {"involvedObject": {"kind": "Pod", "name": "p"}, "message": "m", "lastTimestamp": rfc3339(NOW)},
        ),
        (EVENTS_V1, {"regarding": {"kind": "Pod", "name": "p"}, "note": "m", "eventTime": rfc3339(NOW)}),
    ],
)
def test_an_event_row_is_the_same_in_both_forms(resource: Any, event: Any) -> None:
    row = cells(resource, {"metadata": {"name": "e"}, **event})
    assert (row["Object"], row["Message"], row["Last Seen"]) == ("pod/p", "m", "0s")
