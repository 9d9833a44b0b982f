"""What of the cluster's objects goes into a snapshot: what placement depends on, and no secrets.

Environment variables, volumes, images, labels of pods and foreign annotations are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hami.protocol import keys
from hami.protocol.members import map_of, objects_of
from hami.vendors.selection import steering_keys
from hami.vendors.types import VendorProfile

Object = dict[str, Any]

_META = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp")
_CONTAINER = ("name", "resources", "restartPolicy")
_POD_SPEC = (
    "nodeName",
    "schedulerName",
    "priority",
    "nodeSelector",
    "tolerations",
    "overhead",
    "schedulingGroup",
)
_CONDITION = ("type", "status", "reason", "message")


class Redaction:
    """Reduces objects for clusters with these vendors."""

    def __init__(self, profiles: Iterable[VendorProfile]) -> None:
        self._keys: set[str] = {keys.DEVICE_CORDON}
        self._domains = {"hami.io"}
        for profile in profiles:
            rules = profile.rules
            named = (rules.to_allocate, rules.allocated, rules.handshake, rules.cleanup, rules.register.key)
            self._keys.update(filter(None, named))
            self._keys.update(rules.register.watched, profile.placed_annotations, steering_keys(rules))
            self._keys.update(profile.read_annotations)
            self._domains.update(name.partition("/")[0] for name in profile.names.all() if "/" in name)
        self._domains.update(key.partition("/")[0] for key in self._keys if "/" in key)

    def pod(self, pod: Mapping[str, Any]) -> Object:
        """A pod without what does not matter."""
        spec, status = map_of(pod, "spec"), map_of(pod, "status")
        kept: Object = _some(spec, _POD_SPEC)
        affinity = map_of(map_of(spec, "affinity"), "nodeAffinity")
        if affinity:
            kept["affinity"] = {"nodeAffinity": affinity}
        for member in ("initContainers", "containers"):
            if spec.get(member):
                kept[member] = [_container(one) for one in objects_of(spec, member)]
        state: Object = _some(status, ("phase", "reason"))
        for member in ("initContainerStatuses", "containerStatuses"):
            if status.get(member):
                state[member] = [_container_status(one) for one in objects_of(status, member)]
        if status.get("conditions"):
            state["conditions"] = [_some(one, _CONDITION) for one in objects_of(status, "conditions")]
        return {"metadata": self._metadata(pod), "spec": kept, "status": state}

    def node(self, node: Mapping[str, Any]) -> Object:
        """A node without what does not matter."""
        metadata = self._metadata(node)
        labels = map_of(map_of(node, "metadata"), "labels")
        if labels:
            metadata["labels"] = dict(labels)
        status = _some(map_of(node, "status"), ("capacity", "allocatable"))
        conditions = objects_of(map_of(node, "status"), "conditions")
        status["conditions"] = [_some(one, ("type", "status")) for one in conditions]
        return {
            "metadata": metadata,
            "spec": _some(map_of(node, "spec"), ("unschedulable", "taints")),
            "status": status,
        }

    def quota(self, quota: Mapping[str, Any]) -> Object:
        """A quota's limits."""
        return {"metadata": self._metadata(quota), "spec": _some(map_of(quota, "spec"), ("hard",))}

    def _metadata(self, obj: Mapping[str, Any]) -> Object:
        metadata = map_of(obj, "metadata")
        kept = _some(metadata, _META)
        annotations = {
            key: text for key, text in map_of(metadata, "annotations").items() if self._is_ours(str(key))
        }
        if annotations:
            kept["annotations"] = annotations
        return kept

    def _is_ours(self, key: str) -> bool:
        domain, slash, _ = key.partition("/")
        return key in self._keys or (bool(slash) and domain in self._domains)


def _container(container: Mapping[str, Any]) -> Object:
    kept = _some(container, _CONTAINER)
    if map_of(container, "securityContext").get("privileged") is True:
        kept["securityContext"] = {"privileged": True}
    return kept


def _container_status(status: Mapping[str, Any]) -> Object:
    ended = map_of(map_of(status, "state"), "terminated")
    kept = _some(status, ("name",))
    if ended:
        kept["state"] = {"terminated": _some(ended, ("exitCode", "reason", "finishedAt"))}
    return kept


def _some(obj: Mapping[str, Any], members: Iterable[str]) -> Object:
    return {member: obj[member] for member in members if obj.get(member) is not None}
