"""The broker's directory, lock and socket at start and at the end (host-pid-broker.md §15.2)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostpid_world import LIMIT_S, ME, Clock, everything, good, running, wait_until

from hami.node.hostpid import lock
from hami.node.hostpid.broker import start_broker
from hami.node.hostpid.codec import REQUEST
from hami.node.hostpid.counters import Counters
from hami.node.hostpid.endpoint import Endpoint, open_endpoint
from hami.node.hostpid.errors import BrokerError, combined
from hami.node.hostpid.serving import accept_from
from hami.node.paths import HostPaths

Disown = Callable[[Path], None]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: a Unix socket path has at most 107 characters."""
    path = tempfile.mkdtemp(prefix="hp")
    yield Path(path) / "hostpid"
    shutil.rmtree(path)


@pytest.fixture
def disown(monkeypatch: pytest.MonkeyPatch) -> Disown:
    """Makes a file look as if it belonged to another UID, without the right to give it away."""
    foreign: set[tuple[int, int]] = set()

    def judged(found: os.stat_result) -> os.stat_result:
        fields = list(found)
        if (found.st_dev, found.st_ino) in foreign:
            fields[stat.ST_UID] = ME + 1000
        return os.stat_result(fields)

    real_stat, real_fstat = os.stat, os.fstat

    def give(path: Path) -> None:
        found = path.lstat()
        foreign.add((found.st_dev, found.st_ino))
        monkeypatch.setattr(os, "stat", lambda *a, **k: judged(real_stat(*a, **k)))
        monkeypatch.setattr(os, "fstat", lambda descriptor: judged(real_fstat(descriptor)))

    return give


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@contextlib.contextmanager
def opened(folder: Path, lock_wait_s: float = 0.0) -> Iterator[Endpoint]:
    endpoint = open_endpoint(str(folder), ME, lock_wait_s)
    try:
        yield endpoint
    finally:
        endpoint.close()


def refused(folder: Path, words: str, owner: int = ME) -> str:
    with pytest.raises(BrokerError, match=words) as caught:
        open_endpoint(str(folder), owner, 0.0)
    return str(caught.value)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_locked(folder: Path) -> bool:
    with (folder / "broker.lock").open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def stale_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as left:
        left.bind(str(path))
        left.listen()


def test_s2_the_default_path_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("something was made"))
    with pytest.raises(BrokerError, match="must run as root"):
        start_broker(HostPaths(), Counters())


@pytest.mark.parametrize("mask", [0o077, 0o000, 0o022])
def test_s3_modes_are_independent_of_the_umask(folder: Path, mask: int) -> None:
    old = os.umask(mask)
    try:
        with opened(folder):
            assert mode(folder) == 0o711
            assert mode(folder / "broker.sock") == 0o666
            assert mode(folder / "broker.lock") == 0o600
            assert stat.S_ISSOCK((folder / "broker.sock").lstat().st_mode)
            assert {item.lstat().st_uid for item in (folder, *folder.iterdir())} == {ME}
    finally:
        os.umask(old)


