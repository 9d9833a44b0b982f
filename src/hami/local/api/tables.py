"""The ``Table`` form of lists and watches: the columns that kubectl prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hami.local.api.columns import AGE, NAME, Column, count, pairs, since, text
from hami.local.api.objects import Object, dig, meta
from hami.local.api.resources import Resource
from hami.local.api.workload_tables import WORKLOAD_COLUMNS


def table(
    resource: Resource, objects: Iterable[Object], now: float, *, include: str, metadata: Object
) -> Object:
    """``meta.k8s.io/v1 Table`` of ``objects``. ``include``: ``Object``, ``Metadata`` or ``None``."""
    columns = _COLUMNS.get(resource.key, (NAME, AGE))
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


def _ready(pod: Object, _now: float) -> str:
    statuses = dig(pod, "status", "containerStatuses") or []
    total = len(dig(pod, "spec", "containers") or [])
    return f"{sum(1 for status in statuses if status.get('ready'))}/{total}"


def _restarts(pod: Object, now: float) -> str:
    statuses = dig(pod, "status", "containerStatuses") or []
    count = sum(int(status.get("restartCount") or 0) for status in statuses)
    last = [dig(status, "lastState", "terminated", "finishedAt") for status in statuses]
    times = [stamp for stamp in last if stamp]
    return f"{count} ({since(max(times), now)} ago)" if count and times else str(count)


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
    about = event.get("involvedObject") or event.get("regarding")
    return f"{str(dig(about, 'kind') or '').lower()}/{dig(about, 'name') or ''}"


def _last_seen(event: Object, now: float) -> str:
    for field in ("lastTimestamp", "deprecatedLastTimestamp", "eventTime"):
        if event.get(field):
            return since(event[field], now)
    return since(meta(event).get("creationTimestamp"), now)


def _role(binding: Object, _now: float) -> str:
    return f"{dig(binding, 'roleRef', 'kind')}/{dig(binding, 'roleRef', 'name')}"


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
    **WORKLOAD_COLUMNS,
    "pods": (
        NAME,
        Column("Ready", "string", 0, _ready),
        Column("Status", "string", 0, lambda pod, _now: pod_status(pod)),
        Column("Restarts", "string", 0, _restarts),
        AGE,
        Column("IP", "string", 1, text("status", "podIP")),
        Column("Node", "string", 1, text("spec", "nodeName")),
        Column("Nominated Node", "string", 1, text("status", "nominatedNodeName")),
        Column("Readiness Gates", "string", 1, lambda _obj, _now: "<none>"),
    ),
    "nodes": (
        NAME,
        Column("Status", "string", 0, _node_status),
        Column("Roles", "string", 0, _node_roles),
        AGE,
        Column("Version", "string", 0, text("status", "nodeInfo", "kubeletVersion", default="")),
        Column("Internal-IP", "string", 1, _node_address("InternalIP")),
        Column("External-IP", "string", 1, _node_address("ExternalIP")),
        Column("OS-Image", "string", 1, text("status", "nodeInfo", "osImage", default="<unknown>")),
        Column(
            "Kernel-Version", "string", 1, text("status", "nodeInfo", "kernelVersion", default="<unknown>")
        ),
        Column(
            "Container-Runtime", "string", 1,
            text("status", "nodeInfo", "containerRuntimeVersion", default="<unknown>"),
        ),
    ),
    "namespaces": (NAME, Column("Status", "string", 0, text("status", "phase", default="")), AGE),
    "events": (
        Column("Last Seen", "string", 0, _last_seen),
        Column("Type", "string", 0, text("type", default="")),
        Column("Reason", "string", 0, text("reason", default="")),
        Column("Object", "string", 0, _event_object),
        Column("Source", "string", 1, text("source", "component", default="")),
        Column("Message", "string", 0, text("message", default="")),
        Column("Count", "string", 1, lambda event, _now: str(event.get("count") or 1)),
        Column("Name", "string", 1, lambda event, _now: meta(event).get("name", "")),
    ),
    "events.events.k8s.io": (
        Column("Last Seen", "string", 0, _last_seen),
        Column("Type", "string", 0, text("type", default="")),
        Column("Reason", "string", 0, text("reason", default="")),
        Column("Object", "string", 0, _event_object),
        Column("Message", "string", 0, text("note", default="")),
    ),
    "serviceaccounts": (NAME, Column("Secrets", "integer", 0, count("secrets")), AGE),
    "roles.rbac.authorization.k8s.io": (
        NAME, Column("Created At", "string", 0, text("metadata", "creationTimestamp")),
    ),
    "clusterroles.rbac.authorization.k8s.io": (
        NAME, Column("Created At", "string", 0, text("metadata", "creationTimestamp")),
    ),
    "rolebindings.rbac.authorization.k8s.io": (NAME, Column("Role", "string", 0, _role), AGE),
    "clusterrolebindings.rbac.authorization.k8s.io": (NAME, Column("Role", "string", 0, _role), AGE),
    "configmaps": (NAME, Column("Data", "string", 0, count("data")), AGE),
    "secrets": (
        NAME,
        Column("Type", "string", 0, text("type", default="Opaque")),
        Column("Data", "string", 0, count("data")),
        AGE,
    ),
    "services": (
        NAME,
        Column("Type", "string", 0, text("spec", "type", default="ClusterIP")),
        Column("Cluster-IP", "string", 0, text("spec", "clusterIP")),
        Column("External-IP", "string", 0, lambda _obj, _now: "<none>"),
        Column("Port(s)", "string", 0, _service_ports),
        AGE,
        Column("Selector", "string", 1, pairs("spec", "selector")),
    ),
    "endpoints": (NAME, Column("Endpoints", "string", 0, _endpoints), AGE),
    "resourcequotas": (
        NAME,
        Column("Request", "string", 0, _quota("requests.")),
        Column("Limit", "string", 0, _quota("limits.")),
        AGE,
    ),
    "leases.coordination.k8s.io": (
        NAME, Column("Holder", "string", 0, text("spec", "holderIdentity", default="")), AGE,
    ),
    "mutatingwebhookconfigurations.admissionregistration.k8s.io": (
        NAME, Column("Webhooks", "integer", 0, count("webhooks")), AGE,
    ),
    "validatingwebhookconfigurations.admissionregistration.k8s.io": (
        NAME, Column("Webhooks", "integer", 0, count("webhooks")), AGE,
    ),
}  # fmt: skip
