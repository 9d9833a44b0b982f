"""The node lock against a disturbed API server (protocol.md §7, cases 39, 40, 64)."""

from __future__ import annotations

import asyncio
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
from hami.scheduler.edge import node_locks
from hami.scheduler.edge.node_locks import LockContention, LockFailed, NodeLocks

CONTENTION = "node n1 has been locked within 5m0s: node lock contention"
OWNER, OTHER = LockOwner("default", "a"), LockOwner("default", "b")


@asynccontextmanager
async def locking(api: ApiServer) -> AsyncIterator[tuple[Client, NodeLocks, EventRecorder]]:
    async with Client(ClientConfig(api.url), Limits(qps=0)) as client:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        await client.create(NODES, node, msgspec.Raw)
        recorder = EventRecorder(client, "test")
        yield client, NodeLocks(client, recorder, rng=random.Random(0)), recorder


async def lock_of(client: Client) -> str | None:
    return (await client.get(NODES, "n1", Node)).annotations.get(NODE_LOCK)


async def set_lock(client: Client, text: str | None) -> None:
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


async def test_a_pod_waits_for_a_lock_that_was_just_given(
    embedded_api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other, as they came, and without a question while the lock is held."""
    monkeypatch.setattr(node_locks, "_ASKED_EVERY_S", 600.0)
    async with locking(embedded_api) as (client, locks, _):
        await add_pod(client, "a")
        text = await locks.acquire("n1", OWNER)
        locks.saw("n1", text)
        requests = Requests(embedded_api)
        third = LockOwner("default", "c")
        waiting = [asyncio.create_task(locks.acquire("n1", owner)) for owner in (OTHER, third)]
        await asyncio.sleep(0.3)
        assert requests.count == 0
        await set_lock(client, None)
        locks.saw("n1", None)
        assert (await waiting[0]).endswith(",default,b")
        await locks.release("n1", OTHER, await waiting[0])
        assert (await waiting[1]).endswith(",default,c")


async def test_waiting_for_a_lock_has_an_end(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (client, locks, _):
        await add_pod(client, "a")
        text = await locks.acquire("n1", OWNER)
        third = LockOwner("default", "c")
        waiting = [locks.acquire("n1", owner, wait_s=0.3) for owner in (OTHER, third)]
        refused = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in refused] == [LockContention, LockContention]
        assert str(refused[0]) == str(refused[1]) == CONTENTION
        assert await locks.acquire("n1", OWNER) == "", "the holder itself does not wait"
        assert await lock_of(client) == text


async def test_a_lock_that_was_given_is_taken_over_once_its_holder_is_gone(
    embedded_api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod was deleted before its node allocated anything; the lock is still there."""
    monkeypatch.setattr(node_locks, "_ASKED_EVERY_S", 0.05)
    async with locking(embedded_api) as (_, locks, __):
        await locks.acquire("n1", OWNER)
        assert (await locks.acquire("n1", OTHER)).endswith(",default,b")


async def test_a_late_release_leaves_the_line_of_the_next_holder_alone(embedded_api: ApiServer) -> None:
    """The answer to the release comes when somebody in line has the lock already."""
    async with locking(embedded_api) as (client, locks, _):
        await add_pod(client, "b")
        text = await locks.acquire("n1", OWNER)
        await set_lock(client, None)
        locks.saw("n1", None)
        await locks.acquire("n1", OTHER)
        await locks.release("n1", OWNER, text)
        await waits_for_its_turn(client, locks)


async def test_an_old_word_of_the_informer_ends_no_waiting(embedded_api: ApiServer) -> None:
    async with locking(embedded_api) as (client, locks, _):
        await add_pod(client, "b")
        await locks.acquire("n1", OTHER)
        locks.saw("n1", None)
        await waits_for_its_turn(client, locks, None, "another lock")


async def waits_for_its_turn(client: Client, locks: NodeLocks, *old: str | None) -> None:
    """A third pod gets the lock of OTHER once that is removed; before, the informer shows these texts."""
    third = asyncio.create_task(locks.acquire("n1", LockOwner("default", "c")))
    for text in old:
        await asyncio.sleep(0.1)
        locks.saw("n1", text)
    await asyncio.sleep(0.3)
    assert not third.done(), "it is in line"
    await set_lock(client, None)
    locks.saw("n1", None)
    assert (await third).endswith(",default,c")


class Requests:
    """Counts requests."""

    def __init__(self, api: ApiServer) -> None:
        self.count = 0
        api.intercept = self

    async def __call__(self, _: web.Request) -> web.StreamResponse | None:
        self.count += 1
        return None


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
        reasons = [event.reason for queue in recorder._queues.values() for event in queue]
        assert reasons == ["ClockSkew"]
        now[0] += 299
        with pytest.raises(LockContention):
            await locks.acquire("n1", OWNER)
        now[0] += 2
        assert (await locks.acquire("n1", OWNER)).endswith(",default,a")
        locks.forget("n1")
        assert not locks._sights
