"""Pods that fitted nowhere, once something changes (scheduler.md §15.1; cases 86, 87)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hami.kube.client import Client, Limits
from hami.kube.config import ClientConfig
from hami.kube.errors import TransportError
from hami.scheduler.core.answers import PodRequest
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge import pending as pending_module
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.pending import PendingPods

Lab = Any


class Patches(Client):
    """Records whose metadata would be written; ``broken``: every write fails."""

    def __init__(self) -> None:
        super().__init__(ClientConfig("http://unused"), Limits(qps=0))
        self.names: list[str] = []
        self.broken = False

    async def request(self, method: str, path: str, **_: Any) -> bytes:
        self.names.append(path.rpartition("/")[2])
        if self.broken:
            raise TransportError("no route")
        return b"{}"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Passes follow each other at once; how many pods each touched."""
    monkeypatch.setattr(pending_module, "_PERIOD_S", 0.0)
    monkeypatch.setattr(pending_module, "_QUIET_S", 0.0)
    done: list[int] = []
    touch = PendingPods.touch_fitting

    async def counted(self: PendingPods) -> int:
        done.append(await touch(self))
        return done[-1]

    monkeypatch.setattr(PendingPods, "touch_fitting", counted)
    return done


@asynccontextmanager
async def waiting(lab: Lab, client: Client, *pods: Any) -> AsyncIterator[PendingPods]:
    """The running pass over these pods, which `/filter` has just rejected."""
    pending = PendingPods(client, lab.state, Leadership("h", electing=False))
    for pod in pods:
        lab.refused(pod)
        pending.rejected(lab.request(pod))
    task = asyncio.create_task(pending.run())
    try:
        yield pending
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 -- the pass tells nobody
        await asyncio.sleep(0)


def card_heals(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))


def node_comes(lab: Lab) -> None:
    lab.node("n2", lab.card("b"))


def quota_rises(lab: Lab) -> None:
    lab.quota("default", gpumem=8000)


def quota_goes(lab: Lab) -> None:
    lab.state.delete_quota("default", "quota")


def pod_ends(lab: Lab) -> None:
    lab.see(lab.pod("holder", node="n1", phase="Succeeded"))


def pod_goes(lab: Lab) -> None:
    lab.state.delete_pod("uid-holder")


def cordon_is_lifted(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))


def reservation_expires(lab: Lab) -> None:
    assert lab.state.expire(lab.now + 900)


def sick(lab: Lab) -> None:
    lab.node("n1", lab.card("a", health=False))


