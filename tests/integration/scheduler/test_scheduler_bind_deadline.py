"""One deadline for a whole bind request, and nothing left half done after it (scheduler.md §10)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from hami.kube.errors import TransportError
from hami.protocol.extender import ExtenderBindingArgs
from hami.scheduler.edge import node_locks
from hami.scheduler.edge.deadline import ANSWER_WITHIN_S
from hami.scheduler.edge.node_locks import SHUTTING_DOWN
from hami.scheduler.edge.pod_locks import KEPT_S

NODE = "/api/v1/nodes/n1"
POD = "/api/v1/namespaces/default/pods/p"
BINDING = f"{POD}/binding"


class Slow:
    """Requests of one kind wait until ``go``; the answers of those after that are let through."""

    def __init__(self, world: Any, wanted: Callable[[web.Request], bool]) -> None:
        self.arrived, self.go = asyncio.Event(), asyncio.Event()
        self.count = 0
        self._wanted = wanted
        world.api.intercept = self

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        if self._wanted(request):
            self.count += 1
            self.arrived.set()
            await self.go.wait()
        return None


def request_to(method: str, path: str) -> Callable[[web.Request], bool]:
    return lambda request: (request.method, request.path) == (method, path)


def answer_within(world: Any, seconds: float) -> None:
    binder = world.scheduler.binder
    binder._settings = replace(binder._settings, answer_within_s=seconds)


async def placed(world: Any, name: str = "p", **metadata: Any) -> Any:
    if "n1" not in world.scheduler.state.node_names():
        await world.add_node("n1")
    pod = await world.add_pod(name, **metadata)
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    return pod


async def lock_of(world: Any) -> str | None:
    text: str | None = (await world.request("GET", NODE))["metadata"]["annotations"].get("hami.io/mutex.lock")
    return text


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def test_the_answer_comes_before_kube_scheduler_hangs_up() -> None:
    chart = Path(__file__).parents[3] / "charts/hami/templates/scheduler/configmap.yaml"
    timeouts = [float(text) for text in re.findall(r"httpTimeout: (\d+)s", chart.read_text())]
    assert timeouts
    assert KEPT_S < ANSWER_WITHIN_S <= min(timeouts) - 2


async def test_a_lock_that_is_not_written_in_time_is_told_and_taken_back(world: Any) -> None:
    """The write may still land after the answer."""
    pod = await placed(world)
    answer_within(world, 1.0)
    slow = Slow(world, request_to("PATCH", NODE))
    answer = await world.bind(pod, "n1")
    assert answer.startswith("no success with the lock of node n1 within 1s: PATCH /api/v1/nodes/n1")
    assert world.used_mib("n1") == [1000], "kube-scheduler comes back for its reservation"
    slow.go.set()
    await eventually(lambda: _is_none(lock_of(world)))
    answer_within(world, 28.0)
    assert await world.bind(pod, "n1") == ""


async def _is_none(answer: Awaitable[str | None]) -> bool:
    return await answer is None


async def test_pods_of_the_node_that_are_not_read_in_time_fail_the_bind_and_free_the_lock(
    world: Any,
) -> None:
    pod = await placed(world)
    answer_within(world, 1.0)
    slow = Slow(world, lambda request: "spec.nodeName" in request.query.get("fieldSelector", ""))
    text = "the pods of node n1 were not read in time: no Binding of pod default/p was sent within 1s"
    assert await world.bind(pod, "n1") == text
    assert not any(path == BINDING for _, path in world.api.seen)
    await eventually(lambda: _is_none(lock_of(world)))
    slow.go.set()
    assert world.used_mib("n1") == [1000]
    await world.scheduler.recorder.flush(10)
    assert ("Warning", "BindingFailed", text) in await world.events()


async def test_what_the_lock_took_is_missing_from_the_time_for_the_binding(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await placed(world)
    given: list[float] = []

    async def bind_pod(*_: Any, timeout_s: float, **__: Any) -> None:
        given.append(timeout_s)
        raise TransportError("lost")

    async def intercept(request: web.Request) -> web.StreamResponse | None:
        if request_to("PATCH", NODE)(request):
            await asyncio.sleep(1.0)
        return None

    monkeypatch.setattr("hami.scheduler.edge.binder.bind_pod", bind_pod)
    answer_within(world, 4.0)
    world.api.intercept = intercept
    asked = asyncio.create_task(world.bind(pod, "n1"))
    await world.until(lambda: bool(given))
    assert 1.0 <= given[0] <= 3.0
    monkeypatch.undo()
    assert await asked == ""


async def test_a_pod_that_is_to_be_tried_again_after_the_deadline_is_refused_now(world: Any) -> None:
    pod = await placed(world)
    answer_within(world, 5.0)

    async def intercept(request: web.Request) -> web.StreamResponse | None:
        if request_to("POST", BINDING)(request):
            body = {"kind": "Status", "code": 429, "reason": "Told", "message": "too many"}
            return web.json_response(body, status=429, headers={"Retry-After": "10"})
        return None

    world.api.intercept = intercept
    assert "too many" in await world.bind(pod, "n1")
    assert world.used_mib("n1") == [0]
    assert await lock_of(world) is None


async def test_a_release_that_fails_is_tried_until_it_succeeds(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hami.scheduler.edge.pod_locks._BACKOFF_S", (0.01, 0.02))
    pod = await placed(world)
    refused = 0

    async def intercept(request: web.Request) -> web.StreamResponse | None:
        nonlocal refused
        if request_to("POST", BINDING)(request):
            return web.json_response({"kind": "Status", "code": 403, "message": "no"}, status=403)
        if request_to("PATCH", NODE)(request) and b'"hami.io/mutex.lock":null' in await request.read():
            refused += 1
            if refused <= 7:  # a run of the release gives up after five
                return web.json_response({"kind": "Status", "code": 500, "message": "no"}, status=500)
        return None

    world.api.intercept = intercept
    answer_within(world, 0.5)
    assert "no" in await world.bind(pod, "n1")
    await eventually(lambda: _is_none(lock_of(world)))
    assert refused == 8


async def test_a_pod_that_comes_again_while_its_lock_is_being_released_does_not_lose_it(world: Any) -> None:
    """The lock is released, or kept for the pod: never both."""
    pod = await placed(world)
    refusals = [403]
    slow = asyncio.Event()

    async def intercept(request: web.Request) -> web.StreamResponse | None:
        if request_to("POST", BINDING)(request) and refusals:
            return web.json_response({"kind": "Status", "code": refusals.pop(), "message": "no"}, status=403)
        if request_to("PATCH", NODE)(request) and b'"hami.io/mutex.lock":null' in await request.read():
            await slow.wait()
        return None

    world.api.intercept = intercept
    answer_within(world, 1.0)
    first = asyncio.create_task(world.bind(pod, "n1"))
    await world.until(lambda: not refusals)
    await first
    answer_within(world, 28.0)
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    second = asyncio.create_task(world.bind(pod, "n1"))
    await asyncio.sleep(0.1)
    assert not second.done(), "it waits for the release"
    slow.set()
    assert await second == ""
    assert (await lock_of(world) or "").endswith(",default,p")


async def test_a_bind_that_is_cancelled_gives_its_lock_back(world: Any) -> None:
    pod = await placed(world)
    slow = Slow(world, lambda request: "spec.nodeName" in request.query.get("fieldSelector", ""))
    meta = pod["metadata"]
    args = ExtenderBindingArgs(meta["name"], meta["namespace"], meta["uid"], "n1")
    binding = asyncio.create_task(world.scheduler.binder.bind(args))
    await slow.arrived.wait()
    assert await lock_of(world) is not None
    binding.cancel()
    await asyncio.wait({binding})
    assert binding.cancelled()
    await eventually(lambda: _is_none(lock_of(world)))


async def test_a_bug_before_the_binding_gives_the_lock_back(world: Any) -> None:
    pod = await placed(world)

    async def broken(_node: str) -> None:
        raise KeyError("bug")

    world.scheduler.binder._catch_up = broken
    assert await world.bind(pod, "n1") == "internal error: KeyError"
    assert await lock_of(world) is None
    assert world.used_mib("n1") == [1000]


async def test_who_waits_for_a_lock_when_the_process_ends_is_told_and_leaves_nothing(start: Any) -> None:
    async with start() as world:
        first, second, third = [await placed(world, name) for name in ("p", "q", "r")]
        group = {"labels": {"scheduling.x-k8s.io/pod-group": "g"}}
        fourth = await placed(world, "s", **group)
        assert await world.bind(first, "n1") == ""
        lock = await lock_of(world)
        waiting = [asyncio.create_task(world.bind(pod, "n1")) for pod in (second, third, fourth)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in waiting)
        world.scheduler.binder.end()
        assert await asyncio.gather(*waiting) == [SHUTTING_DOWN] * 3
        assert await lock_of(world) == lock, "that of the pod that is bound stays for its node's plugin"


async def test_a_bind_under_way_when_the_process_ends_gives_its_lock_back(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server cancels what does not end by itself."""
    monkeypatch.setattr("hami.scheduler.edge.server._GRACE_S", 0)
    async with start() as world:
        pod = await placed(world)
        slow = Slow(world, lambda request: "spec.nodeName" in request.query.get("fieldSelector", ""))
        binding = asyncio.create_task(world.bind(pod, "n1"))
        await slow.arrived.wait()
        assert await lock_of(world) is not None
    await asyncio.gather(binding, return_exceptions=True)
    async with start() as world:
        assert await lock_of(world) is None


def test_the_wait_in_line_leaves_time_for_the_rest() -> None:
    assert node_locks.WAIT_S <= ANSWER_WITHIN_S - KEPT_S
