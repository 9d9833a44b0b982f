"""Handshakes and labels: merged, written by the leader, tried again (decision 28)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.errors import KubeError, NotFound, TransportError
from hami.kube.events import EventRecorder
from hami.kube.resources import NODES, PODS
from hami.protocol.views import Lease, LeaseSpec
from hami.scheduler.edge import handshakes
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.handshakes import MetadataWriter
from hami.scheduler.edge.informers import NodeEvents
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.node_locks import NodeLocks


class Api(Client):
    """Records patches; fails the first ones as told."""

    def __init__(self, *failures: KubeError) -> None:
        super().__init__(ClientConfig("http://unused"), Limits(qps=0))
        self.patches: list[tuple[str, dict[str, Any]]] = []
        self.tried = asyncio.Event()
        self._failures = list(failures)

    async def request(self, method: str, path: str, *, body: bytes | None = None, **_: Any) -> bytes:
        assert body is not None
        self.tried.set()
        if self._failures:
            raise self._failures.pop(0)
        self.patches.append((path, msgspec.json.decode(body)["metadata"]))
        return b"{}"

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.patches) < count:  # noqa: ASYNC110 -- polled under a time-out
                await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "_BACKOFF_S", (0.01, 0.01))


@asynccontextmanager
async def writing(api: Api, leadership: Leadership | None = None) -> AsyncIterator[MetadataWriter]:
    writer = MetadataWriter(api, leadership or Leadership("h", electing=False), random.Random(0))
    task = asyncio.create_task(writer.run())
    try:
        yield writer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_wishes_for_one_object_become_one_patch_with_the_newest_values() -> None:
    api = Api()
    async with writing(api) as writer:
        writer.want(NODES, "n1", annotations={"a": "1", "b": "1"})
        writer.want(NODES, "n1", annotations={"a": "2", "b": None})
        writer.want(PODS, "p", namespace="ns", uid="u", labels={"l": "x"})
        await api.until(2)
    assert api.patches == [
        ("/api/v1/nodes/n1", {"annotations": {"a": "2", "b": None}}),
        ("/api/v1/namespaces/ns/pods/p", {"labels": {"l": "x"}, "uid": "u"}),
    ]


async def test_a_failed_write_is_tried_again_under_what_was_wanted_meanwhile() -> None:
    api = Api(TransportError("lost"))
    async with writing(api) as writer:
        writer.want(NODES, "n1", annotations={"a": "old", "b": "old"})
        await api.tried.wait()
        writer.want(NODES, "n1", annotations={"a": "new"})
        await api.until(1)
        assert writer.failed == 1
    assert api.patches == [("/api/v1/nodes/n1", {"annotations": {"a": "new", "b": "old"}})]


async def test_an_object_that_is_gone_is_forgotten() -> None:
    api = Api(NotFound(404, "NotFound", "gone"))
    async with writing(api) as writer:
        writer.want(NODES, "n1", annotations={"a": "1"})
        writer.want(NODES, "n2", annotations={"a": "1"})
        await api.until(1)
    assert [path for path, _ in api.patches] == ["/api/v1/nodes/n2"]


async def test_a_follower_writes_nothing_and_keeps_no_wishes() -> None:
    api = Api()
    leadership = Leadership("h", electing=True)
    async with writing(api, leadership) as writer:
        writer.want(NODES, "n1", annotations={"a": "1"})
        spec = LeaseSpec(holder_identity="h_1", lease_duration_seconds=60)
        leadership.on_add(Lease(spec=spec))
        writer.want(NODES, "n2", annotations={"a": "1"})
        await api.until(1)
    assert [path for path, _ in api.patches] == ["/api/v1/nodes/n2"]


async def test_a_new_leader_looks_at_its_nodes_a_few_at_a_time(lab: Any) -> None:
    """Thousands of nodes take most of a second, in which nobody would be answered."""
    for number in range(50):
        lab.node(f"n{number:02}", lab.card(f"c{number}"))
    api, leadership = Api(), Leadership("h", electing=False)
    recorder = EventRecorder(api, "test")
    writer = MetadataWriter(api, leadership)
    nodes = NodeEvents(lab.state, leadership, SchedulerEvents(recorder), writer, NodeLocks(api, recorder))
    leading = asyncio.create_task(nodes.leading())
    turns = 0
    while not leading.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 5
    assert len(writer._pending) == 50
