"""Exact fit of one pod on one node (scheduler.md §6.4): pure, changes nothing."""

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.growth import Fragmentation
from hami.scheduler.core.nodes import Node, OnNode
from hami.scheduler.core.policies import FRAGMENTATION, bonus_policy, ordered
from hami.scheduler.core.requests import slots_needed
from hami.vendors.annotate import node_bonus
from hami.vendors.fit import fit, refuse_all
from hami.vendors.reasons import NODE_INSUFFICIENT, OUT_OF_SLOTS
from hami.vendors.selection import policy_words, select
from hami.vendors.types import (
    UNLIMITED,
    Allocation,
    Card,
    ContainerDevice,
    ContainerRequest,
    FitContext,
    FitResult,
    Holder,
    NodeRefuses,
    QuotaView,
    ScoreContext,
    SlotKind,
    VendorProfile,
)


@dataclass(frozen=True, slots=True)
class NodeFit:
    """The pod on one node: allocations by vendor and the vendors' bonus, or the reason."""

    allocations: Mapping[str, Allocation] | None
    bonus: float = 0.0
    reason: str = ""


def fit_node(
    node: Node,
    request: PodRequest,
    quotas: Mapping[str, QuotaView],
    fragmentation: Fragmentation | None = None,
) -> NodeFit:
    """Fit every container of the pod on a node as it is.

    An init container sees the node with the sidecars declared before it; sidecars and regular containers
    add up. `quotas`: what is left per vendor; vendors without a limit may be absent. Without
    `fragmentation` the policy fragmentation-aware knows no mix of requests and acts as an unknown one.
    """
    steps = fit_steps(node, request, quotas, fragmentation)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            fit: NodeFit = end.value
            return fit


def fit_steps(
    node: Node,
    request: PodRequest,
    quotas: Mapping[str, QuotaView],
    fragmentation: Fragmentation | None = None,
) -> Generator[None, None, NodeFit]:
    """`fit_node`, with a pause after every container."""
    if request.invalid:
        return NodeFit(None, reason=request.invalid)
    words = request.vendors
    steady = {word: there.cards for word, there in node.vendors.items()}
    slots = {word: slots_needed(request, word) for word in words}
    chosen: dict[str, Allocation] = dict.fromkeys(words, ())
    last = len(request.slots) - 1
    for at, (kind, slot) in enumerate(zip(request.info.shape.kinds, request.slots, strict=True)):
        held = dict(steady)
        for word in words:
            wanted = slot.get(word)
            if wanted is None:
                chosen[word] = (*chosen[word], ())
                continue
            there = node.vendors.get(word)
            if there is None:
                return NodeFit(None, reason=NODE_INSUFFICIENT)
            quota = quotas.get(word, UNLIMITED)
            result = _fit_vendor(
                node, there, request, wanted, held, chosen[word], quota, slots[word], fragmentation
            )
            if result.devices is None:
                return NodeFit(None, reason=result.text())
            if at < last or len(words) > 1:  # somebody of the pod will look at them
                held[word] = _with_devices(there, request, held[word], result.devices)
            chosen[word] = (*chosen[word], result.devices)
        if kind is not SlotKind.INIT:
            steady = held
        yield
    return NodeFit(chosen, _bonus(node, request, chosen))


def cards_with(node: Node, request: PodRequest, chosen: Mapping[str, Allocation]) -> dict[str, list[Card]]:
    """The node's cards of these vendors with the pod running on them, its init containers done."""
    after = {}
    for word, allocation in chosen.items():
        there = node.vendors[word]
        cards = there.cards
        for kind, devices in zip(request.info.shape.kinds, allocation, strict=True):
            if kind is not SlotKind.INIT:
                cards = _with_devices(there, request, cards, devices)
        after[word] = cards
    return after


