"""Why a pod fits nowhere, for all nodes at once (scheduler.md §6.6, D33)."""

import numpy as np
from numpy.typing import NDArray

from hami.scheduler.answers import PodRequest
from hami.scheduler.columns import Bank
from hami.scheduler.masks import Checks, served
from hami.scheduler.nodes import NodeTable
from hami.scheduler.requests import slots_needed
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
    """Reasons of every node for a pod with this one request, and the rows for which only the exact fit knows.

    Per card the first failing check counts, as in the exact fit. The texts of nodes that fit mean nothing.
    """
    texts: Texts = np.full(len(table.by_row), NODE_INSUFFICIENT, object)
    unknown = np.zeros(len(table.by_row), np.bool_)
    for bank in table.columns[profile.common_word].banks():
        found, inexact = _bank_reasons(profile, wanted, request, bank, checks)
        texts[bank.node_rows] = found
        unknown[bank.node_rows] = inexact
    return texts, unknown


def _bank_reasons(
    profile: VendorProfile, wanted: ContainerRequest, request: PodRequest, bank: Bank, checks: Checks
) -> tuple[Texts, BoolArray]:
    needs = profile.vector_needs(profile, wanted, request.info, policy_words(request.card_policy), bank)
    inexact = np.zeros(bank.rows, np.bool_)
    if needs.inexact is not None:
        inexact = bank.per_node(needs.inexact & bank.real) > 0
    few = bank.card_counts < needs.cards
    if needs.capacity is not None:
        few = served(bank, needs, bank.real) < needs.cards
    full = bank.free_slots < slots_needed(request, profile.common_word)
    full_cards = np.repeat(full, bank.width)
    alive = bank.real
    columns: list[IntArray] = [few.astype(np.int64), full.astype(np.int64), bank.card_counts]
    for check in checks:
        passes = check.passes(bank, needs)
        if check.reason == OUT_OF_SLOTS:
            passes = passes & ~full_cards
        columns.append(bank.per_node(alive & ~passes).astype(np.int64))
        alive = alive & passes
    columns.append(bank.per_node(alive).astype(np.int64))
    firsts, kinds = _kinds(columns)
    distinct = [_text(checks, [int(column[row]) for column in columns]) for row in firsts]
    return np.array(distinct, object)[kinds], inexact


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
