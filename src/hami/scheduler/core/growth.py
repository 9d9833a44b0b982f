"""The policy `fragmentation-aware`: nodes and cards by the growth of their unusable capacity.

What a node would become with a pod on it is remembered per request signature and recomputed only for nodes
that changed since, for all of them at once.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.bank_view import BankView
from hami.scheduler.core.columns import Bank
from hami.scheduler.core.hosts import NOTHING, HostAmount
from hami.scheduler.core.masks import Passing
from hami.scheduler.core.mix import RequestMix
from hami.scheduler.core.nodes import Node, NodeTable, OnNode
from hami.scheduler.core.ranking import FloatArray
from hami.scheduler.core.unusable import Growths, Host, States, Tables
from hami.vendors.engine import card_healthy, cordoned_ids
from hami.vendors.types import BoolArray, Card, ContainerRequest, IntArray

HOST_WEIGHT: Final = 6.0
"""Cards that a node's whole CPU, or its whole memory, is worth. Pods without cards go where CPU is left, and
cards without CPU serve nobody: of nodes that fragment alike the one with more CPU and memory left is taken.
From 4 on the placement bench is flat; 0 loses several points there."""

_POINTS: Final = 10.0  # of score per card, as a full card adds to the base score of scheduler.md §7.4
_DECIMALS: Final = 6
_UNITS: Final = 10.0**_DECIMALS
_REMEMBERED: Final = 16  # request signatures


class Fragmentation:
    """The mix of requests and what follows from it for the nodes of one table."""

    def __init__(self, table: NodeTable, mix: RequestMix) -> None:
        self.mix = mix
        self._table = table
        self._tables: dict[str, tuple[tuple[int, int], Tables]] = {}
        self._memo: OrderedDict[Hashable, _Remembered] = OrderedDict()
        self._views: dict[Bank, BankView] = {}

    def epoch(self, words: Iterable[str]) -> Hashable:
        """Changes with the mix of these vendors' requests."""
        return tuple(self._stamp(word) for word in words)

    # --- one node -----------------------------------------------------------------------------------------

    def card_growths(
        self, node: Node, there: OnNode, cards: Sequence[Card], wanted: ContainerRequest, request: PodRequest
    ) -> list[float]:
        """Per card the growth if it takes one device of the (resolved) request."""
        tables = self._of(there.profile.common_word)
        states = self._states(node, there, cards)
        now, then = tables.look(states), tables.look(states.with_request(wanted))
        codes = np.arange(len(cards))[None, :]
        left = node.host_left
        before = tables.before(now, codes, _host(left))
        host_after = _host(_without(left, request.host))
        passes = np.ones(codes.shape, np.bool_)
        growths: list[float] = (
            Growths(tables, now, then, codes, passes, before, host_after).each[0].round(_DECIMALS).tolist()
        )
        return growths

    def node_growth(self, node: Node, request: PodRequest, after: Mapping[str, Sequence[Card]]) -> float:
        """Growth with the pod on the node; `after`: its cards by vendor then, complete."""
        left = node.host_left
        then = _without(left, request.host)
        host = Host(np.array([left.cpu, then.cpu]), np.array([left.mem, then.mem]))
        total = 0.0
        for word in request.vendors:
            there = node.vendors[word]
            tables = self._of(there.profile.common_word)
            looked = tables.look(self._states(node, there, (*there.cards, *after[word])))
            codes = np.arange(2 * len(there.cards)).reshape(2, -1)
            unusable = tables.before(looked, codes, host).unusable
            total += float(unusable[1] - unusable[0])
        return total

    def score(self, node: Node, request: PodRequest, growth: float) -> float:
        """The node's score, highest best, from its growth in cards; rounded as `scores` rounds."""
        share = self._table.host_taken.item(node.row)
        if request.host != NOTHING:
            cpu, mem = node.host_part
            share += cpu * request.host.cpu + mem * request.host.mem
        score: float = -_POINTS * (growth + HOST_WEIGHT * share)
        return round(score * _UNITS) / _UNITS

    def _states(self, node: Node, there: OnNode, cards: Sequence[Card]) -> States:
        """States of the node's cards, or of them all several times over."""
        start = there.bank_row * there.bank.width
        cordoned = cordoned_ids(node.facts.annotations)
        columns = np.array(
            [
                (
                    card.info.devmem,
                    card.info.devmem - card.used.mem,
                    card.info.devcore - card.used.cores,
                    card.info.count - card.used.slots,
                    card.used.slots,
                    card_healthy(there.profile, card.info, card.used) and card.info.id not in cordoned,
                )
                for card in cards
            ],
            np.int64,
        ).T
        kind = np.resize(there.bank.kind[start : start + len(there.cards)], len(cards))
        devmem, free_mem, free_cores, free_slots, used_slots, alive = columns
        return States(kind, devmem, free_mem, free_cores, free_slots, used_slots, alive > 0)

    # --- all nodes ----------------------------------------------------------------------------------------

    def scores(
        self,
        request: PodRequest,
        wanted: ContainerRequest,
        rows: BoolArray,
        passing: Passing,
        bound: int | None,
    ) -> "Estimates":
        """Per row of the table the node's score if `wanted`, the pod's first device request, takes the cards
        that grow least; highest best; minus infinity outside `rows`. `passing`: its cards per bank; `bound`:
        what the quota has to do with that (`masks.quota_bound`)."""
        worked_out: dict[Bank, tuple[Growths, IntArray]] = {}
        table = self._table
        tables = self._of(wanted.type)
        remembered = self._remembered((request.signature, self.epoch(request.vendors), bound), len(rows))
        current = table.versions[: len(rows)] + table.host_versions[: len(rows)]
        for bank, (_, passes) in passing.items():
            there = bank.node_rows
            at = np.flatnonzero(rows[there] & (remembered.stamps[there] != current[there]))
            if not len(at):
                continue
            view = self._views.setdefault(bank, BankView(bank))
            view.refresh(tables, table, current[there])
            some: IntArray | slice = slice(None) if len(at) == bank.rows else at
            growths = view.growths(tables, table, request, wanted, passes, some)
            worked_out[bank] = (growths, at)
            remembered.growths[there[some]] = growths.best(wanted.nums)
            remembered.stamps[there[some]] = current[there[some]]
        total = self._host_share(slice(0, len(rows)), request) * HOST_WEIGHT
        total += remembered.growths[: len(rows)]
        total *= -_POINTS
        np.round(total, _DECIMALS, out=total)
        total[~rows] = -np.inf
        return Estimates(total, worked_out)

    def _host_share(self, rows: IntArray | slice, request: PodRequest) -> FloatArray:
        """Shares of CPU and of memory that are taken with the pod on the nodes, added up."""
        share: FloatArray = self._table.host_taken[rows]
        if request.host != NOTHING:
            part = self._table.host_part[rows]
            share = share + (part[:, 0] * request.host.cpu + part[:, 1] * request.host.mem)
        return share

    def _remembered(self, key: Hashable, rows: int) -> "_Remembered":
        found = self._memo.get(key)
        if found is None or len(found.stamps) < rows:
            found = self._memo[key] = _Remembered(rows)
        self._memo.move_to_end(key)
        if len(self._memo) > _REMEMBERED:
            self._memo.popitem(last=False)
        return found

    # --- tables -------------------------------------------------------------------------------------------

    def _stamp(self, word: str) -> tuple[int, int]:
        return self.mix.of(word).version, self._table.columns[word].tables.kinds.version

    def _of(self, word: str) -> Tables:
        stamp = self._stamp(word)
        known = self._tables.get(word)
        if known is None or known[0] != stamp:
            kinds = self._table.columns[word].tables.kinds.values
            known = self._tables[word] = (stamp, Tables(self.mix.of(word).shares(), kinds))
        return known[1]


