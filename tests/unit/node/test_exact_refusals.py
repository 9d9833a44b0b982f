"""PreStartContainer in mode exact: what is refused, what waits, what is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exact_world import ALLOCATED, CARDS, GPU, LOCK, World, documents_of, gpus
from node_cards import U1, U2

from hami.kube.errors import KubeError, ServerError
from hami.node.config import Settings
from hami.node.exact.cdi import device_name
from hami.node.exact.errors import NotYetError, RefusedError
from hami.node.paths import HostPaths
from hami.protocol.views import Pod

Make = Callable[..., Any]


@pytest.fixture
def world(cluster: Any, host: HostPaths) -> World:
    return World(cluster, host)


@pytest.fixture
def served(world: World, make_pod: Make) -> World:
    """Pod ``p`` with one container that holds one id."""
    world.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    world.held[("p", "app")] = gpus(0)
    return world


def become_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


async def test_without_an_owner_nothing_is_written(served: World) -> None:
    served.held.clear()
    served.limit_s = 1.5
    served.plugin = served.start()
    with pytest.raises(NotYetError, match="no container with these devices"):
        await served.pre_start(*gpus(0))
    assert served.lists > 1
    assert served.cluster.patches == []
    assert documents_of(served) == []


async def test_an_owner_that_kubelet_lists_late_is_found_within_the_call(served: World) -> None:
    held = dict(served.held)
    served.held.clear()
    served.limit_s = 60.0
    served.plugin = served.start()
    call = asyncio.create_task(served.pre_start(*gpus(0)))
    await served.listed()
    served.held.update(held)
    await call
    assert served.path(gpus(0)).exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            f"{U1},NVIDIA,1,0:{U2},NVIDIA,1,0:;", "has 2, kubelet gave it 1", id="count"
        ),
        pytest.param("GPU-elsewhere,NVIDIA,1,0:;", "card GPU-elsewhere, which this node does not", id="card"),
        pytest.param(f"{U1},NVIDIA,-5,0:;", "with -5 MiB", id="negative"),
        pytest.param("nonsense,;", "device request not found", id="malformed"),
        pytest.param(";", "has 0, kubelet gave it 1", id="empty entry"),
        pytest.param(f"{U1},NVIDIA,1,0:;{U1},NVIDIA,1,0:;", "device request not found", id="surplus"),
    ],
)  # fmt: skip
async def test_an_impossible_allocation_fails_the_pod(served: World, text: str, message: str) -> None:
    served.cluster.notes("p")[ALLOCATED] = text
    served.cluster.node_annotations[LOCK] = "2026-11-29T20:00:00Z,team-a,p"
    with pytest.raises(RefusedError, match=message):
        await served.started("p")
    notes = served.cluster.notes("p")
    assert notes["hami.io/bind-phase"] == "failed"
    assert message in notes["hami.io/allocate-error"]
    assert LOCK not in served.cluster.node_annotations
    assert not served.path(gpus(0)).exists()


async def test_an_unhealthy_card_is_refused_and_served_once_it_is_healthy(served: World) -> None:
    served.cards = (replace(CARDS[0], healthy=False), CARDS[1])
    with pytest.raises(RefusedError, match=f"names card {U1}, which is unhealthy"):
        await served.started("p")
    served.cards = CARDS
    await served.started("p")
    assert served.cluster.notes("p")["hami.io/bind-phase"] == "success"
    assert "hami.io/allocate-error" not in served.cluster.notes("p")


async def test_a_card_that_is_not_offered_is_only_for_those_who_have_it(served: World) -> None:
    hidden = replace(served.settings, excluded_uuids=frozenset({U1}))
    served.settings = hidden
    with pytest.raises(RefusedError, match="which this node does not have"):
        await served.started("p")
    served.settings = Settings()
    await served.started("p")
    served.settings = hidden
    await served.started("p")


async def test_a_library_that_is_no_regular_file_is_refused_by_path(served: World) -> None:
    preload = Path(served.host.preload)
    become_directory(preload)
    with pytest.raises(RefusedError, match=f"{preload} is not a regular file"):
        await served.started("p")
    assert "not a regular file" in served.cluster.notes("p")["hami.io/allocate-error"]


async def test_a_full_disk_is_told_on_the_node_once_a_minute(
    served: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(name: str, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(served.documents, "write", full)
    for now in (1000.0, 1030.0, 1061.0):
        served.now = now
        with pytest.raises(NotYetError, match="No space left on device"):
            await served.started("p")
    assert len(served.events("HAMiStorageFailed")) == 2
    assert served.cluster.patches == []


async def test_without_the_api_server_the_watchs_copy_serves(served: World) -> None:
    async def unreachable(namespace: str, name: str) -> Pod:
        raise ServerError(503, "ServiceUnavailable", "down")

    def refuse(_notes: Mapping[str, str | None]) -> KubeError | None:
        return ServerError(503, "ServiceUnavailable", "down")

    served.cluster.pod = unreachable
    served.cluster.fail_pod_patches = refuse
    await served.started("p")
    served.pods.unseen.add("p")
    with pytest.raises(NotYetError, match="cannot read pod team-a/p"):
        await served.started("p")


async def test_own_variables_are_refused_where_that_is_configured(world: World, make_pod: Make) -> None:
    world.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;", env={"app": [("CUDA_OVERSUBSCRIBE", "true")]}))
    world.held[("p", "app")] = gpus(0)
    world.settings = replace(world.settings, reserved_env="deny")
    with pytest.raises(RefusedError, match="sets variables of the device limits itself: CUDA_OVERSUBSCRIBE"):
        await world.started("p")


async def test_a_call_that_kubelet_gave_up_is_finished(served: World) -> None:
    call = asyncio.create_task(served.pre_start(*gpus(0)))
    await served.listed()
    call.cancel()
    await asyncio.wait({call})
    await served.plugin.drain(30)
    assert served.path(gpus(0)).exists()


async def test_documents_that_nobody_holds_any_more_go(served: World) -> None:
    await served.started("p")
    await served.plugin.collect(GPU, -1e12)
    assert served.path(gpus(0)).exists()
    served.held.clear()
    await served.plugin.collect(GPU, 1e12)
    assert served.path(gpus(0)).exists()
    await served.plugin.collect(GPU, -1e12)
    assert not served.path(gpus(0)).exists()


async def test_entries_of_pods_that_are_gone_are_forgotten(served: World) -> None:
    await served.started("p")
    del served.cluster.objects[("team-a", "p")]
    await served.plugin.prune()
    assert served.checkpoint()["entries"] == []


def test_allocate_answers_names_and_needs_ids(world: World) -> None:
    assert world.plugin.names([["b", "a"], ["c"]]) == (
        f"hami.io/vgpu={device_name(['a', 'b'])}",
        f"hami.io/vgpu={device_name(['c'])}",
    )
    with pytest.raises(RefusedError, match="at least one device id"):
        world.plugin.names([[]])


async def test_an_answer_that_is_given_while_the_pods_are_listed_is_not_forgotten(served: World) -> None:
    """It would count as never given: the pod stays unmarked, and an edited annotation is believed."""
    listed = served.cluster.pods

    async def meanwhile() -> list[Pod]:
        found = [pod for pod in await listed() if pod.name != "p"]  # it was bound a moment later
        await served.started("p")
        return found

    served.cluster.pods = meanwhile
    await served.plugin.prune()
    served.cluster.pods = listed
    served.cluster.notes("p")[ALLOCATED] = f"{U1},NVIDIA,9000,30:;"
    with pytest.raises(RefusedError, match="somebody changed the annotation"):
        await served.started("p")
