"""The mount point ``hostpid`` in the lock parent (host-pid-broker.md §7, D2, D10, D18, D19)."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hami.node.errors import UnsafePathError
from hami.node.paths import HostPaths
from hami.node.plugin import mountpoint
from hami.node.plugin.lockparent import prepare_lock_parent
from hami.node.plugin.mountpoint import prepare_mount_point, release_mount_point
from hami.node.plugin.workspace import Workspace

ME = os.geteuid()


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Path]:
    """A lock parent; in the end nothing in it is immutable any more."""
    folder = tmp_path / "vgpulock"
    folder.mkdir()
    folder.chmod(0o1777)
    yield folder
    release(folder)


def prepare(parent: Path, owner: int = ME, *, immutable: bool = False) -> str:
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return prepare_mount_point(descriptor, owner, immutable=immutable)
    finally:
        os.close(descriptor)


def release(parent: Path, owner: int = ME) -> None:
    descriptor = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        release_mount_point(descriptor, owner)
    finally:
        os.close(descriptor)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def is_immutable(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        flags = mountpoint._flags(descriptor)
    finally:
        os.close(descriptor)
    return bool(flags and flags & mountpoint._IMMUTABLE)


class Flags:
    """A file system with inode flags, in place of the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int = 0) -> None:
        self.value = 0x80000
        self.sets: list[int] = []
        self._error = error
        monkeypatch.setattr(fcntl, "ioctl", self._ioctl)

    def _ioctl(self, descriptor: int, request: int, data: bytes) -> bytes:
        assert stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if request == 0x40086602:
            if self._error:
                raise OSError(self._error, os.strerror(self._error))
            self.value = int.from_bytes(data, "little")
            self.sets.append(self.value)
        else:
            assert request == 0x80086601
        return self.value.to_bytes(4, "little")


def test_d18_the_mount_point_is_made_and_immutable_where_it_can_be(parent: Path) -> None:
    """The real file system: what is immutable nobody removes, whatever his UID."""
    old = os.umask(0o077)
    try:
        prepare(parent, immutable=True)
        prepare(parent, immutable=True)
    finally:
        os.umask(old)
    place = parent / "hostpid"
    assert mode(place) == 0o755
    assert place.lstat().st_uid == ME
    if is_immutable(place):
        with pytest.raises(PermissionError):
            place.rmdir()
        with pytest.raises(PermissionError):
            place.rename(parent / "away")
    release(parent)
    assert not is_immutable(place)
    place.rmdir()


