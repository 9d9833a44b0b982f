"""What of a picture a reader may see: pods of the namespaces in which he may list pods, and every card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass

import msgspec

from hami.dashboard.shapes import Device, Lock, MigInstance, Node, Slice, Workload, WorkloadCounts
from hami.dashboard.view import View


@dataclass(frozen=True, slots=True)
class Scope:
    """Namespaces that may be seen; None: all."""

    namespaces: frozenset[str] | None = None

    def allows(self, namespace: str) -> bool:
        """Whether pods of the namespace may be seen."""
        return self.namespaces is None or namespace in self.namespaces


EVERYTHING = Scope()


def namespaces_of(view: View) -> Set[str]:
    """Every namespace that the picture names."""
    named = {one.namespace for one in view.workloads} | {one.namespace for one in view.quotas}
    holders = (one.lock.holder for one in view.nodes if one.lock is not None)
    return named | {holder.partition("/")[0] for holder in holders if holder}


def restricted(view: View, scope: Scope) -> View:
    """The picture without names of other namespaces: their parts of cards stay, as "other"."""
    if scope.namespaces is None:
        return view
    workloads = tuple(one for one in view.workloads if scope.allows(one.namespace))
    summary = msgspec.structs.replace(
        view.summary,
        workloads=_counts(workloads),
        alerts=tuple(one for one in view.summary.alerts if not one.namespace or scope.allows(one.namespace)),
    )
    return View(
        summary,
        tuple(_node(one, scope) for one in view.nodes),
        tuple(_device(one, scope) for one in view.devices),
        workloads,
        tuple(one for one in view.pending if scope.allows(one.namespace)),
        tuple(one for one in view.quotas if scope.allows(one.namespace)),
    )


def _counts(workloads: tuple[Workload, ...]) -> WorkloadCounts:
    return WorkloadCounts(**Counter(one.status for one in workloads))


def _node(node: Node, scope: Scope) -> Node:
    if node.lock is None or scope.allows(node.lock.holder.partition("/")[0]):
        return node
    return msgspec.structs.replace(node, lock=Lock("", node.lock.age_seconds))


def _device(device: Device, scope: Scope) -> Device:
    return msgspec.structs.replace(
        device,
        containers=tuple(_slice(one, scope) for one in device.containers),
        mig_instances=tuple(_instance(one, scope) for one in device.mig_instances),
    )


def _slice(part: Slice, scope: Scope) -> Slice:
    if scope.allows(part.namespace):
        return part
    return Slice("", "", "", part.memory_mi_b, part.cores, other=True)


def _instance(part: MigInstance, scope: Scope) -> MigInstance:
    if scope.allows(part.namespace):
        return part
    return msgspec.structs.replace(part, namespace="", pod="", other=True)
