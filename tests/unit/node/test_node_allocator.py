"""Allocate as a whole, with files below a temporary host root (device-plugin.md §15.2)."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from typing import Any

import pytest
from allocator_world import LOCK, ONE, Bench
from node_cards import U1, U2

from hami.kube.errors import ApiError, ServerError, TransportError
from hami.node.config import Settings
from hami.node.errors import AllocateError, NoBindingPodError
from hami.node.paths import HostPaths
from hami.node.plugin.allocator import REPEAT_S
from hami.node.plugin.preferred import Choice

KEY = "hami.io/vgpu-devices-to-allocate"
Make = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(cluster: Any, host: HostPaths) -> Bench:
    return Bench(cluster, host)


async def test_l1_one_container_is_answered_marked_and_unlocked(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.lock("p")
    (answer,) = await bench.allocate([f"{U1}-7"])
    assert answer.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "3000m"
    assert answer.env["CUDA_DEVICE_MEMORY_SHARED_CACHE"].startswith("/usr/local/vgpu/")
    notes = bench.cluster.notes("p")
    assert notes[KEY] == ";"
    assert notes["hami.io/vgpu-devices-allocated"] == ONE
    assert notes["hami.io/bind-phase"] == "success"
    assert not bench.is_locked
    cache = bench.path("containers/uid-p_app")
    assert stat.S_IMODE(cache.stat().st_mode) == 0o777
    assert bench.mode_below_root("tmp/vgpulock") == 0o1777


async def test_l2_the_plain_library_name_is_the_fallback(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.path("libvgpu.so.v2.10.0").unlink()
    (answer,) = await bench.allocate([f"{U1}-7"])
    assert answer.mounts[0].host_path == str(bench.path("libvgpu.so"))


async def test_l41_our_own_layout_comes_before_the_names_of_hami(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    own = bench.path("lib/v2.10.0/libvgpu.so")
    own.parent.mkdir(parents=True)
    own.write_bytes(b"ours")
    (answer,) = await bench.allocate([f"{U1}-7"])
    assert answer.mounts[0].host_path == str(own)
    assert bench.path("libvgpu.so.v2.10.0").read_bytes() == b"library"


async def test_l7_l38_a_count_mismatch_fails_the_pod_and_unlocks(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", f"{U1},NVIDIA,1,1:{U2},NVIDIA,1,1:;"))
    bench.lock("p")
    with pytest.raises(AllocateError, match="device number not matched"):
        await bench.allocate([f"{U1}-7"])
    notes = bench.cluster.notes("p")
    assert notes["hami.io/bind-phase"] == "failed"
    assert "device number not matched" in notes["hami.io/allocate-error"]
    assert notes[KEY] != ";"
    assert not bench.is_locked
    assert [event[:2] for event in bench.cluster.events] == [("p", "AllocateFailed")]
    assert list(bench.path("containers").iterdir()) == []


async def test_l8_the_lock_is_held_until_the_last_container(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", f"{U1},NVIDIA,1,0:;{U1},NVIDIA,2,0:;", init=("setup",)))
    bench.lock("p")
    (first,) = await bench.allocate([f"{U1}-7"])
    assert first.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "1m"
    assert bench.is_locked
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "allocating"
    (second,) = await bench.allocate([f"{U1}-7"])
    assert second.env["CUDA_DEVICE_MEMORY_LIMIT_0"] == "2m"
    assert not bench.is_locked


async def test_l40_a_lock_of_the_future_is_reported_and_obeyed(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.cluster.node_annotations[LOCK] = "2026-08-21T08:40:00Z,team-a,p"
    await bench.allocate([f"{U1}-7"])
    assert [event[:2] for event in bench.cluster.events] == [("node", "ClockSkew")]
    assert not bench.is_locked


async def test_a_leftover_mig_lock_is_removed_at_start(bench: Bench) -> None:
    folder = bench.path("../../../tmp/hami")
    (folder / "hami-mig-apply.lock").write_text("")
    bench.workspace.prepare_start()
    assert list(folder.iterdir()) == []


async def test_l11_without_a_pod_nothing_is_written(bench: Bench) -> None:
    with pytest.raises(NoBindingPodError, match="no binding pod found on node n1"):
        await bench.allocate([f"{U1}-7"])
    assert bench.cluster.patches == []


async def test_l14_a_refused_patch_fails_the_pod_and_removes_its_files(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.lock("p")
    bench.cluster.fail_pod_patches = lambda notes: ApiError(403, "Forbidden", "no") if KEY in notes else None
    with pytest.raises(AllocateError, match="403"):
        await bench.allocate([f"{U1}-7"])
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "failed"
    assert not bench.is_locked
    assert list(bench.path("containers").iterdir()) == []
    assert list(bench.path("limits").iterdir()) == []
    assert b"uid-p" not in bench.path("allocations.json").read_bytes()


async def test_the_lock_is_released_even_if_the_pod_cannot_be_marked(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.lock("p")
    bench.cluster.fail_pod_patches = lambda _: TransportError("gone")
    with pytest.raises(AllocateError):
        await bench.allocate([f"{U1}-7"])
    assert not bench.is_locked


async def test_the_lock_of_another_pod_stays(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.lock("elsewhere")
    await bench.allocate([f"{U1}-7"])
    assert bench.is_locked


async def test_l19_a_symlink_as_lock_parent_fails_without_mounts(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.link_below_root("tmp/vgpulock", "elsewhere")
    with pytest.raises(AllocateError, match="failed to prepare host PID lock parent"):
        await bench.allocate([f"{U1}-7"])
    assert bench.mode_below_root("elsewhere") == 0o700
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "failed"


async def test_d16_an_unsafe_lock_parent_fails_the_pod_and_frees_the_node(
    bench: Bench, make_pod: Make
) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.lock("p")
    bench.link_below_root("tmp/vgpulock", "elsewhere")
    with pytest.raises(AllocateError, match="failed to prepare host PID lock parent"):
        await bench.allocate([f"{U1}-7"])
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "failed"
    assert not bench.is_locked
    assert "is a symlink" in bench.cluster.notes("p")["hami.io/allocate-error"]


@pytest.mark.parametrize("name", ["libvgpu.so.v2.10.0", "ld.so.preload", "limits/uid-p_app"])
@pytest.mark.parametrize("kind", ["directory", "symlink"])
async def test_l35_a_mount_source_that_is_no_regular_file_fails(
    bench: Bench, make_pod: Make, name: str, kind: str
) -> None:
    bench.cluster.add(make_pod("p", ONE))
    path = bench.path(name)
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(bench.path("libvgpu.so"))
    with pytest.raises(AllocateError, match="not a regular file"):
        await bench.allocate([f"{U1}-7"])
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "failed"
    assert bench.path("libvgpu.so").read_bytes() == b"library"


async def test_l35_a_missing_preload_file_fails_if_it_is_needed(bench: Bench, make_pod: Make) -> None:
    bench.path("ld.so.preload").unlink()
    bench.cluster.add(make_pod("p", ONE, env={"app": [("CUDA_DISABLE_CONTROL", "1")]}))
    await bench.allocate([f"{U1}-7"])
    bench.cluster.add(make_pod("q", ONE))
    with pytest.raises(AllocateError, match=r"ld\.so\.preload is not a regular file"):
        await bench.allocate([f"{U1}-8"])


async def test_l5_only_the_own_container_can_disable_control(bench: Bench, make_pod: Make) -> None:
    env = {"side": [("CUDA_DISABLE_CONTROL", "true")]}
    bench.cluster.add(make_pod("p", f"{ONE};", containers=("app", "side"), env=env))
    (answer,) = await bench.allocate([f"{U1}-7"])
    assert "/etc/ld.so.preload" in [mount.container_path for mount in answer.mounts]


async def test_l26_a_repeated_call_gets_the_same_answer(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    first = await bench.allocate([f"{U1}-7"])
    bench.cluster.add(make_pod("q", ONE))
    writes = len(bench.cluster.patches)
    assert await bench.allocate([f"{U1}-7"]) == first
    assert len(bench.cluster.patches) == writes
    bench.now += REPEAT_S + 1
    (other,) = await bench.allocate([f"{U1}-7"])
    assert other.mounts[1].host_path.endswith("uid-q_app")


async def test_l29_a_request_without_ids_is_an_error(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    calls: list[list[list[str]]] = [[], [[]], [[f"{U1}-1"], []]]
    for ids in calls:
        with pytest.raises(AllocateError, match="at least one device id"):
            await bench.allocate(*ids)
    assert bench.cluster.patches == []


async def test_l25_concurrent_calls_are_serialised(bench: Bench, make_pod: Make) -> None:
    for index in range(20):
        bench.cluster.add(make_pod(f"p{index}", f"{U1},NVIDIA,{index + 1},0:;", bind_time=1000 + index))
    answers = await asyncio.gather(*(bench.allocate([f"{U1}-{index}"]) for index in range(20)))
    limits = sorted(int(answer.env["CUDA_DEVICE_MEMORY_LIMIT_0"][:-1]) for (answer,) in answers)
    assert limits == list(range(1, 21))
    assert all(bench.cluster.notes(f"p{index}")["hami.io/bind-phase"] == "success" for index in range(20))


async def test_an_allocation_goes_on_when_kubelet_hangs_up(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.lock("p")
    call = asyncio.create_task(bench.allocate([f"{U1}-7"]))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await bench.allocator.drain(30)
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "success"
    assert not bench.is_locked


async def test_errors_of_reads_are_retried(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    bench.cluster.fail_reads = [ServerError(503, "", "busy"), TransportError("lost")]
    await bench.allocate([f"{U1}-7"])
    assert bench.cluster.notes("p")["hami.io/bind-phase"] == "success"


async def test_a_refused_read_is_an_error_at_once(bench: Bench) -> None:
    bench.cluster.fail_reads = [ApiError(403, "Forbidden", "no")]
    with pytest.raises(AllocateError, match="cannot look up the binding pod"):
        await bench.allocate([f"{U1}-7"])


async def test_l34_the_limits_file_is_read_only_for_others(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    (answer,) = await bench.allocate([f"{U1}-7"])
    file = bench.path("limits/uid-p_app")
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o755
    cache = answer.env["CUDA_DEVICE_MEMORY_SHARED_CACHE"]
    assert f"CUDA_DEVICE_MEMORY_SHARED_CACHE={cache}\n" in file.read_text()


async def test_l36_limits_files_come_back_with_their_first_content(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-7"])
    file = bench.path("limits/uid-p_app")
    content = file.read_text()
    file.unlink()
    bench.cluster.notes("p")["hami.io/vgpu-devices-allocated"] = f"{U1},NVIDIA,9000,90:;"
    await bench.restarted().restore(limits_files=True)
    assert file.read_text() == content


async def test_without_limits_files_none_come_back(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-7"])
    bench.path("limits/uid-p_app").unlink()
    await bench.restarted().restore(limits_files=False)
    assert not bench.path("limits/uid-p_app").exists()


async def test_a_limits_file_is_rewritten_in_place(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-7"])
    file = bench.path("limits/uid-p_app")
    content, inode = file.read_text(), file.stat().st_ino
    file.write_text(content + "X=1\n")
    await bench.restarted().restore(limits_files=True)
    assert (file.read_text(), file.stat().st_ino) == (content, inode)


async def test_the_checkpoint_forgets_pods_that_are_gone(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-7"])
    assert stat.S_IMODE(bench.path("allocations.json").stat().st_mode) == 0o600
    bench.cluster.objects.clear()
    await bench.allocator.prune()
    assert b"uid-p" not in bench.path("allocations.json").read_bytes()


async def test_an_unreadable_checkpoint_is_set_aside(bench: Bench) -> None:
    bench.path("allocations.json").write_bytes(b"{")
    await bench.allocator.restore(limits_files=True)
    assert bench.path("allocations.json.unreadable").read_bytes() == b"{"
    assert bench.cluster.events[0][1] == "HAMiCheckpointUnreadable"


async def test_a_refilled_annotation_does_not_change_the_first_answer(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-7"])
    bench.cluster.notes("p").update({KEY: f"{U1},NVIDIA,9000,90:;", "hami.io/bind-phase": "allocating"})
    with pytest.raises(AllocateError, match="was given"):
        await bench.allocate([f"{U1}-8"])
    assert "CUDA_DEVICE_MEMORY_LIMIT_0=3000m\n" in bench.path("limits/uid-p_app").read_text()


@pytest.mark.parametrize(
    ("policy", "events", "failed"), [("warn", 1, False), ("ignore", 0, False), ("deny", 1, True)]
)
async def test_l39_reserved_variables(
    bench: Bench, make_pod: Make, policy: Any, events: int, failed: bool
) -> None:
    bench.cluster.add(make_pod("p", ONE, env={"app": [("CUDA_DEVICE_MEMORY_LIMIT_0", "1g")]}))
    settings = Settings(reserved_env=policy)
    if failed:
        with pytest.raises(AllocateError, match="CUDA_DEVICE_MEMORY_LIMIT_0"):
            await bench.allocate([f"{U1}-7"], settings=settings)
    else:
        await bench.allocate([f"{U1}-7"], settings=settings)
    assert len(bench.cluster.events) == events


async def test_a_new_allocation_gets_an_empty_cache_directory(bench: Bench, make_pod: Make) -> None:
    old = bench.path("containers/uid-p_app")
    (old / "deep").mkdir(parents=True)
    (old / "deep/file").write_text("x")
    (old / "link").symlink_to(bench.path("libvgpu.so"))
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-7"])
    assert list(old.iterdir()) == []
    assert bench.path("libvgpu.so").read_bytes() == b"library"


async def test_preferred_ids_come_from_the_waiting_pod(bench: Bench, make_pod: Make) -> None:
    choice = Choice((f"{U1}-0", f"{U2}-0"), (), 1)
    assert await bench.allocator.preferred([choice]) == ()
    bench.cluster.add(make_pod("p", f";{U2},NVIDIA,1,1:;", init=("setup",)))
    assert await bench.allocator.preferred([choice]) == ((f"{U2}-0",),)
    assert bench.cluster.patches == []
