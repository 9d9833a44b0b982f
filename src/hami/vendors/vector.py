"""The standard vector checks: necessary conditions of the exact fit, for all cards of a vendor at once
(README 3.3).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from hami.vendors import reasons
from hami.vendors.columns import BoolArray, CardColumns, IntArray, VectorCheck, VectorNeeds
from hami.vendors.fit import MAX_CORES
from hami.vendors.selection import Selection, select
from hami.vendors.types import ALL_CHECKS, NO_PERCENT, ContainerRequest, PodInfo, VendorProfile


def vector_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """Lower bounds of what the exact fit of `request` will ask of each card. `policy`: words of the card
    policy.
    """
    return p.vector_needs(p, request, pod, policy, columns)


def vector_exact(p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str]) -> bool:
    """Whether, for a pod of this one container and without a quota limit, vector reasons equal the exact
    ones.

    Cards marked in `VectorNeeds.inexact` are excepted: a node with one needs the exact fit.
    """
    return p.vector_exact(p, request, pod, policy)


def first_failures(p: VendorProfile, columns: CardColumns, needs: VectorNeeds) -> IntArray:
    """Per card the index into `p.vector_checks` of the first check it fails, or the number of checks."""
    count = len(p.vector_checks)
    first = np.full(len(columns.node), count, dtype=np.int64)
    for index in range(count - 1, -1, -1):
        passes = p.vector_checks[index].passes(columns, needs)
        if passes is not None:
            first[~passes] = index
    return first


def passing(p: VendorProfile, columns: CardColumns, needs: VectorNeeds) -> BoolArray:
    """Per card whether it passes every check."""
    result = np.ones(len(columns.node), dtype=np.bool_)
    for check in p.vector_checks:
        passes = check.passes(columns, needs)
        if passes is not None:
            result &= passes
    return result


def node_mask(p: VendorProfile, columns: CardColumns, needs: VectorNeeds, nodes: int) -> BoolArray:
    """Per node number (0..nodes-1) whether its cards may serve the request; False: the fit fails."""
    passed = passing(p, columns, needs)
    weights = passed.astype(np.float64) if needs.capacity is None else np.where(passed, needs.capacity, 0)
    served = np.bincount(columns.node, weights=weights, minlength=nodes)
    mask: BoolArray = served >= needs.cards
    return mask


def card_reasons(p: VendorProfile, failures: Sequence[int] | IntArray) -> dict[str, int]:
    """Reasons of one node that does not fit, from its cards' `first_failures`: counts per code.

    Equal to the exact fit's where `vector_exact` holds, as long as the node has as many cards as asked.
    """
    counts: dict[str, int] = {}
    passed = 0
    for index in failures:
        if index == len(p.vector_checks):
            passed += 1
        else:
            code = p.vector_checks[index].reason
            counts[code] = counts.get(code, 0) + 1
    if passed:
        counts[reasons.INSUFFICIENT_CARDS] = passed
    return counts


# --- the standard profile -------------------------------------------------------------------------------


def standard_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """Needs of a request that asks the same of every card."""
    mem: int | IntArray = request.memreq
    if request.memreq <= 0:
        mem = columns.mem * request.mem_percent // 100 if request.mem_percent != NO_PERCENT else 0
    return VectorNeeds(
        cards=request.nums,
        slots=request.slots,
        mem=mem,
        cores=min(request.cores, MAX_CORES),
        allowed=allowed_codes(select(p.rules, pod.annotations), columns),
        mutex="mutex" in policy and "mutex" in p.rules.checks,
    )


def unused_card_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """Needs of a request for whole cards: only cards that nobody uses."""
    return replace(standard_needs(p, request, pod, policy, columns), mem=0, cores=0, mutex=True)


def always_exact(
    _p: VendorProfile, _request: ContainerRequest, _pod: PodInfo, _policy: frozenset[str]
) -> bool:
    """For vendors whose exact fit is the standard one."""
    return True


def never_exact(
    _p: VendorProfile, _request: ContainerRequest, _pod: PodInfo, _policy: frozenset[str]
) -> bool:
    """For vendors whose reasons only the exact fit knows."""
    return False


def allowed_codes(selection: Selection, columns: CardColumns) -> dict[str, BoolArray]:
    """Which codes of the type, mode and id columns the pod's annotations admit; absent: all."""
    tables = columns.tables
    allowed: dict[str, BoolArray] = {}
    if selection.use_types is not None or selection.no_use_types:
        allowed["type"] = np.array([selection.allows_model(t, "") for t in tables.types], dtype=np.bool_)
    if selection.modes is not None:
        allowed["mode"] = np.array([selection.allows_mode(m) for m in tables.modes], dtype=np.bool_)
    if selection.use_ids:
        allowed["id"] = np.zeros(len(tables.ids), dtype=np.bool_)
        for card_id in frozenset.intersection(*selection.use_ids):
            _mark(allowed["id"], tables.id_codes.get(card_id), True)
    if selection.no_use_ids:
        allowed.setdefault("id", np.ones(len(tables.ids), dtype=np.bool_))
        for card_id in selection.no_use_ids:
            _mark(allowed["id"], tables.id_codes.get(card_id), False)
    return allowed


