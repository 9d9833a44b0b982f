"""The books: which pod uses what on which node and in which namespace, and the versions that say when that
changed."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final

import msgspec

from hami.protocol import views
from hami.scheduler.core.growth import Fragmentation
from hami.scheduler.core.hosts import HostBook, HostCharge
from hami.scheduler.core.mix import RequestMix
from hami.scheduler.core.nodes import Node, NodeFacts, NodeTable
from hami.scheduler.core.pods import Charge
from hami.scheduler.core.quota import QuotaBook
from hami.scheduler.core.reach import Reach
from hami.vendors.types import UNLIMITED, DeviceInfo, QuotaView, VendorProfile
from hami.vendors.usage import quota_use

_NO_TOTALS: Final[Mapping[str, int]] = MappingProxyType({})


class _Booked(msgspec.Struct, gc=False):
    """A charge in force, and the quota amounts booked for it (vendor, MiB, cores)."""

    charge: Charge
    quota: tuple[tuple[str, int, int], ...]


class World:
    """Node table, quota book and the charges booked on both. Every change leaves all three consistent."""

    def __init__(self, profiles: Mapping[str, VendorProfile]) -> None:
        self.profiles = profiles
        self.table = NodeTable(profiles)
        self.quota = QuotaBook(profiles.values())
        self.hosts = HostBook()
        self.fragmentation = Fragmentation(self.table, RequestMix())
        self.reach = Reach(self.table, profiles)
        self.version = 0  # grows with every change a decision could see
        self.freed = 0  # grows when capacity is freed or added
        self._booked: dict[str, _Booked] = {}
        self._by_node: dict[str, list[str]] = {}  # node -> uids of the pods booked there

    # --- charges ------------------------------------------------------------------------------------------

    def charge_of(self, uid: str) -> Charge | None:
        booked = self._booked.get(uid)
        return None if booked is None else booked.charge

    def charges(self) -> Iterator[Charge]:
        """What is booked now; changes during the iteration do no harm and are not seen."""
        return (booked.charge for booked in list(self._booked.values()))

    def set_charge(self, uid: str, charge: Charge | None) -> None:
        """Make `charge` (None: nothing) the pod's booking, in place of what it had."""
        before = self._booked.get(uid)
        if before is None and charge is None:
            return
        if before is not None and charge is not None and before.charge.same_use(charge):
            before.charge = charge
            return
        self.version += 1
        if before is not None:
            self._unbook(before)
            self.freed += 1
        if charge is not None:
            self._book(charge)

    def _book(self, charge: Charge) -> None:
        self._booked[charge.uid] = booked = _Booked(charge, ())
        uids = self._by_node.get(charge.node)
        if uids is None:
            self._by_node[charge.node] = [charge.uid]
        else:
            uids.append(charge.uid)
        node = self.table.by_name.get(charge.node)
        if node is not None:
            self._put(node, charge)
        self._book_quota(booked, node)

    def _unbook(self, booked: _Booked) -> None:
        charge = booked.charge
        del self._booked[charge.uid]
        uids = self._by_node[charge.node]
        uids.remove(charge.uid)
        if not uids:
            del self._by_node[charge.node]
        node = self.table.by_name.get(charge.node)
        if node is not None:
            holder = charge.holder()
            for word, usages in charge.effective.items():
                self.table.remove_usage(node, word, usages, holder, self.version)
        self._unbook_quota(booked)

    def _put(self, node: Node, charge: Charge) -> None:
        holder = charge.holder()
        for word, usages in charge.effective.items():
            self.table.add_usage(node, word, usages, holder, self.version)

    def _book_quota(self, booked: _Booked, node: Node | None) -> None:
        amounts = []
        for word, usages in booked.charge.effective.items():
            profile = self.profiles[word]
            there = node.vendors.get(word) if node is not None else None
            totals = _NO_TOTALS
            if there is not None and profile.hooks.quota_use is not None:
                totals = {info.id: info.devcore for info in there.infos}
            mem, cores = quota_use(profile, usages, totals)
            amounts.append((word, mem, cores))
            self.quota.book(booked.charge.namespace, profile, mem, cores)
        booked.quota = _shared(tuple(amounts))

    def _unbook_quota(self, booked: _Booked) -> None:
        for word, mem, cores in booked.quota:
            self.quota.book(booked.charge.namespace, self.profiles[word], -mem, -cores)
        booked.quota = ()

    # --- nodes --------------------------------------------------------------------------------------------

    def set_node(self, facts: NodeFacts, devices: Mapping[str, tuple[DeviceInfo, ...]]) -> None:
        """Register a node with these devices, or, without any, take it out; its pods' usage is booked
        again."""
        if not devices:
            self.drop_node(facts.name)
            return
        self.version += 1
        self.freed += 1
        node = self.table.register(facts, devices, self.version)
        self.table.set_host_used(node, self.hosts.used(facts.name))
        for uid in sorted(self._by_node.get(facts.name, ())):
            booked = self._booked[uid]
            self._put(node, booked.charge)
            self._unbook_quota(booked)
            self._book_quota(booked, node)

    def drop_node(self, name: str) -> None:
        """Take a node out of the table; its pods stay booked on their quota."""
        if name not in self.table.by_name:
            return
        self.version += 1
        self.table.remove(name)
        for uid in self._by_node.get(name, ()):
            booked = self._booked[uid]
            self._unbook_quota(booked)
            self._book_quota(booked, None)

    def set_host_charge(self, uid: str, charge: HostCharge | None) -> None:
        """Make `charge` (None: nothing) what the pod holds of a node's CPU and memory."""
        for name in self.hosts.set(uid, charge):
            node = self.table.by_name.get(name)
            if node is not None:
                self.table.set_host_used(node, self.hosts.used(name))

    # --- quota --------------------------------------------------------------------------------------------

    def set_quota(self, quota: views.ResourceQuota) -> None:
        if self.quota.upsert(quota):
            self.version += 1
            self.freed += 1

    def drop_quota(self, namespace: str, name: str) -> None:
        if self.quota.delete(namespace, name):
            self.version += 1
            self.freed += 1

    def quotas(self, namespace: str, words: Iterable[str]) -> dict[str, QuotaView]:
        """What the namespace has left of these vendors; vendors without a limit are left out."""
        left = {word: self.quota.view(namespace, self.profiles[word]) for word in words}
        return {word: view for word, view in left.items() if view != UNLIMITED}


@lru_cache(maxsize=4096)
def _shared(amounts: tuple[tuple[str, int, int], ...]) -> tuple[tuple[str, int, int], ...]:
    """One object for the many pods that use the same."""
    return amounts
