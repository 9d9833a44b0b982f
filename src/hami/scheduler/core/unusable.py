"""How much capacity the requests seen lately cannot use, and by how much a placement makes it grow.

Fragmentation gradient descent (Weng et al., "Beware of Fragmentation", USENIX ATC 2023). The unit is one
whole card. For one kind of request m, what is free on a card is unusable if m does not fit there: not on
this card, not on so many cards of the node as m asks, or not into the CPU and memory left on the node. The
unusable capacity of a node is the mean over the kinds, weighted by how often they are asked.

What is free on a card is the mean of its free share of memory and of cores. Kinds are counted into tables,
so that a look-up per card takes the place of a loop over kinds: shares of a card are rounded down to 1/256,
and where kinds name more different amounts than a table has levels, the rarer amounts count as the next
larger one that is kept.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hami.scheduler.core.columns import CardKind
from hami.scheduler.core.mix import RequestKind
from hami.vendors.fit import MAX_CORES
from hami.vendors.selection import Selection
from hami.vendors.types import NO_PERCENT, BoolArray, ContainerRequest, IntArray

Floats = NDArray[np.float64]
Columns = TypeVar("Columns", Floats, NDArray[np.int8])

_BUCKETS: Final = 256
_MEM_LEVELS, _CORE_LEVELS, _HOST_LEVELS = 20, 14, 16
_MOST_KINDS: Final = 32  # of cards; rarer ones use the tables of the kind with the nearest memory
_MOST_GROUPS: Final = 3  # of requests for several cards that are looked at as such
_LEAST_GROUP: Final = 0.01  # of all cards asked for; requests in smaller groups count as for single cards
_MOST_CARDS: Final = 64
_OFFSET: Final = 1e6  # makes every growth positive
_INFINITE: Final = 0x7FF << 52  # the bits of infinity


class Host(NamedTuple):
    """CPU (thousandths) and memory (MiB) left on nodes, one entry per node."""

    cpu: IntArray
    mem: IntArray


@dataclass(frozen=True, slots=True)
class States:
    """States that cards of one vendor are in, one entry per state."""

    kind: IntArray  # codes of `CardKind`
    devmem: IntArray
    free_mem: IntArray
    free_cores: IntArray
    free_slots: IntArray
    used_slots: IntArray
    alive: BoolArray  # false: holds nothing for anybody (broken, cordoned)

    def with_request(self, wanted: ContainerRequest) -> "States":
        """Every card with one device of the request on it."""
        mem: int | IntArray = wanted.memreq
        if wanted.memreq <= 0:
            mem = 0 if wanted.mem_percent == NO_PERCENT else self.devmem * wanted.mem_percent // 100
        return States(
            self.kind,
            self.devmem,
            self.free_mem - mem,
            self.free_cores - min(wanted.cores, MAX_CORES),
            self.free_slots - wanted.slots,
            self.used_slots + wanted.slots,
            self.alive,
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests for several cards of one size: which states of a card serve them, and how much they weigh."""

    serves: BoolArray  # per state
    weight: Floats  # (host class, cards that serve): share of the requests that want more cards


