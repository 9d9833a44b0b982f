from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hami.kube.client import Client
from hami.kube.events import MAX_MESSAGE_CHARS, EventRecorder, ObjectRef
from hami.kube.lease import LeaseObservation
from hami.kube.logs import JsonFormatter
from hami.protocol.views import LeaseSpec

POD = ObjectRef("Pod", "train-0", "team-a", "u1")
EVENTS = "/api/v1/namespaces/team-a/events"


@contextlib.asynccontextmanager
async def recording(client: Client, now: list[float]) -> AsyncIterator[EventRecorder]:
    recorder = EventRecorder(client, "hami-scheduler", "host", clock=lambda: now[0])
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_an_event_names_its_object_and_source(api: Any, client: Client) -> None:
    api.answer("POST", EVENTS, {}, status=201)
    async with recording(client, [0.0]) as recorder:
        recorder.record(POD, "Warning", "BindingFailed", "no luck")
        await recorder.flush(60)
    sent = api.seen[0].json()
    assert sent["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "train-0",
        "namespace": "team-a",
        "uid": "u1",
    }
    assert (sent["type"], sent["reason"], sent["message"]) == ("Warning", "BindingFailed", "no luck")
    assert sent["source"] == {"component": "hami-scheduler", "host": "host"}
    assert sent["firstTimestamp"] == "1970-01-01T00:00:00Z"
    assert sent["metadata"]["name"].startswith("train-0.")


@pytest.mark.parametrize("joint", ["-", ".", "--"])
async def test_an_event_of_a_long_name_has_a_name_that_the_api_server_takes(
    api: Any, client: Client, joint: str
) -> None:
    api.answer("POST", EVENTS, {}, status=201)
    name = "a" * (200 - len(joint)) + joint + "b" * 20
    async with recording(client, [0.0]) as recorder:
        recorder.record(ObjectRef("Pod", name, "team-a", "u1"), "Normal", "BindingSucceed", "m")
        await recorder.flush(60)
    made = api.seen[0].json()["metadata"]["name"]
    assert len(made) <= 253
    assert all(re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", part) for part in made.split("."))


async def test_events_of_nodes_go_to_the_default_namespace(api: Any, client: Client) -> None:
    api.answer("POST", "/api/v1/namespaces/default/events", {}, status=201)
    async with recording(client, [0.0]) as recorder:
        recorder.record(ObjectRef("Node", "n1"), "Warning", "ClockSkew", "m")
        await recorder.flush(60)
    assert api.count("POST", "/api/v1/namespaces/default/events") == 1


async def test_the_same_event_again_increases_a_count(api: Any, client: Client) -> None:
    api.answer("POST", EVENTS, {}, status=201)
    now = [1000.0]
    async with recording(client, now) as recorder:
        recorder.record(POD, "Normal", "R", "m")
        await recorder.flush(60)
        path = f"{EVENTS}/{api.seen[0].json()['metadata']['name']}"
        api.answer("PATCH", path, {})
        for _ in range(2):
            now[0] += 5
            recorder.record(POD, "Normal", "R", "m")
            await recorder.flush(60)
        now[0] += 601
        recorder.record(POD, "Normal", "R", "m")
        await recorder.flush(60)
    assert [seen.method for seen in api.seen] == ["POST", "PATCH", "PATCH", "POST"]
    assert [seen.json().get("count") for seen in api.seen] == [1, 2, 3, 1]
    assert api.seen[2].json()["lastTimestamp"] == "1970-01-01T00:16:50Z"


async def test_an_event_that_was_cleaned_up_meanwhile_is_created_anew(api: Any, client: Client) -> None:
    api.answer("POST", EVENTS, {}, status=201)
    async with recording(client, [0.0]) as recorder:
        for _ in range(2):
            recorder.record(POD, "Normal", "R", "m")
            await recorder.flush(60)
    assert [seen.method for seen in api.seen] == ["POST", "PATCH", "POST"]


async def test_a_refused_event_is_lost_and_the_next_one_is_sent(api: Any, client: Client) -> None:
    api.on("POST", EVENTS, api.json({"reason": "Forbidden"}, 403), api.json({}, 201))
    async with recording(client, [0.0]) as recorder:
        recorder.record(POD, "Normal", "R", "one")
        recorder.record(POD, "Normal", "R", "two")
        await recorder.flush(60)
        assert recorder.dropped == 1
    assert [seen.json()["message"] for seen in api.seen] == ["one", "two"]


async def test_a_full_queue_drops_the_oldest_and_long_messages_are_cut(api: Any, client: Client) -> None:
    recorder = EventRecorder(client, "c")
    for number in range(2500):
        recorder.record(POD, "Normal", "R", str(number))
    assert recorder.dropped == 500
    recorder.record(POD, "Normal", "R", "x" * 10000)
    assert len(recorder._queues[POD.namespace][-1].message) == MAX_MESSAGE_CHARS


async def test_a_namespace_with_many_events_costs_its_own_and_delays_nobody(api: Any, client: Client) -> None:
    for namespace in ("loud", "quiet"):
        api.answer("POST", f"/api/v1/namespaces/{namespace}/events", {})
    recorder = EventRecorder(client, "c")
    recorder.record(ObjectRef("Pod", "first", "quiet"), "Normal", "R", "first")
    for number in range(3000):
        recorder.record(ObjectRef("Pod", f"p{number}", "loud"), "Normal", "R", "loud")
    recorder.record(ObjectRef("Pod", "second", "quiet"), "Normal", "R", "second")
    assert [recorder._next().message for _ in range(4)] == ["first", "loud", "second", "loud"]


def lease_record(holder: str, renewed: str) -> LeaseSpec:
    return LeaseSpec(holder_identity=holder, lease_duration_seconds=15, renew_time=renewed)


def test_a_lease_is_held_until_its_duration_after_the_last_change() -> None:
    lease = LeaseObservation()
    record = lease_record("sched-1_uuid", "t1")
    lease.observe(record, 100.0)
    assert lease.held_by("sched-1", 114.9)
    assert not lease.held_by("sched-1", 115.0)
    lease.observe(record, 110.0)
    assert not lease.held_by("sched-1", 115.0), "seeing the same record again proves nothing"
    lease.observe(lease_record("sched-1_uuid", "t2"), 110.0)
    assert lease.held_by("sched-1", 124.0)
    lease.forget()
    assert not lease.held_by("sched-1", 111.0)


def test_a_host_whose_name_is_a_prefix_of_the_holder_is_not_the_leader() -> None:
    lease = LeaseObservation()
    lease.observe(lease_record("sched-10_x", "t"), 0.0)
    assert not lease.held_by("sched-1", 1.0)
    assert lease.held_by("sched-10", 1.0)
    lease.observe(lease_record("sched-1", "t2"), 0.0)
    assert not lease.held_by("sched-1", 1.0), "an identity without a uuid part is not ours"


def test_a_log_record_is_one_line_of_json_whatever_is_in_it() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("hami.test")
    logger.addHandler(handler)
    logger.info(
        "pod.bound", extra={"pod": "a/b", "n": 1, "odd": "x\ny\ud800", "level": "ignored", "set": {1}}
    )
    try:
        json.loads("boom")
    except ValueError:
        logger.exception("it.failed", extra={"obj": object()})
    first, second = stream.getvalue().splitlines()
    assert json.loads(first) | {"ts": ""} == {
        "ts": "",
        "level": "info",
        "logger": "hami.test",
        "event": "pod.bound",
        "pod": "a/b",
        "n": 1,
        "odd": "x\ny?",
        "set": [1],
    }
    assert "JSONDecodeError" in json.loads(second)["error"]
