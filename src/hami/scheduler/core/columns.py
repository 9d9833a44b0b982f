"""Cards as NumPy columns: what the vendors' vector checks see.

The cards of one vendor live in *banks*, one per card count rounded up to a power of two, so that every node
of a bank takes the same number of entries and "how many cards of each node pass" is a popcount over machine
words. Entries that no card fills are never healthy and never real.
"""

from collections.abc import Hashable
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hami.vendors.types import INT32_MAX, BoolArray, DeviceInfo, IntArray, Usage

NO_SLOT_LIMIT = 2**62
"""Free slots of a node that does not report the count resource."""

# Half the width where 32-bit registrations cannot overflow a vendor's arithmetic: half the time per check.
_INT_COLUMNS: dict[str, type[np.signedinteger[Any]]] = {
    "node": np.int64,
    "slots": np.int32,
    "used": np.int32,
    "mem": np.int64,
    "usedmem": np.int64,
    "cores": np.int32,
    "usedcores": np.int32,
    "slots_left": np.int32,
    "mem_left": np.int32,
    "cores_left": np.int32,
    "type": np.int32,
    "mode": np.int32,
    "id": np.int32,
    "kind": np.int32,
}
_BOOL_COLUMNS = ("healthy", "cordoned", "real")
_WORDS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class CardKind(NamedTuple):
    """What cards have in common that serve the same requests as long as nothing is used."""

    type: str
    mode: str
    devmem: int
    devcore: int


_Value = TypeVar("_Value", bound=Hashable)


class Codes(Generic[_Value]):
    """Numbers for distinct values; one is counted per use, and its number is used again when it is gone."""

    def __init__(self, nothing: _Value) -> None:
        self.values: list[_Value] = []  # by code; `nothing` where no value is
        self.codes: dict[_Value, int] = {}
        self.version = 0  # changes when a value comes or goes
        self._nothing = nothing
        self._uses: dict[_Value, int] = {}
        self._free: list[int] = []

    def take(self, value: _Value) -> int:
        """Code of a value; each use is given back with `drop`."""
        self._uses[value] = self._uses.get(value, 0) + 1
        code = self.codes.get(value)
        if code is None:
            self.version += 1
            if self._free:
                code = self._free.pop()
                self.values[code] = value
            else:
                code = len(self.values)
                self.values.append(value)
            self.codes[value] = code
        return code

    def drop(self, value: _Value) -> None:
        uses = self._uses[value] - 1
        if uses:
            self._uses[value] = uses
            return
        del self._uses[value]
        self.version += 1
        code = self.codes.pop(value)
        self.values[code] = self._nothing
        self._free.append(code)


class CodeBook:
    """Distinct values behind the coded columns of one vendor."""

    def __init__(self) -> None:
        self._types, self._modes, self._ids = Codes(""), Codes(""), Codes("")
        self.kinds: Codes[CardKind | None] = Codes(None)
        self.types = self._types.values
        self.modes = self._modes.values
        self.ids = self._ids.values
        self.id_codes = self._ids.codes

    def take(self, info: DeviceInfo) -> tuple[int, int, int, int]:
        """Codes of a card's type, mode, id and kind; given back with `drop`."""
        return (
            self._types.take(info.type),
            self._modes.take(info.mode),
            self._ids.take(info.id),
            self.kinds.take(_kind_of(info)),
        )

    def drop(self, info: DeviceInfo) -> None:
        self._types.drop(info.type)
        self._modes.drop(info.mode)
        self._ids.drop(info.id)
        self.kinds.drop(_kind_of(info))


