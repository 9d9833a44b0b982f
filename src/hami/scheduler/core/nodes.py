"""The node table: registered nodes with their cards and the usage on them, kept exact by every change.

Per card a `Card` object (for the exact fit) and an entry in the vendor's columns (for masks); per node
running sums, the base score of scheduler.md §7.4, and a version that changes with anything a decision could
see.
"""

import struct
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hami.protocol import keys, views
from hami.protocol.errors import QuantityError
from hami.protocol.quantity import value
from hami.scheduler.core.columns import NO_SLOT_LIMIT, Bank, VendorColumns, enlarged
from hami.scheduler.core.hosts import NOTHING, HostAmount, capacity_of
from hami.scheduler.core.ranking import FloatArray, Ranking
from hami.vendors.engine import card_healthy, cordoned_ids
from hami.vendors.types import (
    BoolArray,
    Card,
    DeviceInfo,
    Holder,
    IntArray,
    Usage,
    VendorProfile,
)


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as its object says; implements `NodeView`. Only resources of configured vendors are kept."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]  # without node locks
    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    host: HostAmount = NOTHING


NO_HOST_LIMIT = 2**41
"""CPU or memory left on a node that does not report it."""

_EXACT_IN_SINGLE = 2**24
_IN_SINGLE = struct.Struct("f")
_LOCKS = frozenset({keys.NODE_LOCK, keys.CAMBRICON_LOCK})


def facts_of(node: views.Node, resources: frozenset[str]) -> NodeFacts:
    """What the core keeps of a node object; a quantity nobody can read counts as not reported."""
    return NodeFacts(
        node.name,
        # nodes of a cluster say mostly the same: one text of each is kept
        {sys.intern(key): sys.intern(text) for key, text in node.labels.items()},
        {sys.intern(key): text for key, text in node.annotations.items() if key not in _LOCKS},
        _integers(node.capacity, resources),
        _integers(node.allocatable, resources),
        capacity_of(node),
    )


def _integers(quantities: Mapping[str, str | int | float], resources: frozenset[str]) -> dict[str, int]:
    found = {}
    for name in resources & quantities.keys():
        try:
            found[name] = value(quantities[name])
        except QuantityError:
            continue
    return found


class OnNode:
    """The cards of one vendor on one node, in inventory order."""

    __slots__ = ("bank", "bank_row", "cards", "infos", "position", "profile", "used_slots")

    def __init__(self, profile: VendorProfile, infos: tuple[DeviceInfo, ...]) -> None:
        self.profile = profile
        self.infos = infos
        self.cards = [Card(info, profile.algebra.zero) for info in infos]
        self.position = {info.id: at for at, info in enumerate(infos)}
        self.used_slots = 0
        self.bank: Bank
        self.bank_row = -1

    def slots_left(self, facts: NodeFacts) -> int:
        """Slots kubelet would still give out, or `NO_SLOT_LIMIT` when the node does not count them (D31)."""
        if not self.profile.rules.real_count:
            return NO_SLOT_LIMIT
        reported = self.profile.names.reported_count(facts.allocatable)
        return NO_SLOT_LIMIT if reported is None else reported - self.used_slots


@dataclass(slots=True)
class Sums:
    """Totals over all cards of a node."""

    cards: int = 0
    used: int = 0
    count: int = 0
    usedcores: int = 0
    cores: int = 0
    usedmem: int = 0
    mem: int = 0

    def base_score(self) -> float:
        """10 x (slots + cores + memory in use, as fractions); 0 when a total is 0 (scheduler.md §7.4).

        In single precision, like HAMi: nodes that tie there tie here, and the printed decimals agree.
        """
        if not (self.count and self.cores and self.mem):
            return 0.0
        sums: tuple[float, ...] = (
            self.used, self.count, self.usedcores, self.cores, self.usedmem, self.mem
        )  # fmt: skip
        if max(sums) > _EXACT_IN_SINGLE:
            sums = tuple([_single(amount) for amount in sums])
        used, count, usedcores, cores, usedmem, mem = sums
        # a step in double precision, rounded, is that step in single precision
        filled = _single(_single(used / count) + _single(usedcores / cores))
        return _single(10 * _single(filled + _single(usedmem / mem)))


@dataclass(slots=True)
class Node:
    """One registered node."""

    name: str
    row: int
    facts: NodeFacts
    version: int = 0
    vendors: dict[str, OnNode] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)
    host_used: HostAmount = NOTHING
    host_part: tuple[float, float] = (0.0, 0.0)  # of the node's CPU and memory that one unit of each is

    @property
    def host_left(self) -> HostAmount:
        """CPU and memory that pods may still ask for; without end where the node reports none."""
        has, used = self.facts.host, self.host_used
        return HostAmount(
            has.cpu - used.cpu if has.cpu else NO_HOST_LIMIT,
            has.mem - used.mem if has.mem else NO_HOST_LIMIT,
        )