def test_s4_a_directory_that_is_too_open_becomes_0711(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with opened(folder):
        assert mode(folder) == 0o711


@pytest.mark.parametrize("kind", ["symlink", "file"])
def test_s5_anything_but_a_directory_is_refused_and_stays(folder: Path, kind: str) -> None:
    victim = folder.parent / "victim"
    victim.mkdir(mode=0o700)
    if kind == "symlink":
        folder.symlink_to(victim)
    else:
        folder.write_text("keep")
    refused(folder, f"is a {'symlink' if kind == 'symlink' else 'regular file'}")
    assert mode(victim) == 0o700
    assert list(victim.iterdir()) == []


def test_s6_a_directory_of_another_owner_is_refused_and_stays(folder: Path, disown: Disown) -> None:
    folder.mkdir(mode=0o700)
    disown(folder)
    refused(folder, f"UID {ME + 1000}")
    assert mode(folder) == 0o700
    assert list(folder.iterdir()) == []


def test_s7_a_symlink_above_the_directory_is_followed(folder: Path) -> None:
    root = folder.parent
    (root / "run").mkdir()
    (root / "var").mkdir()
    (root / "var/run").symlink_to("../run")
    with opened(root / "var/run/hami/hostpid"):
        assert stat.S_ISSOCK((root / "run/hami/hostpid/broker.sock").lstat().st_mode)


def test_s8_a_symlink_as_lock_is_refused_and_its_target_stays(folder: Path) -> None:
    folder.mkdir()
    victim = folder.parent / "victim"
    victim.write_text("keep")
    (folder / "broker.lock").symlink_to(victim)
    refused(folder, "symlink")
    assert victim.read_text("utf-8") == "keep"


def test_s9_a_lock_that_others_can_open_is_refused(folder: Path) -> None:
    folder.mkdir()
    (folder / "broker.lock").touch(0o644)
    (folder / "broker.lock").chmod(0o644)
    refused(folder, "0644")
    assert not is_locked(folder)


def test_s10_a_lock_of_another_owner_is_refused(folder: Path, disown: Disown) -> None:
    folder.mkdir()
    (folder / "broker.lock").touch(0o600)
    disown(folder / "broker.lock")
    refused(folder, rf"broker\.lock belongs to UID {ME + 1000}")
    assert not (folder / "broker.sock").exists()


def test_a_lock_that_is_no_file_is_refused(folder: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "broker.lock", 0o600)
    refused(folder, "fifo")


def test_s11_a_second_broker_fails_and_the_first_goes_on(folder: Path) -> None:
    with running(folder) as first:
        refused(folder, "another broker holds")
        assert first.ask() == good()


@pytest.mark.parametrize("kind", ["file", "directory", "symlink"])
def test_s12_what_is_no_socket_at_the_socket_s_path_is_refused_and_stays(folder: Path, kind: str) -> None:
    folder.mkdir()
    path = folder / "broker.sock"
    if kind == "directory":
        path.mkdir()
    else:
        target = path if kind == "file" else folder / "target"
        target.write_text("keep")
        if kind == "symlink":
            path.symlink_to(target)
    refused(folder, "not a socket")
    assert path.is_dir() if kind == "directory" else path.read_text("utf-8") == "keep"
    assert not is_locked(folder)


def test_s13_a_stale_socket_is_replaced(folder: Path) -> None:
    folder.mkdir()
    stale_socket(folder / "broker.sock")
    with running(folder) as broker:
        assert broker.ask() == good()


def test_s14_a_live_listener_is_left_alone(folder: Path) -> None:
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(folder / "broker.sock"))
        other.listen()
        before = (folder / "broker.sock").lstat().st_ino
        refused(folder, "already listening")
        assert (folder / "broker.sock").lstat().st_ino == before
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(folder / "broker.sock"))
        assert not is_locked(folder)


