"""Allocations of one vendor as pod annotations: written in the Binding, read back from placed pods (README
R5).
"""

from collections.abc import Mapping

from hami.protocol.allocation import decode_allocation, encode_allocation, fit_slots
from hami.vendors.types import (
    Allocation,
    AnnotateContext,
    NodeBonus,
    NodePolicy,
    PodInfo,
    ScoreContext,
    VendorProfile,
)


def annotations(p: VendorProfile, ctx: AnnotateContext) -> dict[str, str]:
    """The vendor's complete set of keys for the Binding; empty when no container has a device."""
    if not any(ctx.allocation):
        return {}
    text = encode_allocation(pad(ctx.allocation, len(ctx.pod.shape.kinds)))
    written = {p.rules.allocated: text}
    if p.rules.to_allocate is not None:
        written[p.rules.to_allocate] = text
    if p.hooks.extra_annotations is not None:
        written.update(p.hooks.extra_annotations(ctx))
    return written


def pad(allocation: Allocation, slots: int) -> Allocation:
    """The allocation with an entry for every container slot."""
    return allocation + ((),) * (slots - len(allocation))


def read_allocation(p: VendorProfile, pod: PodInfo) -> Allocation:
    """What the pod's annotations say it holds of this vendor, with payloads, one entry per slot; () for
    nothing.

    Only the allocated key counts, except for vendors whose node side may erase it. Surplus empty slots are
    dropped; devices beyond the pod's slots stay, in slots of their own. Raises `AllocationError`.
    """
    text = allocation_text(p, pod)
    if not text:
        return ()
    allocation = decode_allocation(text)
    slots = len(pod.shape.kinds)
    if len(allocation) != slots and not any(allocation[slots:]):
        allocation = fit_slots(allocation, slots)
    restored = p.restore(pod, allocation)
    return restored if any(restored) else ()


def allocation_text(p: VendorProfile, pod: PodInfo) -> str:
    """The text that says what the pod holds of this vendor, "" for none. Raises `AllocationError`."""
    rules = p.rules
    text = pod.annotations.get(rules.allocated, "")
    if rules.rebuild == "longer_of_both_keys" and rules.to_allocate is not None:
        other = pod.annotations.get(rules.to_allocate, "")
        if _devices(decode_allocation(other)) > _devices(decode_allocation(text)):
            return other
    return text


def placed_annotations(p: VendorProfile, pod: PodInfo) -> Mapping[str, str]:
    """The pod's annotations that fits of other pods may look at."""
    found = pod.annotations
    return {key: found[key] for key in p.placed_annotations if key in found}


def node_bonus(p: VendorProfile, ctx: ScoreContext) -> float:
    """What the vendor adds to the node's score; bonuses are higher-is-better, negated under spread."""
    if p.hooks.node_bonus is None:
        return 0.0
    return added(p.hooks.node_bonus(ctx), ctx.policy)


def added(bonus: NodeBonus, policy: NodePolicy) -> float:
    """What a bonus adds to the score of a node under this node policy."""
    value = bonus.value * bonus.weight
    return -value if policy == "spread" and bonus.higher_is_better else value


def _devices(allocation: Allocation) -> int:
    return sum(len(slot) for slot in allocation)
