"""What `/bind` does with every answer of the API server (scheduler.md §10, cases 49 to 53, 73 to 85)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

LOST = "the connection breaks, nothing was stored"
BINDING = "/api/v1/namespaces/default/pods/p/binding"


def status(code: int, reason: str = "Refused") -> web.Response:
    return web.json_response(
        {"kind": "Status", "code": code, "reason": reason, "message": "said the test"}, status=code
    )


class Fault:
    """Answers the Bindings of pod p as told, one after the other; then lets them through."""

    def __init__(
        self, world: Any, *answers: Callable[[], Awaitable[web.Response | None]] | web.Response | str
    ) -> None:
        self.bindings = 0
        self._answers = list(answers)
        world.api.intercept = self

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        if request.method != "POST" or request.path != BINDING:
            return None
        self.bindings += 1
        if not self._answers:
            return None
        answer = self._answers.pop(0)
        if isinstance(answer, str):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return answer if isinstance(answer, web.Response) else await answer()


def free(world: Any) -> bool:
    return bool(world.used_mib("n1") == [0])


async def node_lock(world: Any) -> str | None:
    node = await world.request("GET", "/api/v1/nodes/n1")
    lock: str | None = node["metadata"].get("annotations", {}).get("hami.io/mutex.lock")
    return lock


@pytest.mark.parametrize("code", [400, 403, 404, 422])
async def test_a_definite_refusal_releases_reservation_and_lock(world: Any, code: int) -> None:
    pod = await world.placed()
    fault = Fault(world, status(code))
    error = await world.bind(pod, "n1")
    assert "said the test" in error
    assert fault.bindings == 1
    assert free(world)
    assert list(world.scheduler.state.quota_usage()) == []
    assert await node_lock(world) is None
    stored = await world.pod("p")
    assert "hami.io/vgpu-node" not in stored["metadata"].get("annotations", {})
    await world.scheduler.recorder.flush(60)
    assert any(reason == "BindingFailed" for _, reason, _ in await world.events())
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    assert await world.bind(pod, "n1") == ""


async def test_a_5xx_that_was_not_stored_is_sent_again_and_bound(world: Any) -> None:
    pod = await world.placed()
    fault = Fault(world, status(500), status(503))
    assert await world.bind(pod, "n1") == ""
    assert fault.bindings == 3
    assert (await world.pod("p"))["spec"]["nodeName"] == "n1"
    assert world.used_mib("n1") == [1000]


async def test_a_5xx_that_was_stored_is_found_by_a_get(world: Any) -> None:
    pod = await world.placed()
    seen: list[list[int]] = []

    async def stored_but_500() -> web.Response | None:
        reservation = world.scheduler.state.reservation(pod["metadata"]["uid"])
        binding = {
            "metadata": {"name": "p", "annotations": reservation.binding_annotations(0.0)},
            "target": {"kind": "Node", "name": "n1"},
        }
        world.api.intercept = None
        await world.request("POST", BINDING, binding)
        seen.append(world.used_mib("n1"))
        return status(500)

    Fault(world, stored_but_500)
    assert await world.bind(pod, "n1") == ""
    seen.append(world.used_mib("n1"))
    assert seen == [[1000], [1000]], "usage is counted once throughout"


async def test_a_binding_whose_connection_was_lost_is_sent_again_and_bound(world: Any) -> None:
    pod = await world.placed()
    fault = Fault(world, LOST)
    assert await world.bind(pod, "n1") == ""
    assert fault.bindings == 2
    assert (await world.pod("p"))["spec"]["nodeName"] == "n1"
    assert world.used_mib("n1") == [1000]


async def test_a_connection_that_is_lost_and_a_refusal_afterwards_release(world: Any) -> None:
    pod = await world.placed()
    fault = Fault(world, LOST, status(422))
    assert "said the test" in await world.bind(pod, "n1")
    assert fault.bindings == 2
    assert free(world)


@pytest.mark.parametrize("code", [401, 403, 429])
async def test_a_repetition_that_is_not_worked_on_says_nothing_of_the_first(world: Any, code: int) -> None:
    """The first may still be carried out: the cards must not be given to another pod meanwhile."""
    pod = await world.placed()
    refusals = [
        web.json_response({"kind": "Status"}, status=code, headers={"Retry-After": "3600"})
        for _ in range(2 if code == 401 else 1)  # after 401 another credential is tried
    ]
    fault = Fault(world, status(504), *refusals)
    assert await world.bind(pod, "n1") == ""
    assert fault.bindings == 2 + len(refusals)


async def test_a_binding_that_can_no_longer_be_carried_out_nor_sent_is_over(world: Any) -> None:
    pod = await world.placed()
    binder = world.scheduler.binder
    binder._settings = type(binder._settings)(late_s=0.0)
    Fault(world, status(504), status(403))
    assert "403" in await world.bind(pod, "n1")
    assert world.scheduler.state.reservation(pod["metadata"]["uid"]) is None
    assert world.used_mib("n1") == [0]


async def test_while_the_outcome_is_unknown_the_reservation_is_held_and_filter_waits(start: Any) -> None:
    async with start() as world:
        pod = await world.placed()
        gate = asyncio.Event()

        async def hang() -> web.Response | None:
            await gate.wait()
            return status(500)

        Fault(world, status(500), hang)
        binding = asyncio.create_task(world.bind(pod, "n1"))
        uid = pod["metadata"]["uid"]
        await world.until(lambda: world.scheduler.state.reservation(uid).phase.value == "unknown")
        world.scheduler.state.expire(1e12)
        assert world.used_mib("n1") == [1000], "a reservation of unknown outcome does not expire"
        filtering = asyncio.create_task(world.filter(pod, "n1"))
        await asyncio.sleep(0.1)
        assert not filtering.done()
        gate.set()
        assert await binding == ""
        assert "already bound" in (await filtering)["Error"]


async def test_a_conflict_because_the_pod_is_bound_elsewhere_releases(world: Any) -> None:
    pod = await world.placed()
    body = {"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "other"}}
    await world.request("POST", BINDING, body)
    error = await world.bind(pod, "n1")
    assert "already bound" in error or "stale" in error or error.startswith("pod default/p")
    await world.until(lambda: free(world))


async def test_429_is_sent_again_within_the_request(world: Any) -> None:
    pod = await world.placed()
    slow = web.json_response(
        {"kind": "Status", "reason": "TooManyRequests"}, status=429, headers={"Retry-After": "0"}
    )
    fault = Fault(world, slow)
    assert await world.bind(pod, "n1") == ""
    assert fault.bindings == 2


async def test_without_a_reservation_an_unbound_pod_is_scheduled_again(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    world.api.seen.clear()
    assert await world.bind(pod, "n1") == "no reservation for pod default/p, it will be scheduled again"
    assert list(world.api.seen) == [("GET", "/api/v1/namespaces/default/pods/p")]
    await world.filter(pod, "n1")
    assert await world.bind(pod, "n1") == ""
    await world.until(lambda: world.scheduler.state.reservation(pod["metadata"]["uid"]) is None)
    assert await world.bind(pod, "n1") == "", "already bound to this node: success without a write"


async def plain_pod(world: Any, scheduler: str, limits: dict[str, str]) -> Any:
    container = {"name": "a", "image": "i", "resources": {"limits": limits}}
    pod = {
        "metadata": {"name": "p", "namespace": "default"},
        "spec": {"schedulerName": scheduler, "containers": [container]},
    }
    return await world.request("POST", "/api/v1/namespaces/default/pods", pod)


@pytest.mark.parametrize(
    ("scheduler", "limits"),
    [
        ("default-scheduler", {"nvidia.com/priority": "1"}),
        ("hami-scheduler", {"cpu": "1"}),
        ("hami-scheduler", {}),
    ],
)
async def test_a_pod_that_is_no_business_of_ours_is_not_bound(
    world: Any, scheduler: str, limits: dict[str, str]
) -> None:
    await world.add_node("n1")
    pod = await plain_pod(world, scheduler, limits)
    assert await world.bind(pod, "n1") == "pod default/p is not scheduled by this scheduler"
    assert "nodeName" not in (await world.pod("p"))["spec"]


async def test_a_pod_without_devices_gets_a_plain_binding(world: Any) -> None:
    await world.add_node("n1")
    pod = await plain_pod(world, "hami-scheduler", {"nvidia.com/priority": "1"})
    assert await world.bind(pod, "n1") == ""
    annotations = (await world.pod("p"))["metadata"]["annotations"]
    assert sorted(annotations) == ["hami.io/bind-phase", "hami.io/bind-time"]


async def test_a_bind_for_another_node_or_a_recreated_pod_is_stale(world: Any) -> None:
    pod = await world.placed()
    assert await world.bind(pod, "n2") == "stale bind request"
    assert world.used_mib("n1") == [1000]
    old = {"metadata": {**pod["metadata"], "uid": "another"}}
    assert await world.bind(old, "n1") == "stale bind request"


async def test_of_two_binds_at_once_one_binds_and_the_lock_stays_for_the_plugin(world: Any) -> None:
    pod = await world.placed()
    fault = Fault(world)
    answers = await asyncio.gather(world.bind(pod, "n1"), world.bind(pod, "n1"))
    assert sorted(answers) == ["", "a Binding of pod default/p is under way"]
    assert fault.bindings == 1
    assert str(await node_lock(world)).endswith(",default,p")
    assert world.used_mib("n1") == [1000]


async def test_a_second_filter_replaces_the_first_decision(world: Any) -> None:
    pod = await world.placed()
    await world.add_node("n2")
    assert (await world.filter(pod, "n2"))["NodeNames"] == ["n2"]
    assert (world.used_mib("n1"), world.used_mib("n2")) == ([0], [1000])


# --- locks --------------------------------------------------------------------------------------------------


def lock_text(owner: str) -> str:
    return f"{datetime.now(UTC).strftime('%Y-%m-%dT%H:%M:%SZ')},default,{owner}"


async def hold_lock(world: Any, owner: str) -> str:
    text = lock_text(owner)
    patch = {"metadata": {"annotations": {"hami.io/mutex.lock": text}}}
    await world.request("PATCH", "/api/v1/nodes/n1", patch, "application/merge-patch+json")
    return text


async def test_a_lock_of_a_live_pod_fails_the_bind_at_once_and_stays(world: Any) -> None:
    pod = await world.placed()
    await world.add_pod("holder")
    body = {"metadata": {"name": "holder"}, "target": {"kind": "Node", "name": "n1"}}
    await world.request("POST", "/api/v1/namespaces/default/pods/holder/binding", body)
    text = await hold_lock(world, "holder")
    fault = Fault(world)
    assert "node lock contention" in await world.bind(pod, "n1")
    assert fault.bindings == 0
    assert await node_lock(world) == text
    assert world.used_mib("n1") == [1000], "the reservation stays, kube-scheduler filters again"


async def test_a_lock_whose_holder_lost_its_reservation_does_not_stop_the_node(world: Any) -> None:
    """A scheduler was killed between lock and Binding; meanwhile another pod took the holder's room."""
    await world.add_node("n1")
    holder, pod = await world.add_pod("holder", mem=5000), await world.add_pod("p", mem=5000)
    text = await hold_lock(world, "holder")
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    assert not (await world.filter(holder, "n1"))["NodeNames"], "p has its room"
    assert "node lock contention" in await world.bind(pod, "n1")
    assert free(world), "p lets go of the room: its lock is what p waits for"
    assert (await world.filter(holder, "n1"))["NodeNames"] == ["n1"]
    assert await world.bind(holder, "n1") == ""
    assert await node_lock(world) == text


