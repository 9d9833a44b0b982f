"""What `/bind` does when something else happens meanwhile (scheduler.md §10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

POD = "/api/v1/namespaces/default/pods/p"
BINDING = f"{POD}/binding"


def refusal(code: int) -> web.Response:
    body = {"kind": "Status", "code": code, "reason": "Told", "message": "said the test"}
    return web.json_response(body, status=code, headers={"Retry-After": "3600"} if code == 429 else {})


class Script:
    """Answers requests to a path with these codes, one after the other; then lets them through.

    In place of a code: something to call before the request is let through.
    """

    def __init__(
        self, world: Any, method: str, path: str, *answers: int | Callable[[], Any], **also: Any
    ) -> None:
        self.count = 0
        self._wanted = (method, path)
        self._answers = list(answers)
        self._next = also.get("then")
        world.api.intercept = self

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        if (request.method, request.path) != self._wanted:
            return None if self._next is None else await self._next(request)
        self.count += 1
        if not self._answers:
            return None
        answer = self._answers.pop(0)
        if isinstance(answer, int):
            return refusal(answer)
        done = answer()
        if asyncio.iscoroutine(done):
            await done
        return None


async def lock_of(world: Any, node: str = "n1") -> str | None:
    found = await world.request("GET", f"/api/v1/nodes/{node}")
    text: str | None = found["metadata"]["annotations"].get("hami.io/mutex.lock")
    return text


async def test_a_lock_that_cannot_be_written_fails_the_bind_and_keeps_the_reservation(world: Any) -> None:
    pod = await world.placed()
    Script(world, "PATCH", "/api/v1/nodes/n1", *[403] * 5)
    assert "said the test" in await world.bind(pod, "n1")
    assert world.used_mib("n1") == [1000]
    assert await world.bind(pod, "n1") == ""


async def test_a_decision_replaced_while_the_lock_is_taken_is_stale_and_gives_its_lock_back(
    world: Any,
) -> None:
    pod = await world.placed()
    await world.add_node("n2")
    Script(world, "PATCH", "/api/v1/nodes/n1", lambda: world.filter(pod, "n2"))
    assert await world.bind(pod, "n1") == "stale bind request"
    assert await lock_of(world) is None
    assert (world.used_mib("n1"), world.used_mib("n2")) == ([0], [1000])
    assert await world.bind(pod, "n2") == ""


async def test_a_replica_that_no_longer_leads_binds_nothing(start: Any) -> None:
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        spec = {"holderIdentity": "host_1", "leaseDurationSeconds": 60, "leaseTransitions": 1}
        lease = {"metadata": {"name": "hami-scheduler", "namespace": "kube-system"}, "spec": spec}
        await world.request("POST", "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", lease)
        await world.until(lambda: world.scheduler.gate.is_open)
        pod = await world.placed()
        world.scheduler.leadership._lease.forget()  # as if it had expired: nobody has noticed yet
        assert await world.bind(pod, "n1") == "not the leader"
        assert world.used_mib("n1") == [0]
        assert await lock_of(world) is None


async def test_a_bind_that_comes_again_while_the_outcome_is_settled_gets_the_same_answer(
    world: Any,
) -> None:
    pod = await world.placed()
    arrived, go = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        arrived.set()
        await go.wait()

    script = Script(world, "POST", BINDING, wait)
    first = asyncio.create_task(world.bind(pod, "n1"))
    await arrived.wait()
    second = asyncio.create_task(world.bind(pod, "n1"))
    await asyncio.sleep(0.05)
    assert not second.done()
    go.set()
    assert (await first, await second) == ("", "")
    assert script.count == 1


async def test_an_answer_that_does_not_come_in_time_says_that_it_is_being_settled(world: Any) -> None:
    pod = await world.placed()
    go = asyncio.Event()
    Script(world, "POST", BINDING, go.wait)
    binder = world.scheduler.binder
    binder._settings = type(binder._settings)(answer_within_s=2.0)
    text = "the outcome of the Binding of pod default/p is unknown, it is being settled"
    assert await world.bind(pod, "n1") == text
    assert world.used_mib("n1") == [1000]
    go.set()
    await world.until(lambda: world.scheduler.state.reservation(pod["metadata"]["uid"]) is None)
    assert world.used_mib("n1") == [1000]


async def test_a_bind_after_the_pod_was_bound_but_before_the_watch_shows_it_is_a_success(
    world: Any,
) -> None:
    pod = await world.placed()
    uid = pod["metadata"]["uid"]
    world.scheduler.state.binding_started(uid)
    world.scheduler.state.binding_confirmed(uid)
    world.api.seen.clear()
    assert await world.bind(pod, "n1") == ""
    assert world.writes() == []


async def test_429_without_end_is_a_refusal_because_nothing_was_processed(world: Any) -> None:
    pod = await world.placed()
    Script(world, "POST", BINDING, *[429] * 20)
    assert "said the test" in await world.bind(pod, "n1")
    assert world.used_mib("n1") == [0]
    assert await lock_of(world) is None


@pytest.mark.parametrize("recreated", [False, True])
async def test_a_pod_that_is_gone_when_the_outcome_is_looked_up_releases(world: Any, recreated: bool) -> None:
    pod = await world.placed()

    async def delete(_request: web.Request) -> None:
        world.api.intercept = None
        await world.request("DELETE", POD, {"gracePeriodSeconds": 0})
        if recreated:
            await world.add_pod("p")

    binding = asyncio.create_task(world.bind(pod, "n1"))
    # The Binding is lost; its pod is deleted before the look-up.
    Script(world, "POST", BINDING, 500, then=_once("GET", POD, delete))
    answer = await binding
    assert answer == "pod default/p was recreated" if recreated else "not found" in answer
    assert world.scheduler.state.reservation(pod["metadata"]["uid"]) is None
    assert world.used_mib("n1") == [0]
    assert await lock_of(world) is None


def _once(method: str, path: str, action: Callable[[web.Request], Any]) -> Callable[[web.Request], Any]:
    async def intercept(request: web.Request) -> web.StreamResponse | None:
        if (request.method, request.path) == (method, path):
            await action(request)
        return None

    return intercept


async def test_a_look_up_that_fails_is_made_again(world: Any) -> None:
    pod = await world.placed()
    looks = Script(world, "GET", POD, 403)
    bindings = Script(world, "POST", BINDING, 500, then=looks)
    assert await world.bind(pod, "n1") == ""
    assert (looks.count, bindings.count) == (2, 2)


async def test_a_pod_that_cannot_be_read_is_an_error_with_an_event(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    Script(world, "GET", POD, 403)
    assert "said the test" in await world.bind(pod, "n1")
    await world.scheduler.recorder.flush(60)
    assert [reason for _, reason, _ in await world.events()] == ["BindingFailed"]


async def test_a_follower_binds_no_pod_without_devices_either(start: Any) -> None:
    async with start(lease=("kube-system", "hami-scheduler")) as world:
        await world.add_node("n1")
        limits = {"nvidia.com/priority": "1"}
        container = {"name": "a", "image": "i", "resources": {"limits": limits}}
        spec = {"schedulerName": "hami-scheduler", "containers": [container]}
        pod = {"metadata": {"name": "p", "namespace": "default"}, "spec": spec}
        pod = await world.request("POST", "/api/v1/namespaces/default/pods", pod)
        assert await world.bind(pod, "n1") == "not the leader"
        assert "nodeName" not in (await world.pod("p"))["spec"]


async def test_the_process_ends_although_an_outcome_is_unknown(start: Any) -> None:
    async with start() as world:
        pod = await world.placed()
        Script(world, "POST", BINDING, *[500] * 100)
        binding = asyncio.create_task(world.bind(pod, "n1"))
        uid = pod["metadata"]["uid"]
        await world.until(lambda: world.scheduler.state.reservation(uid).phase.value == "unknown")
        binding.cancel()
    await asyncio.gather(binding, return_exceptions=True)
