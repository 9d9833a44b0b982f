"""The node table: registered nodes with their cards and the usage on them, kept exact by every change.

Per card a `Card` object (for the exact fit) and an entry in the vendor's columns (for masks); per node
running sums, the base score of scheduler.md §7.4, and a version that changes with anything a decision could
see.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hami.protocol import keys, views
from hami.protocol.errors import QuantityError
from hami.protocol.quantity import value
from hami.scheduler.core.columns import NO_SLOT_LIMIT, Bank, VendorColumns
from hami.vendors.engine import card_healthy, cordoned_ids
from hami.vendors.types import BoolArray, Card, DeviceInfo, Holder, IntArray, Usage, VendorProfile


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as its object says; implements `NodeView`. Only resources of configured vendors are kept."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]  # without node locks
    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]


_SINGLE = np.float32
_LOCKS = frozenset({keys.NODE_LOCK, keys.CAMBRICON_LOCK})


def facts_of(node: views.Node, resources: frozenset[str]) -> NodeFacts:
    """What the core keeps of a node object; a quantity nobody can read counts as not reported."""
    return NodeFacts(
        node.name,
        dict(node.labels),
        {key: text for key, text in node.annotations.items() if key not in _LOCKS},
        _integers(node.capacity, resources),
        _integers(node.allocatable, resources),
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
        reported = facts.allocatable.get(self.profile.names.count)
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
        slots = _SINGLE(self.used) / _SINGLE(self.count)
        cores = _SINGLE(self.usedcores) / _SINGLE(self.cores)
        memory = _SINGLE(self.usedmem) / _SINGLE(self.mem)
        return float(_SINGLE(10) * (slots + cores + memory))


@dataclass(slots=True)
class Node:
    """One registered node."""

    name: str
    row: int
    facts: NodeFacts
    version: int = 0
    vendors: dict[str, OnNode] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)


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
        self.base: np.ndarray[tuple[int], np.dtype[np.float64]] = np.zeros(0)
        self.card_counts: IntArray = np.zeros(0, np.int64)
        self.registrations = 0  # changes when the cards of some node change
        self._free_rows: list[int] = []
        self._rank: IntArray = np.zeros(0, np.int64)
        self._rank_version = -1

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
        if row >= len(self.base):
            size = max(64, 2 * len(self.base))
            self.base = np.concatenate([self.base, np.zeros(size - len(self.base))])
            self.card_counts = np.concatenate(
                [self.card_counts, np.zeros(size - len(self.card_counts), np.int64)]
            )
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
                holders = tuple(other for other in holders if other.uid != holder.uid)
                if adding:
                    mine = Holder(holder.uid, holder.namespace, holder.name, holder.annotations, usage)
                    holders = tuple(sorted((*holders, mine), key=lambda one: one.uid))
            there.cards[at] = Card(card.info, used, holders)
            there.bank.set_usage(there.bank_row, at, used)
            if there.profile.hooks.healthy is not None:
                there.bank.set_healthy(there.bank_row, at, card_healthy(there.profile, card.info, used))
        there.bank.free_slots[there.bank_row] = there.slots_left(node.facts)
        self._score(node, version)

    def _score(self, node: Node, version: int) -> None:
        node.version = version
        self.base[node.row] = node.sums.base_score()
        self.card_counts[node.row] = node.sums.cards

    # --- views --------------------------------------------------------------------------------------------

    def rank(self) -> IntArray:
        """Per row the position of its name in ascending order; ties between nodes are broken by it."""
        if self._rank_version != self.names_version:
            rank = np.zeros(len(self.by_row), np.int64)
            for at, name in enumerate(sorted(self.by_name)):
                rank[self.by_name[name].row] = at
            self._rank, self._rank_version = rank, self.names_version
        return self._rank

    def best(self, alive: BoolArray, *, lowest: bool) -> int:
        """The alive row with the best base score; ties: fewer cards, then name order (D2). -1 when none is
        alive."""
        rows = np.flatnonzero(alive)
        if not len(rows):
            return -1
        scores = self.base[rows]
        rows = rows[scores == (scores.min() if lowest else scores.max())]
        if len(rows) > 1:
            cards = self.card_counts[rows]
            rows = rows[cards == cards.min()]
        if len(rows) > 1:
            return int(rows[self.rank()[rows].argmin()])
        return int(rows[0])

    def worst_first(self, alive: BoolArray, *, lowest: bool) -> list[int]:
        """The alive rows, the best one last."""
        rows = np.flatnonzero(alive)
        scores = self.base[rows]
        order = np.lexsort((-self.rank()[rows], -self.card_counts[rows], -scores if lowest else scores))
        found: list[int] = rows[order].tolist()
        return found

    def registered(self) -> Iterator[Node]:
        return iter(self.by_name.values())
