"""Descriptor-based file work and the lock parent (host-pid-broker.md §15.3)."""

from __future__ import annotations

import errno
import os
import stat
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from hami.node.errors import SettingsError, UnsafePathError
from hami.node.files import (
    ensure_directory,
    open_directory,
    open_regular,
    read_regular,
    remove_tree,
    replace_file,
    require_regular,
    rewrite_file,
)
from hami.node.paths import HostPaths
from hami.node.plugin.lockparent import prepare_lock_parent

ME = os.geteuid()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A directory like /tmp."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize("before", [None, 0o777, 0o700, 0o2777])
def test_d1_d3_d4_the_lock_parent_ends_with_mode_01777(shared: Path, before: int | None) -> None:
    target = shared / "vgpulock"
    if before is not None:
        target.mkdir()
        target.chmod(before)
    old = os.umask(0o022)
    try:
        prepare_lock_parent(str(target), ME)
    finally:
        os.umask(old)
    assert mode(target) == 0o1777


def test_d5_a_foreign_owner_fails(shared: Path) -> None:
    (shared / "vgpulock").mkdir(mode=0o700)
    with pytest.raises(UnsafePathError, match=r"failed to prepare host PID lock parent.*expected"):
        prepare_lock_parent(str(shared / "vgpulock"), ME + 1)


@pytest.mark.parametrize("kind", ["symlink", "file", "fifo"])
def test_d6_d7_anything_but_a_directory_fails_and_stays(shared: Path, kind: str) -> None:
    target = shared / "vgpulock"
    victim = shared / "victim"
    victim.mkdir(mode=0o700)
    if kind == "symlink":
        target.symlink_to(victim)
    elif kind == "file":
        target.write_text("x")
    else:
        os.mkfifo(target)
    with pytest.raises(UnsafePathError, match="failed to prepare host PID lock parent"):
        prepare_lock_parent(str(target), ME)
    assert mode(victim) == 0o700


def test_d8_a_symlink_as_parent_fails(shared: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(shared)
    with pytest.raises(UnsafePathError):
        prepare_lock_parent(str(link / "vgpulock"), ME)
    assert list(shared.iterdir()) == []


def test_d9_d11_the_parent_needs_the_sticky_bit_only_if_others_can_write(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(UnsafePathError, match=rf"sticky bit: chmod \+t {shared}"):
        prepare_lock_parent(str(shared / "vgpulock"), ME)
    shared.chmod(0o755)
    prepare_lock_parent(str(shared / "vgpulock"), ME)


def test_d10_a_parent_of_somebody_else_is_named_with_the_way_out(shared: Path) -> None:
    owner = ME + 1 if ME else 0
    if ME == 0:
        os.chown(shared, 1000, 1000)
    with pytest.raises(UnsafePathError, match=f"expected {owner}: chown {owner} {shared}$"):
        prepare_lock_parent(str(shared / "vgpulock"), owner)


def test_d12_an_exchanged_entry_is_noticed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = shared / "vgpulock"
    real = os.fchmod

    def exchange(descriptor: int, bits: int) -> None:
        real(descriptor, bits)
        target.rename(shared / "old")
        target.mkdir()
        target.chmod(0o1777)

    monkeypatch.setattr(os, "fchmod", exchange)
    with pytest.raises(UnsafePathError, match="exchanged"):
        prepare_lock_parent(str(target), ME)


def test_d13_a_bit_that_cannot_be_cleared_is_noticed(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fchmod
    monkeypatch.setattr(os, "fchmod", lambda descriptor, bits: real(descriptor, bits | 0o2000))
    with pytest.raises(UnsafePathError, match="3777"):
        prepare_lock_parent(str(shared / "vgpulock"), ME)


def test_a_tree_of_any_depth_is_removed_without_following_links(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "kept").write_text("x")
    top = tmp_path / "top"
    here = top
    for _ in range(130):
        here.mkdir()
        (here / "link").symlink_to(victim)
        (here / "file").write_text("x")
        here = here / "d"
    with open_directory(tmp_path) as parent:
        remove_tree(parent, "top")
        remove_tree(parent, "absent")
    assert not top.exists()
    assert (victim / "kept").exists()


def test_a_directory_of_any_size_is_removed_in_little_memory(tmp_path: Path) -> None:
    inner = tmp_path / "top" / "inner"
    inner.mkdir(parents=True)
    for number in range(15_000):
        (inner / f"{number:0100d}").touch()
    tracemalloc.start()
    try:
        with open_directory(tmp_path) as parent:
            remove_tree(parent, "top")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "top").exists()
    assert peak < 1 << 20


def test_a_link_in_place_of_the_tree_is_removed_itself(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "top").symlink_to(tmp_path / "victim")
    with open_directory(tmp_path) as parent:
        remove_tree(parent, "top")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["victim"]


def test_a_planted_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("old")
    (tmp_path / "name").symlink_to(victim)
    with open_directory(tmp_path) as directory:
        replace_file(directory, "name", b"new", 0o600)
        assert (tmp_path / "name").read_bytes() == b"new"
        (tmp_path / "name").unlink()
        (tmp_path / "name").symlink_to(victim)
        with pytest.raises(UnsafePathError):
            rewrite_file(directory, "name", b"new")
    assert victim.read_text() == "old"


def test_a_failed_replacement_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "name").mkdir()
    with open_directory(tmp_path) as directory, pytest.raises(OSError, match="name"):
        replace_file(directory, "name", b"new", 0o600)
    assert [item.name for item in tmp_path.iterdir()] == ["name"]


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: replace_file(folder, "name", b"new", 0o600),
        lambda folder: rewrite_file(folder, "name", b"n"),
    ],
    ids=["replace", "rewrite"],
)
def test_a_full_disk_is_named_with_the_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[int], None]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "name").write_bytes(b"old")
    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(os, "pwrite", full)
    with open_directory(tmp_path) as directory, pytest.raises(OSError, match="No space") as caught:
        write(directory)
    assert caught.value.filename == f"{tmp_path}/name"


