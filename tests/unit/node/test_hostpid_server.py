"""What the broker answers, to whom, and until when (host-pid-broker.md §15.1)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostpid_world import (
    INVALID,
    LIMIT_S,
    ME,
    PATIENT,
    Clock,
    Running,
    accepts,
    clients,
    end,
    everything,
    good,
    is_open,
    process,
    running,
    socket_path,
    wait_until,
)

from hami.node.hostpid.codec import REQUEST
from hami.node.hostpid.counters import Counters, Result
from hami.node.hostpid.endpoint import open_endpoint
from hami.node.hostpid.errors import BrokerError
from hami.node.hostpid.serving import MAX_ACTIVE, Server, accept_from, longer_pause

VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).resolve().parents[2] / "vectors/hostpid.json").read_text("utf-8")
)

IDLE_DESCRIPTORS = 9
"""Standard streams, directory, lock, listener, epoll, and two of the pipe that wakes the loop."""


@pytest.fixture
def broker(folder: Path) -> Iterator[Running]:
    with running(folder / "hostpid") as found:
        yield found


def results(broker: Running) -> dict[str, int]:
    """Transactions by result, as soon as none is under way."""
    wait_until(lambda: broker.counters.totals().active == 0)
    return {result.name: count for result, count in broker.counters.totals().results.items() if count}


def test_p1_a_request_is_answered_with_the_caller_s_pid(broker: Running) -> None:
    assert broker.ask(bytes.fromhex("4850494400010001")) == good()
    assert results(broker) == {"OK": 1}


def test_p2_a_request_byte_by_byte(broker: Running) -> None:
    with broker.connect() as client:
        for position in range(len(REQUEST)):
            assert is_open(client)
            client.sendall(REQUEST[position : position + 1])
        assert everything(client) == good()


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param("48504945 0001 0001", id="P3"),
        pytest.param("48504944 0002 0001", id="P4"),
        pytest.param("48504944 0000 0001", id="P5"),
        pytest.param("48504944 0001 0000", id="P6"),
        pytest.param("48504944 0001 0002", id="P6b"),
        pytest.param("48504944 0100 0001", id="P7"),
    ],
)
def test_an_invalid_request_gets_the_answer_that_says_so(broker: Running, request_bytes: str) -> None:
    assert broker.ask(bytes.fromhex(request_bytes)) == INVALID
    assert results(broker) == {"INVALID": 1}


@pytest.mark.parametrize("sent", [b"", REQUEST[:4], REQUEST[:7]])
def test_p8_less_than_a_request_is_closed_without_an_answer(broker: Running, sent: bytes) -> None:
    with broker.connect(sent) as client:
        client.shutdown(socket.SHUT_WR)
        assert everything(client) == b""
    assert results(broker) == {"DROPPED": 1}


@pytest.mark.parametrize("sent", [pytest.param(REQUEST[:4], id="P9"), pytest.param(b"", id="P10")])
def test_silence_is_closed_after_500_ms_and_others_are_served_meanwhile(folder: Path, sent: bytes) -> None:
    clock = Clock()
    with running(folder / "hostpid", clock=clock) as broker, broker.connect(sent) as silent:
        wait_until(lambda: broker.counters.totals().active == 1)
        clock.now += 0.499
        broker.poke()
        assert is_open(silent)
        clock.now += 0.001
        broker.poke()
        assert everything(silent) == b""
        assert results(broker) == {"OK": 2, "DROPPED": 1}


def test_p11_what_follows_the_request_is_ignored(broker: Running) -> None:
    assert broker.ask(REQUEST * 2) == good()
    assert results(broker) == {"OK": 1}


def test_p12_a_forked_child_gets_its_own_pid(broker: Running) -> None:
    assert clients(broker.path, 3) == (3, 0, 0)


def test_p13_a_process_of_another_pid_namespace_gets_its_pid_on_the_host(broker: Running) -> None:
    script = (
        "import os, socket, sys; c = socket.socket(socket.AF_UNIX); c.connect(sys.argv[1]);"
        f"c.sendall({REQUEST!r}); print(os.getpid(), c.recv(12, socket.MSG_WAITALL)[8:].hex(), flush=True);"
        "sys.stdin.read()"
    )
    with contextlib.ExitStack() as stack:
        for user in ((), ("--user", "--map-root-user")):
            command = ["unshare", *user, "--pid", "--fork", "--kill-child", sys.executable, "-c", script]
            started = stack.enter_context(
                subprocess.Popen(
                    [*command, broker.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            )
            assert started.stdout is not None
            line = started.stdout.readline().split()
            if line:
                break
        else:
            pytest.fail("this test makes a PID namespace: run it as root or with user namespaces")
        (child,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text("utf-8").split()
        assert line[0] == "1", "its PID in its own namespace"
        assert int(line[1], 16) == int(child)
        started.communicate(timeout=LIMIT_S)


def test_p14_a_client_that_never_reads_frees_its_place(folder: Path) -> None:
    with running(folder / "hostpid", max_active=1) as broker:
        for _ in range(5):
            broker.connect(REQUEST).close()
            wait_until(lambda: broker.counters.totals().active == 0)
        with broker.connect(REQUEST):
            wait_until(lambda: sum(broker.counters.totals().results.values()) == 6)
            broker.poke()


def test_p15_300_clients_at_once_are_all_answered(folder: Path) -> None:
    with process(folder):
        assert clients(socket_path(folder), 300) == (300, 0, 0)


def test_p16_connections_over_the_limit_are_closed_without_bytes(folder: Path) -> None:
    clock = Clock()
    with running(folder / "hostpid", clock=clock, max_active=2) as broker:
        silent = [broker.connect(), broker.connect()]
        wait_until(lambda: broker.counters.totals().active == 2)
        assert broker.ask() == b""
        assert broker.counters.totals().results[Result.SATURATED] == 1
        clock.now += 0.5
        wait_until(lambda: broker.ask() == good())
        wait_until(lambda: broker.counters.totals().active == 0)
        assert broker.ask() == good()
        for client in silent:
            assert everything(client) == b""
            client.close()


def descriptors(server: subprocess.Popen[bytes]) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def memory(server: subprocess.Popen[bytes]) -> int:
    """Resident bytes."""
    pages = int(Path(f"/proc/{server.pid}/statm").read_text("utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_p17_descriptors_threads_and_memory_do_not_grow_with_requests(folder: Path) -> None:
    with process(folder) as server:
        wait_until(lambda: descriptors(server) == IDLE_DESCRIPTORS)
        ask_many(folder, 1000)
        before = memory(server)
        ask_many(folder, 10_000)
        wait_until(lambda: descriptors(server) == IDLE_DESCRIPTORS)
        assert memory(server) <= before + (256 << 10)
        assert len(list(Path(f"/proc/{server.pid}/task").iterdir())) == 1


def test_p18_a_drip_of_bytes_extends_nothing(folder: Path) -> None:
    clock = Clock()
    with running(folder / "hostpid", clock=clock) as broker, broker.connect() as client:
        wait_until(lambda: broker.counters.totals().active == 1)
        for position in range(3):
            clock.now += 0.125
            client.sendall(REQUEST[position : position + 1])
            broker.poke()
            assert is_open(client)
        clock.now += 0.125
        client.sendall(REQUEST[3:4])
        broker.poke()
        assert everything(client) == b""


def test_p19_unreadable_credentials_are_closed_without_bytes(folder: Path) -> None:
    def fail(_: socket.SocketType) -> int:
        raise OSError(errno.ENOTCONN, "no credentials")

    with running(folder / "hostpid", read_pid=fail) as broker:
        assert broker.ask() == b""
        assert broker.ask(b"HPIE\0\1\0\1") == INVALID, "credentials are not read for it"
        assert results(broker) == {"DROPPED": 1, "INVALID": 1}


class FullEpoll:
    """An epoll to which nothing can be added: containers share root's number of watches."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def register(self, descriptor: int, events: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_connection_that_cannot_be_watched_is_closed_and_others_are_served(folder: Path) -> None:
    with running(folder, max_active=2) as broker:
        broker.poke()
        real = broker.server._epoll
        broker.server._epoll = FullEpoll(real)  # type: ignore[assignment]
        for _ in range(3):
            with broker.connect() as silent:
                assert everything(silent) == b""
        broker.server._epoll = real
        broker.poke()
        wait_until(lambda: broker.counters.totals().active == 0)  # no place is lost
        assert broker.counters.totals().results[Result.DROPPED] == 3


