"""DaemonSets: one pod on every node that may take it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, clone, dig, labels_of, meta, name_of, namespace_of
from hami.local.api.resources import DAEMONSETS, NODES, PODS
from hami.local.api.store import Event
from hami.local.controllers.common import (
    is_active,
    is_available,
    is_controlled_by,
    is_deleting,
    pod_from_template,
    ready_since,
    share_of,
    template_hash,
)
from hami.local.controllers.controller import Controller, Key
from hami.local.controllers.replicaset import pause_after_failures
from hami.local.scheduling import node_fit

HASH_LABEL = "controller-revision-hash"
_TOLERATIONS: tuple[tuple[str, str], ...] = (
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
)


@dataclass(slots=True)
class _Plan:
    """Nodes that miss a pod, pods that are to go, and how many nodes were to have one."""

    create: list[str] = field(default_factory=list)
    delete: list[Object] = field(default_factory=list)
    eligible: list[str] = field(default_factory=list)
    again_s: float | None = None


class DaemonSetController(Controller):
    """Keeps one pod per eligible node; replaces outdated pods a few at a time."""

    resource = DAEMONSETS
    component = "daemonset-controller"

    def keys(self, storage_key: str, event: Event) -> Iterable[Key]:
        if storage_key == NODES.key:
            return self.initial() if _node_matters(event) else []
        return super().keys(storage_key, event)

    async def sync(self, key: Key) -> float | None:
        daemonset = self.store.find(DAEMONSETS, *key)
        if daemonset is None or is_deleting(daemonset):
            return None
        digest = template_hash(daemonset["spec"]["template"])
        nodes = self.store.list(NODES)
        pods = self._pods(daemonset)
        steps = plan(daemonset, nodes, pods, digest, self.clock())
        for pod in steps.delete:
            await self.delete(PODS, pod)
            await self.recorder.record(
                daemonset, "Normal", "SuccessfulDelete", f"Deleted pod: {name_of(pod)}"
            )
        failure = ""
        for node in steps.create:
            failure = await self._create(daemonset, node, digest)
            if failure:
                break
        status = status_of(daemonset, steps.eligible, self._pods(daemonset), digest, self.clock())
        await self.write_status(daemonset, status)
        if failure:
            raise ApiError(403, "Forbidden", failure)
        return steps.again_s

    def _pods(self, daemonset: Object) -> list[Object]:
        return [
            pod for pod in self.store.list(PODS, namespace_of(daemonset)) if is_controlled_by(pod, daemonset)
        ]

    async def _create(self, daemonset: Object, node: str, digest: str) -> str:
        try:
            pod, _ = await self.registry.create(
                PODS, namespace_of(daemonset), daemon_pod(daemonset, node, digest)
            )
        except ApiError as error:
            await self.recorder.record(
                daemonset, "Warning", "FailedCreate", f"Error creating: {error.message}"
            )
            return error.message
        await self.recorder.record(daemonset, "Normal", "SuccessfulCreate", f"Created pod: {name_of(pod)}")
        return ""


def _node_matters(event: Event) -> bool:
    """Whether a node has come, gone, or changed in labels, taints or schedulability."""
    if event.previous is None or event.change == "DELETED":
        return True
    before, after = event.previous, event.obj
    return before.get("spec") != after.get("spec") or labels_of(before) != labels_of(after)


def daemon_pod(daemonset: Object, node: str, digest: str) -> Object:
    """The pod for ``node``: bound to it by affinity, so that the scheduler places it, and tolerant."""
    pod = pod_from_template(daemonset["spec"]["template"], DAEMONSETS, daemonset)
    meta(pod)["labels"] = {**labels_of(pod), HASH_LABEL: digest}
    spec = pod["spec"]
    spec.setdefault("tolerations", [])
    for key, effect in _TOLERATIONS:
        toleration = {"key": key, "operator": "Exists", "effect": effect}
        if toleration not in spec["tolerations"]:
            spec["tolerations"].append(toleration)
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": [{**term, "matchFields": fields} for term in terms]
    }
    return pod


def target_node(pod: Object) -> str:
    """The node that a pod is on or was made for."""
    if dig(pod, "spec", "nodeName"):
        return str(pod["spec"]["nodeName"])
    required = dig(pod, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    for term in dig(required, "nodeSelectorTerms") or []:
        for expression in term.get("matchFields") or []:
            if expression.get("key") == "metadata.name" and expression.get("values"):
                return str(expression["values"][0])
    return ""


def eligible(daemonset: Object, node: Object) -> bool:
    """Whether the node's labels, taints and name allow a pod; room on it is the scheduler's affair."""
    pod = daemon_pod(daemonset, name_of(node), "")
    pod["spec"] = clone(pod["spec"])
    for container in [*(pod["spec"].get("initContainers") or []), *(pod["spec"].get("containers") or [])]:
        container.pop("resources", None)
    return node_fit.check(pod, node, (), frozenset()) is None


def plan(
    daemonset: Object, nodes: Sequence[Object], pods: Sequence[Object], digest: str, now: float
) -> _Plan:
    """What to create and delete next."""
    steps = _Plan(eligible=[name_of(node) for node in nodes if eligible(daemonset, node)])
    by_node: dict[str, list[Object]] = {}
    for pod in pods:
        by_node.setdefault(target_node(pod), []).append(pod)
    for node, found in by_node.items():
        if node not in steps.eligible:
            steps.delete += [pod for pod in found if not is_deleting(pod)]
    unavailable = 0
    outdated: list[Object] = []
    minimum = float(daemonset["spec"].get("minReadySeconds") or 0)
    for node in steps.eligible:
        found = by_node.get(node, [])
        active = [pod for pod in found if is_active(pod)]
        ended = [pod for pod in found if not is_active(pod) and not is_deleting(pod)]
        steps.delete += active[1:]
        if not active:
            unavailable += 1
            pause = pause_after_failures(found, now)
            if pause is not None:
                steps.again_s = pause if steps.again_s is None else min(steps.again_s, pause)
                continue
            steps.delete += ended
            if not any(is_deleting(pod) for pod in found):
                steps.create.append(node)
            continue
        if not is_available(active[0], minimum, now):
            unavailable += 1
            if labels_of(active[0]).get(HASH_LABEL) != digest:
                outdated.insert(0, active[0])
        elif labels_of(active[0]).get(HASH_LABEL) != digest:
            outdated.append(active[0])
    if dig(daemonset, "spec", "updateStrategy", "type") == "RollingUpdate":
        steps.delete += _to_replace(daemonset, outdated, unavailable, len(steps.eligible), minimum, now)
    return steps


def _to_replace(
    daemonset: Object, outdated: Sequence[Object], unavailable: int, total: int, minimum: float, now: float
) -> list[Object]:
    """Outdated pods that may go now: those that serve nobody, and as many others as may be missing."""
    rolling = dig(daemonset, "spec", "updateStrategy", "rollingUpdate") or {}
    allowed = max(share_of(rolling.get("maxUnavailable", 1), total, round_up=True), 1)
    useless = [pod for pod in outdated if not is_available(pod, minimum, now)]
    serving = [pod for pod in outdated if is_available(pod, minimum, now)]
    return [*useless, *serving[: max(allowed - unavailable, 0)]]


def status_of(
    daemonset: Object, nodes: Sequence[str], pods: Sequence[Object], digest: str, now: float
) -> Object:
    """``status`` of a DaemonSet; ``nodes`` are those that are to have a pod."""
    minimum = float(daemonset["spec"].get("minReadySeconds") or 0)
    active = [pod for pod in pods if is_active(pod)]
    placed = {target_node(pod): pod for pod in active if target_node(pod) in nodes}
    available = sum(is_available(pod, minimum, now) for pod in placed.values())
    status: Object = {
        "currentNumberScheduled": len(placed),
        "desiredNumberScheduled": len(nodes),
        "numberMisscheduled": sum(target_node(pod) not in nodes for pod in active),
        "numberReady": sum(ready_since(pod) is not None for pod in placed.values()),
        "observedGeneration": meta(daemonset).get("generation", 1),
    }
    counts = {
        "updatedNumberScheduled": sum(labels_of(pod).get(HASH_LABEL) == digest for pod in placed.values()),
        "numberAvailable": available,
        "numberUnavailable": len(nodes) - available,
    }
    status.update({name: count for name, count in counts.items() if count})
    return status
