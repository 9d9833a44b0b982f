"""The vector side: what a pod asks of all cards of a vendor at once, as conditions on NumPy columns.

Mask of a pod on a node: the cards that pass every check serve at least `needs.cards` devices. A node whose
mask is false cannot pass the exact fit; one whose mask is true may still fail it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class CodeTables(Protocol):
    """Distinct values behind the coded columns: code i stands for entry i; new entries are appended."""

    @property
    def types(self) -> Sequence[str]: ...
    @property
    def modes(self) -> Sequence[str]: ...
    @property
    def ids(self) -> Sequence[str]: ...
    @property
    def id_codes(self) -> Mapping[str, int]: ...


class CardColumns(Protocol):
    """One entry per card of this vendor, NumPy, never written by the vendor side.

    `node` is the caller's node number; `type`, `mode`, `id` are codes into `tables`; `*_left` is what the
    card has less what is used of it, negative where more is used than there is.
    """

    @property
    def node(self) -> IntArray: ...
    @property
    def slots(self) -> IntArray: ...
    @property
    def used(self) -> IntArray: ...
    @property
    def mem(self) -> IntArray: ...
    @property
    def usedmem(self) -> IntArray: ...
    @property
    def cores(self) -> IntArray: ...
    @property
    def usedcores(self) -> IntArray: ...
    @property
    def slots_left(self) -> IntArray: ...
    @property
    def mem_left(self) -> IntArray: ...
    @property
    def cores_left(self) -> IntArray: ...
    @property
    def healthy(self) -> BoolArray: ...
    @property
    def cordoned(self) -> BoolArray: ...
    @property
    def type(self) -> IntArray: ...
    @property
    def mode(self) -> IntArray: ...
    @property
    def id(self) -> IntArray: ...
    @property
    def tables(self) -> CodeTables: ...


@dataclass(frozen=True, slots=True)
class VectorNeeds:
    """Lower bounds of what the exact fit will ask."""

    cards: int  # devices asked: the capacities of the passing cards of a node must sum to at least this
    slots: int  # free slots a passing card needs
    mem: int | IntArray  # MiB: a scalar, or one value per card (percent requests)
    cores: int | IntArray
    # per column name ("type", "mode", "id"; absent: no constraint) which codes pass
    allowed: Mapping[str, BoolArray] = field(default_factory=dict)
    mutex: bool = False  # only unused cards
    capacity: IntArray | None = None  # devices one passing card can serve at most, per card; None: one each
    inexact: BoolArray | None = None  # cards for which the exact fit may find another reason (MIG)
    total_cores: int | None = None  # takes the place of the `cores` column (Ascend soft mode)


@dataclass(frozen=True, slots=True)
class VectorCheck:
    """One necessary condition on cards, in the order of the exact fit."""

    reason: str
    passes: Callable[[CardColumns, VectorNeeds], BoolArray | None]  # one bool per card; None: all pass