class Bank:
    """Columns of every node of one vendor whose card count rounds up to `width`; implements `CardColumns`.

    Entry `row * width + position` is the card at `position` of the bank's node `row`. Rows are dense:
    removing one moves the last row into its place.
    """

    def __init__(self, width: int, tables: CodeBook) -> None:
        self.width = width
        self.tables = tables
        self.rows = 0
        self._capacity = 0
        self._ints: dict[str, NDArray[Any]] = {name: np.zeros(0, kind) for name, kind in _INT_COLUMNS.items()}
        self._bools = {name: np.zeros(0, np.bool_) for name in _BOOL_COLUMNS}
        self._node_rows = np.zeros(0, np.int64)
        self._card_counts = np.zeros(0, np.int64)
        self._free_slots = np.zeros(0, np.int64)
        self._cut()

    # --- columns ------------------------------------------------------------------------------------------

    def _cut(self) -> None:
        end = self.rows * self.width
        ints = {name: column[:end] for name, column in self._ints.items()}
        self.node: IntArray = ints["node"]
        self.slots: IntArray = ints["slots"]
        self.used: IntArray = ints["used"]
        self.mem: IntArray = ints["mem"]
        self.usedmem: IntArray = ints["usedmem"]
        self.cores: IntArray = ints["cores"]
        self.usedcores: IntArray = ints["usedcores"]
        self.slots_left: IntArray = ints["slots_left"]
        self.mem_left: IntArray = ints["mem_left"]
        self.cores_left: IntArray = ints["cores_left"]
        self.type: IntArray = ints["type"]
        self.mode: IntArray = ints["mode"]
        self.id: IntArray = ints["id"]
        self.kind: IntArray = ints["kind"]
        self.healthy: BoolArray = self._bools["healthy"][:end]
        self.cordoned: BoolArray = self._bools["cordoned"][:end]
        self.real: BoolArray = self._bools["real"][:end]
        self.node_rows: IntArray = self._node_rows[: self.rows]  # one per bank row: row of the node table
        self.card_counts: IntArray = self._card_counts[: self.rows]
        self.free_slots: IntArray = self._free_slots[: self.rows]

    def per_node(self, passes: BoolArray) -> NDArray[Any]:
        """How many entries of each bank row are true."""
        word = _WORDS.get(self.width)
        if word is not None:
            return np.bitwise_count(passes.view(word))
        words = np.bitwise_count(passes.view(np.uint64)).reshape(self.rows, self.width // 8)
        totals: NDArray[Any] = words.sum(axis=1, dtype=np.int64)
        return totals

    # --- changes ------------------------------------------------------------------------------------------

    def add(self, node_row: int, infos: tuple[DeviceInfo, ...], cordoned: frozenset[str]) -> int:
        """Append a node's cards, unused; returns the bank row."""
        if self.rows == self._capacity:
            self._grow()
        row = self.rows
        self.rows += 1
        self._node_rows[row] = node_row
        self._card_counts[row] = len(infos)
        self._free_slots[row] = NO_SLOT_LIMIT
        self._cut()
        start, end = row * self.width, (row + 1) * self.width
        for column in self._ints.values():
            column[start:end] = 0
        for flags in self._bools.values():
            flags[start:end] = False
        self.node[start:end] = node_row
        for at, info in enumerate(infos, start):
            self.slots[at] = self.slots_left[at] = info.count
            self.mem[at] = self.mem_left[at] = info.devmem
            self.cores[at] = self.cores_left[at] = info.devcore
            self.type[at], self.mode[at], self.id[at], self.kind[at] = self.tables.take(info)
            self.healthy[at] = info.health
            self.cordoned[at] = info.id in cordoned
            self.real[at] = True
        return row

    def remove(self, row: int, infos: tuple[DeviceInfo, ...]) -> int:
        """Drop a bank row; returns the row that now lies in its place (its former number), or -1."""
        for info in infos:
            self.tables.drop(info)
        last = self.rows - 1
        if row != last:
            into = slice(row * self.width, (row + 1) * self.width)
            source = slice(last * self.width, (last + 1) * self.width)
            for column in (*self._ints.values(), *self._bools.values()):
                column[into] = column[source]
            for per_row in (self._node_rows, self._card_counts, self._free_slots):
                per_row[row] = per_row[last]
        self.rows = last
        self._cut()
        return last if row != last else -1

    def set_usage(self, row: int, position: int, info: DeviceInfo, used: Usage) -> None:
        """`info`: the card at this place. Uses are not negative; what is left is 32 bits wide like what is
        registered."""
        at = row * self.width + position
        self.used[at] = min(used.slots, INT32_MAX)
        self.usedmem[at] = used.mem
        self.usedcores[at] = min(used.cores, INT32_MAX)
        self.slots_left[at] = max(info.count - used.slots, -INT32_MAX)
        self.mem_left[at] = max(info.devmem - used.mem, -INT32_MAX)
        self.cores_left[at] = max(info.devcore - used.cores, -INT32_MAX)

    def set_healthy(self, row: int, position: int, healthy: bool) -> None:
        self.healthy[row * self.width + position] = healthy

    def _grow(self) -> None:
        self._capacity = max(8, self._capacity + self._capacity // 2)
        entries = self._capacity * self.width
        for name, column in self._ints.items():
            self._ints[name] = enlarged(column, entries)
        for name, flags in self._bools.items():
            self._bools[name] = enlarged(flags, entries)
        self._node_rows = enlarged(self._node_rows, self._capacity)
        self._card_counts = enlarged(self._card_counts, self._capacity)
        self._free_slots = enlarged(self._free_slots, self._capacity)


class VendorColumns:
    """All banks of one vendor."""

    def __init__(self) -> None:
        self.tables = CodeBook()
        self._banks: dict[int, Bank] = {}

    def bank_for(self, cards: int) -> Bank:
        """The bank of nodes with `cards` cards (>= 1)."""
        width = 1 << (cards - 1).bit_length()
        bank = self._banks.get(width)
        if bank is None:
            bank = self._banks[width] = Bank(width, self.tables)
        return bank

    def banks(self) -> list[Bank]:
        """The banks that hold a node."""
        return [bank for bank in self._banks.values() if bank.rows]


def _kind_of(info: DeviceInfo) -> CardKind:
    return CardKind(info.type, info.mode, info.devmem, info.devcore)


def enlarged(column: NDArray[Any], entries: int) -> NDArray[Any]:
    """The column with zeros up to `entries` entries."""
    larger = np.zeros((entries, *column.shape[1:]), column.dtype)
    larger[: len(column)] = column
    return larger
