"""kubectl's columns of ReplicaSets, Deployments, DaemonSets, Jobs and PodDisruptionBudgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hami.local.api.columns import AGE, NAME, Column, human_duration, pairs
from hami.local.api.objects import Object, dig, parse_time


def _number(*path: str) -> Callable[[Object, float], int]:
    return lambda obj, _now: int(dig(obj, *path) or 0)


def _of_containers(field: str) -> Callable[[Object, float], str]:
    return lambda obj, _now: ",".join(
        str(container.get(field)) for container in dig(obj, "spec", "template", "spec", "containers") or []
    )


def _ready(obj: Object, _now: float) -> str:
    return f"{dig(obj, 'status', 'readyReplicas') or 0}/{dig(obj, 'spec', 'replicas') or 0}"


def _completions(job: Object, _now: float) -> str:
    done, wanted = dig(job, "status", "succeeded") or 0, dig(job, "spec", "completions")
    if wanted is not None:
        return f"{done}/{wanted}"
    parallel = dig(job, "spec", "parallelism") or 0
    return f"{done}/1 of {parallel}" if parallel > 1 else f"{done}/1"


def job_status(job: Object) -> str:
    """Complete, Failed, Suspended or Running."""
    for condition in dig(job, "status", "conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed", "Suspended"):
            return str(condition["type"])
    return "Running"


def _duration(job: Object, now: float) -> str:
    began = parse_time(str(dig(job, "status", "startTime") or ""))
    if began is None:
        return ""
    ended = parse_time(str(dig(job, "status", "completionTime") or ""))
    return human_duration((now if ended is None else ended) - began)


_TEMPLATE: tuple[Column, ...] = (
    Column("Containers", "string", 1, _of_containers("name")),
    Column("Images", "string", 1, _of_containers("image")),
    Column("Selector", "string", 1, pairs("spec", "selector", "matchLabels")),
)


def _integer(name: str, *path: str) -> Column:
    return Column(name, "integer", 0, _number(*path))


def _budget(field: str) -> Callable[[Object, float], Any]:
    return lambda obj, _now: str(dig(obj, "spec", field) if dig(obj, "spec", field) is not None else "N/A")


WORKLOAD_COLUMNS: dict[str, tuple[Column, ...]] = {
    "replicasets.apps": (
        NAME,
        _integer("Desired", "spec", "replicas"),
        _integer("Current", "status", "replicas"),
        _integer("Ready", "status", "readyReplicas"),
        AGE,
        *_TEMPLATE,
    ),
    "deployments.apps": (
        NAME,
        Column("Ready", "string", 0, _ready),
        _integer("Up-to-date", "status", "updatedReplicas"),
        _integer("Available", "status", "availableReplicas"),
        AGE,
        *_TEMPLATE,
    ),
    "daemonsets.apps": (
        NAME,
        _integer("Desired", "status", "desiredNumberScheduled"),
        _integer("Current", "status", "currentNumberScheduled"),
        _integer("Ready", "status", "numberReady"),
        _integer("Up-to-date", "status", "updatedNumberScheduled"),
        _integer("Available", "status", "numberAvailable"),
        Column("Node Selector", "string", 0, pairs("spec", "template", "spec", "nodeSelector")),
        AGE,
        *_TEMPLATE,
    ),
    "jobs.batch": (
        NAME,
        Column("Status", "string", 0, lambda job, _now: job_status(job)),
        Column("Completions", "string", 0, _completions),
        Column("Duration", "string", 0, _duration),
        AGE,
        *_TEMPLATE,
    ),
    "poddisruptionbudgets.policy": (
        NAME,
        Column("Min Available", "string", 0, _budget("minAvailable")),
        Column("Max Unavailable", "string", 0, _budget("maxUnavailable")),
        _integer("Allowed Disruptions", "status", "disruptionsAllowed"),
        AGE,
    ),
}
