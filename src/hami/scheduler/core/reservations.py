"""From a decision to the reservation that the one Binding will carry (protocol.md §5, §6; D18, D24)."""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime

from hami.protocol import keys
from hami.scheduler.core.answers import PodRequest, Reservation
from hami.scheduler.core.nodes import Node
from hami.scheduler.core.placement import NodeFit
from hami.scheduler.core.pods import Charge, placed
from hami.vendors.engine import annotations, effective
from hami.vendors.types import AnnotateContext, ContainerRequest, PodInfo, VendorProfile

_LABEL_MAX = 63
_LABEL_KEPT = 54


def label_value(node: str) -> str:
    """The node's name as a label value: names over 63 characters are cut and told apart by a hash (D18)."""
    if len(node) <= _LABEL_MAX:
        return node
    return f"{node[:_LABEL_KEPT]}-{hashlib.sha256(node.encode()).hexdigest()[:8]}"


def make_reservation(
    profiles: Mapping[str, VendorProfile], request: PodRequest, node: Node, fit: NodeFit, now: float
) -> Reservation:
    """The reservation of a pod that fits: allocations, and everything the Binding writes but the `bind-`
    keys."""
    assert fit.allocations is not None
    written = {keys.ASSIGNED_NODE: node.name, keys.ASSIGNED_TIME: str(int(now))}
    for word, allocation in fit.allocations.items():
        context = AnnotateContext(
            pod=request.info,
            allocation=allocation,
            node=node.facts,
            now=datetime.fromtimestamp(now, UTC),
            requests=_resolved(profiles[word], request, node),
        )
        written.update(annotations(profiles[word], context))
    if request.stale_mig:
        written.setdefault(keys.MIG_ALLOCATIONS, "[]")
    return Reservation(
        uid=request.info.uid,
        namespace=request.info.namespace,
        name=request.info.name,
        node=node.name,
        allocations=fit.allocations,
        annotations=written,
        labels={keys.ASSIGNED_NODE_LABEL: label_value(node.name)},
        locks=tuple(
            (word, profiles[word].rules.lock)
            for word in sorted(fit.allocations)
            if profiles[word].rules.lock != "none"
        ),
        reserved_at=now,
        host=request.host,
    )


def charge_of(profiles: Mapping[str, VendorProfile], request: PodRequest, reservation: Reservation) -> Charge:
    """What the reserved pod uses, its init containers still to come."""
    info = request.info
    after = PodInfo(
        info.uid, info.namespace, info.name, {**info.annotations, **reservation.annotations}, info.shape
    )
    return Charge(
        reservation.uid,
        reservation.namespace,
        reservation.name,
        reservation.node,
        reservation.allocations,
        {
            word: effective(profiles[word], info.shape, allocation, inits_finished=False)
            for word, allocation in reservation.allocations.items()
        },
        placed(after, profiles.values()),
    )


def _resolved(profile: VendorProfile, request: PodRequest, node: Node) -> tuple[ContainerRequest | None, ...]:
    infos = node.vendors[profile.common_word].infos
    found = []
    for slot in request.slots:
        wanted = slot.get(profile.common_word)
        found.append(None if wanted is None else profile.resolve(wanted, node.facts, infos))
    return tuple(found)
