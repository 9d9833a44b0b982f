"""Why a node cannot take a pod: the checks of kube-scheduler's default filters, with its words. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from hami.local.api.objects import Object, dig, labels_of, name_of
from hami.local.scheduling.amounts import milli, pod_amounts

_COMPARISONS = ("Gt", "Lt")


@dataclass(frozen=True, slots=True)
class Unfit:
    """Reasons against one node. ``unresolvable``: evicting pods would not help."""

    reasons: tuple[str, ...]
    unresolvable: bool


def check(pod: Object, node: Object, placed: Iterable[Object], ignored: Collection[str]) -> Unfit | None:
    """None if ``node`` can take ``pod`` beside the pods ``placed`` there.

    Resources named in ``ignored`` are left to the extender.
    """
    wanted = dig(pod, "spec", "nodeName")
    if wanted and wanted != name_of(node):
        return Unfit(("node(s) didn't match the requested node name",), True)
    if dig(node, "spec", "unschedulable") and not _tolerates(
        pod, {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    ):
        return Unfit(("node(s) were unschedulable",), True)
    for taint in dig(node, "spec", "taints") or []:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not _tolerates(pod, taint):
            shown = f"{{{taint.get('key')}: {taint.get('value') or ''}}}"
            return Unfit((f"node(s) had untolerated taint {shown}",), True)
    if not _affine(pod, node):
        return Unfit(("node(s) didn't match Pod's node affinity/selector",), True)
    return _resources(pod, node, list(placed), ignored)


def message(total: int, reasons: Mapping[str, Iterable[str]]) -> str:
    """kube-scheduler's sentence: ``0/2 nodes are available: 1 Insufficient cpu, 1 CardNotHealth.``"""
    counts = Counter(reason for found in reasons.values() for reason in found)
    listed = ", ".join(sorted(f"{count} {reason}" for reason, count in counts.items()))
    return f"0/{total} nodes are available: {listed}." if listed else f"0/{total} nodes are available."


def _resources(pod: Object, node: Object, placed: list[Object], ignored: Collection[str]) -> Unfit | None:
    allocatable = {name: milli(amount) for name, amount in (dig(node, "status", "allocatable") or {}).items()}
    reasons: list[str] = []
    beyond = False
    if len(placed) * 1000 + 1000 > allocatable.get("pods", 110_000):
        reasons.append("Too many pods")
    used: Counter[str] = Counter()
    for other in placed:
        used.update(pod_amounts(other))
    for name, amount in pod_amounts(pod).items():
        if name in ignored or amount == 0:
            continue
        if used[name] + amount > allocatable.get(name, 0):
            reasons.append(f"Insufficient {name}")
            beyond = beyond or amount > allocatable.get(name, 0)
    return Unfit(tuple(reasons), beyond) if reasons else None


def _tolerates(pod: Object, taint: Mapping[str, str]) -> bool:
    for toleration in dig(pod, "spec", "tolerations") or []:
        if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
            continue
        exists = toleration.get("operator") == "Exists"
        if not toleration.get("key"):
            if exists:
                return True
            continue
        same_value = (toleration.get("value") or "") == (taint.get("value") or "")
        if toleration["key"] == taint.get("key") and (exists or same_value):
            return True
    return False


def _affine(pod: Object, node: Object) -> bool:
    labels = labels_of(node)
    for key, value in (dig(pod, "spec", "nodeSelector") or {}).items():
        if labels.get(key) != value:
            return False
    required = dig(pod, "spec", "affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution")
    if not required:
        return True
    return any(
        (term.get("matchExpressions") or term.get("matchFields"))
        and all(_expression(item, labels) for item in term.get("matchExpressions") or [])
        and all(_expression(item, {"metadata.name": name_of(node)}) for item in term.get("matchFields") or [])
        for term in required.get("nodeSelectorTerms") or []
    )


def _expression(expression: Object, labels: Mapping[str, str]) -> bool:
    key, operator = str(expression.get("key")), expression.get("operator")
    values = expression.get("values") or []
    if operator == "Exists":
        return key in labels
    if operator == "DoesNotExist":
        return key not in labels
    if operator == "In":
        return labels.get(key) in values
    if operator == "NotIn":
        return labels.get(key) not in values
    if operator in _COMPARISONS and key in labels and len(values) == 1:
        try:
            left, right = int(labels[key]), int(values[0])
        except ValueError:
            return False
        return left > right if operator == "Gt" else left < right
    return False
