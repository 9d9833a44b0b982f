"""The client of the host PID broker by itself: what it trusts, what it makes of answers, when it gives up."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostpid_harness import FOREIGN_UID, REQUEST, Containers, StandIn, needs_root, real_broker, stand_in
from vgpu_harness import Node, wait_until

VECTORS = json.loads((Path(__file__).parents[1] / "vectors/hostpid.json").read_text())
LIMIT_MS = 500


def answer(pid: int, *, magic: bytes = b"HPID", version: int = 1, status: int = 0) -> bytes:
    return magic + version.to_bytes(2) + status.to_bytes(2) + pid.to_bytes(4)


@pytest.fixture
def containers(node: Node) -> Containers:
    return Containers(node)


@contextlib.contextmanager
def silent(path: Path) -> Iterator[StandIn]:
    """A server that takes requests and says nothing."""
    made: list[StandIn] = []

    def behave(connection: socket.socket) -> None:
        made[0].take(connection)

    made.append(StandIn(path, behave))
    with made[0]:
        yield made[0]


# ---- what is trusted -----------------------------------------------------------------------------


def test_a_good_socket_is_asked_with_the_eight_bytes(containers: Containers) -> None:
    with stand_in(containers.socket, answer(4711)) as server:
        assert containers.ask()[:2] == ("", 4711)
        assert server.received == [REQUEST]


def test_a_symlink_in_place_of_the_directory_is_refused(containers: Containers) -> None:
    """C3."""
    with stand_in(containers.socket, answer(4711)) as server:
        assert containers.ask("link")[:2] == ("ENOTSOCK", 0)
        assert server.connections == 0


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777])
def test_a_directory_that_others_may_write_is_refused(containers: Containers, mode: int) -> None:
    """C4."""
    with stand_in(containers.socket, answer(4711)) as server:
        containers.broker.chmod(mode)
        assert containers.ask()[:2] == ("EPERM", 0)
        assert server.connections == 0


def test_a_mount_that_can_be_written_is_refused(containers: Containers) -> None:
    """C5."""
    with stand_in(containers.socket, answer(4711)) as server:
        assert containers.ask("rw")[:2] == ("EPERM", 0)
        assert server.connections == 0


def test_a_file_in_place_of_the_directory_or_the_socket_is_refused(containers: Containers) -> None:
    containers.broker.mkdir(parents=True)
    containers.socket.write_text("keep")
    assert containers.ask()[:2] == ("ENOTSOCK", 0)
    containers.socket.unlink()
    containers.socket.symlink_to("/nowhere")
    assert containers.ask()[:2] == ("ENOTSOCK", 0)
    containers.parent.mkdir(exist_ok=True)
    (containers.parent / "hostpid").rmdir()
    (containers.parent / "hostpid").write_text("")
    assert containers.ask("none")[:2] == ("ENOTSOCK", 0)


@pytest.mark.parametrize("which", ["socket", "directory"])
def test_what_belongs_to_another_user_is_refused(containers: Containers, which: str) -> None:
    """C6."""
    needs_root("a socket of another user")
    with stand_in(containers.socket, answer(4711)) as server:
        os.chown(containers.socket if which == "socket" else containers.broker, FOREIGN_UID, FOREIGN_UID)
        assert containers.ask()[:2] == ("EPERM", 0)
        assert server.connections == 0


def test_a_server_of_another_user_gets_no_byte(containers: Containers) -> None:
    """C7: the credentials of a listening socket are those of its listen()."""
    needs_root("a server of another user")
    made: list[StandIn] = []

    def behave(connection: socket.socket) -> None:
        made[0].take(connection)
        connection.sendall(answer(4711))

    class Foreign(StandIn):
        def __enter__(self) -> StandIn:
            started = super().__enter__()
            os.seteuid(FOREIGN_UID)
            try:
                self._listener.listen(self.backlog)
            finally:
                os.seteuid(0)
            return started

    made.append(Foreign(containers.socket, behave))
    with made[0]:
        assert containers.ask()[:2] == ("EPERM", 0)
        wait_until(lambda: made[0].received == [b""])
    assert made[0].connections == 1


def test_a_directory_that_another_pod_left_is_refused(containers: Containers) -> None:
    """C24: a neighbour's root can make directory and socket, but no read-only mount in this container."""
    planted = containers.parent / "hostpid"
    planted.mkdir(parents=True)
    with stand_in(planted / "broker.sock", answer(4711)) as server:
        assert containers.ask("none")[:2] == ("EPERM", 0)
        assert (server.connections, server.received) == (0, [])