def test_a_listener_whose_queue_is_full_is_left_alone(folder: Path) -> None:
    """Neither a connection nor a refusal: nobody knows, so it stays."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, contextlib.ExitStack() as stack:
        other.bind(str(folder / "broker.sock"))
        other.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            filler.setblocking(False)
            filler.connect_ex(str(folder / "broker.sock"))
        refused(folder, "stale")
        assert (folder / "broker.sock").exists()


def test_s15_a_stale_socket_of_another_owner_is_left_in_place(folder: Path, disown: Disown) -> None:
    folder.mkdir()
    stale_socket(folder / "broker.sock")
    disown(folder / "broker.sock")
    refused(folder, rf"broker\.sock belongs to UID {ME + 1000}")
    assert (folder / "broker.sock").exists()


def test_s16_an_error_after_bind_takes_the_socket_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "chmod is not possible")

    monkeypatch.setattr(os, "chmod", fail)
    refused(folder, "chmod is not possible")
    assert not (folder / "broker.sock").exists()
    assert not is_locked(folder)


def test_s17_the_end_removes_the_socket_and_keeps_the_lock_file(folder: Path) -> None:
    with opened(folder):
        assert is_locked(folder)
    assert not (folder / "broker.sock").exists()
    assert (folder / "broker.lock").exists()
    assert not is_locked(folder)


def test_s18_a_file_in_the_socket_s_place_is_left_at_the_end(folder: Path) -> None:
    with opened(folder):
        (folder / "broker.sock").unlink()
        (folder / "broker.sock").write_text("keep")
    assert (folder / "broker.sock").read_text("utf-8") == "keep"


@pytest.mark.parametrize("removal", ["rename", "unlink"])
def test_s19_another_socket_in_its_place_is_left_at_the_end(folder: Path, removal: str) -> None:
    with opened(folder):
        path = folder / "broker.sock"
        if removal == "rename":
            path.rename(folder / "away")
        else:
            path.unlink()
        stale_socket(path)
        other = path.lstat().st_ino
    assert path.lstat().st_ino == other


def test_s21_a_second_end_does_nothing(folder: Path) -> None:
    endpoint = open_endpoint(str(folder), ME, 0.0)
    endpoint.close()
    (folder / "broker.sock").write_text("keep")
    endpoint.close()
    assert (folder / "broker.sock").read_text("utf-8") == "keep"


def test_everything_that_fails_at_the_end_is_told_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = open_endpoint(str(folder), ME, 0.0)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "first")

    def fail_too(*_: object) -> None:
        raise OSError(errno.EIO, "second")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        patch.setattr(fcntl, "flock", fail_too)
        with pytest.raises(BrokerError, match="first; second"):
            endpoint.close()
    assert not is_locked(folder), "the descriptor was closed all the same"
    assert str(combined([BrokerError("a"), BrokerError("b")])) == "a; b"


def test_s25_a_new_broker_waits_for_the_old_one_to_end(folder: Path) -> None:
    """The lock is held by another process, which serves, and lets go of both when it is told to."""
    with opened(folder):
        pass
    script = (
        "import fcntl, socket, sys; f = open(sys.argv[1], 'r+b'); fcntl.flock(f, fcntl.LOCK_EX);"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1].replace('.lock', '.sock')); s.listen();"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(folder / "broker.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as old:
        assert old.stdout is not None
        assert old.stdout.readline() == b"held\n"
        found: list[Endpoint] = []
        waiting = threading.Thread(target=lambda: found.append(open_endpoint(str(folder), ME, LIMIT_S)))
        waiting.start()
        wait_until((folder / "broker.lock").exists)
        assert found == []
        old.communicate()
        waiting.join(LIMIT_S)
        assert len(found) == 1
        found[0].close()


@contextlib.contextmanager
def reader(folder: Path, action: str) -> Iterator[None]:
    """A process that does something to the lock file, with a descriptor that can only read it."""
    script = (
        f"import fcntl, os, sys; f = os.open(sys.argv[1], os.O_RDONLY); {action};"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(folder / "broker.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        try:
            yield
        finally:
            holder.communicate()


READERS = {
    "lock": "fcntl.flock(f, fcntl.LOCK_EX)",
    "lease": "fcntl.fcntl(f, fcntl.F_SETLEASE, fcntl.F_RDLCK)",
}


@pytest.mark.parametrize("action", READERS.values(), ids=READERS.keys())
def test_a_reader_of_the_lock_that_does_not_serve_keeps_no_broker_out(
    folder: Path, action: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Root of a container can open the lock file through its read-only mount."""
    with opened(folder):
        pass
    held = (folder / "broker.lock").stat().st_ino
    with reader(folder, action), opened(folder):
        assert is_locked(folder)
        assert mode(folder / "broker.lock") == 0o600
        assert (folder / "broker.lock").stat().st_ino != held
        refused(folder, "another broker holds")
        assert names(folder) == ["broker.lock", "broker.sock"]
    assert [record.message for record in caplog.records] == ["hostpid.lock_replaced"]
    assert f":{held} " in caplog.records[0].__dict__["advice"]


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Time:
    found = Time()
    monkeypatch.setattr(lock, "time", found)
    return found


def taken(folder: Path, wait_s: float, is_served: Callable[[], bool]) -> None:
    """Take the lock of the folder and give it back."""
    directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        os.close(lock.take_lock(directory, str(folder / "broker.lock"), ME, wait_s, is_served))
    finally:
        os.close(directory)