@pytest.mark.parametrize("pid", [0, -1])
def test_p20_an_invisible_caller_is_closed_without_bytes(folder: Path, pid: int) -> None:
    with running(folder / "hostpid", read_pid=lambda _: pid) as broker:
        assert broker.ask() == b""
        assert results(broker) == {"DROPPED": 1}


def test_credentials_are_read_after_the_request(folder: Path) -> None:
    read: list[int] = []

    def note(connection: socket.SocketType) -> int:
        read.append(1)
        return 7

    with running(folder / "hostpid", read_pid=note) as broker, broker.connect(REQUEST[:7]) as client:
        wait_until(lambda: broker.counters.totals().active == 1)
        assert read == []
        client.sendall(REQUEST[7:])
        assert everything(client) == good(7)
        assert read == [1]


def test_p21_nothing_below_proc_is_opened(folder: Path) -> None:
    """Traced from the first step to the end of the shutdown."""
    strace = shutil.which("strace")
    assert strace, "this test needs strace"
    trace = folder / "trace"
    script = PATIENT.replace("sys.exit(", "import os\nos.access('/from-here-on', os.R_OK)\nsys.exit(")
    command = [strace, "-f", "-e", "trace=%file", "-o", str(trace), sys.executable, "-c", script]
    tracer = subprocess.Popen([*command, "--host-root", str(folder)])
    try:
        wait_until(lambda: tracer.poll() is not None or accepts(socket_path(folder)))
        ask_many(folder, 100)
    finally:
        for child in Path(f"/proc/{tracer.pid}/task/{tracer.pid}/children").read_text("utf-8").split():
            os.kill(int(child), signal.SIGTERM)
        try:
            tracer.wait(LIMIT_S)
        finally:
            end(tracer)
    lines = trace.read_text("utf-8", "replace").split("/from-here-on")[1].splitlines()
    assert any("broker.lock" in line for line in lines), "the trace shows what the broker opens"
    assert [line for line in lines if '"/proc' in line] == []


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda vector: vector["name"])
def test_p22_byte_vectors_of_requests(broker: Running, vector: dict[str, Any]) -> None:
    with broker.connect(bytes.fromhex(vector["bytes"])) as client:
        client.shutdown(socket.SHUT_WR)
        wanted = (vector["answer"] or "").replace("pid", f"{os.getpid():08x}")
        assert everything(client).hex() == wanted


