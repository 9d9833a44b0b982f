"""Two device plugins on one node: ours says so and takes nothing (chart.md §19, operations.md case 27)."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugin_world import Node

from hami.node.errors import UnsafePathError
from hami.node.plugin import service, sockets
from hami.node.plugin.rival import OtherPluginError, PluginLock, check_unserved

CARD = ("GPU-11111111-2222-3333-4444-555555555555", "NVIDIA A", 1 << 30)
Until = Callable[..., Awaitable[None]]


@pytest.fixture
def node(cluster: Any, make_nvml: Callable[..., Any]) -> Iterator[Node]:
    # short: a Unix socket path has at most 107 characters
    folder = tempfile.mkdtemp(prefix="hr")
    yield Node(cluster, make_nvml([CARD]), Path(folder))
    shutil.rmtree(folder)


def serve(path: Path) -> socket.socket:
    """Another plugin: like NVIDIA's it removes whatever socket is there and makes its own."""
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    server.listen()
    return server


def told(node: Node) -> list[str]:
    return [text for _, reason, text in node.cluster.events if reason == "HAMiOtherDevicePlugin"]


async def test_a_plugin_that_is_there_already_keeps_its_socket_until_it_is_gone(
    node: Node, until: Until
) -> None:
    path = node.kubelet.folder / "nvidia-gpu.sock"
    async with node:
        other = serve(path)
        inode = path.stat().st_ino
        await until(lambda: told(node))
        assert f"process {os.getpid()} (" in told(node)[0]
        assert path.stat().st_ino == inode
        assert not node.kubelet.registered
        other.close()
        await until(lambda: node.kubelet.registered)


async def test_a_plugin_that_takes_our_socket_over_is_told_and_left_alone(node: Node, until: Until) -> None:
    path = node.kubelet.folder / "nvidia-gpu.sock"
    async with node:
        await until(lambda: node.kubelet.registered)
        other = serve(path)
        await until(lambda: told(node))
        other.close()
        await until(lambda: len(node.kubelet.registered) == 2)


async def test_a_second_process_of_the_plugin_does_nothing_until_the_first_has_ended(
    node: Node, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PATIENCE_S", 0)
    first = PluginLock(node.paths)
    assert first.take()
    mig_lock = node.root / "tmp/hami/hami-mig-apply.lock"
    mig_lock.parent.mkdir(parents=True)
    mig_lock.touch()
    async with node:
        await until(lambda: told(node))
        assert f"process {os.getpid()} of {socket.gethostname()} is the device plugin" in told(node)[0]
        assert str(node.root / "usr/local/vgpu/device-plugin.lock") in told(node)[0]
        assert not (node.root / "usr/local/vgpu/containers").exists()
        assert mig_lock.exists(), "the first one may be changing MIG"
        first.release()
        await until(lambda: node.kubelet.registered)
        assert len(told(node)) == 1
        assert not PluginLock(node.paths).take()
    assert PluginLock(node.paths).take()


async def test_a_plugin_that_waits_for_another_can_be_stopped(node: Node) -> None:
    first = PluginLock(node.paths)
    assert first.take()
    async with node:
        pass
    assert not node.kubelet.registered


@pytest.mark.parametrize("plant", ["symlink", "foreign mode"])
def test_a_lock_file_that_is_not_ours_alone_is_refused(node: Node, plant: str) -> None:
    path = node.root / "usr/local/vgpu/device-plugin.lock"
    if plant == "symlink":
        path.symlink_to(node.root / "target")
    else:
        path.touch(0o666)
        path.chmod(0o666)
    with pytest.raises(UnsafePathError, match=str(path)):
        PluginLock(node.paths).take()
    assert not (node.root / "target").exists()


def test_a_file_system_without_locks_is_named_with_the_file(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = PluginLock(node.paths)
    with pytest.raises(OSError, match=f"No locks available.*{lock.path}"):
        lock.take()


async def test_new_rights_of_our_socket_are_no_new_socket(
    node: Node, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "DEBOUNCE_S", 0)
    looks: list[str] = []
    look = sockets.identity

    def counted(path: str) -> tuple[int, int, int] | None:
        looks.append(path)
        return look(path)

    monkeypatch.setattr(sockets, "identity", counted)
    path = node.kubelet.folder / "nvidia-gpu.sock"
    async with node:
        await until(lambda: node.kubelet.registered)
        path.chmod(0o700)
        looks.clear()
        await until(lambda: looks.count(str(path)) > 2)
        assert node.plugin.rounds == 1


def test_a_socket_that_nobody_serves_is_free(tmp_path: Path) -> None:
    check_unserved(str(tmp_path / "absent.sock"))
    serve(tmp_path / "left.sock").close()
    check_unserved(str(tmp_path / "left.sock"))


def test_a_plugin_that_hangs_with_a_full_queue_keeps_its_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "o.sock")
    with serve(tmp_path / "o.sock") as other, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as waiting:
        other.listen(0)
        waiting.connect(path)
        with pytest.raises(OtherPluginError, match="a program that does not accept already serves"):
            check_unserved(path)


def test_the_name_of_a_program_is_only_shown_as_far_as_it_can_be_printed(tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "comm").write_text("gpu\x1b[31m-plugin" + "x" * 100)
    with serve(tmp_path / "o.sock"), pytest.raises(OtherPluginError) as caught:
        check_unserved(str(tmp_path / "o.sock"), str(tmp_path))
    assert "\x1b" not in str(caught.value)
    assert f"process {os.getpid()} (gpu[31m-plugin" in str(caught.value)