def test_reading_is_bounded_and_follows_no_link(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    assert read_regular(str(file), 10) == b"x" * 10
    with pytest.raises(UnsafePathError, match="longer than 9"):
        read_regular(str(file), 9)
    (tmp_path / "link").symlink_to(file)
    for path in (tmp_path / "link", tmp_path):
        with pytest.raises(UnsafePathError):
            read_regular(str(path), 10)
        with pytest.raises(UnsafePathError, match="not a regular file"):
            require_regular(str(path))


def test_a_directory_gets_exactly_the_mode_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a/b"
    ensure_directory(str(path), 0o755, ME)
    path.chmod(0o700)
    ensure_directory(str(path), 0o755, ME)
    assert mode(path) == 0o755
    with pytest.raises(UnsafePathError, match="UID"):
        ensure_directory(str(path), 0o755, ME + 1)


@pytest.mark.parametrize("folder", ["/var/lib/kubelet/device-plugins", "/elsewhere"])
def test_d19_host_root_is_refused_with_a_socket_outside_of_it(tmp_path: Path, folder: str) -> None:
    paths = HostPaths(str(tmp_path))
    with pytest.raises(SettingsError, match="--host-root"):
        paths.kubelet_socket(f"{folder}/kubelet.sock")
    assert paths.kubelet_socket(None) == f"{tmp_path}/var/lib/kubelet/device-plugins/kubelet.sock"


def test_a_link_out_of_the_host_root_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "root"
    (root / "var/lib").mkdir(parents=True)
    (root / "var/lib/kubelet").symlink_to(outside)
    with pytest.raises(SettingsError):
        HostPaths(str(root)).kubelet_socket(None)


def test_what_is_no_regular_file_is_not_opened_at_all(tmp_path: Path) -> None:
    """Whoever opens a device may start it; here a writer of a FIFO, who waits for a reader, would go on."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    written = threading.Thread(target=lambda: os.close(os.open(fifo, os.O_WRONLY)), daemon=True)
    written.start()
    for access in (os.O_RDONLY, os.O_RDWR):
        with pytest.raises(UnsafePathError, match="it is a fifo"):
            open_regular(fifo, access)
    written.join(timeout=0.3)
    assert written.is_alive()
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    written.join()
    os.close(reader)