class Tables:
    """The mix of one vendor's requests over the states of cards and nodes."""

    def __init__(self, shares: Mapping[RequestKind, float], kinds: Sequence[CardKind | None]) -> None:
        """`kinds`: the kinds of cards by code, None where a code is not in use."""
        tasks = _Tasks.of(shares)
        self._cpu = _levels(tasks.cpu, tasks.share, _HOST_LEVELS)
        self._mem = _levels(tasks.host_mem, tasks.share, _HOST_LEVELS)
        task_host = (
            np.searchsorted(self._cpu, tasks.cpu) + 1,
            np.searchsorted(self._mem, tasks.host_mem) + 1,
        )
        rows, self._row_of_code = _table_rows(kinds)
        sides = [_CardSide(tasks, kind) for kind in rows]
        self._levels = max((len(side.mem) for side in sides), default=0) + 1
        self._core_levels = max((len(side.cores) for side in sides), default=0) + 1
        hosts = (len(self._cpu) + 1, len(self._mem) + 1)
        self._dead = len(rows) * self._levels * self._core_levels
        shape = (*hosts, len(rows), self._levels, self._core_levels)
        fits = np.zeros(shape)
        for row, side in enumerate(sides):
            at = side.fits
            where = (task_host[0][at], task_host[1][at], side.mem_level[at], side.core_level[at])
            np.add.at(fits[:, :, row], where, tasks.share[at])
        for axis in (0, 1, 3, 4):
            np.cumsum(fits, axis=axis, out=fits)
        flat = fits.reshape(hosts[0] * hosts[1], self._dead)
        # (host class, state of a card): share of the requests that do not fit
        self._unfit = np.concatenate([1.0 - flat, np.ones((len(flat), 1))], axis=1)
        self._host_columns = hosts[1]
        self._mem_lut = np.array([side.mem_lut for side in sides], np.int32).reshape(-1)
        self._core_lut = np.array([side.core_lut for side in sides], np.int32).reshape(-1)
        self._per_mib = np.array([side.per_mib for side in sides])
        self._per_core = np.array([side.per_core for side in sides])
        self.groups = [
            _Group(self._serving(sides, group), self._weights(tasks, task_host, group, hosts))
            for group in tasks.groups()
        ]

    # --- questions ----------------------------------------------------------------------------------------

    def look(self, states: States) -> "Looked":
        """What the tables say about these states."""
        place, free = self._places(states)
        return Looked(place, free, [group.serves[place] for group in self.groups])

    def before(self, looked: "Looked", codes: IntArray, host: Host) -> "Before":
        """How nodes stand. `codes`: (nodes, cards), the state of each card; -1: no card."""
        hosts = self.host_class(host)
        unfit = self.unfit(looked, hosts, codes)
        counts, capacities = [], []
        single = total = _row_sums(unfit)
        for group, serves in zip(self.groups, looked.serves, strict=True):
            count = np.minimum(np.count_nonzero(serves.take(codes), axis=1), _MOST_CARDS)
            capacity = _row_sums((looked.free * serves).take(codes))
            total = total + group.weight[hosts, count] * capacity
            counts.append(count)
            capacities.append(capacity)
        return Before(total, single, hosts, counts, capacities)

    def host_class(self, host: Host) -> IntArray:
        """Nodes with the same class serve the same requests, as far as CPU and memory go."""
        cpu = np.searchsorted(self._cpu, host.cpu, "right")
        mem = np.searchsorted(self._mem, host.mem, "right")
        found: IntArray = cpu * self._host_columns + mem
        return found

    def unfit(
        self, looked: "Looked", hosts: IntArray, codes: IntArray, less: "Looked | None" = None
    ) -> Floats:
        """(nodes, cards): what is free and serves no request for single cards; `less` the same of that."""
        present = np.flatnonzero(np.bincount(hosts))
        row = np.zeros(len(self._unfit), np.int64)
        row[present] = np.arange(len(present)) * len(looked.place)
        shares = self._unfit[present]
        table = shares.take(looked.place, axis=1) * looked.free
        if less is not None:
            table -= shares.take(less.place, axis=1) * less.free
        at = codes if len(present) == 1 else codes + row[hosts][:, None]
        found: Floats = table.reshape(-1).take(at)
        return found

    def _places(self, states: States) -> tuple[IntArray, Floats]:
        """Per state its place in the tables, and what is free, in cards. One more entry than states: the
        last one, so that code -1 finds it, is no card at all."""
        row = self._row_of_code[states.kind]
        mem = np.maximum(states.free_mem, 0) * self._per_mib[row]
        cores = np.maximum(states.free_cores, 0) * self._per_core[row]
        mem_bucket = np.minimum(mem, _BUCKETS).astype(np.int64)
        # a card in use serves no request for a whole card (fit check 11)
        core_bucket = np.minimum(cores, _BUCKETS - (states.used_slots > 0)).astype(np.int64)
        mem_level = self._mem_lut[mem_bucket + row * (_BUCKETS + 1)] * (states.free_slots > 0)
        core_level = self._core_lut[core_bucket + row * (_BUCKETS + 1)]
        place = (row * self._levels + mem_level) * self._core_levels + core_level
        free = (mem + cores) * (0.5 / _BUCKETS)
        places = np.full(len(place) + 1, self._dead, np.int64)
        frees = np.zeros(len(place) + 1)
        np.copyto(places[:-1], place, where=states.alive)
        np.copyto(frees[:-1], free, where=states.alive)
        return places, frees

    # --- building -----------------------------------------------------------------------------------------

    def _serving(self, sides: "Sequence[_CardSide]", group: IntArray) -> BoolArray:
        serves = np.zeros((len(sides), self._levels, self._core_levels), np.bool_)
        task = int(group[0])
        for row, side in enumerate(sides):
            if side.fits[task]:
                serves[row, side.mem_level[task] :, side.core_level[task] :] = True
        return np.concatenate([serves.reshape(-1), [False]])

    def _weights(
        self, tasks: "_Tasks", host: tuple[Any, Any], group: IntArray, hosts: tuple[int, int]
    ) -> Floats:
        weights = np.zeros((*hosts, _MOST_CARDS + 1))
        for task in group.tolist():
            weights[host[0][task] :, host[1][task] :, : int(tasks.nums[task])] += tasks.share[task]
        flat: Floats = weights.reshape(hosts[0] * hosts[1], -1)
        return flat


