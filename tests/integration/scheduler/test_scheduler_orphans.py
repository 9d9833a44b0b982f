"""Reservations of pods whose end the watch never reported."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

from hami.scheduler.edge import orphans as orphans_module
from hami.scheduler.edge.orphans import Orphans


@pytest.fixture(autouse=True)
def _no_other_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's own sweep stays away: the tests count what theirs find."""
    monkeypatch.setattr(orphans_module, "_PERIOD_S", 3600.0)


def orphans_of(world: Any) -> Orphans:
    scheduler = world.scheduler
    return Orphans(scheduler.client, scheduler.state, scheduler.informers.pods)


def unseen_pod(name: str = "ghost") -> Any:
    """A pod as kube-scheduler sends it, which the API server no longer has."""
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    return {
        "metadata": {"name": name, "namespace": "default", "uid": f"uid-of-{name}"},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }


async def test_a_pod_deleted_before_the_watch_showed_it_loses_its_reservation(world: Any) -> None:
    await world.add_node("n1")
    assert (await world.filter(unseen_pod(), "n1"))["NodeNames"] == ["n1"]
    assert world.used_mib("n1") == [1000]
    orphans = orphans_of(world)
    assert await orphans.sweep() == 0, "the watch gets the time of a pass to show it"
    assert await orphans.sweep() == 1
    assert world.used_mib("n1") == [0]


async def test_a_pod_that_was_recreated_keeps_only_its_own_reservation(world: Any) -> None:
    await world.add_node("n1")
    old = unseen_pod("p")
    await world.filter(old, "n1")
    new = await world.add_pod("p")
    await world.until(lambda: world.scheduler.informers.pods.get("p", "default") is not None)
    await world.filter(new, "n1")
    assert world.used_mib("n1") == [2000]
    orphans = orphans_of(world)
    await orphans.sweep()
    assert await orphans.sweep() == 1
    assert world.scheduler.state.reservation(new["metadata"]["uid"]) is not None
    assert world.used_mib("n1") == [1000]


async def test_a_pod_that_the_watch_has_shown_is_not_read(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.until(lambda: world.scheduler.informers.pods.get("p", "default") is not None)
    await world.filter(pod, "n1")
    world.api.seen.clear()
    orphans = orphans_of(world)
    assert (await orphans.sweep(), await orphans.sweep()) == (0, 0)
    assert ("GET", "/api/v1/namespaces/default/pods/p") not in list(world.api.seen)
    assert world.used_mib("n1") == [1000]


async def test_a_reservation_stays_while_the_api_server_cannot_say(world: Any) -> None:
    await world.add_node("n1")
    await world.filter(unseen_pod(), "n1")
    refused = web.json_response({"kind": "Status", "code": 500, "message": "ill"}, status=500)

    async def ill(request: web.Request) -> web.StreamResponse | None:
        return refused if request.path.endswith("/pods/ghost") else None

    world.api.intercept = ill
    orphans = orphans_of(world)
    await orphans.sweep()
    assert await orphans.sweep() == 0
    assert world.used_mib("n1") == [1000]
    world.api.intercept = None
    assert await orphans.sweep() == 1


async def test_a_bound_pod_deleted_before_the_watch_showed_it_loses_its_reservation(world: Any) -> None:
    await world.add_node("n1")
    pod = unseen_pod()
    await world.filter(pod, "n1")
    state = world.scheduler.state
    state.binding_started(pod["metadata"]["uid"])
    orphans = orphans_of(world)
    await orphans.sweep()
    assert await orphans.sweep() == 0, "a Binding under way is left to its sender"
    state.binding_confirmed(pod["metadata"]["uid"])
    await orphans.sweep()
    assert await orphans.sweep() == 1
    assert world.used_mib("n1") == [0]
