"""Pair scores of the cards of a node, from the links between them (nvidia-scheduling.md §13.2). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from types import MappingProxyType
from typing import Final

from hami.node.errors import TopologyError
from hami.node.nvml import NvLink

PCIE_WEIGHTS: Final = MappingProxyType({50: 10, 40: 20, 30: 30, 20: 40, 10: 50, 0: 60})
"""Weight by NVML's common ancestor: whole system, CPU, host bridge, several switches, one switch, board."""
NVLINK_WEIGHT: Final = 100
_ZERO_DOMAIN: Final = "0000"
_NAMED_PAIRS: Final = 8

Scores = dict[str, dict[str, int]]
"""``uuid -> uuid -> score``, in both directions and without self."""


@dataclass(frozen=True, slots=True)
class Links:
    """What NVML shows between cards.

    ``bus_ids`` and ``nvlinks`` are by UUID, in NVML's writing; a card that is missing in ``nvlinks`` could
    not be asked, and its pairs have no score. ``levels`` are common ancestors by ordered pair of UUIDs,
    absent where NVML knows none.
    """

    bus_ids: Mapping[str, str]
    nvlinks: Mapping[str, Sequence[NvLink]]
    levels: Mapping[tuple[str, str], int] = field(default_factory=dict)


def pair_scores(uuids: Iterable[str], links: Links) -> tuple[Scores, tuple[str, ...]]:
    """Scores of every ordered pair of ``uuids``, and a line for each pair whose ends disagree (it scores 0).

    Every UUID has an entry. Raises :class:`TopologyError` for a UUID that NVML does not list and for a common
    ancestor of unknown kind.
    """
    wanted = tuple(uuids)
    for uuid in wanted:
        if uuid not in links.bus_ids:
            raise TopologyError(f"NVML lists no GPU {uuid}")
    scores: Scores = {uuid: {} for uuid in wanted}
    disagreeing = []
    for one, other in combinations(wanted, 2):
        if one not in links.nvlinks or other not in links.nvlinks:
            continue
        there, back = _records(one, other, links), _records(other, one, links)
        if len(there) != len(back):
            disagreeing.append(f"{one} sees {_named(there)} to {other}, which sees {_named(back)} back")
            there = back = ()
        scores[one][other], scores[other][one] = sum(there), sum(back)
    return scores, tuple(disagreeing)


def asymmetry_text(disagreeing: Sequence[str]) -> str:
    """Message of the event about pairs whose ends disagree; names at most eight of them."""
    more = len(disagreeing) - _NAMED_PAIRS
    named = "; ".join(disagreeing[:_NAMED_PAIRS]) + (f"; and {more} more" if more > 0 else "")
    return f"asymmetric P2P link data, these pairs score 0: {named}"


def same_bus(one: str, other: str) -> bool:
    """Whether two bus ids name one device: letters in any case, one leading ``0000`` left out."""
    return _bus(one) == _bus(other)


def _bus(bus_id: str) -> str:
    name = bus_id.lower()
    return name if name == _ZERO_DOMAIN else name.removeprefix(_ZERO_DOMAIN)


def _records(one: str, other: str, links: Links) -> tuple[int, ...]:
    """Weights of the links from one card to another: at most one of PCIe and one of NVLink."""
    found = []
    level = links.levels.get((one, other))
    if level is not None:
        if level not in PCIE_WEIGHTS:
            raise TopologyError(f"NVML names the unknown common ancestor {level} of {one} and {other}")
        found.append(PCIE_WEIGHTS[level])
    count = _nvlinks(one, other, links)
    if count:
        found.append(NVLINK_WEIGHT * count)
    return tuple(found)


def _nvlinks(one: str, other: str, links: Links) -> int:
    """Direct links if there are any, else as many as both cards have to switches."""
    own, theirs = links.nvlinks[one], links.nvlinks[other]
    direct = sum(bool(link.remote) and same_bus(link.remote, links.bus_ids[other]) for link in own)
    if direct or not any(link.remote for link in own):
        return direct
    return min(sum(link.to_switch for link in own), sum(link.to_switch for link in theirs))


def _named(records: Sequence[int]) -> str:
    return f"{len(records)} kind{'' if len(records) == 1 else 's'} of link"
