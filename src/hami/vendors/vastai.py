"""Vastai: whole cards, or single dies of cards (vendors/vastai.md).

Several dies share a physical card, the AIC. Dies of one container are kept on as few AICs as possible, and
AICs with many free dies are kept for those who need them.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from hami.protocol import keys
from hami.protocol.allocation import ContainerDevice
from hami.vendors.reasons import EXCLUSIVE
from hami.vendors.schema import DeviceConfig
from hami.vendors.types import (
    BestBonus,
    BonusAsk,
    Card,
    ContainerRequest,
    DeviceInfo,
    FitContext,
    Hooks,
    Need,
    NodeBonus,
    NodeView,
    PodInfo,
    ResourceNames,
    ScoreContext,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import checks_for, standard_needs
from hami.vendors.whole_devices import CHECKS, rules_of

_KEYS: Final = keys.VENDOR_KEYS["Vastai"]
_STRATEGY: Final = "DeviceStrategy"
_AIC: Final = "AIC"
_WEIGHT: Final = 10_000.0
"""The topology of the dies comes before how full the nodes are (scores up to 30)."""


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `vastai`."""
    hooks = Hooks(
        device_rule=neighbour_rule,
        choose=choose,
        choose_when=of_several_dies,
        node_bonus=node_bonus,
        best_bonus=best_bonus,
    )
    profile = VendorProfile(
        _KEYS.common_word,
        ResourceNames(device_config.vastai.resource_count_name),
        rules_of(_KEYS, "vastaitech.com"),
        checks_for(CHECKS),
        standard_needs,
        vector_exact,
        STANDARD,
        hooks=hooks,
    )
    return (profile,)


def neighbour_rule(ctx: FitContext, card: Card, _need: Need, _taken: Sequence[ContainerDevice]) -> str | None:
    """Policy `mutex` wants the whole AIC unused."""
    aic = _aic_of(card.info)
    if "mutex" not in ctx.policy or aic is None:
        return None
    used = any(other.used.slots > 0 and _aic_of(other.info) == aic for other in ctx.candidates)
    return EXCLUSIVE if used else None


def of_several_dies(ctx: FitContext) -> bool:
    """Whether this is a node of dies, and more than one is asked for."""
    return ctx.request.nums > 1 and any(_is_die(card.info) for card in ctx.candidates)


def choose(ctx: FitContext, eligible: Sequence[Card], _reasons: Mapping[str, int]) -> Sequence[int]:
    """Positions of the dies to take: the smallest AIC that holds all; else the largest AICs whole, and for
    what is then missing the smallest that covers it. A die without AIC is a card of its own. Where all are
    needed they keep their order.
    """
    if len(eligible) == ctx.request.nums:
        return range(len(eligible))
    groups: dict[str, list[int]] = {}
    for position, card in enumerate(eligible):
        groups.setdefault(_aic_of(card.info) or f"/{position}", []).append(position)
    left = list(groups.values())
    missing, chosen = ctx.request.nums, list[int]()
    while missing > 0 and left:
        covering = [group for group in left if len(group) >= missing]
        group = min(covering, key=len) if covering else max(left, key=len)  # ties: earliest in the walk
        left.remove(group)
        chosen += group[:missing]
        missing -= len(group)
    return chosen


def node_bonus(ctx: ScoreContext) -> NodeBonus:
    """Mean over the containers of the largest share of a container's dies on one AIC, 0..1; 0 unless all
    are dies.
    """
    shares = []
    for slot in filter(None, ctx.allocation):
        aics = [_die_aic(device.custom) for device in slot]
        if None in aics:
            return NodeBonus(0.0)
        shares.append(max(map(aics.count, aics)) / len(aics))
    return NodeBonus(sum(shares) / len(shares) if shares else 0.0, _WEIGHT)


def best_bonus(ask: BonusAsk) -> BestBonus:
    """Every container on the AIC with most dies left; only dies that say their AIC give a bonus."""
    counts = ask.counts

    def of_node(_node: NodeView, cards: Sequence[Card]) -> NodeBonus:
        dies: dict[str, int] = {}
        for card in cards:
            aic = _aic_of(card.info)
            if aic is not None and card.used.slots < card.info.count:
                dies[aic] = dies.get(aic, 0) + 1
        most = max(dies.values(), default=0)
        return NodeBonus(sum([min(count, most) / count for count in counts]) / len(counts), _WEIGHT)

    return of_node


def vector_exact(
    _p: VendorProfile, _request: ContainerRequest, _pod: PodInfo, policy: frozenset[str]
) -> bool:
    """Everywhere but for `mutex`, which looks at the neighbours on the AIC."""
    return "mutex" not in policy


def _is_die(info: DeviceInfo) -> bool:
    return info.custom.get(_STRATEGY) == "die"


def _aic_of(info: DeviceInfo) -> str | None:
    return _die_aic(info.custom)


def _die_aic(custom: Mapping[str, object]) -> str | None:
    """The physical card of a die; None for whole cards and dies that do not say."""
    aic = custom.get(_AIC)
    return aic if custom.get(_STRATEGY) == "die" and isinstance(aic, str) and aic else None
