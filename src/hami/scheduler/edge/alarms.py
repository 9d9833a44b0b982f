"""Figures of the scheduler that alarms are made of, and nothing else (docs/alerts.md)."""

from __future__ import annotations

from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.metrics import Counter
from hami.scheduler.edge.node_locks import NodeLocks
from hami.scheduler.edge.tls import ReloadingTls


def alarm_counters(events: SchedulerEvents, locks: NodeLocks) -> list[Counter]:
    """What every scheduler has."""
    return [
        (
            "hami_scheduler_bind_failures",
            "Pods that could not be bound when kube-scheduler asked",
            lambda: float(events.binding_failures),
        ),
        ("hami_scheduler_oldest_node_lock_seconds", "Age of the oldest node lock, 0: none", locks.oldest_s),
    ]


def certificate_counter(tls: ReloadingTls) -> Counter:
    """What a scheduler that serves TLS has."""
    return (
        "hami_scheduler_certificate_expiry_timestamp_seconds",
        "End of the certificate that the webhook is served with, Unix seconds",
        lambda: tls.not_after,
    )