def test_a_holder_that_never_listens_is_not_waited_for_like_a_broker(folder: Path, simulated: Time) -> None:
    with opened(folder):
        pass
    with reader(folder, READERS["lock"]):
        taken(folder, 10.0, lambda: False)
    assert 101.0 <= simulated.now < 102.0


def test_a_holder_that_listens_for_a_while_is_a_broker_that_ends(folder: Path, simulated: Time) -> None:
    with opened(folder):
        pass
    with reader(folder, READERS["lock"]):
        taken(folder, 10.0, lambda: simulated.now < 103.0)
    assert 104.0 <= simulated.now < 105.0


def cannot_tell() -> bool:
    raise BrokerError("cannot tell")


@pytest.mark.parametrize(
    ("is_served", "words"), [(lambda: True, "another broker holds"), (cannot_tell, "cannot tell")]
)
def test_a_holder_that_may_serve_is_waited_for_to_the_end(
    folder: Path, simulated: Time, is_served: Callable[[], bool], words: str
) -> None:
    with opened(folder):
        pass
    with reader(folder, READERS["lock"]), pytest.raises(BrokerError, match=words):
        taken(folder, 10.0, is_served)
    assert simulated.now >= 110.0


def test_a_lock_that_is_not_safe_is_not_replaced_when_it_is_held(folder: Path) -> None:
    with opened(folder):
        pass
    with reader(folder, READERS["lock"]):
        (folder / "broker.lock").chmod(0o644)
        refused(folder, "0644")
    assert mode(folder / "broker.lock") == 0o644


def test_somebody_who_takes_every_fresh_lock_ends_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder):
        pass
    before = (folder / "broker.lock").stat().st_ino

    def taken(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "taken")

    monkeypatch.setattr(fcntl, "flock", taken)
    refused(folder, "again and again")
    assert names(folder) == ["broker.lock"]
    assert (folder / "broker.lock").stat().st_ino == before


def test_a_broker_whose_lock_was_replaced_while_it_started_gives_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listen = socket.socket.listen

    def late(self: socket.socket, backlog: int) -> None:
        (folder / "fresh").touch(0o600)
        (folder / "fresh").rename(folder / "broker.lock")
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", late)
    refused(folder, "another broker took over")
    assert names(folder) == ["broker.lock"]


def test_s26_below_a_host_root_the_own_uid_is_trusted_and_no_other(
    folder: Path, disown: Disown, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder.parent
    monkeypatch.setattr(os, "geteuid", lambda: ME + 1000)
    with pytest.raises(BrokerError, match=f"UID {ME}"):
        start_broker(HostPaths(str(root)), Counters(), 0.0)
    assert not (root / "var/run/hami/hostpid/broker.sock").exists()
    disown(root / "var/run/hami/hostpid")
    with pytest.raises(BrokerError, match=r"broker\.lock belongs to UID"):
        start_broker(HostPaths(str(root)), Counters(), 0.0)
    monkeypatch.undo()
    broker = start_broker(HostPaths(str(root)), Counters(), 0.0)
    assert (root / "var/run/hami/hostpid/broker.sock").exists()
    broker.close()
    broker.close()


def test_a_path_that_is_too_long_for_a_socket_is_an_error_in_words(folder: Path) -> None:
    refused(folder / ("x" * 100), "longer than the 107 bytes")


def test_a_connection_that_waits_at_the_end_is_closed_without_bytes(folder: Path) -> None:
    """Connected, not accepted for want of descriptors, when the broker stops."""
    codes = [errno.EMFILE]

    def accept(listener: socket.socket) -> socket.SocketType:
        if codes:
            raise OSError(codes.pop(), "no descriptors")
        return accept_from(listener)

    with running(folder, clock=Clock(), accept=accept) as broker, broker.connect(REQUEST) as client:
        wait_until(lambda: broker.counters.totals().accept_failures == 1)
        broker.server.stop()
        broker.join()
        assert everything(client) == b""
        assert set(broker.counters.totals().results.values()) == {0}