def test_a_stale_socket_is_told_from_a_missing_one(containers: Containers) -> None:
    """C19, C20."""
    assert containers.ask("none")[:2] == ("ENOENT", 0)
    assert containers.ask()[:2] == ("ENOENT", 0)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(str(containers.socket))
    answers = [containers.ask() for _ in range(3)]
    assert {found[:2] for found in answers} == {("ECONNREFUSED", 0)}
    assert min(milliseconds for *_, milliseconds in answers) < LIMIT_MS  # nobody waited for it


def test_a_workload_of_another_user_or_with_a_read_only_root_is_answered(containers: Containers) -> None:
    """X9, X10."""
    needs_root("a workload of another user")
    other = ("setpriv", f"--reuid={FOREIGN_UID}", f"--regid={FOREIGN_UID}", "--clear-groups")
    read_only = ("sh", "-c", 'mount -o remount,ro / && ! touch /file 2>/dev/null && exec "$@"', "sh")
    with stand_in(containers.socket, answer(4711)):
        for program in (other, read_only, (*read_only, *other)):
            ((error, pid, _, _),) = containers.client(program=program)
            assert (error, pid) == (0, 4711), program


def test_a_workload_cannot_change_the_socket_through_its_mount(containers: Containers) -> None:
    """X12."""
    script = (
        "cd /tmp/vgpulock/hostpid; ! touch new && ! rm broker.sock && ! mv broker.sock old && ! chmod 777 ."
    )
    with stand_in(containers.socket, answer(4711)):
        command = [*containers.prefix(), "sh", "-c", f"{{ {script}; }} 2>/dev/null"]
        assert subprocess.run(command, check=False).returncode == 0
        assert containers.socket.is_socket()


# ---- what is made of an answer -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        pytest.param(answer(43210, magic=b"BPID"), ("EPROTO", 0), id="C8"),
        pytest.param(answer(43210, version=2), ("EPROTO", 0), id="C9"),
        pytest.param(answer(0, status=1), ("EPROTO", 0), id="C10"),
        pytest.param(answer(0), ("ERANGE", 0), id="C11"),
        pytest.param(answer(0x80000000), ("ERANGE", 0), id="C12"),
        pytest.param(answer(0x7FFFFFFF), ("", 0x7FFFFFFF), id="C13"),
        pytest.param(answer(43210)[:5], ("ECONNRESET", 0), id="C14"),
        pytest.param(b"", ("ECONNRESET", 0), id="closed"),
        pytest.param(answer(43210) + b"\0", ("EPROTO", 0), id="longer"),
    ],
)
def test_answers(containers: Containers, sent: bytes, expected: tuple[str, int]) -> None:
    with stand_in(containers.socket, sent):
        assert containers.ask()[:2] == expected


def test_an_answer_in_pieces_is_put_together(containers: Containers) -> None:
    with stand_in(containers.socket, answer(43210), pause=0.005, size=1):
        assert containers.ask()[:2] == ("", 43210)


@pytest.mark.parametrize("vector", VECTORS["answers"], ids=lambda vector: vector["name"])
def test_every_answer_of_the_shared_vectors_is_read_as_they_say(
    containers: Containers, vector: dict[str, str]
) -> None:
    """P22: the answers of any server, HAMi's among them."""
    done = subprocess.run(
        [str(containers.node.build.program("vgpu_broker")), "answer", vector["bytes"]],
        capture_output=True,
        text=True,
        check=True,
    )
    error, pid = (int(word) for word in done.stdout.split())
    expected = vector["result"]
    assert (errno.errorcode[error] if error else pid) == expected


def test_the_request_is_the_one_of_the_shared_vectors(containers: Containers) -> None:
    """P22: it is what HAMi's client sends."""
    program = [str(containers.node.build.program("vgpu_broker")), "request"]
    assert subprocess.run(program, capture_output=True, text=True, check=True).stdout.strip() == REQUEST.hex()
    assert VECTORS["client_request"] == REQUEST.hex()


# ---- time, signals, threads, forks ---------------------------------------------------------------


def test_a_silent_server_costs_the_limit(containers: Containers) -> None:
    """C15."""
    with silent(containers.socket) as server:
        error, pid, milliseconds = containers.ask(in_time=True)
        assert (error, pid) == ("ETIMEDOUT", 0)
        assert milliseconds >= LIMIT_MS
        wait_until(lambda: server.received == [REQUEST])


def test_a_drip_does_not_extend_the_limit(containers: Containers) -> None:
    """C16: the whole answer would take 720 ms."""
    with stand_in(containers.socket, answer(43210), pause=0.06, size=1):
        assert containers.ask(in_time=True)[:2] == ("ETIMEDOUT", 0)


