"""Why a pod fits nowhere, for all nodes at once (scheduler.md §6.6, D33)."""

import numpy as np
from numpy.typing import NDArray

from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.columns import Bank
from hami.scheduler.core.masks import Checks, served
from hami.scheduler.core.nodes import NodeTable
from hami.scheduler.core.requests import slots_needed
from hami.vendors.reasons import (
    INSUFFICIENT_CARDS,
    NODE_INSUFFICIENT,
    OUT_OF_SLOTS,
    reasons_text,
)
from hami.vendors.selection import policy_words
from hami.vendors.types import BoolArray, ContainerRequest, IntArray, VendorProfile

Texts = NDArray[np.object_]
"""Per row of the node table a reason text, or None."""


def vector_reasons(
    table: NodeTable, profile: VendorProfile, wanted: ContainerRequest, request: PodRequest, checks: Checks
) -> tuple[Texts, BoolArray]:
    """Why nodes refuse the pod's first device request, and the rows for which that text is the exact reason.

    Of each card the first failing check counts, as in the exact fit. The other rows serve this request, or
    only the exact fit knows; their texts mean nothing.
    """
    texts: Texts = np.full(len(table.by_row), NODE_INSUFFICIENT, object)
    known = np.ones(len(table.by_row), np.bool_)
    for bank in table.columns[profile.common_word].banks():
        texts[bank.node_rows], known[bank.node_rows] = _bank_reasons(profile, wanted, request, bank, checks)
    return texts, known


def _bank_reasons(
    profile: VendorProfile, wanted: ContainerRequest, request: PodRequest, bank: Bank, checks: Checks
) -> tuple[Texts, BoolArray]:
    needs = profile.vector_needs(profile, wanted, request.info, policy_words(request.card_policy), bank)
    few = bank.card_counts < needs.cards
    if needs.capacity is not None:
        few = served(bank, needs, bank.real) < needs.cards
    full = bank.free_slots < slots_needed(request, profile.common_word)
    full_cards = np.repeat(full, bank.width)
    alive = bank.real
    nothing = np.zeros(bank.rows, np.int64)
    columns: list[IntArray] = [few.astype(np.int64), full.astype(np.int64), bank.card_counts]
    for check in checks:
        passes = check.passes(bank, needs)
        if check.reason == OUT_OF_SLOTS:
            passes = ~full_cards if passes is None else passes & ~full_cards
        if passes is None:
            columns.append(nothing)
            continue
        columns.append(bank.per_node(alive & ~passes).astype(np.int64))
        alive = alive & passes
    columns.append(bank.per_node(alive).astype(np.int64))
    firsts, kinds = _kinds(columns)
    distinct = [_text(checks, [int(column[row]) for column in columns]) for row in firsts]
    known = few | full | (served(bank, needs, alive) < needs.cards)
    if needs.inexact is not None:
        known &= bank.per_node(needs.inexact & bank.real) == 0
    return np.array(distinct, object)[kinds], known


def _kinds(columns: list[IntArray]) -> tuple[IntArray, IntArray]:
    """One row of each distinct combination of values, and per row the number of its combination."""
    key = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:
        top = int(column.max()) + 1
        if size * top > 2**62:
            key = np.unique(key, return_inverse=True)[1]
            size = int(key.max()) + 1
        key = key * top + column
        size *= top
    _, firsts, kinds = np.unique(key, return_index=True, return_inverse=True)
    return firsts, kinds


def _text(checks: Checks, values: list[int]) -> str:
    few, full, cards, *counts, passed = values
    if few:
        return NODE_INSUFFICIENT
    reasons: dict[str, int] = {}
    for check, count in zip(checks, counts, strict=True):
        if count:
            reasons[check.reason] = reasons.get(check.reason, 0) + count
    if full and passed:  # a vendor that does not look at slots
        return reasons_text({OUT_OF_SLOTS: cards}, cards)
    if passed:
        reasons[INSUFFICIENT_CARDS] = passed
    return reasons_text(reasons, cards)
