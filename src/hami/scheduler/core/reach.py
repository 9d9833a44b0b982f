"""The best score that a pod can get on each node, for vendors whose bonus depends on the cards chosen.

It spares the exact fit of nodes that cannot win. What a vendor says of a node is remembered per request
signature, and asked again only of nodes that changed since.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Final

import numpy as np

from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.nodes import NodeTable
from hami.scheduler.core.policies import bonus_policy
from hami.scheduler.core.ranking import FloatArray
from hami.vendors.annotate import added
from hami.vendors.types import BestBonus, BonusAsk, BoolArray, IntArray, NodePolicy, VendorProfile

_REMEMBERED: Final = 16  # request signatures


class Reach:
    """Upper bounds (under spread: lower ones) of the scores of one table's nodes."""

    def __init__(self, table: NodeTable, profiles: Mapping[str, VendorProfile]) -> None:
        self._table = table
        self._profiles = profiles
        self._memo: OrderedDict[Hashable, _Remembered] = OrderedDict()

    def of(self, request: PodRequest, rows: BoolArray) -> FloatArray | None:
        """Per row of the table; holds for `rows`, whose nodes have cards of all the vendors asked. None: some
        vendor does not say."""
        policy = bonus_policy(request.node_policy)
        found = self._remembered(request, policy, len(rows))
        if found is None:
            return None
        versions = self._table.versions[: len(rows)]
        for row in np.flatnonzero(rows & (found.versions != versions)).tolist():
            node = self._table.by_row[row]
            assert node is not None
            total = 0.0
            for word, best in found.vendors:
                total += added(best(node.facts, node.vendors[word].cards), policy)
            found.bonuses[row] = total
            found.versions[row] = versions[row]
        # in single precision, as scores are added
        bonuses = found.bonuses.astype(np.float32)
        return (self._table.base[: len(rows)].astype(np.float32) + bonuses).astype(np.float64)

    def _remembered(self, request: PodRequest, policy: NodePolicy, rows: int) -> "_Remembered | None":
        found = self._memo.get(request.signature)
        if found is None or len(found.versions) != rows:
            vendors = []
            for word in request.vendors:
                hooks = self._profiles[word].hooks
                if hooks.best_bonus is not None:
                    asked = [slot.get(word) for slot in request.slots]
                    vendors.append((word, hooks.best_bonus(BonusAsk(request.info, asked, policy))))
                elif hooks.node_bonus is not None:
                    return None
            found = self._memo[request.signature] = _Remembered(vendors, rows)
        self._memo.move_to_end(request.signature)
        if len(self._memo) > _REMEMBERED:
            self._memo.popitem(last=False)
        return found


class _Remembered:
    """What the vendors say of one request; bonus per row, and the version of the node it holds for."""

    __slots__ = ("bonuses", "vendors", "versions")

    def __init__(self, vendors: list[tuple[str, BestBonus]], rows: int) -> None:
        self.vendors = vendors
        self.bonuses: FloatArray = np.zeros(rows)
        self.versions: IntArray = np.full(rows, -1, np.int64)
