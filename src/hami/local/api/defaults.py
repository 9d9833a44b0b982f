"""Fills what clients may leave out of an object, as the API server's defaulting does. Idempotent."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

from hami.local.api.errors import bad_request
from hami.local.api.objects import Object, dig, meta, without_nulls
from hami.local.api.resources import Resource
from hami.protocol.errors import QuantityError
from hami.protocol.quantity import canonical


def apply_defaults(resource: Resource, obj: Object) -> None:
    """Fill what clients may leave out; idempotent. Raises 400 for a field of the wrong type."""
    try:
        default = _DEFAULTS.get(resource.key)
        if default is not None:
            default(obj)
    except (AttributeError, TypeError, KeyError) as error:
        raise bad_request(f"{resource.kind} in version {resource.version!r} is malformed: {error}") from error


def _default_pod(pod: Object) -> None:
    spec = pod.setdefault("spec", {})
    _default_pod_spec(spec)
    _fill(spec, ("enableServiceLinks", True), ("serviceAccountName", "default"), ("priority", 0))
    for container in _containers(spec):
        resources = container["resources"]
        for name, amount in (resources.get("limits") or {}).items():
            if name not in (resources.get("requests") or {}):
                requests = resources.get("requests")
                if requests is None:
                    requests = resources["requests"] = {}
                requests[name] = amount
    status = pod.setdefault("status", {})
    status.setdefault("phase", "Pending")
    status.setdefault("qosClass", _qos(spec))


def _default_pod_spec(spec: Object) -> None:
    """What pods and pod templates have in common."""
    _fill(
        spec, ("restartPolicy", "Always"), ("terminationGracePeriodSeconds", 30),
        ("dnsPolicy", "ClusterFirst"), ("schedulerName", "default-scheduler"), ("securityContext", {}),
    )  # fmt: skip
    for container in _containers(spec):
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        image = str(container.get("image") or "")
        latest = image.endswith(":latest") or ":" not in image.rsplit("/", 1)[-1]
        container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
        resources = container.get("resources")
        if resources is None:
            resources = container["resources"] = {}
        for side in ("limits", "requests"):
            if isinstance(resources.get(side), dict):
                resources[side] = {name: _canonical(amount) for name, amount in resources[side].items()}
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")


def _fill(target: Object, *defaults: tuple[str, Any]) -> None:
    for field, value in defaults:
        if target.get(field) in (None, ""):
            target[field] = value


def _containers(spec: Object) -> list[Object]:
    return [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]


def _canonical(amount: Any) -> Any:
    try:
        return canonical(amount)
    except QuantityError:
        return amount  # left for validation, which names the field


def _qos(spec: Object) -> str:
    containers = _containers(spec)
    sides = [
        (dig(container, "resources", side) or {}).get(name)
        for container in containers
        for side in ("requests", "limits")
        for name in ("cpu", "memory")
    ]
    if not any(sides):
        return "BestEffort"
    equal = all(
        (dig(container, "resources", "limits") or {}).get(name)
        and (dig(container, "resources", "limits") or {}).get(name)
        == (dig(container, "resources", "requests") or {}).get(name)
        for container in containers
        for name in ("cpu", "memory")
    )
    return "Guaranteed" if equal else "Burstable"


def _default_webhooks(configuration: Object) -> None:
    mutating = configuration["kind"] == "MutatingWebhookConfiguration"
    for webhook in configuration.get("webhooks") or []:
        webhook.setdefault("failurePolicy", "Fail")
        webhook.setdefault("matchPolicy", "Equivalent")
        webhook.setdefault("timeoutSeconds", 10)
        webhook.setdefault("namespaceSelector", {})
        webhook.setdefault("objectSelector", {})
        if mutating:
            webhook.setdefault("reinvocationPolicy", "Never")
        for rule in webhook.get("rules") or []:
            rule.setdefault("scope", "*")


def _default_namespace(namespace: Object) -> None:
    namespace.setdefault("spec", {}).setdefault("finalizers", ["kubernetes"])
    namespace.setdefault("status", {}).setdefault("phase", "Active")
    labels = meta(namespace).setdefault("labels", {})
    labels["kubernetes.io/metadata.name"] = meta(namespace).get("name", "")


def _default_node(node: Object) -> None:
    node.setdefault("spec", {})
    node.setdefault("status", {})


def _default_secret(secret: Object) -> None:
    secret.setdefault("type", "Opaque")
    for key, text in (secret.pop("stringData", None) or {}).items():
        secret.setdefault("data", {})[key] = base64.b64encode(str(text).encode()).decode()


def _default_service(service: Object) -> None:
    """``clusterIP`` is made out of the uid: nothing listens there, as there is no service network."""
    spec = service.setdefault("spec", {})
    _fill(spec, ("type", "ClusterIP"), ("sessionAffinity", "None"), ("internalTrafficPolicy", "Cluster"))
    for port in spec.get("ports") or []:
        _fill(port, ("protocol", "TCP"), ("targetPort", port.get("port")))
    if spec["type"] != "ExternalName" and not spec.get("clusterIP") and meta(service).get("uid"):
        digest = hashlib.sha256(str(meta(service)["uid"]).encode()).digest()
        spec["clusterIP"] = f"10.96.{digest[0]}.{digest[1]}"
    if spec.get("clusterIP"):
        spec.setdefault("clusterIPs", [spec["clusterIP"]])
    service.setdefault("status", {}).setdefault("loadBalancer", {})


def _default_template(workload: Object) -> Object:
    """The spec of a workload, its pod template filled."""
    spec: Object = workload.setdefault("spec", {})
    # Clients that encode templates from typed objects send nulls, which mean absent.
    template = spec["template"] = without_nulls(spec.get("template") or {})
    template.setdefault("metadata", {})
    _default_pod_spec(template.setdefault("spec", {}))
    workload.setdefault("status", {})
    return spec


def _default_replicaset(replicaset: Object) -> None:
    _fill(_default_template(replicaset), ("replicas", 1))


def _default_deployment(deployment: Object) -> None:
    spec = _default_template(deployment)
    _fill(spec, ("replicas", 1), ("revisionHistoryLimit", 10), ("progressDeadlineSeconds", 600))
    strategy = spec.setdefault("strategy", {})
    _fill(strategy, ("type", "RollingUpdate"))
    if strategy["type"] == "RollingUpdate":
        rolling = strategy.get("rollingUpdate")
        if rolling is None:
            rolling = strategy["rollingUpdate"] = {}
        _fill(rolling, ("maxSurge", "25%"), ("maxUnavailable", "25%"))


def _default_daemonset(daemonset: Object) -> None:
    spec = _default_template(daemonset)
    _fill(spec, ("revisionHistoryLimit", 10))
    strategy = spec.setdefault("updateStrategy", {})
    _fill(strategy, ("type", "RollingUpdate"))
    if strategy["type"] == "RollingUpdate":
        rolling = strategy.get("rollingUpdate")
        if rolling is None:
            rolling = strategy["rollingUpdate"] = {}
        _fill(rolling, ("maxSurge", 0), ("maxUnavailable", 1))


def _default_job(job: Object) -> None:
    given = dig(job, "spec", "template", "spec", "restartPolicy")
    spec = _default_template(job)
    if not given:
        del spec["template"]["spec"]["restartPolicy"]  # required of jobs: validation says so
    if spec.get("completions") is None and spec.get("parallelism") is None:
        spec["completions"] = 1
    _fill(
        spec, ("parallelism", 1), ("backoffLimit", 6), ("completionMode", "NonIndexed"), ("suspend", False),
    )  # fmt: skip
    uid = meta(job).get("uid")
    if uid and not spec.get("manualSelector") and not spec.get("selector"):
        spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
        labels = meta(spec["template"]).setdefault("labels", {})
        for prefix in ("", "batch.kubernetes.io/"):
            labels[f"{prefix}controller-uid"] = uid
            labels[f"{prefix}job-name"] = meta(job).get("name", "")


_DEFAULTS: dict[str, Callable[[Object], None]] = {
    "pods": _default_pod,
    "namespaces": _default_namespace,
    "nodes": _default_node,
    "secrets": _default_secret,
    "services": _default_service,
    "replicasets.apps": _default_replicaset,
    "deployments.apps": _default_deployment,
    "daemonsets.apps": _default_daemonset,
    "jobs.batch": _default_job,
    "mutatingwebhookconfigurations.admissionregistration.k8s.io": _default_webhooks,
    "validatingwebhookconfigurations.admissionregistration.k8s.io": _default_webhooks,
}
