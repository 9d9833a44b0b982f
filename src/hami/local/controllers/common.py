"""What the controllers share: ownership, readiness, pods from templates, shares of a whole. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from hami.local.api.objects import Object, clone, dig, labels_of, meta, name_of, parse_time
from hami.local.api.resources import Resource
from hami.protocol.members import objects_of

FINISHED = ("Succeeded", "Failed")
_SAFE = "bcdfghjklmnpqrstvwxz2456789"


def owner_reference(resource: Resource, owner: Object) -> Object:
    """The reference by which ``owner`` controls an object."""
    return {
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "name": name_of(owner),
        "uid": meta(owner)["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def owners_of(obj: Object) -> list[Object]:
    return objects_of(meta(obj), "ownerReferences")


def with_owner(obj: Object, reference: Object) -> Object:
    """A copy of ``obj`` with one more owner."""
    copy: Object = clone(obj)
    others = [owner for owner in owners_of(copy) if owner.get("uid") != reference["uid"]]
    meta(copy)["ownerReferences"] = [*others, reference]
    return copy


def without_owner(obj: Object, uid: str) -> Object:
    """A copy of ``obj`` without the owner ``uid``."""
    copy: Object = clone(obj)
    meta(copy)["ownerReferences"] = [owner for owner in owners_of(copy) if owner.get("uid") != uid]
    return copy


def without_finalizer(obj: Object, finalizer: str) -> Object:
    """A copy of ``obj`` without one of its finalizers."""
    copy: Object = clone(obj)
    meta(copy)["finalizers"] = [item for item in meta(copy).get("finalizers") or [] if item != finalizer]
    return copy


def controller_of(obj: Object) -> Object | None:
    """The owner reference with ``controller: true``."""
    return next((item for item in owners_of(obj) if item.get("controller")), None)


def is_controlled_by(obj: Object, owner: Object) -> bool:
    reference = controller_of(obj)
    return reference is not None and reference.get("uid") == meta(owner)["uid"]


def is_deleting(obj: Object) -> bool:
    return bool(meta(obj).get("deletionTimestamp"))


def is_active(pod: Object) -> bool:
    """Neither finished nor being deleted."""
    return dig(pod, "status", "phase") not in FINISHED and not is_deleting(pod)


def ready_since(pod: Object) -> float | None:
    """Since when the pod is Ready, in seconds since the epoch; None if it is not."""
    for condition in dig(pod, "status", "conditions") or []:
        if condition.get("type") == "Ready" and condition.get("status") == "True":
            return parse_time(str(condition.get("lastTransitionTime"))) or 0.0
    return None


def is_available(pod: Object, min_ready_s: float, now: float) -> bool:
    """Ready for at least ``min_ready_s``."""
    since = ready_since(pod)
    return since is not None and since + min_ready_s <= now


def pod_from_template(template: Object, resource: Resource, owner: Object) -> Object:
    """A new pod that ``owner`` controls, with a name made up by the server."""
    metadata = dict(template.get("metadata") or {})
    return {
        "metadata": {
            "generateName": f"{name_of(owner)}-",
            "labels": dict(metadata.get("labels") or {}),
            "annotations": dict(metadata.get("annotations") or {}),
            "finalizers": list(metadata.get("finalizers") or []),
            "ownerReferences": [owner_reference(resource, owner)],
        },
        "spec": clone(template["spec"]),
    }


def template_hash(template: Object) -> str:
    """Ten characters that are the same for equal templates."""
    digest = hashlib.sha256(msgspec.json.encode(template, order="sorted")).digest()
    return "".join(_SAFE[byte % len(_SAFE)] for byte in digest[:10])


def without_label(template: Object, label: str) -> Object:
    """A copy of a pod template without one of its labels."""
    copy: Object = clone(template)
    meta(copy)["labels"] = {key: value for key, value in labels_of(copy).items() if key != label}
    return copy


def share_of(value: Any, total: int, *, round_up: bool) -> int:
    """An IntOrString (``3`` or ``"25%"``) of ``total``; 0 for anything else."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int):
        return max(value, 0)
    text = str(value or "")
    if not text.endswith("%") or not text[:-1].isdigit():
        return 0
    product = int(text[:-1]) * total
    return -(-product // 100) if round_up else product // 100
