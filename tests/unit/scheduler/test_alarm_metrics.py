"""Series that alarms are made of: sick cards, old locks, failed Bindings, certificates that end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hami.kube.certificates import KeyPair, create_authority, issue, write_pair
from hami.kube.client import Client
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder, ObjectRef
from hami.protocol.lock import LockOwner, format_lock
from hami.scheduler.edge.alarms import alarm_counters, certificate_counter
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.metrics import Metrics
from hami.scheduler.edge.node_locks import NodeLocks
from hami.scheduler.edge.timing import Timings
from hami.scheduler.edge.tls import ReloadingTls

NOW = 1_787_400_000.0
OWNER = LockOwner("team", "train-0")


async def text_of(metrics: Metrics) -> str:
    return b"".join([chunk async for chunk in metrics.chunks()]).decode()


async def test_only_a_sick_card_has_a_series_that_says_so(lab: Any) -> None:
    metrics = Metrics(lab.state, Timings(), legacy=False)
    lab.node("n1", lab.card("a"), lab.card("b", health=False))
    (line,) = [
        line for line in (await text_of(metrics)).splitlines() if line.startswith("hami_gpu_unhealthy{")
    ]
    assert line.endswith(" 1")
    assert 'device_uuid="b",node="n1",zone="vGPU"' in line
    lab.node("n1", lab.card("a"), lab.card("b"))
    assert "hami_gpu_unhealthy{" not in await text_of(metrics)


@pytest.fixture
def locks() -> NodeLocks:
    client = Client(ClientConfig("http://127.0.0.1:1"))
    return NodeLocks(client, EventRecorder(client, "test"), clock=lambda: NOW)


def test_the_oldest_lock_counts_until_it_is_gone(locks: NodeLocks) -> None:
    assert locks.oldest_s() == 0.0
    for node, age in (("n1", 10), ("n2", 400), ("n3", 20)):
        locks.saw(node, format_lock(OWNER, NOW - age))
    locks.saw("n4", "no lock at all,")
    assert locks.oldest_s() == 400.0
    locks.saw("n2", None)
    assert locks.oldest_s() == 20.0
    locks.forget("n3")
    assert locks.oldest_s() == 10.0
    locks.saw("n1", format_lock(OWNER, NOW + 60))
    assert locks.oldest_s() == 0.0


async def test_failed_bindings_are_counted(lab: Any, locks: NodeLocks) -> None:
    events = SchedulerEvents(EventRecorder(Client(ClientConfig("http://127.0.0.1:1")), "test"))
    counters = alarm_counters(events, locks)
    metrics = Metrics(lab.state, Timings(), legacy=False, counters=counters)
    assert 'hami_scheduler_bind_failures{zone="vGPU"} 0\n' in await text_of(metrics)
    events.binding_failed(ObjectRef("Pod", "p", "default", "u"), "why")
    assert 'hami_scheduler_bind_failures{zone="vGPU"} 1\n' in await text_of(metrics)


async def test_the_certificate_in_use_says_when_it_ends(lab: Any, tmp_path: Path) -> None:
    metrics = Metrics(lab.state, Timings(), legacy=False)
    assert "hami_scheduler_certificate_expiry" not in await text_of(metrics)
    authority = create_authority("ca", time.time())

    def renewed(days: int) -> KeyPair:
        pair = issue(authority, "host", time.time(), hosts=["host"], days=days)
        write_pair(pair, tmp_path / "tls.crt", tmp_path / "tls.key")
        return pair

    for days in (10, 20):
        pair = renewed(days)
        if days == 10:
            tls = ReloadingTls(tmp_path / "tls.crt", tmp_path / "tls.key")
            metrics.add(certificate_counter(tls))
        else:
            assert tls.check()
        wanted = f'hami_scheduler_certificate_expiry_timestamp_seconds{{zone="vGPU"}} {pair.not_after:.0f}\n'
        assert wanted in await text_of(metrics)
