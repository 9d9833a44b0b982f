"""The ``scale`` subresource: autoscaling/v1 Scale of Deployments and ReplicaSets."""

from __future__ import annotations

from typing import Any

from hami.local.api.errors import bad_request, invalid
from hami.local.api.objects import Object, clone, dig, meta, name_of

_FIELDS = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")


def scale_of(obj: Object) -> Object:
    """The Scale that shows ``obj``."""
    selector = dig(obj, "spec", "selector") or {}
    terms = [f"{key}={value}" for key, value in sorted((selector.get("matchLabels") or {}).items())]
    terms += [_term(expression) for expression in selector.get("matchExpressions") or []]
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {field: meta(obj)[field] for field in _FIELDS if field in meta(obj)},
        "spec": {"replicas": dig(obj, "spec", "replicas") or 0},
        "status": {"replicas": dig(obj, "status", "replicas") or 0, "selector": ",".join(terms)},
    }


def _term(expression: Object) -> str:
    key, values = expression.get("key"), ",".join(sorted(expression.get("values") or []))
    return {
        "In": f"{key} in ({values})", "NotIn": f"{key} notin ({values})", "Exists": f"{key}",
        "DoesNotExist": f"!{key}",
    }.get(str(expression.get("operator")), "")  # fmt: skip


def scaled(obj: Object, scale: Any) -> Object:
    """A copy of ``obj`` with the replicas (and resourceVersion) of ``scale``. Raises 400 and 422."""
    if not isinstance(scale, dict) or scale.get("kind", "Scale") != "Scale":
        raise bad_request("the body of the request is not a Scale")
    replicas = dig(scale, "spec", "replicas")
    replicas = 0 if replicas is None else replicas
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise invalid(
            "Scale", "autoscaling", name_of(obj),
            [("spec.replicas", f"Invalid value: {replicas!r}: must be greater than or equal to 0")],
        )  # fmt: skip
    copy: Object = clone(obj)
    copy["spec"]["replicas"] = replicas
    for field in ("uid", "resourceVersion"):
        if dig(scale, "metadata", field):
            meta(copy)[field] = scale["metadata"][field]
    return copy
