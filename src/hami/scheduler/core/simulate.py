"""Dry runs (scheduler.md §2.3): the given nodes, all empty, judged one by one; only the quota is the live
one."""

from collections.abc import Mapping, Sequence

from hami.protocol import views
from hami.protocol.errors import ProtocolError
from hami.scheduler.core.answers import PodRequest, Simulated
from hami.scheduler.core.nodes import NodeTable, facts_of
from hami.scheduler.core.placement import fit_node
from hami.scheduler.core.texts import UNREGISTERED
from hami.vendors.engine import node_devices
from hami.vendors.types import DeviceInfo, NodeView, QuotaView, VendorProfile


class Simulation:
    """One dry run; spread it over several turns with `advance`."""

    def __init__(
        self,
        profiles: Mapping[str, VendorProfile],
        resources: frozenset[str],
        request: PodRequest,
        nodes: Sequence[views.Node],
        quotas: Mapping[str, QuotaView],
    ) -> None:
        self._profiles = profiles
        self._resources = resources
        self._request = request
        self._nodes = nodes
        self._quotas = quotas
        self._done = 0
        self._fits: list[str] = []
        self._failed: dict[str, str] = {}

    def advance(self, fits: int) -> Simulated | None:
        """Judge up to `fits` (>= 1) nodes; None: not decided yet."""
        upto = min(self._done + fits, len(self._nodes))
        for node in self._nodes[self._done : upto]:
            reason = self._judge(node)
            if reason:
                self._failed[node.name] = reason
            else:
                self._fits.append(node.name)
        self._done = upto
        return Simulated(tuple(self._fits), self._failed) if upto == len(self._nodes) else None

    def _judge(self, node: views.Node) -> str:
        facts = facts_of(node, self._resources)
        devices = registered_devices(self._profiles, facts)
        if not devices:
            return UNREGISTERED
        table = NodeTable(self._profiles)
        fit = fit_node(table.register(facts, devices, version=0), self._request, self._quotas)
        return fit.reason


def registered_devices(
    profiles: Mapping[str, VendorProfile], node: NodeView
) -> dict[str, tuple[DeviceInfo, ...]]:
    """The node's devices per vendor, whatever its handshakes say; vendors without readable devices are left
    out."""
    devices = {}
    for word, profile in profiles.items():
        try:
            devices[word] = tuple(node_devices(profile, node))
        except ProtocolError:
            continue
    return devices