def tight(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    lab.quota("default", gpumem=100)


def full(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    lab.holder("holder", "n1", "a,NVIDIA,8000,0:;")


def cordoned(lab: Lab) -> None:
    lab.node("n1", lab.card("a"), annotations={"hami.io/device-cordon": "a"})


def reserved(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    lab.placed(lab.pod("other", lab.container(mem=8000)))


@pytest.mark.parametrize(
    ("before", "change"),
    [
        pytest.param(sick, card_heals, id="card healthy again"),
        pytest.param(sick, node_comes, id="node registered"),
        pytest.param(tight, quota_rises, id="quota raised"),
        pytest.param(tight, quota_goes, id="quota deleted"),
        pytest.param(full, pod_ends, id="pod ended"),
        pytest.param(full, pod_goes, id="pod deleted"),
        pytest.param(cordoned, cordon_is_lifted, id="cordon lifted"),
        pytest.param(reserved, reservation_expires, id="reservation expired"),
    ],
)
async def test_a_change_that_makes_room_touches_the_pod_that_fits_and_no_other(
    lab: Lab, passes: list[int], before: Callable[[Lab], None], change: Callable[[Lab], None]
) -> None:
    before(lab)
    client = Patches()
    big = lab.pod("big", lab.container(mem=99_999))
    async with waiting(lab, client, big, lab.pod("fits", lab.container(mem=8000))):
        await until(lambda: len(passes) == 1)
        assert client.names == []
        change(lab)
        await until(lambda: len(client.names) == 1)
    assert client.names == ["fits"]


async def test_a_retry_that_came_before_our_watch_saw_the_end_is_made_up_for(
    lab: Lab, passes: list[int]
) -> None:
    full(lab)
    client = Patches()
    pod = lab.pod("fits", lab.container(mem=8000))
    async with waiting(lab, client, pod) as pending:
        await until(lambda: len(passes) == 1)
        lab.refused(pod)  # kube-scheduler has seen the end of the holder, we have not
        pending.rejected(lab.request(pod))
        pod_ends(lab)
        await until(lambda: len(client.names) == 1)


async def test_a_touch_that_fails_is_made_again(lab: Lab, passes: list[int]) -> None:
    now = [0.0]
    full(lab)
    client = Patches()
    client.broken = True
    pending = PendingPods(client, lab.state, Leadership("h", electing=False), clock=lambda: now[0])
    pending.rejected(lab.request(lab.pod("fits", lab.container(mem=8000))))
    pod_ends(lab)
    assert await pending.touch_fitting() == 1
    now[0] += 10
    assert await pending.touch_fitting() == 1
    assert client.names == ["fits", "fits"]


async def test_a_replica_that_does_not_lead_forgets_the_rejected(lab: Lab, passes: list[int]) -> None:
    full(lab)
    client = Patches()
    pending = PendingPods(client, lab.state, Leadership("h", electing=True))
    pending.rejected(lab.request(lab.pod("fits", lab.container(mem=8000))))
    pod_ends(lab)
    task = asyncio.create_task(pending.run())
    await until(lambda: len(pending) == 0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert client.names == []


def test_no_more_pods_are_remembered_than_the_limit(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_module, "_REMEMBERED", 3)
    pending = PendingPods(Patches(), lab.state, Leadership("h", electing=False))
    for number in range(5):
        pending.rejected(lab.request(lab.pod(f"p{number}")))
    assert len(pending) == 3


@pytest.mark.parametrize("fits", [False, True])
async def test_of_pods_that_ask_for_the_same_one_is_tried(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    """A long queue mostly asks for the same: a trial for each takes the loop from those that are placed."""
    tried: list[str] = []
    trials = ClusterState.trials

    def counted(self: ClusterState, request: PodRequest) -> Iterator[bool]:
        tried.append(request.info.name)
        return trials(self, request)

    monkeypatch.setattr(ClusterState, "trials", counted)
    full(lab)
    lab.node("n2", lab.card("b"))
    lab.quota("poor", gpumem=100)
    client = Patches()
    pending = PendingPods(client, lab.state, Leadership("h", electing=False), clock=lambda: 0.0)
    size = 500 if fits else 9000
    for number in range(100):
        pending.rejected(lab.request(lab.pod(f"p{number}", lab.container(mem=size))))
    pending.rejected(lab.request(lab.pod("poor", lab.container(mem=size), namespace="poor")))
    assert await pending.touch_fitting() == 0, "they were at /filter a moment ago"
    assert tried == ["p0", "poor"]


async def test_what_is_freed_during_a_pass_is_seen_by_the_rest_of_it(lab: Lab) -> None:
    full(lab)
    client = Patches()
    now = [0.0]
    pending = PendingPods(client, lab.state, Leadership("h", electing=False), clock=lambda: now[0])
    for name in ("before", "large", "after"):
        pending.rejected(lab.request(lab.pod(name, lab.container(mem=8000 if name != "large" else 9000))))
    now[0] = 10.0
    trials = ClusterState.trials

    def freeing(request: PodRequest) -> Iterator[bool]:
        if request.info.name == "large":
            pod_ends(lab)
        return trials(lab.state, request)

    lab.state.trials = freeing
    await pending.touch_fitting()
    assert client.names == ["after"]


async def test_a_pass_lets_others_go_on_after_every_trial_fit(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a pod of a hundred containers each takes tens of milliseconds."""
    monkeypatch.setattr(pending_module, "_SLICE_S", 0.0)
    for number in range(8):
        lab.node(f"n{number}", lab.card(f"{number}-a"), lab.card(f"{number}-b"))
    pod = lab.pod("large", *(lab.container(mem=8000) for _ in range(3)))
    pending = PendingPods(Patches(), lab.state, Leadership("h", electing=False))
    pending.rejected(lab.request(pod))
    passing = asyncio.create_task(pending.touch_fitting())
    turns = 0
    while not passing.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns >= 8
    assert await passing == 0


async def test_a_pod_that_goes_while_it_is_tried_is_not_touched(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    client, now = Patches(), [0.0]
    pending = PendingPods(client, lab.state, Leadership("h", electing=False), clock=lambda: now[0])
    pending.rejected(lab.request(lab.pod("p")))
    now[0] = 60.0

    def going(_request: PodRequest) -> Iterator[bool]:
        pending.forget("uid-p")
        yield True

    lab.state.trials = going
    assert await pending.touch_fitting() == 0
    assert client.names == []