def test_p25_2000_clients_are_answered_right_or_turned_away_and_leave_nothing(folder: Path) -> None:
    with process(folder) as server:
        used = 0
        for _ in range(2):
            right, _, wrong = clients(socket_path(folder), 2000)
            assert right > 0
            assert wrong == 0
            wait_until(lambda: descriptors(server) == IDLE_DESCRIPTORS)
            assert not used or memory(server) <= used + (1 << 20)
            used = memory(server)


def test_held_connections_are_bounded_and_the_next_round_is_served(folder: Path) -> None:
    """Half requests: 64 wait, the others are turned away, and all places come back."""
    assert MAX_ACTIVE == 512
    clock = Clock()
    with running(folder / "hostpid", clock=clock, max_active=64) as broker, contextlib.ExitStack() as stack:
        held = [stack.enter_context(broker.connect()) for _ in range(100)]
        wait_until(lambda: broker.counters.totals().results[Result.SATURATED] == 36)
        assert broker.counters.totals().active == 64
        assert sum(is_open(client) for client in held) == 64
        clock.now += 0.5
        wait_until(lambda: broker.ask() == good())
        wait_until(lambda: broker.counters.totals().active == 0)


def test_one_user_s_silent_connections_do_not_keep_another_user_out(folder: Path) -> None:
    users = [1]
    with (
        running(folder / "hostpid", clock=Clock(), max_active=2, read_uid=lambda _: users[-1]) as broker,
        broker.connect() as oldest,
    ):
        wait_until(lambda: broker.counters.totals().active == 1)
        with broker.connect() as other:
            wait_until(lambda: broker.counters.totals().active == 2)
            users.append(2)
            assert broker.ask() == good()
            assert everything(oldest) == b"", "the oldest makes room"
            assert is_open(other)
            totals = broker.counters.totals()
            assert (totals.results[Result.DROPPED], totals.results[Result.SATURATED]) == (1, 0)