async def test_a_lock_whose_holder_is_being_bound_leaves_the_reservation(world: Any) -> None:
    await world.add_node("n1")
    holder, pod = await world.add_pod("holder"), await world.add_pod("p")
    for one in (holder, pod):
        await world.filter(one, "n1")
    await hold_lock(world, "holder")
    assert "node lock contention" in await world.bind(pod, "n1")
    assert world.used_mib("n1") == [2000]


async def test_a_lock_of_a_pod_that_is_gone_is_taken_over(world: Any) -> None:
    pod = await world.placed()
    await hold_lock(world, "gone")
    assert await world.bind(pod, "n1") == ""
    assert str(await node_lock(world)).endswith(",default,p")


async def test_a_member_of_a_pod_group_waits_for_the_lock(start: Any) -> None:
    async with start(node_lock_retry_s=20.0) as world:
        pod = await world.placed(labels={"scheduling.x-k8s.io/pod-group": "g"})
        await world.add_pod("holder")
        await hold_lock(world, "holder")
        binding = asyncio.create_task(world.bind(pod, "n1"))
        await asyncio.sleep(0.3)
        assert not binding.done()
        patch = {"metadata": {"annotations": {"hami.io/mutex.lock": None}}}
        await world.request("PATCH", "/api/v1/nodes/n1", patch, "application/merge-patch+json")
        assert await binding == ""


