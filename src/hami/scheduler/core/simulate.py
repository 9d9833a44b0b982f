"""Dry runs (scheduler.md §2.3): the given nodes, all empty, judged one by one; only the quota is the live
one."""

from collections.abc import Generator, Mapping, Sequence
from typing import Final

from hami.protocol import views
from hami.protocol.errors import ProtocolError
from hami.scheduler.core.answers import PodRequest, Simulated
from hami.scheduler.core.nodes import NodeTable, facts_of
from hami.scheduler.core.placement import fit_steps
from hami.scheduler.core.texts import UNREGISTERED
from hami.vendors.engine import node_devices
from hami.vendors.types import DeviceInfo, NodeView, QuotaView, VendorProfile

MOST_CARDS: Final = 512
"""Of one node: whoever asks makes the nodes up, and a step must stay short."""


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
        self._steps = self._judge_all()
        self._answer: Simulated | None = None

    def advance(self, steps: int) -> Simulated | None:
        """Judge up to `steps` (>= 1) containers, each on one node; None: not decided yet."""
        for _ in range(steps):
            if self._answer is not None:
                break
            try:
                next(self._steps)
            except StopIteration as end:
                self._answer = end.value
        return self._answer

    def _judge_all(self) -> Generator[None, None, Simulated]:
        fits: list[str] = []
        failed: dict[str, str] = {}
        for node in self._nodes:
            reason = yield from self._judge(node)
            if reason:
                failed[node.name] = reason
            else:
                fits.append(node.name)
            yield
        return Simulated(tuple(fits), failed)

    def _judge(self, node: views.Node) -> Generator[None, None, str]:
        facts = facts_of(node, self._resources)
        devices = registered_devices(self._profiles, facts)
        if not devices:
            return UNREGISTERED
        cards = sum(map(len, devices.values()))
        if cards > MOST_CARDS:
            return f"{cards} cards, dry runs are made for at most {MOST_CARDS} on a node"
        table = NodeTable(self._profiles)
        fit = yield from fit_steps(table.register(facts, devices, version=0), self._request, self._quotas)
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