def test_d18_the_flag_is_added_to_those_that_are_there(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Flags(monkeypatch)
    prepare(parent, immutable=True)
    prepare(parent, immutable=True)
    assert flags.sets == [0x80010], "once"
    prepare(parent, immutable=False)
    assert flags.sets == [0x80010], "only the gate takes it off"
    release(parent)
    assert flags.sets == [0x80010, 0x80000]
    release(parent)
    assert flags.sets == [0x80010, 0x80000]


def test_a_mode_is_put_right_under_the_flag(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Flags(monkeypatch)
    prepare(parent, immutable=True)
    (parent / "hostpid").chmod(0o700)
    prepare(parent, immutable=True)
    assert mode(parent / "hostpid") == 0o755
    assert flags.sets == [0x80010, 0x80000, 0x80010]


@pytest.mark.parametrize("code", [1, 95, 25])
def test_a_file_system_or_a_user_that_cannot_is_no_error(
    parent: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    Flags(monkeypatch, error=code)
    assert prepare(parent, immutable=True) == os.strerror(code)
    assert prepare(parent) == ""
    assert mode(parent / "hostpid") == 0o755


def test_a_file_system_without_flags_is_no_error(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> bytes:
        raise OSError(25, "Inappropriate ioctl for device")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "ioctl", none)
        assert prepare(parent, immutable=True) == "the file system has no such flag"
        release(parent)
    assert mode(parent / "hostpid") == 0o755


def test_what_is_exchanged_while_it_is_prepared_is_prepared_again(
    parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root of a container renames the directory away after it was opened, and puts a symlink there."""
    flags = Flags(monkeypatch)
    real = os.fchmod
    place = parent / "hostpid"
    place.mkdir(mode=0o700)

    def exchange(descriptor: int, mode: int) -> None:
        real(descriptor, mode)
        place.rename(parent / "away")
        place.symlink_to(tmp_path)

    monkeypatch.setattr(os, "fchmod", exchange)
    prepare(parent, immutable=True)
    assert stat.S_ISDIR(place.lstat().st_mode)
    assert mode(place) == 0o755
    assert flags.sets == [0x80010]
    assert sum(path.is_symlink() for path in parent.iterdir()) == 1, "the symlink was renamed"


def test_a_parent_that_somebody_made_immutable_is_refused_with_the_remedy(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(UnsafePathError, match=f"chattr -ia {parent}"):
        prepare_lock_parent(str(parent), ME)


def test_without_the_flag_one_line_says_what_root_of_a_container_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(HostPaths, "host", lambda _, path: f"{tmp_path}{path}")
    monkeypatch.setattr(HostPaths, "trusted_uid", ME)
    (tmp_path / "tmp").mkdir()
    flags = Flags(monkeypatch, error=1)
    workspace = Workspace(HostPaths())
    assert workspace.prepare_lock_parent(True)
    assert workspace.prepare_lock_parent(True)
    (record,) = caplog.records
    assert record.message == "mount_point.not_immutable"
    assert record.__dict__["cause"] == "Operation not permitted"
    assert "symlink" in record.__dict__["advice"]
    assert flags.sets == []
    assert not workspace.prepare_lock_parent(False)


@pytest.mark.parametrize("kind", ["symlink", "file", "fifo", "socket-like link to a directory"])
def test_d19_what_was_planted_is_renamed_away(parent: Path, tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    place = parent / "hostpid"
    if kind == "file":
        place.write_text("planted")
    elif kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to(victim if kind != "symlink" else "/nowhere")
    before = place.lstat().st_ino
    prepare(parent)
    assert stat.S_ISDIR(place.lstat().st_mode)
    (foreign,) = parent.glob("hostpid.foreign-*")
    assert foreign.lstat().st_ino == before
    assert mode(victim) == 0o700
    assert list(victim.iterdir()) == []


def test_d19_a_directory_of_another_owner_is_renamed_away(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = parent / "hostpid"
    place.mkdir(mode=0o700)
    (place / "broker.sock").write_text("fake")
    foreign = place.lstat().st_ino
    real = os.fstat

    def judged(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        if fields[stat.ST_INO] == foreign:
            fields[stat.ST_UID] = ME + 1000
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", judged)
    prepare(parent)
    assert place.lstat().st_ino != foreign
    assert list(place.iterdir()) == []
    (away,) = parent.glob("hostpid.foreign-*")
    assert (away / "broker.sock").read_text("utf-8") == "fake"


def test_a_mount_point_that_is_replaced_without_end_is_an_error(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plant(path: str, *_: object, dir_fd: int) -> None:
        os.symlink("/nowhere", path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", plant)
    with pytest.raises(UnsafePathError, match="again and again"):
        prepare(parent)


def test_below_a_host_root_nothing_is_made_immutable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = Flags(monkeypatch)
    workspace = Workspace(HostPaths(str(tmp_path), "/usr/local", "v1"))
    workspace.prepare_start()
    workspace.prepare_lock_parent(broker=True)
    assert (tmp_path / "tmp/vgpulock/hostpid").is_dir()
    assert flags.sets == []
    assert workspace.mount_point_problem == ""


def test_with_the_gate_off_the_flag_is_taken_off_and_the_directory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = Flags(monkeypatch)
    workspace = Workspace(HostPaths(str(tmp_path), "/usr/local", "v1"))
    workspace.prepare_start()
    workspace.prepare_lock_parent(broker=False)
    workspace.release_mount_point()
    assert not (tmp_path / "tmp/vgpulock/hostpid").exists()
    workspace.prepare_lock_parent(broker=True)
    flags.value |= 0x10
    workspace.release_mount_point()
    assert flags.sets == [0x80000]
    assert (tmp_path / "tmp/vgpulock/hostpid").is_dir()


def test_a_flag_that_may_not_be_taken_off_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags = Flags(monkeypatch, error=1)
    workspace = Workspace(HostPaths(str(tmp_path), "/usr/local", "v1"))
    workspace.prepare_start()
    workspace.prepare_lock_parent(broker=True)
    flags.value |= 0x10
    workspace.release_mount_point()
    assert caplog.records[-1].__dict__["advice"] == f"chattr -i {tmp_path}/tmp/vgpulock/hostpid"


# ---- the lock parent itself --------------------------------------------------------------------------------


def test_d2_the_parent_is_never_open_without_the_sticky_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mode right after it was made, with a umask that takes nothing away."""
    seen: list[int] = []
    real = os.open

    def look(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if dir_fd is not None and path == "vgpulock":
            seen.append(stat.S_IMODE(os.stat(path, dir_fd=dir_fd).st_mode))
        return real(path, flags, *rest, dir_fd=dir_fd)

    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    monkeypatch.setattr(os, "open", look)
    old = os.umask(0)
    try:
        prepare_lock_parent(str(shared / "vgpulock"), ME)
    finally:
        os.umask(old)
    assert seen == [0o1777]


def test_d10_a_parent_s_parent_of_another_owner_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    real = os.fstat

    def judged(descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        if fields[stat.ST_INO] == shared.stat().st_ino:
            fields[stat.ST_UID] = ME + 1000
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", judged)
    with pytest.raises(UnsafePathError, match=f"belongs to UID {ME + 1000}"):
        prepare_lock_parent(str(shared / "vgpulock"), ME)
    assert list(shared.iterdir()) == []