async def test_a_member_of_a_pod_group_gives_up_after_its_time(start: Any) -> None:
    async with start(node_lock_retry_s=0.3) as world:
        pod = await world.placed(labels={"scheduling.x-k8s.io/pod-group": "g"})
        await world.add_pod("holder")
        text = await hold_lock(world, "holder")
        error = await world.bind(pod, "n1")
        assert error == "timed out after 300ms waiting for node n1 to be unlocked: node lock contention"
        assert await node_lock(world) == text


async def test_an_unknown_node_at_bind_drops_the_reservation(world: Any) -> None:
    pod = await world.placed()
    state = world.scheduler.state
    state.binding_started(pod["metadata"]["uid"])  # keeps the reservation while the node goes
    await world.request("DELETE", "/api/v1/nodes/n1")
    await world.until(lambda: state.node("n1") is None)
    state.binding_unsent(pod["metadata"]["uid"])
    assert await world.bind(pod, "n1") == 'node "n1" not found'
    assert state.reservation(pod["metadata"]["uid"]) is None
    await world.scheduler.recorder.flush(60)
    assert ("Warning", "BindingFailed", "failed to get node n1") in await world.events()


async def test_a_reservation_that_is_never_bound_expires_with_an_event(start: Any) -> None:
    async with start(reservation_timeout_s=0.2) as world:
        await world.placed()
        await world.until(lambda: free(world))
        await world.scheduler.recorder.flush(60)
        assert any(reason == "ReservationExpired" for _, reason, _ in await world.events())


