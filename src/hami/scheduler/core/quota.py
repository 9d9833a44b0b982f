"""Namespace quota on the vendors' memory and cores: limits of ResourceQuota objects and the use by counted
pods.

Limits are in the user's unit; use is in recorded units (memory: MiB), so a memory limit is multiplied by
the vendor's factor before it is compared (scheduler.md §9). The count resource is left to Kubernetes.
"""

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction

from hami.protocol import views
from hami.protocol.errors import QuantityError
from hami.protocol.quantity import as_int64
from hami.scheduler.core.answers import QuotaUsage
from hami.vendors.types import UNLIMITED, QuotaView, VendorProfile

_PREFIX = "limits."
_MIB = 1 << 20
Limit = int | Fraction
"""In the user's unit; a fraction of it where the limit was written in bytes."""


class QuotaBook:
    """Limits per quota object and use per namespace; both by resource name."""

    def __init__(self, profiles: Iterable[VendorProfile]) -> None:
        profiles = tuple(profiles)
        self._names = {
            name for profile in profiles for name in (profile.names.memory, profile.names.cores) if name
        }
        self._in_bytes = {
            profile.names.memory: max(1, profile.names.memory_factor)
            for profile in profiles
            if profile.names.memory and profile.names.bytes_with_suffix
        }
        self._limits: dict[str, dict[str, dict[str, Limit]]] = {}  # namespace -> object -> resource -> limit
        self._used: dict[str, dict[str, int]] = {}  # namespace -> resource -> use

    # --- limits -------------------------------------------------------------------------------------------

    def upsert(self, quota: views.ResourceQuota) -> bool:
        """Take over one object's limits; keys it no longer names are gone. True when something changed."""
        limits = self._read(quota.hard)
        objects = self._limits.setdefault(quota.namespace, {})
        before = objects.get(quota.name, {})
        if limits:
            objects[quota.name] = limits
        else:
            objects.pop(quota.name, None)
        if not objects:
            del self._limits[quota.namespace]
        return limits != before

    def delete(self, namespace: str, name: str) -> bool:
        """Forget one object. True when it limited something."""
        objects = self._limits.get(namespace, {})
        gone = objects.pop(name, None)
        if gone is not None and not objects:
            del self._limits[namespace]
        return gone is not None

    def limit(self, namespace: str, resource: str) -> int | None:
        """The smallest limit any object of the namespace sets, in whole units; None: unlimited."""
        least = self._least(namespace, resource)
        return None if least is None else int(least)

    def _least(self, namespace: str, resource: str) -> Limit | None:
        objects = self._limits.get(namespace)
        if not objects:
            return None
        return min((limits[resource] for limits in objects.values() if resource in limits), default=None)

    def _read(self, hard: Mapping[str, str | int | float]) -> dict[str, Limit]:
        limits: dict[str, Limit] = {}
        for key, quantity in hard.items():
            name = key.removeprefix(_PREFIX)
            if name == key or name not in self._names:
                continue
            try:
                limit, whole = as_int64(quantity)
            except QuantityError:
                continue
            if whole and name in self._in_bytes and str(quantity).strip().endswith("i"):
                limits[name] = Fraction(limit // _MIB, self._in_bytes[name])
            elif whole:
                limits[name] = limit
        return limits

    # --- use ----------------------------------------------------------------------------------------------

    def book(self, namespace: str, profile: VendorProfile, mem: int, cores: int) -> None:
        """Add a pod's use of one vendor (negative: take it back)."""
        for resource, amount in ((profile.names.memory, mem), (profile.names.cores, cores)):
            if not resource or not amount:
                continue
            used = self._used.setdefault(namespace, {})
            total = used.get(resource, 0) + amount
            if total:
                used[resource] = total
            else:
                del used[resource]
        if not self._used.get(namespace, True):
            del self._used[namespace]

    def used(self, namespace: str, resource: str) -> int:
        return self._used.get(namespace, {}).get(resource, 0)

    # --- answers ------------------------------------------------------------------------------------------

    def view(self, namespace: str, profile: VendorProfile) -> QuotaView:
        """What the namespace may still use of one vendor."""
        if namespace not in self._limits:
            return UNLIMITED
        names = profile.names
        memory = self._least(namespace, names.memory) if names.memory else None
        cores = self.limit(namespace, names.cores) if names.cores else None
        return QuotaView(
            None
            if memory is None
            else int(memory * max(1, names.memory_factor)) - self.used(namespace, names.memory),
            None if cores is None else cores - self.used(namespace, names.cores),
        )

    def usage(self) -> Iterator[QuotaUsage]:
        """Every namespace and resource with a limit or some use, sorted."""
        for namespace in sorted(self._limits.keys() | self._used.keys()):
            resources = {name for limits in self._limits.get(namespace, {}).values() for name in limits}
            resources |= self._used.get(namespace, {}).keys()
            for resource in sorted(resources):
                yield QuotaUsage(
                    namespace, resource, self.used(namespace, resource), self.limit(namespace, resource)
                )
