"""Which Ascend cards go together: network groups, and modules of two dies (ascend.md §6).

Everywhere ties go to the group whose first card is tried first, so equal inputs give equal answers.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from hami.vendors.types import (
    INSUFFICIENT_CARDS,
    BestBonus,
    BonusAsk,
    Card,
    ContainerDevice,
    FitContext,
    NodeBonus,
    NodeView,
    Refused,
    ScoreContext,
)

NETWORKED: Final = "Ascend910"
"""Chips whose word starts so have network groups."""

NETWORK: Final = "NetworkID"
"""Key of a card's network group in its registered extras."""

_MODULES_WORD: Final = "Ascend910C"
_UNKNOWN_GROUP: Final = -1


def wanted(word: str, ctx: FitContext) -> bool:
    """Whether several cards of this chip are chosen by groups or modules."""
    if ctx.request.nums < 2 or not word.startswith(NETWORKED):
        return False
    return word == _MODULES_WORD or all(NETWORK in card.info.custom for card in ctx.candidates)


def choose(
    paired: bool, ctx: FitContext, eligible: Sequence[Card], reasons: Mapping[str, int]
) -> Sequence[int] | Refused:
    """Positions to take of the eligible cards, in try order. `paired`: only whole modules."""
    nums = ctx.request.nums
    if ctx.request.type != _MODULES_WORD:
        return _by_network(eligible, nums)
    modules, single = _modules(eligible)
    whole = [position for module in modules[: -(-nums // 2)] for position in module]
    if len(whole) == nums:
        return whole
    if not paired and nums % 2 == 0 and len(whole) + len(single) >= nums:
        return [*whole, *single][:nums]
    return Refused({**reasons, INSUFFICIENT_CARDS: len(whole)}, nums)


def _modules(eligible: Sequence[Card]) -> tuple[list[tuple[int, int]], list[int]]:
    """Modules (dies 2k and 2k+1) with both dies eligible, and the other dies, each in try order."""
    by_module: dict[int, dict[int, int]] = {}
    for position, card in enumerate(eligible):
        module, die = divmod(card.info.index, 2)
        by_module.setdefault(module, {}).setdefault(die, position)
    pairs = [tuple(dies.values()) for dies in by_module.values()]
    modules = [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]
    used = {position for module in modules for position in module}
    return modules, [position for position in range(len(eligible)) if position not in used]


def _by_network(eligible: Sequence[Card], nums: int) -> Sequence[int]:
    """The smallest group that holds all; without one the largest groups first."""
    if len(eligible) <= nums:
        return range(len(eligible))
    groups: dict[object, list[int]] = {}
    for position, card in enumerate(eligible):
        groups.setdefault(_group(card.info.custom), []).append(position)
    enough = [group for group in groups.values() if len(group) >= nums]
    if enough:
        return min(enough, key=len)
    return [position for group in sorted(groups.values(), key=len, reverse=True) for position in group]


def _group(custom: Mapping[str, Any]) -> object:
    network = custom.get(NETWORK)
    return network if _is_number(network) else _UNKNOWN_GROUP


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def network_bonus(ctx: ScoreContext) -> NodeBonus:
    """10 for each container whose cards are all of one network group, less where they are spread."""
    slots = [slot for slot in ctx.allocation if slot]
    if any(NETWORK not in device.custom for slot in slots for device in slot):
        return NodeBonus(0.0)
    return NodeBonus(10.0 * sum(_share(slot) for slot in slots))


def best_network_bonus(ask: BonusAsk) -> BestBonus:
    """Every container on the largest group that has slots left."""
    counts = ask.counts

    def of_node(_node: NodeView, cards: Sequence[Card]) -> NodeBonus:
        groups: dict[Any, int] = {}
        for card in cards:
            info = card.info
            if card.used.slots < info.count and NETWORK in info.custom:
                network = info.custom[NETWORK]
                if type(network) is not int:  # what is no number is left out of a share
                    return NodeBonus(10.0 * len(counts))
                groups[network] = groups.get(network, 0) + 1
        most = max(groups.values(), default=0)
        return NodeBonus(10.0 * sum([min(count, most) / count for count in counts]))

    return of_node


def _share(slot: Iterable[ContainerDevice]) -> float:
    networks = [device.custom[NETWORK] for device in slot if _is_number(device.custom[NETWORK])]
    return max(map(networks.count, networks)) / len(networks) if networks else 0.0
