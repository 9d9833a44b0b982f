"""How lists and maps of the served kinds merge: the one table behind strategic merge patch and apply."""

from __future__ import annotations

from typing import Any

# Merge keys by field name; ``kind:field`` outranks it where two kinds disagree. Strategic merge patch uses
# the first key of each.
_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",), "initContainers": ("name",), "ephemeralContainers": ("name",),
    "volumes": ("name",), "env": ("name",), "volumeMounts": ("mountPath",), "volumeDevices": ("devicePath",),
    "ports": ("containerPort", "protocol"), "imagePullSecrets": ("name",), "hostAliases": ("ip",),
    "conditions": ("type",), "ownerReferences": ("uid",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"), "podIPs": ("ip",), "hostIPs": ("ip",),
    "addresses": ("type",), "taints": ("key",), "schedulingGates": ("name",), "resourceClaims": ("name",),
    "webhooks": ("name",), "secrets": ("name",), "Service:ports": ("port", "protocol"),
}  # fmt: skip
_DEFAULTS = {"protocol": "TCP"}
_SETS = frozenset({"finalizers", "podCIDRs"})
# Merged item by item by strategic merge patch, replaced as a whole by apply.
_ATOMIC_LISTS = frozenset({"taints"})
_ATOMIC_MAPS = frozenset(
    {"selector", "nodeSelector", "labelSelector", "namespaceSelector", "objectSelector", "fieldRef",
     "resourceFieldRef", "configMapKeyRef", "secretKeyRef", "roleRef"}
)  # fmt: skip


def merge_key(kind: str, field: str) -> str | None:
    """The key of strategic merge patch; None for a list that is replaced."""
    keys = _KEYS.get(f"{kind}:{field}") or _KEYS.get(field)
    return keys[0] if keys else None


def is_set(field: str) -> bool:
    """Whether the list holds plain values, each at most once."""
    return field in _SETS


def is_atomic_map(field: str) -> bool:
    """Whether apply takes the map as one value."""
    return field in _ATOMIC_MAPS


def list_keys(kind: str, field: str, items: list[Any]) -> tuple[str, ...]:
    """The keys by which apply tells the items apart; empty for a list that is one value."""
    if field in _ATOMIC_LISTS or not items or not all(isinstance(item, dict) for item in items):
        return ()
    keys = _KEYS.get(f"{kind}:{field}") or _KEYS.get(field) or ()
    return keys if all(key_of(keys, item) is not None for item in items) else ()


def key_of(keys: tuple[str, ...], item: Any) -> dict[str, Any] | None:
    """The values of ``keys`` in ``item``, defaults filled in; None where one is missing."""
    found: dict[str, Any] = {}
    for key in keys:
        value = item.get(key, _DEFAULTS.get(key)) if isinstance(item, dict) else None
        if value is None or isinstance(value, dict | list):
            return None
        found[key] = value
    return found