def outgrown(node: Node, allocations: Mapping[str, Allocation]) -> str:
    """Why an allocation that is counted on `node` is not there any more for it; empty: it still fits.

    Another scheduler's pod may have come to a card after it was chosen, or the card may have gone or shrunk.
    """
    for word, allocation in allocations.items():
        there = node.vendors.get(word)
        for device in (device for slot in allocation for device in slot):
            at = None if there is None else there.position.get(device.uuid)
            if there is None or at is None:
                return f"card {device.uuid} is not registered any more"
            info, used, rules = there.cards[at].info, there.cards[at].used, there.profile.rules
            if (
                ("slots" in rules.checks and used.slots > info.count)
                or ("memory" in rules.checks and rules.record_mem is None and used.mem > info.devmem)
                or ("cores" in rules.checks and used.cores > info.devcore)
            ):
                return f"card {device.uuid} has been given to other pods"
    return ""


def has_bonus(profiles: Mapping[str, VendorProfile], request: PodRequest) -> bool:
    """Whether a node's score depends on the cards chosen."""
    return any(profiles[word].hooks.node_bonus is not None for word in request.vendors)


def _fit_vendor(
    node: Node,
    there: OnNode,
    request: PodRequest,
    wanted: ContainerRequest,
    held: Mapping[str, list[Card]],
    before: Allocation,
    quota: QuotaView,
    slots: int,
    fragmentation: Fragmentation | None,
) -> FitResult:
    """One container's request of one vendor; the whole pod needs so many `slots` of it.

    kubelet counts slots per node, not per card: on a node without enough of them every card is out of slots
    (D31).
    """
    profile = there.profile
    cards = held[profile.common_word]
    try:
        wanted = profile.resolve(wanted, node.facts, there.infos)
    except NodeRefuses as refusal:
        return FitResult(None, {refusal.code: refusal.count}, len(cards))
    full = slots > there.slots_left(node.facts)
    if full:
        cards = [Card(replace(card.info, count=card.used.slots), card.used, card.holders) for card in cards]
    numa_bind = select(profile.rules, request.info.annotations).numa_bound
    policy = request.card_policy
    growths: list[float] = []
    if fragmentation is not None and FRAGMENTATION in policy_words(policy):
        growths = fragmentation.card_growths(node, there, cards, wanted, request)
    context = FitContext(
        candidates=ordered(cards, wanted, request.weights, policy, numa_bind=numa_bind, growths=growths),
        request=wanted,
        pod=request.info,
        node=node.facts,
        allocated=before,
        policy=policy_words(policy),
        quota=quota,
        beside={word: held[word] for word in profile.beside if word in held},
    )
    result = fit(profile, context)
    if full and result.devices is not None:  # a vendor that does not look at slots
        return refuse_all(OUT_OF_SLOTS, len(cards))
    return result


def _with_devices(
    there: OnNode, request: PodRequest, cards: list[Card], devices: Iterable[ContainerDevice]
) -> list[Card]:
    """The cards as the pod's next container sees them."""
    profile, info = there.profile, request.info
    after = list(cards)
    for device in devices:
        at = there.position[device.uuid]
        card = after[at]
        usage = profile.algebra.of(device)
        holders = card.holders
        if profile.placed_annotations:
            kept = {
                key: info.annotations[key] for key in profile.placed_annotations if key in info.annotations
            }
            holders = (*holders, Holder(info.uid, info.namespace, info.name, kept, usage))
        after[at] = Card(card.info, profile.algebra.add(card.used, usage), holders)
    return after


def _bonus(node: Node, request: PodRequest, chosen: Mapping[str, Allocation]) -> float:
    """The vendors' bonuses, each with the sign it takes under the pod's node policy."""
    total = 0.0
    for word, allocation in chosen.items():
        there = node.vendors[word]
        policy = bonus_policy(request.node_policy)
        total += node_bonus(
            there.profile, ScoreContext(node.facts, allocation, there.cards, policy, request.info)
        )
    return total
