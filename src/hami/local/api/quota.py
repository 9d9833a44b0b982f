"""ResourceQuota as the API server enforces it: pods and what they request, at creation."""

from __future__ import annotations

from collections.abc import Iterable

from hami.local.api.errors import forbidden
from hami.local.api.objects import Object, dig, name_of, namespace_of
from hami.local.api.resources import PODS, RESOURCEQUOTAS
from hami.local.api.store import Store
from hami.local.scheduling.amounts import milli, plain, sum_amounts

_PLAIN = ("cpu", "memory", "ephemeral-storage")


def _used(names: Iterable[str], pods: list[Object]) -> dict[str, int]:
    """Usage in thousandths of each quota entry that counts pods; other entries are left out."""
    requests, limits = sum_amounts(pods, "requests"), sum_amounts(pods, "limits")
    used: dict[str, int] = {}
    for name in names:
        if name in ("pods", "count/pods"):
            used[name] = len(pods) * 1000
        elif name.startswith("requests."):
            used[name] = requests.get(name.removeprefix("requests."), 0)
        elif name.startswith("limits.") and name.removeprefix("limits.") in _PLAIN:
            used[name] = limits.get(name.removeprefix("limits."), 0)
        elif name in _PLAIN:
            used[name] = requests.get(name, 0)
    return used


def _live(pods: Iterable[Object]) -> list[Object]:
    return [pod for pod in pods if dig(pod, "status", "phase") not in ("Succeeded", "Failed")]


def status(quota: Object, pods: list[Object]) -> Object:
    """``status`` of a quota for the pods of its namespace."""
    hard = dig(quota, "spec", "hard") or {}
    used = _used(hard, _live(pods))
    return {"hard": dict(hard), "used": {name: plain(amount) for name, amount in used.items()}}


def check(store: Store, pod: Object) -> None:
    """Raises 403 ``exceeded quota`` if the new pod would go over a quota of its namespace."""
    namespace = namespace_of(pod)
    for quota in store.list(RESOURCEQUOTAS, namespace):
        hard = dig(quota, "spec", "hard") or {}
        used = _used(hard, _live(store.list(PODS, namespace)))
        asked = _used(hard, [pod])
        over = sorted(
            name for name, amount in asked.items() if amount > 0 and used[name] + amount > milli(hard[name])
        )
        if over:
            raise forbidden(
                "", "pods", name_of(pod),
                f"exceeded quota: {name_of(quota)}, requested: "
                + ",".join(f"{name}={plain(asked[name])}" for name in over)
                + ", used: " + ",".join(f"{name}={plain(used[name])}" for name in over)
                + ", limited: " + ",".join(f"{name}={hard[name]}" for name in over),
            )  # fmt: skip
