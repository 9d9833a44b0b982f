"""Everything the dashboard knows of the cluster, fed by events: the scheduler's own state beside the objects.

One loop owns it. Nothing here is ever written back to the cluster: what the state would have written (the
handshakes) is dropped, that is the leader's work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hami.answers.redact import Redaction
from hami.answers.replay import profiles_of
from hami.answers.snapshot import Settings, Snapshot
from hami.dashboard.objects import NodeEntry, PodEntry, PodParsed, Reader
from hami.dashboard.reading import NOTHING_READ, Reading
from hami.dashboard.shapes import Source
from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.views import ResourceQuota
from hami.scheduler.core.state import ClusterState
from hami.vendors.engine import read_inventory
from hami.vendors.types import VendorProfile

STALE_AFTER_S = 90.0  # three scrapes of a monitor missed
_PROBLEMS_SHOWN = 8
_PROBLEM_LENGTH = 500


@dataclass(slots=True)
class MonitorState:
    """What one node's monitor said last, and when (Unix seconds)."""

    reading: Reading = NOTHING_READ
    heard: float | None = None
    failure: str = ""

    def source(self, now: float) -> Source:
        """Whether its numbers can be relied on."""
        if self.heard is None:
            return Source("monitor", "missing", self.failure or "not asked yet")
        age = max(0.0, now - self.heard)
        if age > STALE_AFTER_S:
            return Source("monitor", "stale", f"stale {_minutes(age)}: {self.failure or 'no answer'}", age)
        return Source("monitor", "ok", "", age)

    def current(self, now: float) -> Reading:
        """The numbers, nothing when they are stale."""
        fresh = self.heard is not None and now - self.heard <= STALE_AFTER_S
        return self.reading if fresh else NOTHING_READ


@dataclass(slots=True)
class Store:
    """Objects, state and readings of one cluster."""

    settings: Settings
    device_config: str
    cluster: str = ""
    version: int = 0  # grows with every change
    nodes: dict[str, NodeEntry] = field(default_factory=dict)
    pods: dict[str, PodEntry] = field(default_factory=dict)  # by uid
    quotas: dict[tuple[str, str], ResourceQuota] = field(default_factory=dict)
    problems: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of nodes' registrations
    pod_problems: dict[str, tuple[str, ...]] = field(default_factory=dict)  # by uid
    monitors: dict[str, MonitorState] = field(default_factory=dict)  # by node
    sources: dict[str, Source] = field(default_factory=dict)
    profiles: tuple[VendorProfile, ...] = field(init=False)
    state: ClusterState = field(init=False)
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        # every vendor is shown; which ones are scheduled is a matter of explanations
        self.profiles = profiles_of(self.device_config, ascend=True, iluvatar=True)
        self.state = ClusterState(self.profiles)
        resources = frozenset(name for one in self.profiles for name in one.names.all())
        rules = [one.rules for one in self.profiles]
        given = frozenset(key for one in rules for key in (one.to_allocate, one.allocated) if key)
        self.reader = Reader(Redaction(self.profiles), resources, given)

    # --- events -------------------------------------------------------------------------------------------

    def put_node(self, entry: NodeEntry, now: float) -> None:
        """A node as it is now."""
        name = entry.view.name
        self.nodes[name] = entry
        self.state.upsert_node(entry.view, now)
        self.problems[name] = self._problems(name)
        self.version += 1

    def drop_node(self, name: str) -> None:
        """A node is gone."""
        self.nodes.pop(name, None)
        self.problems.pop(name, None)
        self.monitors.pop(name, None)
        self.state.delete_node(name)
        self.version += 1

    def put_pod(self, pod: PodParsed) -> None:
        """A pod as it is now."""
        uid = pod.entry.metadata.uid
        self.pods[uid] = pod.entry
        notices = self.state.upsert_pod(pod.view).notices
        if notices:
            self.pod_problems[uid] = _shown([notice.message for notice in notices])
        elif uid in self.pod_problems:
            del self.pod_problems[uid]
        self.version += 1

    def drop_pod(self, uid: str) -> None:
        """A pod is gone."""
        self.pods.pop(uid, None)
        self.pod_problems.pop(uid, None)
        self.state.delete_pod(uid)
        self.version += 1

    def put_quota(self, quota: ResourceQuota) -> None:
        """A quota as it is now."""
        self.quotas[quota.namespace, quota.name] = quota
        self.state.upsert_quota(quota)
        self.version += 1

    def drop_quota(self, namespace: str, name: str) -> None:
        """A quota is gone."""
        self.quotas.pop((namespace, name), None)
        self.state.delete_quota(namespace, name)
        self.version += 1

    def heard(self, node: str, reading: Reading, now: float) -> None:
        """A node's monitor has answered."""
        self.monitors[node] = MonitorState(reading, now)
        self.version += 1

    def not_heard(self, node: str, why: str) -> None:
        """A node's monitor has not answered: what it said before ages."""
        self.monitors.setdefault(node, MonitorState()).failure = why[:_PROBLEM_LENGTH]
        self.version += 1

    def report(self, source: Source) -> None:
        """How a source of data is doing."""
        if self.sources.get(source.name) != source:
            self.sources[source.name] = source
            self.version += 1

    def tick(self, now: float) -> None:
        """Time passes: handshakes that nobody answers end."""
        before = self.state.version
        self.state.tick(now)
        if self.state.version != before:
            self.version += 1

    # --- for explanations ---------------------------------------------------------------------------------

    def frozen(self, now: float) -> FrozenObjects:
        """The objects as they are, to be replayed elsewhere; costs a copy of references only."""
        plain_pods = [one.plain for one in self.pods.values()]
        plain_nodes = [one.plain for one in self.nodes.values()]
        quotas = [
            {
                "metadata": {"name": one.name, "namespace": one.namespace},
                "spec": {"hard": dict(one.hard)},
            }
            for one in self.quotas.values()
        ]
        return FrozenObjects(now, self.settings, self.device_config, plain_nodes, plain_pods, quotas)

    def _problems(self, name: str) -> tuple[str, ...]:
        facts = self.state.node(name)
        if facts is None:
            return ()
        found: list[str] = []
        for profile in self.profiles:
            try:
                warnings: Sequence[str] = read_inventory(profile, facts).warnings
            except DevicesAbsent:
                continue
            except DevicesMalformed as error:
                warnings = (str(error),)
            found += [f"{profile.common_word}: {warning}" for warning in warnings]
        return _shown(found)


@dataclass(frozen=True, slots=True)
class FrozenObjects:
    """The cluster's objects at one moment, undecoded."""

    now: float
    settings: Settings
    device_config: str
    nodes: Sequence[bytes]
    pods: Sequence[bytes]
    quotas: Sequence[Mapping[str, Any]]

    def snapshot(self) -> Snapshot:
        """What `explain` replays; slow for large clusters, so not in the loop."""
        decode = msgspec.json.decode
        return Snapshot(
            self.now,
            self.settings,
            self.device_config,
            [decode(one) for one in self.nodes],
            [decode(one) for one in self.pods],
            [dict(one) for one in self.quotas],
        )


def _shown(problems: list[str]) -> tuple[str, ...]:
    return tuple(problem[:_PROBLEM_LENGTH] for problem in problems[:_PROBLEMS_SHOWN])


def _minutes(age: float) -> str:
    return f"{int(age // 60)} min" if age >= 60 else f"{int(age)} s"
