"""Healthy cards that take no new pods because of a pod on them: which pod, and why (nvidia-scheduling.md
§12.6).
"""

from hami.scheduler.core.answers import Notice
from hami.scheduler.core.nodes import OnNode
from hami.scheduler.core.world import World
from hami.vendors.engine import card_healthy
from hami.vendors.types import Usage


def closed_by(world: World, uid: str) -> tuple[Notice, ...]:
    """A notice on its node for every card that a booked pod closes."""
    charge = world.charge_of(uid)
    node = None if charge is None else world.table.by_name.get(charge.node)
    if charge is None or node is None:
        return ()
    found = []
    for word, usages in charge.effective.items():
        there = node.vendors.get(word)
        if there is not None and there.profile.hooks.why_closed is not None:
            for card_id, used in usages.items():
                at = there.position.get(card_id)
                if at is not None:
                    found += _told(node.name, there, at, used, f"{charge.namespace}/{charge.name}")
    return tuple(found)


def closed_on(world: World, name: str) -> tuple[Notice, ...]:
    """A notice on the node for every pod that closes one of its cards."""
    node = world.table.by_name.get(name)
    found = []
    for there in () if node is None else node.vendors.values():
        if there.profile.hooks.why_closed is not None:
            for at, card in enumerate(there.cards):
                if card.info.health and not card_healthy(there.profile, card.info, card.used):
                    for holder in card.holders:
                        pod = f"{holder.namespace}/{holder.name}"
                        found += _told(name, there, at, holder.usage, pod)
    return tuple(found)


def _told(node: str, there: OnNode, at: int, used: Usage, pod: str) -> list[Notice]:
    info, why_closed = there.infos[at], there.profile.hooks.why_closed
    why = why_closed(info, used) if why_closed is not None and info.health else ""
    if not why:
        return []
    text = f"card {info.id} takes no new pods until pod {pod} ends: {why}"
    return [Notice("Node", "", node, "", "CardClosed", text)]