class NoLabels:
    """An API server that merges a Binding's annotations into the pod and drops its labels."""

    def __init__(self, world: Any, reservation: Any, *, refuse_patches: bool = False) -> None:
        self.patches = 0
        self._world = world
        self._annotations = reservation.binding_annotations(0.0)
        self._refuse = refuse_patches
        world.api.intercept = self

    async def __call__(self, request: web.Request) -> web.StreamResponse | None:
        if (request.method, request.path) == ("PATCH", BINDING.removesuffix("/binding")):
            self.patches += 1
            return status(403) if self._refuse else None
        if (request.method, request.path) != ("POST", BINDING) or "again" in request.query:
            return None
        body = {
            "metadata": {"name": "p", "annotations": self._annotations},
            "target": {"kind": "Node", "name": "n1"},
        }
        await self._world.request("POST", f"{BINDING}?again", body)
        return web.json_response({"kind": "Status", "status": "Success"}, status=201)


async def test_labels_that_the_api_server_drops_are_patched_afterwards(world: Any) -> None:
    pod = await world.placed()
    api = NoLabels(world, world.scheduler.state.reservation(pod["metadata"]["uid"]))
    assert await world.bind(pod, "n1") == ""
    labels: dict[str, str] = {}
    while "hami.io/vgpu-node" not in labels:
        labels = (await world.pod("p"))["metadata"].get("labels", {})
        await asyncio.sleep(0.02)
    assert labels["hami.io/vgpu-node"] == "n1"
    assert api.patches == 1
    assert "hami.io/vgpu-devices-allocated" in (await world.pod("p"))["metadata"]["annotations"]


async def test_a_label_that_cannot_be_patched_changes_nothing_else(world: Any) -> None:
    pod = await world.placed()
    uid = pod["metadata"]["uid"]
    NoLabels(world, world.scheduler.state.reservation(uid), refuse_patches=True)
    assert await world.bind(pod, "n1") == ""
    await world.until(lambda: world.scheduler.writer.failed > 0)
    bound = await world.pod("p")
    assert bound["spec"]["nodeName"] == "n1"
    assert "hami.io/vgpu-devices-allocated" in bound["metadata"]["annotations"]
    assert world.scheduler.state.reservation(uid) is None
    assert world.used_mib("n1") == [1000]


async def test_a_stale_mig_reservation_is_overwritten_by_the_binding(world: Any) -> None:
    stale = (
        '[{"containerIndex":0,"deviceIndex":0,"gpuUUID":"G","profile":"1g.5gb",'
        '"placement":{"start":6,"size":1}}]'
    )
    pod = await world.placed(annotations={"hami.io/vgpu-mig-allocations": stale})
    assert await world.bind(pod, "n1") == ""
    bound = await world.pod("p")
    assert bound["metadata"]["annotations"]["hami.io/vgpu-mig-allocations"] == "[]"
    await world.until(lambda: world.scheduler.state.reservation(pod["metadata"]["uid"]) is None)
    assert [card.healthy for card in world.scheduler.state.node_usage("n1").cards] == [True]


async def test_a_bug_of_ours_while_binding_does_not_hold_the_reservation_for_ever(world: Any) -> None:
    pod = await world.placed()
    binder = world.scheduler.binder
    attempt = binder._attempt

    async def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("bug")

    binder._attempt = broken
    assert await world.bind(pod, "n1") == "internal error: KeyError"
    binder._attempt = attempt
    assert (await world.filter(pod, "n1"))["NodeNames"] == ["n1"]
    assert await world.bind(pod, "n1") == ""
    assert world.used_mib("n1") == [1000]
