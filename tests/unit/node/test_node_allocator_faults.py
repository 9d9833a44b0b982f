"""Never a half answer: any step of an allocation may fail; the pod is then marked, unlocked, cleaned up."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node_cards import U1

from hami.kube.errors import ApiError, Conflict, ServerError, TooManyRequests, TransportError
from hami.node.config import Settings
from hami.node.errors import AllocateError
from hami.node.lock import LockReleaser
from hami.node.paths import HostPaths
from hami.node.plugin.allocator import Allocator
from hami.node.plugin.answer import Delivery
from hami.node.plugin.workspace import Workspace

TWO = f"{U1},NVIDIA,1000,10:;{U1},NVIDIA,2000,20:;"
LOCK = "hami.io/mutex.lock"
KEY = "hami.io/vgpu-devices-to-allocate"
NOW = 1_787_300_100.0
Make = Callable[..., dict[str, Any]]


class Bench:
    """A pod with two containers that are asked for in one call."""

    def __init__(self, cluster: Any, host: HostPaths, pod: dict[str, Any]) -> None:
        self.cluster = cluster
        self.folder = Path(host.root, "usr/local/vgpu")
        self.workspace = Workspace(host)
        self.workspace.prepare_start()
        self.allocator = Allocator(cluster, self.workspace, host, LockReleaser(cluster), clock=lambda: NOW)
        cluster.add(pod)
        cluster.node_annotations[LOCK] = "2026-08-21T08:14:55Z,team-a,p"

    async def allocate(self) -> int:
        delivery = Delivery(extras={}, device_nodes={})
        ids = ([f"{U1}-1"], [f"{U1}-2"])
        return len(await self.allocator.allocate(ids, Settings(), delivery))

    def left_over(self) -> list[str]:
        found = [path.name for name in ("containers", "limits") for path in (self.folder / name).iterdir()]
        checkpoint = self.folder / "allocations.json"
        if checkpoint.exists() and b"uid-p" in checkpoint.read_bytes():
            found.append("checkpoint")
        return found


@pytest.fixture
def bench(cluster: Any, host: HostPaths, make_pod: Make) -> Bench:
    return Bench(cluster, host, make_pod("p", TWO, containers=("a", "b")))


STEPS = [
    "prepare_lock_parent",
    "make_cache_directory",
    "write_limits",
    "check_limits",
    "find_sources",
    "save_checkpoint",
]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("call", [1, 2])
async def test_a_file_that_cannot_be_written_fails_the_whole_call(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str, call: int
) -> None:
    if call == 2 and step in ("prepare_lock_parent", "save_checkpoint"):
        call = 1
    real = getattr(bench.workspace, step)
    calls = 0

    def failing(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call or (step == "save_checkpoint" and calls > call):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **named)

    monkeypatch.setattr(bench.workspace, step, failing)
    with pytest.raises(AllocateError, match="No space left"):
        await bench.allocate()
    notes = bench.cluster.notes("p")
    assert notes["hami.io/bind-phase"] == "failed"
    assert "No space left" in notes["hami.io/allocate-error"]
    assert notes[KEY] == TWO
    assert LOCK not in bench.cluster.node_annotations
    assert bench.left_over() == []


@pytest.mark.parametrize(
    "error",
    [
        ApiError(403, "Forbidden", "no"),
        Conflict(409, "Conflict", "another UID"),
        ServerError(500, "", "broken"),
        TransportError("no answer"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_write_that_fails_fails_the_whole_call(bench: Bench, error: Exception) -> None:
    bench.cluster.fail_pod_patches = lambda notes: error if KEY in notes else None
    with pytest.raises(AllocateError):
        await bench.allocate()
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "failed"
    assert LOCK not in bench.cluster.node_annotations
    assert bench.left_over() == []


@pytest.mark.parametrize(
    "error",
    [ServerError(503, "", "busy"), TooManyRequests(429, "", "slow down"), TransportError("connection lost")],
    ids=lambda error: type(error).__name__,
)
async def test_a_write_is_repeated_while_the_api_server_is_only_disturbed(
    bench: Bench, error: Exception
) -> None:
    refusals = [error, error]
    bench.cluster.fail_pod_patches = lambda notes: refusals.pop() if refusals else None
    assert await bench.allocate() == 2
    assert refusals == []
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "success"


async def test_a_write_that_is_refused_is_not_repeated(bench: Bench) -> None:
    refusals: list[Exception] = [ApiError(403, "Forbidden", "no")]
    bench.cluster.fail_pod_patches = lambda notes: refusals.pop() if refusals else None
    with pytest.raises(AllocateError, match="no"):
        await bench.allocate()
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "failed"


async def test_an_error_of_our_own_program_also_leaves_nothing_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> None:
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(bench.workspace, "find_sources", broken)
    with pytest.raises(AllocateError, match="bug"):
        await bench.allocate()
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "failed"
    assert LOCK not in bench.cluster.node_annotations
    assert bench.left_over() == []


async def test_a_lock_that_cannot_be_released_does_not_undo_the_answer(bench: Bench) -> None:
    bench.cluster.fail_node_patches = [Conflict(409, "Conflict", "changed")] * 2
    assert await bench.allocate() == 2
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "success"
    assert LOCK not in bench.cluster.node_annotations


async def test_after_a_failure_the_next_pod_is_answered(bench: Bench, make_pod: Make) -> None:
    bench.cluster.fail_pod_patches = lambda notes: ServerError(500, "", "broken") if KEY in notes else None
    with pytest.raises(AllocateError):
        await bench.allocate()
    bench.cluster.fail_pod_patches = lambda _: None
    bench.cluster.add(make_pod("q", TWO, containers=("a", "b")))
    assert await bench.allocate() == 2
    assert bench.cluster.notes("q")["hami.io/bind-phase"] == "success"
    assert sorted(bench.left_over()) == ["uid-q_a", "uid-q_a", "uid-q_b", "uid-q_b"]