@contextlib.contextmanager
def full_queue(path: Path) -> Iterator[tuple[socket.socket, int]]:
    """A listener whose accept queue is full; and how many connections fill it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        path.chmod(0o666)
        listener.listen(0)
        count = 0
        while True:
            filler = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            filler.setblocking(False)
            try:
                filler.connect(str(path))
            except BlockingIOError:
                break
            count += 1
        try:
            yield listener, count
        finally:
            path.unlink()


def test_a_full_accept_queue_is_tried_again(containers: Containers) -> None:
    """C17: drained 100 ms after the client has started; a busy machine, where it comes too late for the
    answer or for the full queue, gets more tries.
    """
    for _ in range(5):
        with full_queue(containers.socket) as (listener, queued):
            with started_client(containers) as client:
                time.sleep(0.1)
                listener.settimeout(2)
                for number in range(queued + 1):
                    with contextlib.suppress(OSError):
                        connection, _ = listener.accept()
                        with connection:
                            if number == queued and connection.recv(8) == REQUEST:
                                connection.sendall(answer(4711))
                output, _ = client.communicate(timeout=60)
            error, pid, nanoseconds, descriptors = (int(word) for word in output.split())
            assert descriptors == 0
        if error != 0:
            assert errno.errorcode[error] == "ETIMEDOUT"
        else:
            assert pid == 4711
            if nanoseconds > 20e6:
                return
    raise AssertionError("never answered after a wait and within the limit")


@contextlib.contextmanager
def started_client(containers: Containers) -> Iterator[subprocess.Popen[str]]:
    """The client in a container of its own, which has got as far as the client itself, or is done already."""
    program = [*containers.prefix(), str(containers.node.build.program("vgpu_broker"))]
    client = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: client.poll() is not None or running(client.pid, "vgpu_broker"))
        yield client
    finally:
        client.kill()
        client.communicate()


def running(parent: int, name: str) -> bool:
    """The process in the container has become that program."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            return Path(f"/proc/{child}/comm").read_text().strip() == name
    return False


def test_an_accept_queue_that_stays_full_costs_the_limit(containers: Containers) -> None:
    """C18; `ask` checks the descriptors."""
    with full_queue(containers.socket):
        error, pid, milliseconds = containers.ask(in_time=True)
        assert (error, pid) == ("ETIMEDOUT", 0)
        assert milliseconds >= LIMIT_MS


def test_signals_do_not_disturb(containers: Containers) -> None:
    """C21: a timer signal each millisecond, without and with an answer."""
    with stand_in(containers.socket, answer(4711), pause=0.02, size=1):
        (error, pid, _, descriptors), (signals,) = containers.client("signals")
    assert (error, pid, descriptors) == (0, 4711, 0)
    assert signals > 0
    with silent(containers.socket):
        (error, pid, nanoseconds, descriptors), (signals,) = containers.client("signals", in_time=True)
        assert (errno.errorcode[error], pid, descriptors) == ("ETIMEDOUT", 0, 0)
        assert nanoseconds >= LIMIT_MS * 1e6
        assert signals > 0


def test_a_cancelled_thread_closes_its_descriptor(containers: Containers) -> None:
    """C22: it ends when the question has been answered, or given up."""
    with silent(containers.socket):
        ((error, pid, was_cancelled, descriptors),) = containers.client("cancel", in_time=True)
    assert (errno.errorcode[error], pid, was_cancelled, descriptors) == ("ETIMEDOUT", 0, 1, 0)


def test_a_child_asks_for_itself_and_inherits_no_connection(containers: Containers) -> None:
    """C23: parent and child of one container get the PIDs that the kernel has for each."""
    with real_broker(containers):
        parent, child, (with_connection, descriptors) = containers.client("fork")
    assert parent[0] == child[0] == 0
    assert parent[1] != child[1]
    assert (with_connection, descriptors) == (0, 0)


def test_a_hundred_questions_leave_no_descriptor(containers: Containers) -> None:
    with real_broker(containers):
        lines = containers.client("ask", "100")
    assert {(line[0], line[3]) for line in lines} == {(0, 0)}
    assert len({line[1] for line in lines}) == 1


# ---- trust while it changes ----------------------------------------------------------------------


def test_a_socket_that_is_put_in_place_of_the_mount_gets_no_byte(containers: Containers) -> None:
    """The mount goes away while the client waits for a full queue; what it reaches then is not believed."""
    with full_queue(containers.socket), started_client(containers) as client:
        planted = containers.parent / "hostpid"
        subprocess.run([*containers.prefix("none"), "rmdir", "/tmp/vgpulock/hostpid"], check=True)
        planted.mkdir()
        with stand_in(planted / "broker.sock", answer(4711)) as server:
            output, _ = client.communicate(timeout=60)
            error, pid, _, descriptors = (int(word) for word in output.split())
            assert pid == 0
            assert errno.errorcode[error] in {"EPERM", "ENOENT", "ECONNREFUSED", "ETIMEDOUT"}
            assert descriptors == 0
            assert server.received in ([], [b""])
