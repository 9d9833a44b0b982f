"""A broker for tests: in a thread of this process or as a process, and clients that misbehave."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hami.node.hostpid.child import ask
from hami.node.hostpid.codec import ANSWER_BYTES, REQUEST, BrokerProtocolError
from hami.node.hostpid.counters import Counters
from hami.node.hostpid.endpoint import Endpoint, open_endpoint
from hami.node.hostpid.errors import BrokerError
from hami.node.hostpid.serving import Server

ME = os.geteuid()
LIMIT_S = 30.0
INVALID = bytes.fromhex("485049440001000100000000")


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Running:
    """A broker below a directory, in a thread. Without a clock of the test's own it is patient: on a busy
    machine half a second may pass between two steps of a client."""

    def __init__(self, directory: Path, **options: Any) -> None:
        if "clock" not in options:
            options.setdefault("deadline_s", LIMIT_S)
        self.endpoint: Endpoint = open_endpoint(str(directory), ME, 0.0)
        self.counters = Counters()
        self.server = Server(self.endpoint.listener, self.counters, **options)
        self.path = self.endpoint.path
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:  # the test looks at it
            self.error = error

    def connect(self, data: bytes = b"") -> socket.socket:
        """A client that has sent ``data``."""
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.settimeout(LIMIT_S)
        client.connect(self.path)
        with contextlib.suppress(BrokenPipeError):  # it may have been turned away by now
            client.sendall(data)
        return client

    def ask(self, data: bytes = REQUEST) -> bytes:
        """What a client gets that sends ``data``."""
        with self.connect(data) as client:
            return everything(client)

    def poke(self) -> None:
        """Let the loop look at its clock: one good transaction from start to end."""
        assert self.ask() == good()

    def join(self) -> None:
        """Wait for the end of the loop."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the loop does not end"

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()


@contextlib.contextmanager
def running(directory: Path, **options: Any) -> Iterator[Running]:
    """A broker that is stopped in the end."""
    broker = Running(directory, **options)
    try:
        yield broker
    finally:
        if broker.is_running:
            broker.server.stop()
            broker.join()
        broker.endpoint.close()
        assert broker.error is None or isinstance(broker.error, BrokerError), repr(broker.error)


def everything(client: socket.socket) -> bytes:
    """All bytes until the peer closes; a reset is a way of closing."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(64):
            data += piece
    return data


def good(pid: int | None = None) -> bytes:
    """The right answer to this process."""
    return struct.pack("!4sHHI", b"HPID", 1, 0, pid or os.getpid())


def is_open(client: socket.socket) -> bool:
    """Whether the peer has neither sent anything nor closed."""
    poll = select.poll()
    poll.register(client, select.POLLIN)
    return not poll.poll(0)


def wait_until(condition: Any) -> None:
    """Until the condition holds."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.005)


PATIENT = f"""
import functools, sys
from hami.node.hostpid.__main__ import main
from hami.node.hostpid.broker import start_broker
from hami.node.hostpid.serving import Server

patient = functools.partial(Server, deadline_s={LIMIT_S})
sys.exit(main(sys.argv[1:], functools.partial(start_broker, make_server=patient)))
"""
"""The broker with a deadline that a client on a busy machine does not miss."""


@contextlib.contextmanager
def process(root: Path, *flags: str, script: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A broker process below the host root that serves, patiently; ``script`` replaces the program."""
    program = ["-c", script or PATIENT]
    command = [sys.executable, *program, "--host-root", str(root), *flags]
    started = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: started.poll() is not None or accepts(socket_path(root)))
        assert started.poll() is None, started.stderr and started.stderr.read()
        yield started
    finally:
        end(started)


def end(started: subprocess.Popen[Any]) -> None:
    """SIGTERM, SIGKILL if that is not enough; its pipes are closed and it is waited for in any case."""
    started.terminate()
    try:
        started.communicate(timeout=LIMIT_S)
    finally:
        started.kill()
        started.communicate()


def asked(path: str) -> int:
    """Our PID as the broker at ``path`` sees it; asked again when an answer is too late."""
    until = time.monotonic() + LIMIT_S
    while True:
        try:
            return ask(path, LIMIT_S)
        except (OSError, BrokerProtocolError):
            if time.monotonic() > until:
                raise


def socket_path(root: Path) -> str:
    return f"{root}/var/run/hami/hostpid/broker.sock"


def socket_file(root: Path) -> Path:
    return Path(socket_path(root))


def accepts(path: str) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def server_pid(path: str) -> int:
    """PID of the process that listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(path)
        return int(struct.unpack("iII", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


CLIENTS = f"""
import os, socket, struct, sys
path, count = sys.argv[1], int(sys.argv[2])
start, go = os.pipe()
children = []
for _ in range(count):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.read(start, 1)
        client = socket.socket(socket.AF_UNIX)
        client.settimeout({LIMIT_S})
        try:
            client.connect(path)
            client.sendall({REQUEST!r})
            answer = client.recv({ANSWER_BYTES}, socket.MSG_WAITALL)
        except (ConnectionResetError, BrokenPipeError):
            answer = b""
        right = answer == struct.pack("!4sHHI", b"HPID", 1, 0, os.getpid())
        os._exit(0 if right else 1 if not answer else 2)
    children.append(pid)
os.close(go)
states = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
print(states.count(0), states.count(1), len(states) - states.count(0) - states.count(1))
"""


def clients(path: str, count: int) -> tuple[int, int, int]:
    """Processes that ask at once: how many were answered right, were closed without bytes, or neither."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", CLIENTS, path, str(count)], capture_output=True, text=True, check=True
    )
    right, closed, wrong = map(int, done.stdout.split())
    return right, closed, wrong
