"""Rules for ReplicaSets, Deployments, DaemonSets and Jobs: selectors, numbers, fields that never change."""

from __future__ import annotations

from typing import Any

from hami.local.api.errors import bad_request, invalid
from hami.local.api.objects import Object, clone, dig, meta, name_of
from hami.local.api.resources import DAEMONSETS, DEPLOYMENTS, JOBS, REPLICASETS, Resource
from hami.local.api.selectors import matches_label_selector

SELECTOR_KINDS = frozenset(resource.key for resource in (REPLICASETS, DEPLOYMENTS, DAEMONSETS, JOBS))
_NUMBERS = (
    "replicas", "minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds", "parallelism",
    "completions", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished",
)  # fmt: skip
_MAX_REPLICAS = 10_000


def validate(resource: Resource, obj: Object, causes: list[tuple[str, str]]) -> None:
    """Append what is wrong with the spec outside of its pod template's spec."""
    spec = obj["spec"]
    if not isinstance(dig(spec, "template", "metadata"), dict):
        raise bad_request("spec.template.metadata is not an object")
    selector, labels = spec.get("selector"), dig(spec, "template", "metadata", "labels") or {}
    if not isinstance(selector, dict) or not (
        selector.get("matchLabels") or selector.get("matchExpressions")
    ):
        causes.append(("spec.selector", "Required value"))
    elif not _is_selector(selector):
        raise bad_request("spec.selector is malformed")
    elif not matches_label_selector(selector, labels):
        causes.append(
            ("spec.template.metadata.labels",
             f"Invalid value: {labels}: `selector` does not match template `labels`")
        )  # fmt: skip
    for field in _NUMBERS:
        value = spec.get(field)
        if value is not None and (not _is_count(value) or value > 2**31 - 1):
            causes.append((f"spec.{field}", f"Invalid value: {value!r}: a whole number from 0 is required"))
    for field in ("replicas", "parallelism", "completions"):
        if _is_count(spec.get(field)) and spec[field] > _MAX_REPLICAS:
            causes.append((f"spec.{field}", f"Invalid value: {spec[field]}: at most {_MAX_REPLICAS} here"))
    for field, types in (
        ("strategy", ("RollingUpdate", "Recreate")), ("updateStrategy", ("RollingUpdate", "OnDelete")),
    ):  # fmt: skip
        if field in spec:
            _validate_strategy(f"spec.{field}", spec[field], types, causes)
    policy = dig(spec, "template", "spec", "restartPolicy")
    if resource is JOBS:
        if policy not in ("OnFailure", "Never"):
            causes.append(
                ("spec.template.spec.restartPolicy", 'Required value: valid values: "OnFailure", "Never"')
            )
        if spec.get("completionMode") not in ("NonIndexed", "Indexed"):
            causes.append(("spec.completionMode", f"Unsupported value: {spec.get('completionMode')!r}"))
        elif spec["completionMode"] == "Indexed" and spec.get("completions") is None:
            causes.append(("spec.completions", "Required value: when completion mode is Indexed"))
    elif policy != "Always":
        causes.append(
            ("spec.template.spec.restartPolicy", f'Unsupported value: {policy!r}: supported values: "Always"')
        )


def _validate_strategy(
    path: str, strategy: Any, types: tuple[str, ...], causes: list[tuple[str, str]]
) -> None:
    rolling = strategy.get("rollingUpdate")
    if strategy.get("type") not in types:
        causes.append((f"{path}.type", f"Unsupported value: {strategy.get('type')!r}: {' or '.join(types)}"))
    elif strategy["type"] != "RollingUpdate" and rolling is not None:
        causes.append((f"{path}.rollingUpdate", "Forbidden: may not be specified for this type"))
    if rolling is not None and not isinstance(rolling, dict):
        raise bad_request(f"{path}.rollingUpdate is not an object")
    for field in ("maxSurge", "maxUnavailable"):
        value = (rolling or {}).get(field)
        share = isinstance(value, str) and value[-1:] == "%" and value[:-1].isascii() and value[:-1].isdigit()
        if value is not None and not _is_count(value) and not share:
            causes.append((f"{path}.rollingUpdate.{field}", f"Invalid value: {value!r}: a number or a share"))


def check_change(resource: Resource, old: Object, new: Object) -> None:
    """Raises 422 where an update changes what is fixed; a Job's generated selector is kept."""
    before, after = old["spec"], new["spec"]
    fixed: tuple[str, ...] = ("selector",)
    if resource is JOBS:
        fixed = ("selector", "template", "completionMode")
        if after.get("selector") is None:
            after["selector"] = clone(before["selector"])
            labels = dig(before, "template", "metadata", "labels") or {}
            template = meta(after["template"])
            template["labels"] = {**labels, **(template.get("labels") or {})}
    for field in fixed:
        if after.get(field) != before.get(field):
            raise invalid(
                resource.kind, resource.group, name_of(new),
                [(f"spec.{field}", f"Invalid value: {after.get(field)!r}: field is immutable")],
            )  # fmt: skip


def _is_selector(selector: Object) -> bool:
    """Whether the parts of a label selector have their types."""
    labels, expressions = selector.get("matchLabels") or {}, selector.get("matchExpressions") or []
    return (
        isinstance(labels, dict)
        and all(isinstance(value, str) for value in labels.values())
        and isinstance(expressions, list)
        and all(
            isinstance(item, dict)
            and isinstance(item.get("key"), str)
            and item.get("operator") in ("In", "NotIn", "Exists", "DoesNotExist")
            and isinstance(item.get("values") or [], list)
            and all(isinstance(value, str) for value in item.get("values") or [])
            for item in expressions
        )
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