@dataclass(frozen=True, slots=True)
class Looked:
    """States in the tables; one entry per state, and a last one for no card."""

    place: IntArray
    free: Floats  # in cards
    serves: list[BoolArray]  # per group of requests for several cards


@dataclass(frozen=True, slots=True)
class Before:
    """Nodes without the pod, one entry per node."""

    unusable: Floats  # in cards
    single: Floats  # of that: what serves no request for single cards
    hosts: IntArray  # class of what is left of CPU and memory
    counts: list[IntArray]  # per group: cards that serve it
    capacities: list[Floats]  # per group: what is free of them


class Growths:
    """The growth of unusable capacity by one request, on each of some nodes."""

    def __init__(
        self,
        tables: Tables,
        now: Looked,
        then: Looked,
        codes: IntArray,
        passes: BoolArray,
        before: Before,
        host_after: Host,
    ) -> None:
        """`then`: the states `now` with one device of the request; `passes`: the cards that can take it."""
        hosts = tables.host_class(host_after)
        self._codes = codes
        self._hosts = hosts
        self._passes = passes
        self._taken = tables.unfit(then, hosts, codes, less=now)
        untouched = before.single
        if not np.array_equal(hosts, before.hosts):
            untouched = _row_sums(tables.unfit(now, hosts, codes))
        self._base: Floats = untouched - before.unusable
        self._before = before
        self._groups = [
            _GroupThen(
                group.weight,
                (serves & ~serves_then).view(np.int8),
                then.free * serves_then - now.free * serves,
            )
            for group, serves, serves_then in zip(tables.groups, now.serves, then.serves, strict=True)
        ]

    @cached_property
    def each(self) -> Floats:
        """(nodes, cards): the growth if the request takes this one card; infinite where it cannot."""
        total = self._taken + self._base[:, None]
        groups = zip(self._groups, self._before.counts, self._before.capacities, strict=True)
        for group, count, capacity in groups:
            kept = group.weight[self._hosts, count][:, None]
            fewer = group.weight[self._hosts, np.maximum(count - 1, 0)][:, None]
            if not kept.any() and not fewer.any():
                continue
            weight = np.where(group.lost.take(self._codes), fewer, kept)
            changed = group.change.take(self._codes)
            changed += capacity[:, None]
            changed *= weight
            total += changed
        total[~self._passes] = np.inf
        return total

    def of_cards(self, node: int, cards: Sequence[int]) -> float:
        """The growth of this node if the request takes these cards, both by their positions."""
        chosen = list(cards)
        codes = self._codes[node, chosen]
        total = float(self._base[node] + self._taken[node, chosen].sum())
        groups = zip(self._groups, self._before.counts, self._before.capacities, strict=True)
        for group, count, capacity in groups:
            left = max(int(count[node] - group.lost[codes].sum()), 0)
            held = capacity[node] + group.change[codes].sum()
            total += float(group.weight[self._hosts[node], left] * held)
        return total

    def best(self, nums: int) -> Floats:
        """Per node the growth if the request takes the `nums` (>= 1) cards that grow it least each;
        infinite where it cannot."""
        if nums == 1:
            return _row_minima(self.each)
        width = self.each.shape[1]
        if nums > width:
            return np.full(len(self.each), np.inf)
        # positive floats sort like integers; with the position in the lowest bits that is faster than argsort
        positions = (1 << (width - 1).bit_length()) - 1
        keys = (self.each + _OFFSET).view(np.int64)
        keys &= ~positions
        keys |= np.arange(width)
        keys.sort(axis=1)
        chosen = (keys[:, :nums] & positions) + (np.arange(len(keys)) * width)[:, None]
        codes = self._codes.reshape(-1).take(chosen)
        total: Floats = _row_sums(self._taken.reshape(-1).take(chosen)) + self._base
        groups = zip(self._groups, self._before.counts, self._before.capacities, strict=True)
        for group, count, capacity in groups:
            left = count - _row_sums(group.lost.take(codes))
            held = capacity + _row_sums(group.change.take(codes))
            total += group.weight[self._hosts, np.maximum(left, 0)] * held
        total[keys[:, nums - 1] >= _INFINITE] = np.inf
        return total