def test_places_are_shared_evenly_among_the_users_who_want_all(folder: Path) -> None:
    users = [1]
    with (
        running(folder / "hostpid", clock=Clock(), max_active=8, read_uid=lambda _: users[-1]) as broker,
        contextlib.ExitStack() as stack,
    ):
        first = [stack.enter_context(broker.connect()) for _ in range(8)]
        wait_until(lambda: broker.counters.totals().active == 8)
        users.append(2)
        second = [stack.enter_context(broker.connect()) for _ in range(8)]
        wait_until(lambda: broker.counters.totals().results[Result.SATURATED] == 4)
        assert broker.counters.totals().active == 8
        assert [is_open(client) for client in first] == [False] * 4 + [True] * 4
        assert [is_open(client) for client in second] == [True] * 4 + [False] * 4


def test_a_flood_is_turned_away_in_batches_with_a_rest_between_them(folder: Path) -> None:
    """After 64 in a row that found no place nothing is accepted for 5 ms; then the next ones are."""
    clock, accepted = Clock(), 0

    def accept(listener: socket.socket) -> socket.SocketType:
        nonlocal accepted
        if accepted >= 128:
            raise BlockingIOError
        connection = accept_from(listener) if accepted == 0 else socket.socket(socket.AF_UNIX)
        accepted += 1
        return connection

    with running(folder / "hostpid", clock=clock, max_active=0, accept=accept) as broker, broker.connect():
        wait_until(lambda: broker.server._resume_at is not None)
        assert broker.counters.totals().results[Result.SATURATED] == 64
        clock.now += 0.005
        with broker.connect():
            wait_until(lambda: broker.counters.totals().results[Result.SATURATED] == 128)
        assert broker.counters.totals().accept_failures == 0


def test_a_full_send_buffer_is_waited_for_until_the_deadline(folder: Path) -> None:
    """The answer is written in pieces to whoever reads slowly; who never reads is dropped in the end."""
    clock = Clock()

    sent: list[bytes] = []
    ready = threading.Event()

    class Connection:
        def __init__(self, real: socket.socket) -> None:
            self._real = real

        def send(self, data: bytes, flags: int) -> int:
            if len(sent) == 1 and not ready.is_set():
                raise BlockingIOError
            piece = data[:5]
            sent.append(piece)
            return self._real.send(piece, flags)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    broker = Running(folder / "hostpid", clock=clock)
    broker.server._accept = lambda listener: Connection(listener.accept()[0])  # type: ignore[assignment,return-value]
    try:
        with broker.connect(REQUEST) as client:
            wait_until(lambda: len(sent) == 1)
            assert client.recv(64) == good()[:5]
            ready.set()
            assert everything(client) == good()[5:]
    finally:
        broker.server.stop()
        broker.join()
        broker.endpoint.close()


