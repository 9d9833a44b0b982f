"""Gauges of the scheduler process itself."""

from __future__ import annotations

from hami.kube.bugs import BugLog
from hami.kube.events import EventRecorder
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.handshakes import MetadataWriter
from hami.scheduler.edge.informers import Informers
from hami.scheduler.edge.leader import Leadership, SyncGate
from hami.scheduler.edge.metrics import Counter
from hami.scheduler.edge.pending import PendingPods
from hami.scheduler.edge.reload import ConfigReload


def process_counters(
    state: ClusterState,
    gate: SyncGate,
    leadership: Leadership,
    pending: PendingPods,
    writer: MetadataWriter,
    recorder: EventRecorder,
    informers: Informers,
    bugs: BugLog,
) -> list[Counter]:
    """What every scheduler tells of itself."""
    return [
        (
            "hami_scheduler_synced",
            "Whether this replica answers filter requests",
            lambda: float(gate.is_open),
        ),
        ("hami_scheduler_leader", "Whether this replica leads", lambda: float(leadership.is_leader())),
        (
            "hami_scheduler_pending_pods",
            "Pods that fitted nowhere when last tried",
            lambda: float(len(pending)),
        ),
        (
            "hami_scheduler_requeue_touches",
            "Pods touched because they fit now",
            lambda: float(pending.touches),
        ),
        ("hami_scheduler_metadata_writes", "Handshakes and labels written", lambda: float(writer.written)),
        (
            "hami_scheduler_metadata_failures",
            "Handshakes and labels not written",
            lambda: float(writer.failed),
        ),
        (
            "hami_scheduler_events_dropped",
            "Events that could not be recorded",
            lambda: float(recorder.dropped),
        ),
        (
            "hami_scheduler_doubtful_registrations",
            "Nodes whose registered devices could not be read, or not all of them",
            lambda: float(state.doubtful_registrations),
        ),
        (
            "hami_scheduler_internal_errors",
            "Exceptions that nobody expected",
            lambda: float(bugs.total),
        ),
        ("hami_scheduler_cached_pods", "Pods in the cache", lambda: float(len(informers.pods))),
        ("hami_scheduler_cached_nodes", "Nodes in the cache", lambda: float(len(informers.nodes))),
    ]


def config_counters(config: ConfigReload) -> list[Counter]:
    """What a scheduler tells that follows its device config file."""
    return [
        (
            "hami_scheduler_config_errors",
            "Whether the device config file holds what could not be taken up",
            lambda: float(config.failing),
        ),
        (
            "hami_scheduler_config_reloads",
            "Changes of the device config file that were taken up",
            lambda: float(config.applied),
        ),
    ]
