"""Candidate lists and the vector mask: which nodes may fit, for all nodes at once (scheduler.md §6.6)."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hami.protocol.errors import ObjectError
from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.columns import Bank
from hami.scheduler.core.nodes import NodeTable
from hami.scheduler.core.requests import slots_needed
from hami.vendors.fit import MAX_CORES
from hami.vendors.reasons import INSUFFICIENT_MEMORY, QUOTA_NOT_FIT
from hami.vendors.selection import policy_words
from hami.vendors.types import (
    UNLIMITED,
    BoolArray,
    CardColumns,
    ContainerRequest,
    IntArray,
    QuotaView,
    VectorCheck,
    VectorNeeds,
    VendorProfile,
)

_CACHED_LISTS = 16
_MAX_NAMES = 50_000


class Mask:
    """Candidate nodes by name, resolved to rows of the node table; resolved again after nodes come or go."""

    __slots__ = ("_by_row", "_names_version", "_rows", "names", "registered", "unregistered")

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        self.registered: Sequence[str] = ()  # aligned with `row_numbers`
        self.unregistered: Sequence[str] = ()
        self._names_version = -1
        self._rows: IntArray = np.zeros(0, np.int64)
        self._by_row: BoolArray = np.zeros(0, np.bool_)

    def rows(self, table: NodeTable) -> BoolArray:
        """Per row of the table: is it a candidate. Never write to it."""
        self._resolve(table)
        return self._by_row

    def row_numbers(self, table: NodeTable) -> IntArray:
        """Rows of the registered candidates, in the order of `registered`."""
        self._resolve(table)
        return self._rows

    def _resolve(self, table: NodeTable) -> None:
        if self._names_version == table.names_version:
            return
        rows = list(map(table.row_of.get, self.names))
        self.registered, self.unregistered = self.names, ()
        if None in rows:
            pairs = list(zip(self.names, rows, strict=True))
            self.registered = [name for name, row in pairs if row is not None]
            self.unregistered = [name for name, row in pairs if row is None]
            rows = [row for row in rows if row is not None]
        self._rows = np.array(rows, np.int64)
        self._by_row = np.zeros(len(table.by_row), np.bool_)
        self._by_row[self._rows] = True
        self._names_version = table.names_version


class MaskCache:
    """The masks of the last few distinct candidate lists."""

    def __init__(self) -> None:
        self._masks: OrderedDict[tuple[str, ...] | bytes, Mask] = OrderedDict()

    def of(self, names: Sequence[str]) -> Mask:
        key = tuple(names)
        return self._find(key) or self._keep(key, Mask(key))

    def of_json(self, raw: bytes) -> Mask:
        """Mask of a JSON list of names. Raises `ObjectError`."""
        found = self._find(raw)
        if found is not None:
            return found
        try:
            names = msgspec.json.decode(raw, type=list[str])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ObjectError(f"invalid list of node names: {error}") from None
        if len(names) > _MAX_NAMES:
            raise ObjectError(f"{len(names)} node names, at most {_MAX_NAMES} are read")
        return self._keep(raw, Mask(names))

    def _find(self, key: tuple[str, ...] | bytes) -> Mask | None:
        mask = self._masks.get(key)
        if mask is not None:
            self._masks.move_to_end(key)
        return mask

    def _keep(self, key: tuple[str, ...] | bytes, mask: Mask) -> Mask:
        self._masks[key] = mask
        if len(self._masks) > _CACHED_LISTS:
            self._masks.popitem(last=False)
        return mask


Checks = tuple[VectorCheck, ...]
Passing = dict[Bank, tuple[VectorNeeds, BoolArray]]
"""Of one request: per bank what it asks of a card, and the cards that pass every check."""


def may_fit(
    table: NodeTable,
    profiles: Mapping[str, VendorProfile],
    request: PodRequest,
    checks: Mapping[str, Checks] | None = None,
    passing: dict[ContainerRequest, Passing] | None = None,
) -> BoolArray:
    """Per row of the table: false means the exact fit fails. Usage before the pod; every container by itself.

    `checks` take the place of a vendor's own. `passing` is filled with the cards that pass, per request.
    """
    mask: BoolArray | None = None
    for word in () if request.invalid else request.vendors:
        profile = profiles[word]
        slots = slots_needed(request, word)
        wanted = {slot[word] for slot in request.slots if word in slot}
        used = (checks or {}).get(word, profile.vector_checks)
        some = np.zeros(len(table.by_row), np.bool_)
        for bank in table.columns[word].banks():
            ok = bank.free_slots >= slots
            for one in wanted:
                needs, passes = _passing(profile, one, request, bank, used)
                ok &= served(bank, needs, passes) >= needs.cards
                if passing is not None:
                    passing.setdefault(one, {})[bank] = needs, passes
            some[bank.node_rows] = ok
        mask = some if mask is None else mask & some
    return np.zeros(len(table.by_row), np.bool_) if mask is None else mask


def quota_checks(profile: VendorProfile, wanted: ContainerRequest, left: QuotaView) -> Checks | None:
    """The vendor's checks and, where the exact fit has it, the quota, for a pod of this one request.

    None when the quota's verdict on a card depends on the cards taken before it: only the exact fit knows.
    """
    if left == UNLIMITED or "quota" not in profile.rules.checks:
        return profile.vector_checks
    if profile.hooks.quota_use is not None or profile.hooks.needs is not None:
        return None
    memory = [at for at, check in enumerate(profile.vector_checks) if check.reason == INSUFFICIENT_MEMORY]
    if not memory:
        return None
    if wanted.nums > 1:
        if not wanted.memreq and left.mem_left is not None:
            return None  # a share of each card: amounts differ
        cores = min(wanted.cores, MAX_CORES)
        pairs = ((wanted.memreq, left.mem_left), (cores, left.cores_left))
        cards = min((wanted.nums if not need else room // need) for need, room in pairs if room is not None)
        if 0 < cards < wanted.nums:
            return None

    def passes(_columns: CardColumns, needs: VectorNeeds) -> BoolArray:
        fits = np.ones(len(_columns.node), np.bool_)
        if left.mem_left is not None:
            fits &= np.less_equal(needs.mem, left.mem_left)
        if left.cores_left is not None:
            fits &= np.less_equal(needs.cores, left.cores_left)
        return fits

    before, after = profile.vector_checks[: memory[0]], profile.vector_checks[memory[0] :]
    return (*before, VectorCheck(QUOTA_NOT_FIT, passes), *after)


def quota_bound(wanted: ContainerRequest, left: QuotaView, passing: Passing) -> int | None:
    """With `quota_checks`: what tells quotas apart that let different cards pass. It is the largest share of
    a card's memory that fits into the quota (-1: none); None where the quota takes all cards alike."""
    room = left.mem_left
    if wanted.memreq or room is None:
        return None
    shares = [np.atleast_1d(needs.mem) for needs, _ in passing.values()]
    return max((int(np.max(share[share <= room], initial=-1)) for share in shares), default=-1)


def _passing(
    profile: VendorProfile, wanted: ContainerRequest, request: PodRequest, bank: Bank, checks: Checks
) -> tuple[VectorNeeds, BoolArray]:
    needs = profile.vector_needs(profile, wanted, request.info, policy_words(request.card_policy), bank)
    passes = bank.real.copy()
    for check in checks:
        ok = check.passes(bank, needs)
        if ok is not None:
            passes &= ok
    return needs, passes


def served(bank: Bank, needs: VectorNeeds, passes: BoolArray) -> NDArray[Any]:
    """Devices the passing cards of each bank row can serve at most."""
    if needs.capacity is None:
        return bank.per_node(passes)
    devices: NDArray[Any] = np.where(passes, needs.capacity, 0).reshape(bank.rows, bank.width).sum(axis=1)
    return devices
