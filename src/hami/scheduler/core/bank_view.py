"""The nodes of one bank as the policy `fragmentation-aware` sees them.

Cards of a cluster are in few different states: each card carries the number of its state, sums are taken per
state, and looked up per card. What holds of a node without the pod is kept and brought up to date for nodes
that changed only.
"""

from typing import Final

import numpy as np

from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.columns import Bank
from hami.scheduler.core.nodes import NodeTable
from hami.scheduler.core.unusable import Before, Growths, Host, Looked, States, Tables
from hami.vendors.types import BoolArray, ContainerRequest, IntArray

_COLUMNS: Final = 7
_FEW_STATES: Final = 4096
_FEW_ROWS: Final = 64  # so many changed nodes are read one by one


class BankView:
    """Card states and what follows from them, per bank row."""

    def __init__(self, bank: Bank) -> None:
        self._bank = bank
        self._tables: Tables | None = None
        self._stamps: IntArray = np.zeros(0, np.int64)
        self._nodes: IntArray = np.zeros(0, np.int64)
        self._codes: IntArray = np.zeros((0, bank.width), np.int64)
        self._number: dict[tuple[int, ...], int] = {}
        self._known: IntArray = np.zeros((0, _COLUMNS), np.int64)  # states by number, some room at the end
        self._looked: Looked | None = None
        self._before: Before | None = None

    def refresh(self, tables: Tables, table: NodeTable, stamps: IntArray) -> None:
        """Bring everything up to date; `stamps` change with the node of a bank row."""
        bank = self._bank
        same = len(self._stamps) == bank.rows and np.array_equal(self._nodes, bank.node_rows)
        if not same or len(self._number) > max(_FEW_STATES, bank.rows * bank.width // 2):
            self._stamps = np.full(bank.rows, -1, np.int64)
            self._nodes = bank.node_rows.copy()
            self._codes = np.full((bank.rows, bank.width), -1, np.int64)
            self._number.clear()
            self._tables = None
        changed = np.flatnonzero(self._stamps != stamps)
        if self._tables is tables and not len(changed):
            return
        known = len(self._number)
        if len(changed):
            self._read(changed)
        self._stamps = stamps.copy()
        if self._tables is not tables or len(self._number) != known:
            self._looked = tables.look(self._states())
        assert self._looked is not None
        if self._tables is not tables or self._before is None:
            self._before = tables.before(self._looked, self._codes, _host(table, self._nodes))
        elif len(changed):
            part = tables.before(self._looked, self._codes[changed], _host(table, self._nodes[changed]))
            _put(self._before, part, changed)
        self._tables = tables

    def growths(
        self,
        tables: Tables,
        table: NodeTable,
        request: PodRequest,
        wanted: ContainerRequest,
        passes: BoolArray,
        some: IntArray | slice,
    ) -> Growths:
        """Growths of the bank rows `some`, as refreshed, by `wanted` on the cards of `passes`."""
        assert self._looked is not None
        assert self._before is not None
        then = tables.look(self._states().with_request(wanted))
        host = _host(table, self._nodes[some])
        return Growths(
            tables,
            self._looked,
            then,
            self._codes[some],
            passes.reshape(self._bank.rows, self._bank.width)[some],
            _part(self._before, some),
            Host(host.cpu - request.host.cpu, host.mem - request.host.mem),
        )

    # --- states -------------------------------------------------------------------------------------------

    def _read(self, rows: IntArray) -> None:
        """Number the cards of these bank rows."""
        bank, width = self._bank, self._bank.width
        kind, mem, used, alive = bank.kind, bank.mem, bank.used, bank.healthy & ~bank.cordoned
        columns = (kind, mem, bank.mem_left, bank.cores_left, bank.slots_left, used, alive, bank.real)
        if len(rows) <= _FEW_ROWS:
            for row in rows.tolist():
                cards = slice(row * width, (row + 1) * width)
                states = zip(*(column[cards].tolist() for column in columns), strict=True)
                self._codes[row] = [self._number_of(state) if real else -1 for *state, real in states]
            return
        parts = [column.reshape(bank.rows, width)[rows].reshape(-1) for column in columns]
        distinct, inverse = np.unique(np.stack(parts[:-1], axis=1), axis=0, return_inverse=True)
        numbers = np.array([self._number_of(state) for state in distinct.tolist()], np.int64)
        found = np.where(parts[-1], numbers[inverse.reshape(-1)], -1)
        self._codes[rows] = found.reshape(len(rows), width)

    def _number_of(self, state: list[int]) -> int:
        key = tuple(state)
        number = self._number.get(key)
        if number is None:
            number = self._number[key] = len(self._number)
            if number >= len(self._known):
                room = np.zeros((max(64, 2 * len(self._known)), _COLUMNS), np.int64)
                room[: len(self._known)] = self._known
                self._known = room
            self._known[number] = state
        return number

    def _states(self) -> States:
        kind, devmem, free_mem, free_cores, free_slots, used_slots, alive = self._known[: len(self._number)].T
        return States(kind, devmem, free_mem, free_cores, free_slots, used_slots, alive > 0)


def _host(table: NodeTable, rows: IntArray) -> Host:
    left = table.host_left[rows]
    return Host(left[:, 0], left[:, 1])


def _part(before: Before, some: IntArray | slice) -> Before:
    return Before(
        before.unusable[some],
        before.single[some],
        before.hosts[some],
        [count[some] for count in before.counts],
        [capacity[some] for capacity in before.capacities],
    )


def _put(before: Before, part: Before, rows: IntArray) -> None:
    before.unusable[rows] = part.unusable
    before.single[rows] = part.single
    before.hosts[rows] = part.hosts
    for count, new_count in zip(before.counts, part.counts, strict=True):
        count[rows] = new_count
    for capacity, new_capacity in zip(before.capacities, part.capacities, strict=True):
        capacity[rows] = new_capacity