def accept_failing(codes: list[int]) -> Callable[[socket.socket], socket.SocketType]:
    """An ``accept`` that fails with each of the codes first."""

    def accept(listener: socket.socket) -> socket.SocketType:
        if codes:
            code = codes.pop(0)
            raise OSError(code, os.strerror(code))
        return accept_from(listener)

    return accept


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_s22_accept_is_retried_after_5_10_and_20_ms(
    folder: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    endpoint = open_endpoint(str(folder / "hostpid"), ME, 0.0)
    counters, codes = Counters(), [code] * 3
    server = Server(endpoint.listener, counters, accept=accept_failing(codes))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(LIMIT_S)
            client.connect(endpoint.path)
            client.sendall(REQUEST)
            assert everything(client) == good()
        assert counters.totals().accept_failures == 3
        waits = [getattr(record, "retry_s", None) for record in caplog.records]
        assert waits == [0.005, 0.01, 0.02]
        codes.append(code)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(endpoint.path)
            client.sendall(REQUEST)
            assert everything(client) == good()
        assert getattr(caplog.records[-1], "retry_s", None) == 0.005, "a success sets it back"
    finally:
        server.stop()
        thread.join(LIMIT_S)
        endpoint.close()


def test_the_wait_between_accepts_ends_at_one_second() -> None:
    waits = [0.0]
    for _ in range(12):
        waits.append(longer_pause(waits[-1]))
    assert waits[1:4] == [0.005, 0.01, 0.02]
    assert waits[-4:] == [1.0] * 4


def test_a_signal_in_the_moment_before_the_loop_sleeps_ends_it_at_once(folder: Path) -> None:
    """Signals after random microseconds: some fall between the last look and the sleep."""
    script = """
import random, signal, socket, sys, time, types
from hami.node.hostpid.__main__ import _run
from hami.node.hostpid.broker import Broker
from hami.node.hostpid.counters import Counters, shared_memory
from hami.node.hostpid.serving import Server

counters = Counters(shared_memory())

def arm(state):
    signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 60e-6), 30)

for number in range(2000):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{sys.argv[1]}/{number}")
        listener.listen()
        listener.setblocking(False)
        endpoint = types.SimpleNamespace(path="", close=lambda: None)
        began = time.monotonic()
        _run(Broker(endpoint, Server(listener, counters)), arm, is_child=False)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if time.monotonic() - began > 25:
            sys.exit("the signal was met only after another one")
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_used_up_descriptors_are_waited_for_without_a_spin(folder: Path) -> None:
    """A real limit of descriptors in a real process."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))\nsys.exit("
    with (
        process(folder, script=PATIENT.replace("sys.exit(", limit)) as server,
        contextlib.ExitStack() as stack,
    ):
        assert server.stderr is not None
        for _ in range(40):
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.connect(socket_path(folder))
        waits = [0.0]
        for raw in server.stderr:
            line = json.loads(raw)
            if line["event"] == "hostpid.accept_failed":
                # Each failure doubles the wait, unless a place became free in between.
                assert line["retry_s"] in (0.005, longer_pause(waits[-1]))
                waits.append(line["retry_s"])
                if line["retry_s"] >= 0.04:
                    break
        stack.close()
        wait_until(lambda: ask_one(folder) == good())


def test_s23_a_broken_listener_ends_the_loop_with_an_error(folder: Path) -> None:
    codes = [errno.EBADF]
    with running(folder / "hostpid") as broker:
        broker.server._accept = accept_failing(codes)
        with broker.connect():
            broker.join()
        assert isinstance(broker.error, BrokerError)
        assert "host PID broker" in str(broker.error)


def test_s20_a_shutdown_waits_for_the_transactions_under_way_until_their_deadline(folder: Path) -> None:
    clock = Clock()
    with running(folder / "hostpid", clock=clock) as broker:
        waiting = [broker.connect(REQUEST[:3]) for _ in range(5)]
        wait_until(lambda: broker.counters.totals().active == 5)
        broker.server.stop()
        wait_until(lambda: not accepts(broker.path))
        assert broker.is_running
        waiting[0].sendall(REQUEST[3:])
        assert everything(waiting[0]) == good(), "one that is under way is still answered"
        clock.now += 0.5
        broker.join()
        for client in waiting[1:]:
            assert everything(client) == b""
            client.close()
        waiting[0].close()


def ask_one(root: Path) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(LIMIT_S)
        client.connect(socket_path(root))
        with contextlib.suppress(BrokenPipeError):
            client.sendall(REQUEST)
        return everything(client)


def ask_many(root: Path, count: int) -> None:
    for _ in range(count):
        assert ask_one(root) == good()