def _mark(codes: BoolArray, code: int | None, value: bool) -> None:
    if code is not None:
        codes[code] = value


def _allowed(name: str, column: IntArray, needs: VectorNeeds) -> BoolArray | None:
    codes = needs.allowed.get(name)
    if codes is None:
        return None
    result: BoolArray = codes[column]
    return result


def _total_cores(columns: CardColumns, needs: VectorNeeds) -> IntArray | int:
    return columns.cores if needs.total_cores is None else needs.total_cores


def _cores_left(columns: CardColumns, needs: VectorNeeds) -> IntArray:
    return columns.cores_left if needs.total_cores is None else needs.total_cores - columns.usedcores


def _healthy(columns: CardColumns, _needs: VectorNeeds) -> BoolArray:
    return columns.healthy


def _not_cordoned(columns: CardColumns, _needs: VectorNeeds) -> BoolArray:
    return ~columns.cordoned


def _model(columns: CardColumns, needs: VectorNeeds) -> BoolArray | None:
    kind, mode = _allowed("type", columns.type, needs), _allowed("mode", columns.mode, needs)
    if kind is None or mode is None:
        return mode if kind is None else kind
    return kind & mode


def _id(columns: CardColumns, needs: VectorNeeds) -> BoolArray | None:
    return _allowed("id", columns.id, needs)


def _slots(columns: CardColumns, needs: VectorNeeds) -> BoolArray:
    result: BoolArray = columns.slots_left >= needs.slots
    return result


def _mutex(columns: CardColumns, needs: VectorNeeds) -> BoolArray | None:
    if not needs.mutex:
        return None
    result: BoolArray = columns.used <= 0
    return result


def _memory(columns: CardColumns, needs: VectorNeeds) -> BoolArray:
    result: BoolArray = columns.mem_left >= needs.mem
    return result


def _cores(columns: CardColumns, needs: VectorNeeds) -> BoolArray:
    result: BoolArray = _cores_left(columns, needs) >= needs.cores
    return result


def _exclusive(columns: CardColumns, needs: VectorNeeds) -> BoolArray | None:
    if isinstance(needs.cores, int) and needs.cores != MAX_CORES:
        return None
    total = _total_cores(columns, needs)
    whole = np.equal(needs.cores, MAX_CORES) & np.equal(total, MAX_CORES)
    result: BoolArray = ~(whole & (columns.used > 0))
    return result


def _exhausted(columns: CardColumns, needs: VectorNeeds) -> BoolArray | None:
    if isinstance(needs.cores, int) and needs.cores != 0:
        return None
    result: BoolArray = np.not_equal(_cores_left(columns, needs), 0)
    result |= np.equal(_total_cores(columns, needs), 0)
    if not isinstance(needs.cores, int):
        result |= np.not_equal(needs.cores, 0)
    return result


_CHECKS: Final[tuple[tuple[str, str, Callable[[CardColumns, VectorNeeds], BoolArray | None]], ...]] = (
    ("health", reasons.NOT_HEALTHY, _healthy),
    ("cordon", reasons.CORDONED, _not_cordoned),
    ("type", reasons.TYPE_MISMATCH, _model),
    ("id", reasons.ID_MISMATCH, _id),
    ("slots", reasons.OUT_OF_SLOTS, _slots),
    ("mutex", reasons.EXCLUSIVE, _mutex),
    ("memory", reasons.INSUFFICIENT_MEMORY, _memory),
    ("cores", reasons.INSUFFICIENT_CORES, _cores),
    ("exclusive", reasons.EXCLUSIVE, _exclusive),
    ("exhausted", reasons.EXHAUSTED, _exhausted),
)


def checks_for(names: frozenset[str]) -> tuple[VectorCheck, ...]:
    """The standard checks with these names (as in `Rules.checks`), in fit order."""
    return tuple(VectorCheck(code, passes) for name, code, passes in _CHECKS if name in names)


STANDARD_CHECKS: Final = checks_for(ALL_CHECKS)