@dataclass(frozen=True, slots=True)
class Estimates:
    """Scores of nodes on which a request takes the cards that grow least, for the state they are made of."""

    scores: FloatArray  # per row of the table
    worked_out: Mapping[Bank, tuple[Growths, IntArray]]  # not remembered ones, and their bank rows, ascending

    def growth_of(self, there: OnNode, cards: Sequence[int]) -> float | None:
        """The growth if it takes the cards at these positions; None if that was not worked out just now."""
        growths, rows = self.worked_out.get(there.bank, (None, None))
        if growths is None or rows is None:
            return None
        at = int(np.searchsorted(rows, there.bank_row))
        if at == len(rows) or rows[at] != there.bank_row:
            return None
        return growths.of_cards(at, cards)


class _Remembered:
    """Growth per row, and the state of the row it holds for (-1: none)."""

    __slots__ = ("growths", "stamps")

    def __init__(self, rows: int) -> None:
        self.growths: FloatArray = np.full(rows, np.inf)
        self.stamps: IntArray = np.full(rows, -1, np.int64)


def _host(left: HostAmount) -> Host:
    return Host(np.array([left.cpu]), np.array([left.mem]))


def _without(left: HostAmount, amount: HostAmount) -> HostAmount:
    return HostAmount(left.cpu - amount.cpu, left.mem - amount.mem)
