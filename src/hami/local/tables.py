"""The ``Table`` form of lists and watches: the columns that kubectl prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hami.local.objects import Object, dig, meta, parse_time
from hami.local.resources import Resource


class Column(NamedTuple):
    """``priority`` 0 is always shown, 1 only with ``-o wide``."""

    name: str
    type: str
    priority: int
    cell: Callable[[Object, float], Any]


def table(
    resource: Resource, objects: Iterable[Object], now: float, *, include: str, metadata: Object
) -> Object:
    """``meta.k8s.io/v1 Table`` of ``objects``. ``include``: ``Object``, ``Metadata`` or ``None``."""
    columns = _COLUMNS.get(resource.key, (_NAME, _AGE))
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": [
            {
                "name": column.name,
                "type": column.type,
                "format": "name" if column.name == "Name" else "",
                "description": column.name,
                "priority": column.priority,
            }
            for column in columns
        ],
        "rows": [
            {"cells": [column.cell(obj, now) for column in columns], "object": _row_object(obj, include)}
            for obj in objects
        ],
    }


def _row_object(obj: Object, include: str) -> Object | None:
    if include == "None":
        return None
    if include == "Object":
        return obj
    return partial(obj)


def partial(obj: Object) -> Object:
    """``PartialObjectMetadata`` of an object."""
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": meta(obj)}


def human_duration(seconds: float) -> str:
    """kubectl's short form of an age: ``45s``, ``3m20s``, ``5h``, ``2d``."""
    total = max(0, int(seconds))
    if total < 120:
        return f"{total}s"
    minutes = total // 60
    if minutes < 10:
        return f"{minutes}m{total % 60}s" if total % 60 else f"{minutes}m"
    if minutes < 180:
        return f"{minutes}m"
    hours = minutes // 60
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    days = hours // 24
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d"


def _since(stamp: Any, now: float) -> str:
    parsed = parse_time(stamp) if isinstance(stamp, str) else None
    return "<unknown>" if parsed is None else human_duration(now - parsed)


def _text(*path: str, default: str = "<none>") -> Callable[[Object, float], Any]:
    return lambda obj, _now: dig(obj, *path) or default


def _count(*path: str) -> Callable[[Object, float], Any]:
    return lambda obj, _now: len(dig(obj, *path) or ())


_NAME = Column("Name", "string", 0, lambda obj, _now: meta(obj).get("name", ""))
_AGE = Column("Age", "string", 0, lambda obj, now: _since(meta(obj).get("creationTimestamp"), now))


def _ready(pod: Object, _now: float) -> str:
    statuses = dig(pod, "status", "containerStatuses") or []
    total = len(dig(pod, "spec", "containers") or [])
    return f"{sum(1 for status in statuses if status.get('ready'))}/{total}"


def _restarts(pod: Object, now: float) -> str:
    statuses = dig(pod, "status", "containerStatuses") or []
    count = sum(int(status.get("restartCount") or 0) for status in statuses)
    last = [dig(status, "lastState", "terminated", "finishedAt") for status in statuses]
    times = [stamp for stamp in last if stamp]
    return f"{count} ({_since(max(times), now)} ago)" if count and times else str(count)


def pod_status(pod: Object) -> str:
    """kubectl's STATUS word of a pod: phase, reason, or the state of the first container that has one."""
    status = pod.get("status") or {}
    word = status.get("reason") or status.get("phase") or "Unknown"
    conditions = {item.get("type"): item for item in status.get("conditions") or []}
    if (conditions.get("PodScheduled") or {}).get("reason") == "SchedulingGated":
        word = "SchedulingGated"
    initializing = False
    inits = status.get("initContainerStatuses") or []
    for index, container in enumerate(inits):
        terminated = dig(container, "state", "terminated")
        if terminated and terminated.get("exitCode") == 0:
            continue
        waiting = dig(container, "state", "waiting", "reason")
        if terminated:
            word = "Init:" + (terminated.get("reason") or f"ExitCode:{terminated.get('exitCode')}")
        elif waiting and waiting != "PodInitializing":
            word = f"Init:{waiting}"
        else:
            word = f"Init:{index}/{len(dig(pod, 'spec', 'initContainers') or inits)}"
        initializing = True
        break
    if not initializing and not status.get("reason"):
        word = _container_word(status, word)
    if meta(pod).get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(word)


def _container_word(status: Object, word: str) -> str:
    running = False
    for container in reversed(status.get("containerStatuses") or []):
        waiting = dig(container, "state", "waiting", "reason")
        terminated = dig(container, "state", "terminated")
        if waiting:
            word = waiting
        elif terminated:
            word = terminated.get("reason") or f"ExitCode:{terminated.get('exitCode')}"
        elif container.get("ready") and dig(container, "state", "running"):
            running = True
    return "Running" if word == "Completed" and running else word


