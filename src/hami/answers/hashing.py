"""Snapshots without the names of nodes, namespaces, pods and quotas.

A name becomes a digest keyed with a random salt that is not kept; equal names stay equal. Ids of cards that
contain the name of their node, because the scheduler makes them of it, follow the new name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from hami.answers.replay import profiles_of
from hami.answers.snapshot import Snapshot
from hami.protocol import keys, views
from hami.protocol.errors import HamiError
from hami.protocol.members import map_of, objects_of
from hami.scheduler.core.nodes import facts_of
from hami.vendors.discovery import node_devices
from hami.vendors.types import VendorProfile

Object = dict[str, Any]

_HOSTNAME: Final = "kubernetes.io/hostname"
_LOCKS: Final = (keys.NODE_LOCK, keys.CAMBRICON_LOCK)  # one says which pod holds it; no answer needs them
_CONDITION: Final = ("type", "status", "reason")
_PREDICATE_NODE: Final = "/predicate-node"
_TOKEN: Final = re.compile(r"[^\s,:;\"\[\]{}]+")


def hash_names(snapshot: Snapshot, salt: bytes) -> Snapshot:
    """The snapshot with the names of nodes, namespaces, pods and quotas replaced; container names stay.

    Texts in which names may stand (conditions, notes) are dropped, and so are the labels of nodes that no
    selector of a pod, of the scheduler or of a vendor asks for.
    """
    hashing = _Hashing(snapshot, salt)
    return replace(
        snapshot,
        nodes=[hashing.node(node) for node in snapshot.nodes],
        pods=[hashing.pod(pod) for pod in snapshot.pods],
        quotas=[{**quota, "metadata": hashing.metadata(quota, "quota")} for quota in snapshot.quotas],
        containers_use=[
            replace(
                use,
                namespace=hashing.digest("ns", use.namespace),
                pod=hashing.digest("pod", use.pod),
                device=hashing.ids.get(use.device, use.device),
            )
            for use in snapshot.containers_use
        ],
        cards_use=[
            replace(use, device=hashing.ids.get(use.device, use.device)) for use in snapshot.cards_use
        ],
        notes=[],
        names_hashed=True,
    )


def digest(kind: str, name: str, salt: bytes) -> str:
    """The new name of a thing of that kind (`node`, `ns`, `pod`, `quota`)."""
    return f"{kind}-{hashlib.blake2b(name.encode(), key=salt[:64], digest_size=6).hexdigest()}"


class _Hashing:
    """The new names of one snapshot."""

    def __init__(self, snapshot: Snapshot, salt: bytes) -> None:
        settings = snapshot.settings
        profiles = profiles_of(
            snapshot.device_config, ascend=settings.enable_ascend, iluvatar=settings.enable_iluvatar
        )
        self._key = salt
        self._names = {name: self.digest("node", name) for node in snapshot.nodes if (name := _name(node))}
        self._labels = {*settings.node_selector, _HOSTNAME}
        for pod in snapshot.pods:
            self._labels |= _labels_asked(pod)
        self._prefixes = tuple(filter(None, (profile.rules.register.labels for profile in profiles)))
        own = (key for profile in profiles for key in (profile.rules.allocated, profile.rules.to_allocate))
        self._allocations = frozenset(filter(None, own))
        self.ids: dict[str, str] = {}  # of registered cards
        for node in snapshot.nodes:
            self.ids.update(self._ids(node, profiles))

    def digest(self, kind: str, name: str) -> str:
        """The new name of a thing."""
        return digest(kind, name, self._key)

    def node(self, node: Object) -> Object:
        """A node under its new name, without node locks."""
        metadata = dict(node["metadata"])
        metadata["name"] = self._names.get(_name(node), "")
        labels = {key: text for key, text in map_of(metadata, "labels").items() if self._is_asked(key)}
        metadata["labels"] = {key: self._names.get(text, text) for key, text in labels.items()}
        annotations = {
            key: self._with_ids(text, "")
            for key, text in map_of(metadata, "annotations").items()
            if key not in _LOCKS
        }
        if annotations:
            metadata["annotations"] = annotations
        return {**node, "metadata": metadata}

    def pod(self, pod: Object) -> Object:
        """A pod under its new name."""
        metadata = self.metadata(pod, "pod")
        annotations = dict(map_of(metadata, "annotations"))
        assigned = str(annotations.get(keys.ASSIGNED_NODE, ""))
        for key, text in annotations.items():
            if key == keys.ASSIGNED_NODE or key.endswith(_PREDICATE_NODE):
                annotations[key] = self._node_name(str(text))
            else:
                annotations[key] = self._with_ids(text, assigned if key in self._allocations else "")
        if annotations:
            metadata["annotations"] = annotations
        spec = dict(pod["spec"])
        if spec.get("nodeName"):
            spec["nodeName"] = self._node_name(str(spec["nodeName"]))
        for member in ("nodeSelector", "affinity"):
            if spec.get(member):
                spec[member] = _replaced(spec[member], self._names)
        status = dict(pod["status"])
        if status.get("conditions"):
            status["conditions"] = [
                {part: one[part] for part in _CONDITION if part in one} for one in status["conditions"]
            ]
        return {**pod, "metadata": metadata, "spec": spec, "status": status}

    def metadata(self, obj: Object, kind: str) -> Object:
        """Metadata of a namespaced object under its new name."""
        metadata = dict(obj["metadata"])
        metadata["name"] = self.digest(kind, str(metadata.get("name", "")))
        metadata["namespace"] = self.digest("ns", str(metadata.get("namespace", "")))
        return metadata

    def _node_name(self, name: str) -> str:
        return self._names.get(name) or self.digest("node", name)

    def _is_asked(self, label: str) -> bool:
        return label in self._labels or (bool(self._prefixes) and label.startswith(self._prefixes))

    def _ids(self, node: Object, profiles: Sequence[VendorProfile]) -> dict[str, str]:
        """The ids of a node's cards before and after: where they differ, they were made of its name."""
        renamed = {**node, "metadata": {**node["metadata"], "name": self._names.get(_name(node), "")}}
        found: dict[str, str] = {}
        for profile in profiles:
            before, after = (_card_ids(one, profile) for one in (node, renamed))
            found.update(zip(before, after, strict=True))
        return found

    def _with_ids(self, text: Any, node: str) -> Any:
        """A text with new ids of cards; also of such as nobody registers, where `node` begins them."""
        if not isinstance(text, str):
            return text

        def renamed(found: re.Match[str]) -> str:
            token = found[0]
            new = self.ids.get(token)
            if new is None and node and token.startswith(f"{node}-"):
                return self._node_name(node) + token[len(node) :]
            return new or token

        return _TOKEN.sub(renamed, text)


def _card_ids(node: Object, profile: VendorProfile) -> list[str]:
    try:
        return [
            card.id
            for card in node_devices(profile, facts_of(msgspec.convert(node, views.Node), _names_of(profile)))
        ]
    except (HamiError, msgspec.ValidationError):
        return []


def _names_of(profile: VendorProfile) -> frozenset[str]:
    return frozenset(profile.names.all())


def _replaced(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, list):
        return [_replaced(one, names) for one in value]
    if isinstance(value, dict):
        return {key: _replaced(one, names) for key, one in value.items()}
    return value


def _labels_asked(pod: Object) -> set[str]:
    asked = set(map_of(pod["spec"], "nodeSelector"))
    required = map_of(map_of(pod["spec"], "affinity"), "nodeAffinity").get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    for term in objects_of(required if isinstance(required, dict) else {}, "nodeSelectorTerms"):
        asked.update(str(one.get("key")) for one in objects_of(term, "matchExpressions"))
    return asked


def _name(obj: Object) -> str:
    return str(obj["metadata"].get("name", ""))
