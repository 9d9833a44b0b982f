"""What a container is answered that gets MIG instances: hardware divides them, so there are no limits, no
library and no files (device-plugin.md §8.1, §8.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from hami.node.cdi import kinds
from hami.node.cdi.edits import Edits, qualified
from hami.node.mig.plan import Managed
from hami.node.plugin.answer import Answer, Delivery, DeviceNode, base_response


class InstanceSource(Protocol):
    """What is known of instances; both methods block."""

    def nodes(self, each: Managed) -> tuple[str, ...]:
        """Paths of its device nodes."""
        ...

    def describe(self, each: Managed) -> Edits:
        """Write its CDI document; what that adds. Raises :class:`hami.node.cdi.edits.CdiError`."""
        ...


def instances_answer(instances: Sequence[Managed], source: InstanceSource, delivery: Delivery) -> Answer:
    """The answer for instances that were made for the container; blocks, and raises as ``source``."""
    delivery = with_instances(instances, source, delivery)
    return base_response([each.uuid for each in instances], delivery)


def with_instances(instances: Sequence[Managed], source: InstanceSource, delivery: Delivery) -> Delivery:
    """``delivery`` that also knows these instances. The runtime is told their UUIDs, whatever the id strategy
    is.
    """
    delivery = replace(delivery, indexes=None)
    if "" in delivery.device_nodes:
        delivery = with_nodes(delivery, {each.uuid: source.nodes(each) for each in instances})
    if delivery.cdi is None:
        return delivery
    edits = {qualified(kinds.GPU, each.uuid): source.describe(each) for each in instances}
    return replace(delivery, cdi=replace(delivery.cdi, edits={**delivery.cdi.edits, **edits}))


def with_nodes(delivery: Delivery, paths: Mapping[str, Sequence[str]]) -> Delivery:
    """``delivery`` that also knows the device nodes of these MIG devices, at ``paths`` below its root."""
    root = delivery.dev_root.rstrip("/")
    added = {uuid: tuple(DeviceNode(path, f"{root}{path}") for path in each) for uuid, each in paths.items()}
    return replace(delivery, device_nodes={**delivery.device_nodes, **added})
