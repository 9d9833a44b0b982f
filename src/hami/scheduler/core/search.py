"""One `/filter` in progress: from the mask to a reserved node or the reasons of all (scheduler.md §6.6).

A search may be spread over many turns of the loop. Whatever it learned about a node is stamped with the
node's version and the namespace's quota; after any change of the state it drops what is no longer true, so
the answer always holds for the state it is given on.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping

import numpy as np

from hami.scheduler.core.answers import NoFit, Placement, PlacementError, PodRequest, Reservation
from hami.scheduler.core.growth import Estimates
from hami.scheduler.core.masks import Checks, Mask, Passing, may_fit, quota_bound, quota_checks
from hami.scheduler.core.nodes import Node
from hami.scheduler.core.placement import NodeFit, cards_with, fit_node, has_bonus
from hami.scheduler.core.policies import FRAGMENTATION, SPREAD
from hami.scheduler.core.ranking import FloatArray
from hami.scheduler.core.reasons import Texts, vector_reasons
from hami.scheduler.core.texts import UNREGISTERED, is_unresolvable, success_message
from hami.scheduler.core.world import World
from hami.vendors.selection import policy_words
from hami.vendors.types import UNLIMITED, BoolArray, ContainerRequest, QuotaView

ALL_FITTED = 64  # up to so many candidates every one is judged exactly
SCORES_SHOWN = 20  # above: so many scores in the event
_REMEMBERED = 16  # request signatures
_HITS_PER_FIT = 64  # remembered fits that cost as much as one exact fit
_AHEAD = SCORES_SHOWN  # best nodes looked up at first; the rest is sorted once they are judged
_COMPARED = 8  # best nodes of a fragmentation-aware pod that are compared exactly

Reserve = Callable[[PodRequest, Node, NodeFit, float], Reservation]
Stamp = tuple[int, Hashable]
Shown = tuple[tuple[str, float], ...]


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
        self._spread = request.node_policy == SPREAD
        self._growth_decides = request.node_policy == FRAGMENTATION
        self._has_bonus = has_bonus(world.profiles, request)
        few = len(mask.names) <= ALL_FITTED
        self._bounded = self._has_bonus and not self._growth_decides and not few
        self._mix_chooses_cards = FRAGMENTATION in policy_words(request.card_policy)

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
        passing: dict[ContainerRequest, Passing] | None = {} if self._growth_decides else None
        self._masked: BoolArray = may_fit(world.table, world.profiles, request, checks, passing) & candidates
        self._mix_epoch = world.fragmentation.epoch(request.vendors) if self._mix_chooses_cards else None
        self._scores: FloatArray = world.table.base
        self._estimates = Estimates(self._scores, {})
        if passing is not None and not request.invalid:
            wanted = next(iter(next(slot for slot in request.slots if slot).values()))
            passed = passing.get(wanted, {})
            left = UNLIMITED if self._simple is None else self._quotas.get(wanted.type, UNLIMITED)
            bound = quota_bound(wanted, left, passed)
            self._estimates = world.fragmentation.scores(request, wanted, self._masked, passed, bound)
            self._scores = self._estimates.scores
        self._fitted = {row: it for row, it in self._fitted.items() if self._holds(row, it[0])}
        self._failed = {row: it for row, it in self._failed.items() if self._holds(row, it[0])}
        self._reach = self._scores
        if self._bounded:
            reach = world.reach.of(request, self._masked)
            self._bounded = reach is not None
            self._reach = self._scores if reach is None else reach
        self._grown: dict[int, float] = {}  # scores of fragmentation-aware nodes judged
        self._best: tuple[float, int] | None = None  # preference of the best node judged, if that counts
        self._alive: BoolArray = self._masked.copy()
        if self._fitted or self._failed:
            self._alive[[*self._fitted, *self._failed]] = False
        self._left: list[int] = []  # the next rows to judge, best last
        self._top: list[int] = []  # the best rows of all masked ones, best first, once they were looked up
        self._steps = 0
        self._texts: Texts | None = None  # reasons found by vectors, once needed
        self._unexplained: list[int] = []
        self._ranked = self._reach is world.table.base  # in the order that the table keeps
        few = len(self._mask.names) <= ALL_FITTED
        inexact = any(
            needs.inexact is not None for one in (passing or {}).values() for needs, _ in one.values()
        )
        self._estimated = self._simple is not None and not inexact  # cards that are named have known growths
        self._compares = self._growth_decides and not (
            self._estimated and request.card_policy == FRAGMENTATION
        )
        self._judge_all = (self._has_bonus and not self._bounded) or (
            few and (self._simple is None or self._compares or self._any_inexact())
        )
        self._goes_on = self._judge_all or self._compares or self._bounded
        for row, (_, fit) in self._fitted.items():
            self._note_best(row, fit)

    def _holds(self, row: int, stamp: Stamp) -> bool:
        return row < len(self._candidates) and bool(self._candidates[row]) and stamp == self._stamp(row)

    def _stamp(self, row: int) -> Stamp:
        table = self._world.table
        node = table.by_row[row]
        version = -1 if node is None else node.version
        if not self._mix_chooses_cards:
            return (version, self._quota_stamp)
        return (version, (self._quota_stamp, self._mix_epoch, int(table.host_versions[row])))

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
        while not self._fitted or self._goes_on:
            row = self._next()
            if row < 0 or (self._fitted and not self._judge_all and not self._may_be_better(row)):
                break
            if self._credit <= 0:
                return None
            self._judge(row)
        if self._fitted:
            return self._placement()
        return self._refusal()

    def _may_be_better(self, row: int) -> bool:
        """Whether the next row is worth judging: its score is what it can reach, or an estimate of that."""
        if self._bounded:  # rows come in the order of what they can reach
            return self._best is None or self._preference(row, float(self._reach[row])) > self._best
        if not self._compares or self._steps >= _COMPARED:
            return False
        return self._best is None or float(self._scores[row]) > self._best[0]

    def _next(self) -> int:
        """The next masked row to judge, the best one first; -1 when there is none left. Looks only."""
        while self._left and not self._alive[self._left[-1]]:
            self._left.pop()
        if not self._left:
            first = self._steps == 0 and not self._judge_all
            best = self._best_rows(self._alive, _AHEAD if first else len(self._alive))
            if first and not (self._fitted or self._failed):
                self._top = best
            self._left = best[::-1]
        return self._left[-1] if self._left else -1

    def _best_rows(self, rows: BoolArray, most: int) -> list[int]:
        """The best of these rows by what they can reach, best first."""
        table = self._world.table
        if self._ranked:
            return table.ranking(lowest=self._spread).among(rows, most)
        return table.best(rows, self._reach, most, lowest=self._spread)

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
            fit = fit_node(node, self._request, self._quotas, self._world.fragmentation)
            remembered[row] = (stamp, fit)
            self._credit -= _HITS_PER_FIT
        self._steps += 1
        self._alive[row] = False
        if fit.allocations is None:
            self._failed[row] = (stamp, fit.reason)
        else:
            self._fitted[row] = (stamp, fit)
            self._note_best(row, fit)

    def _note_best(self, row: int, fit: NodeFit) -> None:
        if self._bounded or self._compares:
            preference = self._preference(row, self._score(row, fit))
            self._best = preference if self._best is None else max(self._best, preference)

    # --- a node was found ---------------------------------------------------------------------------------

    def _placement(self) -> Placement:
        names = len(self._mask.names)
        judged = {row: self._score(row, fit) for row, (_, fit) in self._fitted.items()}
        chosen = max(judged, key=lambda row: self._preference(row, judged[row]))
        fits = len(judged)
        exact = names <= ALL_FITTED
        if self._judge_all:
            shown = self._best_of(judged, fits if exact else SCORES_SHOWN)
        else:
            maybe = self._masked
            if self._failed:
                maybe = maybe.copy()
                maybe[list(self._failed)] = False
            fits = int(np.count_nonzero(maybe))
            shown = self._best_of_many(maybe, judged, fits if exact else SCORES_SHOWN)
        node = self._node(chosen)
        message = success_message(node.name, names - fits, fits, shown, exact=exact)
        reservation = self._reserve(self._request, node, self._fitted[chosen][1], self._now)
        return Placement(reservation, message, names - fits, fits, shown, exact)

    def _best_of(self, scores: Mapping[int, float], most: int) -> Shown:
        """The best of these rows, as many as an event shows at most: worst first, best last."""
        ordered = sorted(scores, key=lambda row: self._preference(row, scores[row]))
        return tuple((self._node(row).name, scores[row]) for row in ordered[-most:])

    def _best_of_many(self, rows: BoolArray, judged: Mapping[int, float], most: int) -> Shown:
        """The same of all these rows, those judged among them; the score of another is what it can reach."""
        looked_at = most
        if not self._ranked and np.count_nonzero(rows) <= max(ALL_FITTED, SCORES_SHOWN):
            looked_at = len(rows)
        if rows is self._masked and looked_at <= len(self._top):
            best = self._top[:looked_at][::-1]
        else:
            best = self._best_rows(rows, looked_at)[::-1]
        scores = self._reach[best].tolist()
        if not self._ranked:
            return self._best_of({**dict(zip(best, scores, strict=True)), **judged}, most)
        by_row = self._world.table.by_row
        names = [node.name for row in best if (node := by_row[row]) is not None]
        return tuple(zip(names, scores, strict=True))

    def _score(self, row: int, fit: NodeFit) -> float:
        if self._growth_decides:
            return self._growth_score(row, fit)
        return _score(self._world.table.base[row], fit.bonus)

    def _growth_score(self, row: int, fit: NodeFit) -> float:
        """Of a fragmentation-aware pod; what the vectors found, unless the exact fit may differ."""
        if not (self._compares or self._judge_all):
            return float(self._scores[row])
        known = self._grown.get(row)
        if known is not None:
            return known
        node, fragmentation = self._node(row), self._world.fragmentation
        growth = self._estimated_growth(node, fit)
        if growth is None:
            assert fit.allocations is not None
            after = cards_with(node, self._request, fit.allocations)
            growth = fragmentation.node_growth(node, self._request, after)
        self._grown[row] = score = fragmentation.score(node, self._request, growth) + fit.bonus
        return score

    def _estimated_growth(self, node: Node, fit: NodeFit) -> float | None:
        """Growth by the cards of a fit, from what was worked out for all nodes; None where it was not."""
        if not self._estimated or self._simple is None or fit.allocations is None:
            return None
        word = self._simple[0].type
        there = node.vendors[word]
        devices = (device for slot in fit.allocations[word] for device in slot)
        return self._estimates.growth_of(there, [there.position[device.uuid] for device in devices])

    def _preference(self, row: int, score: float) -> tuple[float, int]:
        """Sort key, best last: score by policy, then fewer cards, then name order (D2)."""
        return (-score if self._spread else score, int(self._world.table.ties()[row]))

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


def _score(base: float, bonus: float) -> float:
    """A node's score, added in single precision as the base is (`Sums.base_score`)."""
    return float(np.float32(base) + np.float32(bonus))
