"""Cases of device-plugin.md §15 that need more than one part of the plugin, by number."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from allocator_world import LOCK, ONE, Bench
from node_cards import U1

from hami.kube.errors import ServerError, TransportError
from hami.node.config import Settings
from hami.node.errors import AllocateError, UnsafePathError
from hami.node.files import ensure_directory, read_regular, rewrite_file
from hami.node.lock import LockReleaser
from hami.node.paths import HostPaths
from hami.node.plugin.allocator import REPEATS_KEPT
from hami.node.plugin.library import install
from hami.node.plugin.lockparent import prepare_lock_parent
from hami.node.plugin.registration import Registrar
from hami.node.plugin.workspace import Workspace
from hami.protocol.views import Pod, decode

OTHER_UID = 12345
Make = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(cluster: Any, host: HostPaths) -> Bench:
    return Bench(cluster, host)


def in_child(user: int, work: Callable[[], None]) -> int:
    """Exit status of a forked child that runs ``work`` as ``user`` (as ourselves if we are not root)."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can look into."""
    path = Path(tempfile.mkdtemp(prefix="hr"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_d19_below_a_host_root_no_privilege_is_needed(open_folder: Path) -> None:
    """Every file of an allocation is made by a user without rights, below the root that is his."""
    root = open_folder / "root"
    root.mkdir()
    if os.geteuid() == 0:
        os.chown(root, OTHER_UID, OTHER_UID)
    library = open_folder / "libvgpu.so"
    library.write_bytes(b"library")
    library.chmod(0o644)

    def work() -> None:
        paths = HostPaths(str(root), "/usr/local", "v2.10.0")
        workspace = Workspace(paths)
        workspace.prepare_start()
        workspace.prepare_lock_parent(broker=False)
        install(library, paths)
        workspace.make_cache_directory("uid", "app")
        workspace.write_limits("uid", "app", {"A": "1"})
        workspace.check_limits("uid", "app")
        workspace.save_checkpoint(workspace.load_checkpoint())
        files = workspace.find_sources(preload=True)
        assert files.library.startswith(str(root))

    assert in_child(OTHER_UID, work) == 0
    assert sorted(open_folder.iterdir()) == [library, root]
    made = list(root.rglob("*"))
    assert (root / "tmp/vgpulock").is_dir()
    if os.geteuid() == 0:
        assert {path.lstat().st_uid for path in made} == {OTHER_UID}


def test_d22_a_third_version_leaves_the_older_two_alone(tmp_path: Path) -> None:
    """A pod of any phase may still name them."""
    source = tmp_path / "libvgpu.so"
    for version, content in (("v1", b"one"), ("v2", b"two"), ("v3", b"three")):
        source.write_bytes(content)
        install(source, HostPaths(str(tmp_path / "root"), "/usr/local", version))
    folder = tmp_path / "root/usr/local/vgpu/lib"
    found = {path.name: (path / "libvgpu.so").read_bytes() for path in folder.iterdir()}
    assert found == {"v1": b"one", "v2": b"two", "v3": b"three"}


async def test_l9_the_directory_is_named_after_the_first_app_container(bench: Bench, make_pod: Make) -> None:
    bench.cluster.add(make_pod("p", f";{U1},NVIDIA,1000,0:;", init=("setup",)))
    (answer,) = await bench.allocate([f"{U1}-1"])
    assert answer.mounts[1].host_path == str(bench.path("containers/uid-p_app"))
    assert [path.name for path in bench.path("containers").iterdir()] == ["uid-p_app"]


async def test_l13_l30_a_lock_that_names_nobody_stays_as_it_is(bench: Bench, make_pod: Make) -> None:
    for index, lock in enumerate(
        ("a,b", "2020-01-01T00:00:00Z,team-a,x", "2026-08-21T08:14:55Z,team-a,gone")
    ):
        bench.cluster.node_annotations[LOCK] = lock
        bench.cluster.add(make_pod(f"p{index}", ONE))
        await bench.allocate([f"{U1}-{index}"])
        assert bench.cluster.notes(f"p{index}")["hami.io/bind-phase"] == "success"
        assert bench.cluster.node_annotations[LOCK] == lock


async def test_l25_fifty_calls_for_fifty_pods_get_their_own_devices(bench: Bench, make_pod: Make) -> None:
    """The lock is held by one pod at a time; whoever gets an answer has the devices of one pod."""
    for index in range(50):
        bench.cluster.add(make_pod(f"p{index}", f"{U1},NVIDIA,{index + 1},0:;", bind_time=1000 + index))
    bench.cluster.node_annotations[LOCK] = "2026-08-21T08:14:55Z,team-a,p7"
    answers = await asyncio.gather(*(bench.allocate([f"{U1}-{index}"]) for index in range(50)))
    limits = [int(answer.env["CUDA_DEVICE_MEMORY_LIMIT_0"][:-1]) for (answer,) in answers]
    assert limits[0] == 8
    assert sorted(limits) == list(range(1, 51))
    assert {Path(answer.mounts[1].host_path).name for (answer,) in answers} == {
        f"uid-p{index}_app" for index in range(50)
    }


async def test_l26_only_the_latest_answers_are_kept_for_a_repeated_call(bench: Bench, make_pod: Make) -> None:
    for index in range(REPEATS_KEPT + 1):
        bench.cluster.add(make_pod(f"p{index}", ONE, bind_time=1000 + index))
        await bench.allocate([f"{U1}-{index}"])
    writes = len(bench.cluster.patches)
    await bench.allocate([f"{U1}-1"])
    assert len(bench.cluster.patches) == writes
    with pytest.raises(Exception, match="no binding pod found"):
        await bench.allocate([f"{U1}-0"])


@pytest.mark.parametrize("change", ["deleted", "replaced", "running", "terminating"])
async def test_l26_a_call_is_repeated_only_for_a_pod_that_still_waits(
    bench: Bench, make_pod: Make, change: str
) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-1"])
    pod = bench.cluster.objects["team-a", "p"]
    if change == "deleted":
        bench.cluster.objects.clear()
    elif change == "replaced":
        pod["metadata"]["uid"] = "another"
    elif change == "running":
        pod["status"]["phase"] = "Running"
    else:
        pod["metadata"]["deletionTimestamp"] = "2026-08-21T10:00:00Z"
    with pytest.raises(Exception, match="no binding pod found"):
        await bench.allocate([f"{U1}-1"])


async def test_l26_without_the_api_server_a_repeated_call_is_an_error(
    bench: Bench, make_pod: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-1"])

    async def lost(namespace: str, name: str) -> Pod:
        raise TransportError("lost")

    monkeypatch.setattr(bench.cluster, "pod", lost)
    with pytest.raises(AllocateError, match="cannot read pod team-a/p"):
        await bench.allocate([f"{U1}-1"])


async def test_l36_one_limits_file_that_cannot_come_back_does_not_stop_the_others(
    bench: Bench, make_pod: Make
) -> None:
    for name in ("p", "q"):
        bench.cluster.add(make_pod(name, ONE))
        await bench.allocate([f"{U1}-{name}"])
    bench.path("limits/uid-p_app").unlink()
    bench.path("limits/uid-p_app").mkdir()
    bench.path("limits/uid-q_app").unlink()
    await bench.allocator.restore(limits_files=True)
    assert bench.path("limits/uid-q_app").read_text().startswith("ACTIVE_OOM_KILLER=0\n")


async def test_l36_what_belongs_to_pods_that_are_gone_is_forgotten_at_start(
    bench: Bench, make_pod: Make
) -> None:
    bench.cluster.add(make_pod("p", ONE))
    await bench.allocate([f"{U1}-1"])
    bench.cluster.objects.clear()
    await bench.allocator.restore(limits_files=True)
    assert b"uid-p" not in bench.path("allocations.json").read_bytes()


# ---- the lock is given back, however often the API server refuses ------------------------------------------


async def test_a_lock_is_released_after_reads_and_writes_that_fail(cluster: Any, make_pod: Make) -> None:
    pod = decode(msgspec.json.encode(make_pod("p", ONE)), Pod)
    cluster.node_annotations[LOCK] = "2026-08-21T08:14:55Z,team-a,p"
    cluster.fail_node_patches = [ServerError(503, "", "busy"), TransportError("lost")]
    assert await LockReleaser(cluster).release(pod)
    assert LOCK not in cluster.node_annotations


async def test_a_lock_that_cannot_be_read_is_reported_as_held(cluster: Any, make_pod: Make) -> None:
    pod = decode(msgspec.json.encode(make_pod("p", ONE)), Pod)
    cluster.node_annotations[LOCK] = "2026-08-21T08:14:55Z,team-a,p"
    cluster.fail_reads = [TransportError("lost")] * 20
    assert not await LockReleaser(cluster).release(pod)
    assert LOCK in cluster.node_annotations


# ---- registration ------------------------------------------------------------------------------------------


async def test_r6_the_loop_backs_off_and_succeeds(cluster: Any, make_nvml: Callable[..., Any]) -> None:
    from hami.node.plugin.board import Board
    from hami.node.plugin.cards import CardReader

    cluster.fail_node_patches = [ServerError(503, "", "busy")]
    board = Board()
    loop = Registrar(cluster, CardReader(make_nvml([(U1, "NVIDIA A", 1 << 30)])), board, Settings())
    running = asyncio.create_task(loop.run())
    while cluster.fail_node_patches:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    board.mark_unhealthy([U1], "XID 79")  # wakes the loop in the middle of its pause
    while "hami.io/node-nvidia-register" not in cluster.node_annotations:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert '"health"' not in cluster.node_annotations["hami.io/node-nvidia-register"]


async def test_r5_a_card_that_is_left_out_is_named_once(
    cluster: Any, make_nvml: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    from hami.node.errors import NvmlUnsupportedError
    from hami.node.plugin.board import Board
    from hami.node.plugin.cards import CardReader

    nvml = make_nvml([(U1, "GB10", NvmlUnsupportedError("no", 3))])
    loop = Registrar(cluster, CardReader(nvml), Board(), Settings())
    for _ in range(3):
        await loop.once()
    assert [record.message for record in caplog.records].count("register.left_out") == 1


# ---- files of a hostile host -------------------------------------------------------------------------------


def test_a_directory_of_somebody_else_is_not_taken_over(tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match="belongs to UID"):
        ensure_directory(str(tmp_path / "d"), 0o755, os.geteuid() + 1)
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    with pytest.raises(UnsafePathError, match="not a directory"):
        ensure_directory(str(link), 0o755, os.geteuid())


@pytest.mark.parametrize("kind", ["fifo", "socket", "directory", "symlink"])
def test_only_a_regular_file_is_rewritten_or_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "target")
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(UnsafePathError, match="not a regular file"):
            rewrite_file(directory, "file", b"x")
    finally:
        os.close(directory)
    with pytest.raises(UnsafePathError, match="not a regular file"):
        read_regular(str(path), 10)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("path", ["relative/vgpulock", "/", "/."])
def test_the_lock_parent_needs_an_absolute_path(path: str) -> None:
    with pytest.raises(UnsafePathError, match="not an absolute path"):
        prepare_lock_parent(path, os.geteuid())


def test_a_lock_parent_without_its_own_parent_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match="failed to prepare host PID lock parent"):
        prepare_lock_parent(str(tmp_path / "absent/vgpulock"), os.geteuid())