def _row_sums(values: Columns) -> Columns:
    """Sums of rows (of flags: up to `_MOST_CARDS`); a product of matrices would wait for other threads."""
    return _halved(np.add, values)


def _row_minima(values: Columns) -> Columns:
    """Minima of rows."""
    return _halved(np.minimum, values)


def _halved(both: np.ufunc, values: Columns) -> Columns:
    """Rows reduced by halving: a fraction of the time of `reduce(axis=1)` on short rows."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        rest = values[:, 2 * half :]
        values = both(values[:, :half], values[:, half : 2 * half])
        if rest.shape[1]:
            values[:, :1] = both(values[:, :1], rest)
    return values[:, 0]


class _GroupThen(NamedTuple):
    """What one device more changes for a group of requests for several cards."""

    weight: Floats  # (host class, cards that serve it)
    lost: NDArray[np.int8]  # per state: 1 where it serves it no more
    change: Floats  # per state: of what is free of the cards that serve it


@dataclass(frozen=True, slots=True)
class _Tasks:
    """The kinds of requests as columns."""

    kinds: tuple[RequestKind, ...]
    share: Floats
    nums: IntArray
    mem: IntArray  # MiB; 0: `percent`
    percent: IntArray
    cores: IntArray
    cpu: IntArray
    host_mem: IntArray

    @classmethod
    def of(cls, shares: Mapping[RequestKind, float]) -> "_Tasks":
        kinds = tuple(shares)

        def column(values: list[int]) -> IntArray:
            return np.array(values, np.int64)

        return cls(
            kinds,
            np.array([shares[kind] for kind in kinds]),
            column([min(kind.nums, _MOST_CARDS + 1) for kind in kinds]),
            column([kind.memreq for kind in kinds]),
            column([kind.mem_percent for kind in kinds]),
            column([min(kind.cores, MAX_CORES) for kind in kinds]),
            column([kind.host.cpu for kind in kinds]),
            column([kind.host.mem for kind in kinds]),
        )

    def groups(self) -> list[IntArray]:
        """Tasks that want several equal cards, by the size of card; the groups that ask for most cards."""
        found: dict[tuple[Any, ...], list[int]] = {}
        for task in np.flatnonzero(self.nums > 1).tolist():
            kind = self.kinds[task]
            size = (
                kind.memreq,
                kind.mem_percent,
                kind.cores,
                kind.use_types,
                kind.no_use_types,
                kind.modes,
            )
            found.setdefault(size, []).append(task)
        cards = self.share * self.nums
        asked = {size: cards[tasks].sum() / cards.sum() for size, tasks in found.items()}
        ordered = sorted(
            (size for size in found if asked[size] >= _LEAST_GROUP), key=lambda size: -asked[size]
        )
        return [np.array(found[size], np.int64) for size in ordered[:_MOST_GROUPS]]


class _CardSide:
    """Where each task stands on one kind of card."""

    def __init__(self, tasks: _Tasks, kind: CardKind) -> None:
        self.per_mib = _BUCKETS / kind.devmem if kind.devmem > 0 else 0.0
        self.per_core = _BUCKETS / kind.devcore if kind.devcore > 0 else 0.0
        mem = np.where(tasks.mem > 0, tasks.mem, kind.devmem * tasks.percent // 100)
        allowed = [
            Selection(use_types=one.use_types, no_use_types=one.no_use_types, modes=one.modes).allows_model(
                kind.type, kind.mode
            )
            for one in tasks.kinds
        ]
        self.fits = (
            np.array(allowed, np.bool_) & (mem <= max(kind.devmem, 0)) & (tasks.cores <= max(kind.devcore, 0))
        )
        mem_bucket = (mem * self.per_mib).astype(np.int64)
        core_bucket = (tasks.cores * self.per_core).astype(np.int64)
        weight = tasks.share * self.fits
        self.mem = _levels(mem_bucket[self.fits], weight[self.fits], _MEM_LEVELS)
        self.cores = _levels(core_bucket[self.fits], weight[self.fits], _CORE_LEVELS)
        self.mem_level = np.searchsorted(self.mem, mem_bucket) + 1
        self.core_level = np.searchsorted(self.cores, core_bucket) + 1
        buckets = np.arange(_BUCKETS + 1)
        self.mem_lut = np.searchsorted(self.mem, buckets, "right")
        self.core_lut = np.searchsorted(self.cores, buckets, "right")
        if kind.devcore > 0:  # a card without a free core serves nobody (fit check 12)
            self.core_lut[0] = 0


def _levels(values: IntArray, weights: Floats, most: int) -> IntArray:
    """Ascending distinct values, at most `most`: the heaviest and the largest."""
    distinct, inverse = np.unique(values, return_inverse=True)
    if len(distinct) <= most:
        return distinct
    heavy = np.bincount(inverse, weights, len(distinct))
    heavy[-1] = np.inf
    return np.sort(distinct[np.argsort(-heavy, kind="stable")[:most]])


def _table_rows(kinds: Sequence[CardKind | None]) -> tuple[list[CardKind], IntArray]:
    """The kinds of cards that get tables, and per code which."""
    rows = sorted({kind for kind in kinds if kind is not None}, key=lambda kind: (kind.devmem, kind))
    if len(rows) > _MOST_KINDS:
        step = len(rows) / _MOST_KINDS
        rows = [rows[int(at * step)] for at in range(_MOST_KINDS)]
    at_row = {kind: row for row, kind in enumerate(rows)}
    memories = np.array([kind.devmem for kind in rows])
    found = [
        0 if kind is None else at_row.get(kind, int(np.abs(memories - kind.devmem).argmin()) if rows else 0)
        for kind in kinds
    ]
    return rows, np.array(found, np.int64)
