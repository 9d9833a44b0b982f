"""What kubectl prints."""

from __future__ import annotations

from typing import Any

import pytest

from hami.local.columns import human_duration
from hami.local.objects import rfc3339
from hami.local.resources import CONFIGMAPS, NODES, PODS
from hami.local.tables import pod_status, table

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
