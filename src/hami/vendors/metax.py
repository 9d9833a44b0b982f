"""MetaX whole cards (`Metax-GPU`); shares are in `metax_sgpu` (vendors/metax.md §5).

The vendor's plugin picks the physical cards; the node is ranked by the tables that it publishes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from hami.protocol import keys
from hami.protocol.inventory import Inventory
from hami.vendors import metax_sgpu
from hami.vendors.discovery import registered
from hami.vendors.request import WHOLE_CARD
from hami.vendors.schema import DeviceConfig
from hami.vendors.types import (
    INT32_MAX,
    BestBonus,
    BonusAsk,
    CapacityCards,
    Hooks,
    NodeBonus,
    NodePolicy,
    NodeView,
    PodInfo,
    Register,
    ResourceNames,
    Rules,
    ScoreContext,
    SlotKind,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import always_exact, checks_for, standard_needs

WHOLE: Final = "Metax-GPU"
LOSSES: Final = "metax-tech.com/gpu.topology.losses"
SCORES: Final = "metax-tech.com/gpu.topology.scores"
_CARD_MIB: Final = 65536
_CHECKS: Final = frozenset(
    {"health", "cordon", "type", "slots", "mutex", "memory", "cores", "exclusive", "exhausted"}
)
_TOP: Final = 2000
_MAX_TEXT: Final = 64 * 1024  # characters of a table that are read
_Amount = Annotated[int, msgspec.Meta(ge=-INT32_MAX, le=INT32_MAX)]


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profiles of section `metax`: whole cards, then shares."""
    config = device_config.metax
    own = keys.VENDOR_KEYS[WHOLE]
    cards = CapacityCards("metax", slots=1, cores=100, mem=_CARD_MIB)
    whole = VendorProfile(
        WHOLE,
        ResourceNames(config.resource_count_name),
        Rules(
            Register("capacity", cards=cards),
            to_allocate=own.to_allocate,
            allocated=own.allocated,
            health="capacity",
            lock="none",
            real_count=False,  # one task a card: kubelet's count says nothing more
            default_cores=WHOLE_CARD,
            checks=_CHECKS,
        ),
        checks_for(_CHECKS),
        standard_needs,
        always_exact,
        STANDARD,
        hooks=Hooks(discover=discover, node_bonus=node_bonus, best_bonus=best_bonus),
        read_annotations=(LOSSES, SCORES),
    )
    return whole, metax_sgpu.profile(config)


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """Cards of the capacity; a warning for a table of the node that cannot be read."""
    inventory = registered(p, node)
    odd = [key for key in (LOSSES, SCORES) if key in node.annotations and table(node, key) is None]
    warnings = (f"{node.name}: annotation {key} is no table of whole numbers, it is ignored" for key in odd)
    return Inventory(inventory.devices, (*inventory.warnings, *warnings))


def table(node: NodeView, key: str) -> dict[int, int] | None:
    """Number of cards -> loss or score; None for a text that is no such table."""
    text = node.annotations.get(key, "")
    return _read(text) if 0 < len(text) <= _MAX_TEXT else None


@lru_cache(maxsize=1024)
def _read(text: str) -> dict[int, int] | None:
    """Nodes alike have equal tables. Never write to one."""
    try:
        found = msgspec.json.decode(text, type=dict[str, _Amount])
        return {int(count): value for count, value in found.items()}
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


_TABLE_OF: Final[Mapping[NodePolicy, str]] = {"binpack": LOSSES, "spread": SCORES}


def node_bonus(ctx: ScoreContext) -> NodeBonus:
    """2000 less the node's loss (binpack) or score (spread) for as many cards as the pod holds at a time;
    nothing under other policies."""
    return _bonus(ctx.node, ctx.policy, _at_a_time(ctx.pod, [len(slot) for slot in ctx.allocation]))


def best_bonus(ask: BonusAsk) -> BestBonus:
    """The bonus itself: whichever cards are given, it is the same."""
    count = _at_a_time(ask.pod, [0 if request is None else request.nums for request in ask.requests])
    return lambda node, _cards: _bonus(node, ask.policy, count)


def _bonus(node: NodeView, policy: NodePolicy, count: int) -> NodeBonus:
    key = _TABLE_OF.get(policy)
    values = None if key is None else table(node, key)
    value = None if values is None else values.get(count)
    return NodeBonus(0.0 if value is None else float(_TOP - value), higher_is_better=False)


def _at_a_time(pod: PodInfo, counts: Sequence[int]) -> int:
    kinds = pod.shape.kinds
    steady = peak = 0
    for position, count in enumerate(counts):
        if position < len(kinds) and kinds[position] is SlotKind.INIT:
            peak = max(peak, steady + count)
        else:
            steady += count
    return max(steady, peak)
