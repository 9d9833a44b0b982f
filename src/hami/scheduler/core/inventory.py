"""Views over the node table: what is registered (for admission), and a comparable picture of everything."""

from collections.abc import Hashable, Sequence

from hami.scheduler.core.nodes import NodeTable, OnNode
from hami.vendors.types import DeviceInfo


class Inventory:
    """What is registered in the cluster, never what is used; implements `InventoryView`."""

    def __init__(self, table: NodeTable) -> None:
        self._table = table
        self._kinds: dict[str, Sequence[DeviceInfo]] = {}
        self._registrations = -1

    def kinds(self, common_word: str) -> Sequence[DeviceInfo]:
        """One device of each distinct (type, count, devmem, devcore, mode, custom), in node name order."""
        if self._registrations != self._table.registrations:
            self._kinds, self._registrations = {}, self._table.registrations
        found = self._kinds.get(common_word)
        if found is None:
            found = self._kinds[common_word] = self._collect(common_word)
        return found

    def _collect(self, common_word: str) -> Sequence[DeviceInfo]:
        kinds: dict[Hashable, DeviceInfo] = {}
        for _, node in sorted(self._table.by_name.items()):
            there = node.vendors.get(common_word)
            for info in () if there is None else there.infos:
                key = (info.type, info.count, info.devmem, info.devcore, info.mode, repr(info.custom))
                kinds.setdefault(key, info)
        return tuple(kinds.values())


def fingerprint_of(table: NodeTable) -> Hashable:
    """Nodes, cards, usage, columns and scores, comparable between tables."""
    return tuple(
        (
            name,
            repr(node.facts),
            tuple((word, _cards(there)) for word, there in sorted(node.vendors.items())),
            node.sums.base_score(),
            float(table.base[node.row]),
            int(table.card_counts[node.row]),
        )
        for name, node in sorted(table.by_name.items())
    )


def _cards(there: OnNode) -> Hashable:
    bank, width = there.bank, there.bank.width
    entries = slice(there.bank_row * width, (there.bank_row + 1) * width)
    numbers = (bank.slots, bank.used, bank.mem, bank.usedmem, bank.cores, bank.usedcores)
    left = (bank.slots_left, bank.mem_left, bank.cores_left)
    flags = (bank.healthy, bank.cordoned, bank.real)
    coded = ((bank.type, bank.tables.types), (bank.mode, bank.tables.modes), (bank.id, bank.tables.ids))
    cards = len(there.infos)
    return (
        repr(there.cards),
        there.used_slots,
        int(bank.free_slots[there.bank_row]),
        int(bank.card_counts[there.bank_row]),
        tuple(tuple(column[entries].tolist()) for column in (*numbers, *left, *flags)),
        tuple(tuple(names[code] for code in codes[entries].tolist()[:cards]) for codes, names in coded),
    )
