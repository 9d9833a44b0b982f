"""One `/filter` in progress: from the mask to a reserved node or the reasons of all (scheduler.md §6.6).

A search may be spread over many turns of the loop. Whatever it learned about a node is stamped with the
node's version and the namespace's quota; after any change of the state it drops what is no longer true, so
the answer always holds for the state it is given on.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from hami.scheduler.core.answers import NoFit, Placement, PlacementError, PodRequest, Reservation
from hami.scheduler.core.masks import Checks, Mask, may_fit, quota_checks
from hami.scheduler.core.nodes import Node
from hami.scheduler.core.placement import NodeFit, fit_node, has_bonus
from hami.scheduler.core.policies import SPREAD
from hami.scheduler.core.reasons import Texts, vector_reasons
from hami.scheduler.core.texts import UNREGISTERED, is_unresolvable, success_message
from hami.scheduler.core.world import World
from hami.vendors.selection import policy_words
from hami.vendors.types import UNLIMITED, BoolArray, ContainerRequest, QuotaView

ALL_FITTED = 64  # up to so many candidates every one is judged exactly
SCORES_SHOWN = 20  # above: so many scores in the event
_REMEMBERED = 16  # request signatures
_HITS_PER_FIT = 64  # remembered fits that cost as much as one exact fit
_SINGLE_STEPS = 3  # best nodes looked up one by one before the rest is sorted

Reserve = Callable[[PodRequest, Node, NodeFit, float], Reservation]
Stamp = tuple[int, Hashable]


class FitMemo:
    """Exact fits of the last few request signatures, and complete answers of the current version."""

    def __init__(self) -> None:
        self._fits: OrderedDict[Hashable, dict[int, tuple[Stamp, NodeFit]]] = OrderedDict()
        self._refusals: dict[tuple[Hashable, Hashable, Mask], NoFit] = {}
        self._version = -1

    def fits(self, signature: Hashable) -> dict[int, tuple[Stamp, NodeFit]]:
        """Row -> stamp and fit of one signature; the caller fills it."""
        found = self._fits.setdefault(signature, {})
        self._fits.move_to_end(signature)
        if len(self._fits) > _REMEMBERED:
            self._fits.popitem(last=False)
        return found

    def refusals(self, version: int) -> dict[tuple[Hashable, Hashable, Mask], NoFit]:
        """Refusals that hold for this version of the state."""
        if self._version != version or len(self._refusals) > _REMEMBERED:
            self._refusals = {}
            self._version = version
        return self._refusals


class Search:
    """Decides one pod. `advance` until it answers; a Placement is reserved when it is returned."""

    def __init__(
        self, world: World, memo: FitMemo, request: PodRequest, mask: Mask, now: float, reserve: Reserve
    ) -> None:
        self._world = world
        self._memo = memo
        self._request = request
        self._mask = mask
        self._now = now
        self._reserve = reserve
        self._answer: Placement | NoFit | None = None
        self._closed = ""
        self._version = -1
        self._fitted: dict[int, tuple[Stamp, NodeFit]] = {}
        self._failed: dict[int, tuple[Stamp, str]] = {}
        self._all_needed = has_bonus(world.profiles, request)
        self._spread = request.node_policy == SPREAD

    @property
    def uid(self) -> str:
        return self._request.info.uid

    @property
    def open(self) -> bool:
        """Not answered and not closed."""
        return self._answer is None and not self._closed

    def close(self, why: str) -> None:
        """The pod is gone or a newer search took over: `advance` raises `PlacementError` from now on."""
        self._closed = why

    def advance(self, fits: int) -> Placement | NoFit | None:
        """Judge up to `fits` (>= 1) nodes exactly; None: not decided yet. Raises `PlacementError` once
        closed."""
        if self._answer is not None:
            return self._answer
        if self._closed:
            raise PlacementError(self._closed)
        if self._version != self._world.version:
            self._refresh()
        self._credit = fits * _HITS_PER_FIT
        self._answer = self._decide()
        return self._answer

    # --- what holds now -----------------------------------------------------------------------------------

    def _refresh(self) -> None:
        world, request = self._world, self._request
        self._version = world.version
        self._quotas: Mapping[str, QuotaView] = world.quotas(request.info.namespace, request.vendors)
        self._quota_stamp: Hashable = tuple(sorted(self._quotas.items(), key=lambda item: item[0]))
        candidates = self._mask.rows(world.table)
        self._candidates = candidates
        self._first = self._first_request()
        only = sum(len(slot) for slot in request.slots) == 1
        self._simple = self._first if only else None  # for it the mask is as good as the exact fit
        checks = {self._simple[0].type: self._simple[1]} if self._simple is not None else {}
        self._masked: BoolArray = may_fit(world.table, world.profiles, request, checks) & candidates
        self._fitted = {row: it for row, it in self._fitted.items() if self._holds(row, it[0])}
        self._failed = {row: it for row, it in self._failed.items() if self._holds(row, it[0])}
        self._alive: BoolArray = self._masked.copy()
        self._alive[list(self._fitted)] = False
        self._alive[list(self._failed)] = False
        self._left: list[int] | None = None  # rows to judge, best last; None: looked up one by one
        self._steps = 0
        self._texts: Texts | None = None  # reasons found by vectors, once needed
        self._unexplained: list[int] = []
        few = len(self._mask.names) <= ALL_FITTED
        self._judge_all = self._all_needed or (few and (self._simple is None or self._any_inexact()))

    def _holds(self, row: int, stamp: Stamp) -> bool:
        return row < len(self._candidates) and bool(self._candidates[row]) and stamp == self._stamp(row)

    def _stamp(self, row: int) -> Stamp:
        node = self._world.table.by_row[row]
        return (-1 if node is None else node.version, self._quota_stamp)

    def _first_request(self) -> tuple[ContainerRequest, Checks] | None:
        """The pod's first device request, with checks that judge it exactly on the nodes as they are; else
        None."""
        if self._request.invalid:
            return None
        (word, wanted), *_ = next(slot for slot in self._request.slots if slot).items()
        profile = self._world.profiles[word]
        checks = quota_checks(profile, wanted, self._quotas.get(word, UNLIMITED))
        words = policy_words(self._request.card_policy)
        if checks is None or not profile.vector_exact(profile, wanted, self._request.info, words):
            return None
        return wanted, checks

    def _any_inexact(self) -> bool:
        """Whether a candidate has cards (MIG) that the mask does not judge exactly."""
        assert self._simple is not None
        word = self._simple[0].type
        repeatable = self._world.profiles[word].hooks.repeatable
        if repeatable is None:
            return False
        nodes = (self._node(row) for row in np.flatnonzero(self._masked).tolist())
        return any(repeatable(card.info) for node in nodes for card in node.vendors[word].cards)

    # --- deciding -----------------------------------------------------------------------------------------

    def _decide(self) -> Placement | NoFit | None:
        while not self._fitted or self._judge_all:
            row = self._next()
            if row < 0:
                break
            if self._credit <= 0:
                return None
            self._judge(row)
        if self._fitted:
            return self._placement()
        return self._refusal()

    def _next(self) -> int:
        """The next masked row to judge, the best one first; -1 when there is none left. Looks only."""
        table = self._world.table
        if self._left is None:
            if not self._judge_all and self._steps < _SINGLE_STEPS:
                return table.best(self._alive, lowest=self._spread)
            self._left = table.worst_first(self._alive, lowest=self._spread)
        while self._left and not self._alive[self._left[-1]]:
            self._left.pop()
        return self._left[-1] if self._left else -1

    def _judge(self, row: int) -> None:
        stamp = self._stamp(row)
        remembered = self._memo.fits(self._request.signature)
        known = remembered.get(row)
        if known is not None and known[0] == stamp:
            fit = known[1]
            self._credit -= 1
        else:
            node = self._world.table.by_row[row]
            assert node is not None
            fit = fit_node(node, self._request, self._quotas)
            remembered[row] = (stamp, fit)
            self._credit -= _HITS_PER_FIT
        self._steps += 1
        self._alive[row] = False
        if fit.allocations is None:
            self._failed[row] = (stamp, fit.reason)
        else:
            self._fitted[row] = (stamp, fit)

    # --- a node was found ---------------------------------------------------------------------------------

    def _placement(self) -> Placement:
        table, names = self._world.table, len(self._mask.names)
        judged = {row: float(table.base[row]) + fit.bonus for row, (_, fit) in self._fitted.items()}
        chosen = max(judged, key=lambda row: self._preference(row, judged[row]))
        fits, scores = len(judged), judged
        exact = names <= ALL_FITTED
        if not self._judge_all:
            maybe = self._masked.copy()
            maybe[list(self._failed)] = False
            fits = int(np.count_nonzero(maybe))
            scores = {**self._base_scores(maybe), **judged}
        ordered = sorted(scores, key=lambda row: self._preference(row, scores[row]))
        if not exact:
            ordered = ordered[-SCORES_SHOWN:]
        shown = tuple((self._node(row).name, scores[row]) for row in ordered)
        node = self._node(chosen)
        message = success_message(node.name, names - fits, fits, shown, exact=exact)
        reservation = self._reserve(self._request, node, self._fitted[chosen][1], self._now)
        return Placement(reservation, message, names - fits, fits, shown, exact)

    def _base_scores(self, rows: BoolArray) -> dict[int, float]:
        """Scores of the best of these rows, as many as an event shows at most."""
        found = np.flatnonzero(rows)
        base = self._world.table.base
        if len(found) > max(ALL_FITTED, SCORES_SHOWN):
            scores = base[found] if self._spread else -base[found]
            found = found[np.argpartition(scores, SCORES_SHOWN)[:SCORES_SHOWN]]
        return {row: float(base[row]) for row in found.tolist()}

    def _preference(self, row: int, score: float) -> tuple[float, int, int]:
        """Sort key, best last: score by policy, then fewer cards, then name order (D2)."""
        table = self._world.table
        return (-score if self._spread else score, -int(table.card_counts[row]), -int(table.rank()[row]))

    def _node(self, row: int) -> Node:
        node = self._world.table.by_row[row]
        assert node is not None
        return node

    # --- nothing fits -------------------------------------------------------------------------------------

    def _refusal(self) -> Placement | NoFit | None:
        known = self._memo.refusals(self._version)
        key = (self._request.signature, self._quota_stamp, self._mask)
        found = known.get(key)
        if found is not None:
            return found
        if self._texts is None:
            self._explain_by_vectors()
        while self._unexplained:
            if self._credit <= 0:
                return None
            self._judge(self._unexplained.pop())
            if self._fitted:  # the mask was wrong about this node: never say no to a node that fits
                return self._placement()
        known[key] = answer = self._no_fit()
        return answer

    def _explain_by_vectors(self) -> None:
        table = self._world.table
        open_rows = self._candidates.copy()
        open_rows[list(self._failed)] = False
        if self._request.invalid:
            self._texts = np.full(len(open_rows), self._request.invalid, object)
            return
        self._texts = np.full(len(open_rows), "", object)
        if self._first is not None:
            wanted, checks = self._first
            profile = self._world.profiles[wanted.type]
            self._texts, known = vector_reasons(table, profile, wanted, self._request, checks)
            open_rows &= ~known
        self._unexplained = np.flatnonzero(open_rows).tolist()

    def _no_fit(self) -> NoFit:
        assert self._texts is not None
        for row, (_, reason) in self._failed.items():
            self._texts[row] = reason
        rows = self._mask.row_numbers(self._world.table)
        texts: list[str] = self._texts[rows].tolist()
        reasons = dict(zip(self._mask.registered, texts, strict=True))
        beyond = {text for text in set(texts) if is_unresolvable(text)}
        unresolvable = {name: text for name, text in reasons.items() if text in beyond} if beyond else {}
        failed = {name: text for name, text in reasons.items() if text not in beyond} if beyond else reasons
        return NoFit(
            failed, {**unresolvable, **dict.fromkeys(self._mask.unregistered, UNREGISTERED)}, self._version
        )
