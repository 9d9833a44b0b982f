"""The node lock against a disturbed API server (protocol.md §7, cases 39, 40, 64)."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from aiohttp import web

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.events import EventRecorder
from hami.kube.operations import patch_metadata
from hami.kube.resources import NODES, PODS
from hami.local.api.apiserver import ApiServer
from hami.protocol.keys import NODE_LOCK
from hami.protocol.lock import LockOwner
from hami.protocol.views import Node
from hami.scheduler.edge.node_locks import LockContention, LockFailed, NodeLocks

OWNER = LockOwner("default", "a")


@asynccontextmanager
async def locking(api: ApiServer) -> AsyncIterator[tuple[Client, NodeLocks, EventRecorder]]:
    async with Client(ClientConfig(api.url), Limits(qps=0)) as client:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        await client.create(NODES, node, msgspec.Raw)
        recorder = EventRecorder(client, "test")
        yield client, NodeLocks(client, recorder, rng=random.Random(0)), recorder


async def lock_of(client: Client) -> str | None:
    return (await client.get(NODES, "n1", Node)).annotations.get(NODE_LOCK)


async def set_lock(client: Client, text: str) -> None:
    await patch_metadata(client, NODES, "n1", annotations={NODE_LOCK: text})


async def add_pod(client: Client, name: str) -> None:
    pod = {"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    await client.create(PODS, pod, msgspec.Raw, namespace="default")


class Patches:
    """Answers PATCHes of the node as told; then lets them through."""

    def __init__(self, api: ApiServer, *answers: str) -> None:
        self.count = 0
        self._api = api
        self._answers = list(answers)
        api.intercept = self

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        if request.method != "PATCH" or request.path != "/api/v1/nodes/n1":
            return None
        self.count += 1
        if not self._answers:
            return None
        answer = self._answers.pop(0)
        if answer == "stored but 500":
            self._api.intercept = None
            async with Client(ClientConfig(self._api.url), Limits(qps=0)) as client:
                body = msgspec.json.decode(await request.read())
                await patch_metadata(client, NODES, "n1", annotations=body["metadata"]["annotations"])
            self._api.intercept = self
        code = 500 if "500" in answer else 409
        return web.json_response({"kind": "Status", "code": code, "reason": "Told"}, status=code)


async def test_a_conflict_is_tried_again_after_a_fresh_read(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (client, locks, _):
        patches = Patches(embedded_api, "409", "500")
        text = await locks.acquire("n1", OWNER)
        assert patches.count == 3
        assert await lock_of(client) == text
        await locks.release("n1", OWNER, text)
        assert await lock_of(client) is None


async def test_a_patch_whose_answer_was_lost_is_recognised_as_our_own(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (client, locks, _):
        patches = Patches(embedded_api, "stored but 500")
        text = await locks.acquire("n1", OWNER)
        assert patches.count == 1, "no second patch"
        assert await lock_of(client) == text


async def test_five_failures_give_up_and_say_what_may_have_been_written(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (_, locks, __):
        Patches(embedded_api, *["500"] * 5)
        with pytest.raises(LockFailed) as caught:
            await locks.acquire("n1", OWNER)
        assert caught.value.written.endswith(",default,a")


async def test_a_node_that_cannot_be_read_is_a_failure(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (_, locks, __):
        with pytest.raises(LockFailed, match="404"):
            await locks.acquire("nowhere", OWNER)


async def test_a_foreign_lock_is_not_released(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (client, locks, _):
        await add_pod(client, "b")
        text = f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')},default,b"
        await set_lock(client, text)
        with pytest.raises(LockContention, match="has been locked within 5m0s"):
            await locks.acquire("n1", OWNER)
        await locks.release("n1", OWNER, "another text")
        assert await lock_of(client) == text


async def test_a_lock_from_the_future_is_reported_and_ages_from_first_sight(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (client, locks, recorder):
        await add_pod(client, "b")
        now = [datetime.now(UTC).timestamp()]
        locks._clock = lambda: now[0]
        ahead = datetime.fromtimestamp(now[0], UTC) + timedelta(minutes=20)
        await set_lock(client, f"{ahead.strftime('%Y-%m-%dT%H:%M:%SZ')},default,b")
        with pytest.raises(LockContention):
            await locks.acquire("n1", OWNER)
        assert [event.reason for event in recorder._queue] == ["ClockSkew"]
        now[0] += 299
        with pytest.raises(LockContention):
            await locks.acquire("n1", OWNER)
        now[0] += 2
        assert (await locks.acquire("n1", OWNER)).endswith(",default,a")
        locks.forget("n1")
        assert not locks._sights