def _node_status(node: Object, _now: float) -> str:
    words = [
        "Ready" if item.get("status") == "True" else "NotReady"
        for item in dig(node, "status", "conditions") or []
        if item.get("type") == "Ready"
    ] or ["Unknown"]
    if dig(node, "spec", "unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _node_roles(node: Object, _now: float) -> str:
    prefix = "node-role.kubernetes.io/"
    found = sorted(key[len(prefix) :] for key in meta(node).get("labels") or {} if key.startswith(prefix))
    return ",".join(found) or "<none>"


def _node_address(kind: str) -> Callable[[Object, float], str]:
    def cell(node: Object, _now: float) -> str:
        for address in dig(node, "status", "addresses") or []:
            if address.get("type") == kind:
                return str(address.get("address"))
        return "<none>"

    return cell


def _event_object(event: Object, _now: float) -> str:
    kind = str(dig(event, "involvedObject", "kind") or "").lower()
    return f"{kind}/{dig(event, 'involvedObject', 'name') or ''}"


def _last_seen(event: Object, now: float) -> str:
    return _since(
        event.get("lastTimestamp") or event.get("eventTime") or meta(event).get("creationTimestamp"), now
    )


def _service_ports(service: Object, _now: float) -> str:
    return (
        ",".join(
            f"{port.get('port')}/{port.get('protocol', 'TCP')}"
            for port in dig(service, "spec", "ports") or []
        )
        or "<none>"
    )


def _endpoints(endpoints: Object, _now: float) -> str:
    found = [
        f"{address.get('ip')}:{port.get('port')}"
        for subset in endpoints.get("subsets") or []
        for address in subset.get("addresses") or []
        for port in subset.get("ports") or []
    ]
    return ",".join(found) or "<none>"


def _quota(prefix: str) -> Callable[[Object, float], str]:
    def cell(quota: Object, _now: float) -> str:
        hard = dig(quota, "status", "hard") or dig(quota, "spec", "hard") or {}
        used = dig(quota, "status", "used") or {}
        return ", ".join(
            f"{name}: {used.get(name, 0)}/{limit}"
            for name, limit in sorted(hard.items())
            if name.startswith("limits.") == (prefix == "limits.")
        )

    return cell


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "pods": (
        _NAME,
        Column("Ready", "string", 0, _ready),
        Column("Status", "string", 0, lambda pod, _now: pod_status(pod)),
        Column("Restarts", "string", 0, _restarts),
        _AGE,
        Column("IP", "string", 1, _text("status", "podIP")),
        Column("Node", "string", 1, _text("spec", "nodeName")),
        Column("Nominated Node", "string", 1, _text("status", "nominatedNodeName")),
        Column("Readiness Gates", "string", 1, lambda _obj, _now: "<none>"),
    ),
    "nodes": (
        _NAME,
        Column("Status", "string", 0, _node_status),
        Column("Roles", "string", 0, _node_roles),
        _AGE,
        Column("Version", "string", 0, _text("status", "nodeInfo", "kubeletVersion", default="")),
        Column("Internal-IP", "string", 1, _node_address("InternalIP")),
        Column("External-IP", "string", 1, _node_address("ExternalIP")),
        Column("OS-Image", "string", 1, _text("status", "nodeInfo", "osImage", default="<unknown>")),
        Column(
            "Kernel-Version", "string", 1, _text("status", "nodeInfo", "kernelVersion", default="<unknown>")
        ),
        Column(
            "Container-Runtime", "string", 1,
            _text("status", "nodeInfo", "containerRuntimeVersion", default="<unknown>"),
        ),
    ),
    "namespaces": (_NAME, Column("Status", "string", 0, _text("status", "phase", default="")), _AGE),
    "events": (
        Column("Last Seen", "string", 0, _last_seen),
        Column("Type", "string", 0, _text("type", default="")),
        Column("Reason", "string", 0, _text("reason", default="")),
        Column("Object", "string", 0, _event_object),
        Column("Source", "string", 1, _text("source", "component", default="")),
        Column("Message", "string", 0, _text("message", default="")),
        Column("Count", "string", 1, lambda event, _now: str(event.get("count") or 1)),
        Column("Name", "string", 1, lambda event, _now: meta(event).get("name", "")),
    ),
    "configmaps": (_NAME, Column("Data", "string", 0, _count("data")), _AGE),
    "secrets": (
        _NAME,
        Column("Type", "string", 0, _text("type", default="Opaque")),
        Column("Data", "string", 0, _count("data")),
        _AGE,
    ),
    "services": (
        _NAME,
        Column("Type", "string", 0, _text("spec", "type", default="ClusterIP")),
        Column("Cluster-IP", "string", 0, _text("spec", "clusterIP")),
        Column("External-IP", "string", 0, lambda _obj, _now: "<none>"),
        Column("Port(s)", "string", 0, _service_ports),
        _AGE,
    ),
    "endpoints": (_NAME, Column("Endpoints", "string", 0, _endpoints), _AGE),
    "resourcequotas": (
        _NAME,
        Column("Request", "string", 0, _quota("requests.")),
        Column("Limit", "string", 0, _quota("limits.")),
        _AGE,
    ),
    "leases.coordination.k8s.io": (
        _NAME, Column("Holder", "string", 0, _text("spec", "holderIdentity", default="")), _AGE,
    ),
    "mutatingwebhookconfigurations.admissionregistration.k8s.io": (
        _NAME, Column("Webhooks", "integer", 0, _count("webhooks")), _AGE,
    ),
    "validatingwebhookconfigurations.admissionregistration.k8s.io": (
        _NAME, Column("Webhooks", "integer", 0, _count("webhooks")), _AGE,
    ),
}  # fmt: skip