class NodeTable:
    """Registered nodes by name and by row. Rows are stable while a node is registered, and used again
    afterwards."""

    def __init__(self, profiles: Mapping[str, VendorProfile]) -> None:
        self._profiles = profiles
        self.columns = {word: VendorColumns() for word in profiles}
        self.by_name: dict[str, Node] = {}
        self.by_row: list[Node | None] = []
        self.row_of: dict[str, int] = {}
        self.names_version = 0  # changes when a name enters or leaves the table
        self._base: FloatArray = np.zeros(0)
        self._unscored: set[int] = set()  # rows whose base score is out of date
        self.card_counts: IntArray = np.zeros(0, np.int64)
        self.versions: IntArray = np.zeros(0, np.int64)
        # per row CPU and memory: left, one part of the node's, and the shares taken of both, added up
        self.host_left: IntArray = np.zeros((0, 2), np.int64)
        self.host_part: FloatArray = np.zeros((0, 2))
        self.host_taken: FloatArray = np.zeros(0)
        self.host_versions: IntArray = np.zeros(0, np.int64)
        self.registrations = 0  # changes when the cards of some node change
        self._free_rows: list[int] = []
        self._registered: IntArray = np.zeros(0, np.int64)  # rows in the order of names
        self._registered_version = -1
        self._ties: IntArray | None = None
        self._rankings = {lowest: Ranking(lowest=lowest) for lowest in (False, True)}

    # --- registration -------------------------------------------------------------------------------------

    def register(self, facts: NodeFacts, devices: Mapping[str, tuple[DeviceInfo, ...]], version: int) -> Node:
        """Put a node's cards in place, all unused: the caller adds the usage again. `devices` must not be
        empty."""
        node = self.by_name.get(facts.name)
        if node is None:
            node = Node(facts.name, self._take_row(), facts)
            self.by_name[facts.name] = node
            self.row_of[facts.name] = node.row
            self.by_row[node.row] = node
            self.names_version += 1
        else:
            self._clear(node)
        self.registrations += 1
        node.facts = facts
        cordoned = cordoned_ids(facts.annotations)
        for word in self._profiles:
            infos = devices.get(word)
            if infos:
                self._place(node, word, infos, cordoned)
        self._score(node, version)
        has = facts.host
        node.host_part = (1 / has.cpu if has.cpu else 0.0), (1 / has.mem if has.mem else 0.0)
        self.host_part[node.row] = node.host_part
        self.set_host_used(node, node.host_used)
        return node

    def remove(self, name: str) -> None:
        """Forget a registered node; unknown names are ignored."""
        node = self.by_name.pop(name, None)
        if node is None:
            return
        self._clear(node)
        self.registrations += 1
        self.by_row[node.row] = None
        del self.row_of[name]
        self._free_rows.append(node.row)
        self.names_version += 1

    def _place(self, node: Node, word: str, infos: tuple[DeviceInfo, ...], cordoned: frozenset[str]) -> None:
        there = OnNode(self._profiles[word], infos)
        there.bank = self.columns[word].bank_for(len(infos))
        there.bank_row = there.bank.add(node.row, infos, cordoned)
        there.bank.free_slots[there.bank_row] = there.slots_left(node.facts)
        for at, card in enumerate(there.cards):
            there.bank.set_healthy(there.bank_row, at, card_healthy(there.profile, card.info, card.used))
        node.vendors[word] = there
        node.sums.cards += len(infos)
        for info in infos:
            node.sums.count += info.count
            node.sums.cores += info.devcore
            node.sums.mem += info.devmem

    def _clear(self, node: Node) -> None:
        for there in node.vendors.values():
            moved = there.bank.remove(there.bank_row, there.infos)
            if moved >= 0:
                other = self.by_row[int(there.bank.node_rows[there.bank_row])]
                assert other is not None
                other.vendors[there.profile.common_word].bank_row = there.bank_row
        node.vendors = {}
        node.sums = Sums()

    def _take_row(self) -> int:
        if self._free_rows:
            return self._free_rows.pop()
        row = len(self.by_row)
        self.by_row.append(None)
        if row >= len(self._base):
            size = max(64, 2 * len(self._base))
            self._base = enlarged(self._base, size)
            self.card_counts = enlarged(self.card_counts, size)
            self.versions = enlarged(self.versions, size)
            self.host_left = enlarged(self.host_left, size)
            self.host_part = enlarged(self.host_part, size)
            self.host_taken = enlarged(self.host_taken, size)
            self.host_versions = enlarged(self.host_versions, size)
        return row

    # --- usage --------------------------------------------------------------------------------------------

    def add_usage(
        self, node: Node, word: str, usages: Mapping[str, Usage], holder: Holder, version: int
    ) -> None:
        """Charge a pod's use of this vendor's cards; ids that are no card of the node are left out."""
        self._change(node, word, usages, holder, version, adding=True)

    def remove_usage(
        self, node: Node, word: str, usages: Mapping[str, Usage], holder: Holder, version: int
    ) -> None:
        """Exact inverse of `add_usage`."""
        self._change(node, word, usages, holder, version, adding=False)

    def _change(
        self,
        node: Node,
        word: str,
        usages: Mapping[str, Usage],
        holder: Holder,
        version: int,
        *,
        adding: bool,
    ) -> None:
        there = node.vendors.get(word)
        if there is None:
            return
        algebra = there.profile.algebra
        combine = algebra.add if adding else algebra.remove
        sums = node.sums
        for card_id, usage in usages.items():
            at = there.position.get(card_id)
            if at is None:
                continue
            card = there.cards[at]
            used = combine(card.used, usage)
            there.used_slots += used.slots - card.used.slots
            sums.used += used.slots - card.used.slots
            sums.usedcores += used.cores - card.used.cores
            sums.usedmem += used.mem - card.used.mem
            holders = card.holders
            if there.profile.placed_annotations:
                others = [other for other in holders if other.uid != holder.uid]
                if adding:
                    others.append(
                        Holder(holder.uid, holder.namespace, holder.name, holder.annotations, usage)
                    )
                    others.sort(key=_uid)
                holders = tuple(others)
            there.cards[at] = Card(card.info, used, holders)
            there.bank.set_usage(there.bank_row, at, card.info, used)
            if there.profile.hooks.healthy is not None:
                there.bank.set_healthy(there.bank_row, at, card_healthy(there.profile, card.info, used))
        there.bank.free_slots[there.bank_row] = there.slots_left(node.facts)
        self._score(node, version)

    def set_host_used(self, node: Node, used: HostAmount) -> None:
        """CPU and memory that pods hold of a registered node."""
        node.host_used = used
        row, (cpu_part, mem_part) = node.row, node.host_part
        # cell by cell: a row at once takes several times as long
        self.host_left[row, 0], self.host_left[row, 1] = node.host_left
        self.host_taken[row] = used.cpu * cpu_part + used.mem * mem_part
        self.host_versions[row] += 1

    def _score(self, node: Node, version: int) -> None:
        row = node.row
        node.version = self.versions[row] = version
        self._unscored.add(row)
        if self.card_counts[row] != node.sums.cards:
            self.card_counts[row] = node.sums.cards
            self._ties = None

    # --- views --------------------------------------------------------------------------------------------

    @property
    def base(self) -> FloatArray:
        """Base scores (scheduler.md §7.4) by row; worked out when they are asked for, since thousands of pods
        may come in between."""
        for row in self._unscored:
            node = self.by_row[row]
            if node is not None:
                self._base[row] = node.sums.base_score()
                for ranking in self._rankings.values():
                    ranking.note(row)
        self._unscored.clear()
        return self._base

    def ties(self) -> IntArray:
        """Per row a number that decides between nodes of equal scores, the highest one wins: fewer cards,
        then name order (D2). Never written to: another array after a change."""
        if self._registered_version != self.names_version:
            names = sorted(self.by_name)
            self._registered = np.array([self.by_name[name].row for name in names], np.int64)
            self._registered_version = self.names_version
            self._ties = None
        if self._ties is None:
            self._ties = np.zeros(len(self.by_row), np.int64)
            order = np.argsort(self.card_counts[self._registered], kind="stable")
            self._ties[self._registered[order]] = np.arange(len(order))[::-1]
        return self._ties

    def ranking(self, *, lowest: bool) -> Ranking:
        """The registered rows by base score and `ties`, as they are now."""
        ranking = self._rankings[lowest]
        ties = self.ties()
        ranking.refresh(self.base, ties, self._registered)
        return ranking

    def best(self, alive: BoolArray, scores: FloatArray, most: int, *, lowest: bool) -> list[int]:
        """The alive rows with the best scores (one per row), then of `ties`: `most` (>= 1), or all there are;
        best first."""
        rows = np.flatnonzero(alive)
        costs = scores[rows] if lowest else -scores[rows]
        if len(rows) > most:
            some = np.flatnonzero(costs <= np.partition(costs, most - 1)[most - 1])
            rows, costs = rows[some], costs[some]
        found: list[int] = rows[np.lexsort((-self.ties()[rows], costs))][:most].tolist()
        return found

    def registered(self) -> Iterator[Node]:
        return iter(self.by_name.values())


def _single(number: float) -> float:
    """The nearest single-precision number."""
    (rounded,) = _IN_SINGLE.unpack(_IN_SINGLE.pack(number))
    found: float = rounded
    return found


def _uid(holder: Holder) -> str:
    return holder.uid
