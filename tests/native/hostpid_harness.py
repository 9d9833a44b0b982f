"""Parts of the host PID broker's tests: containers with namespaces of their own, and servers that misbehave.

A container has a PID namespace, a mount namespace and a `/tmp` of its own, in which the node's broker
directory is mounted as the plugin's answer says, or as a neighbour would like it. Making one takes root, or
user namespaces.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from vgpu_harness import NativeBuild, Node, Shell

from hami.protocol import region_layout as layout

PATIENT_BROKER = """
import functools, sys
from hami.node.hostpid.__main__ import main
from hami.node.hostpid.broker import start_broker
from hami.node.hostpid.serving import Server

patient = functools.partial(Server, deadline_s=60)
sys.exit(main(sys.argv[1:], functools.partial(start_broker, make_server=patient)))
"""
"""The broker with a deadline that a client on a busy machine does not miss."""

GATE = "LIBVGPU_HOSTPID_BROKER"
REQUEST = bytes.fromhex("4850494400010001")
FOREIGN_UID = 1000

#: Arguments: new root, lock parent and broker directory of the node, how the latter is offered, limits file
#: or "", directories below /tmp that stay visible (":"), program.
_CONTAINER = """
set -e
root=$1 parent=$2 broker=$3 how=$4 limits=$5 visible=$6
shift 6
mount -t tmpfs tmpfs "$root"
for entry in /*; do
    name=$root$entry
    if [ "$entry" = /tmp ]; then mkdir -m 1777 "$name"
    elif [ -L "$entry" ]; then cp -P "$entry" "$name"
    elif [ -d "$entry" ]; then mkdir "$name"; mount --rbind "$entry" "$name"
    fi
done
IFS=:
for directory in $visible; do mkdir -p "$root$directory"; mount --rbind "$directory" "$root$directory"; done
unset IFS
mount -t proc proc "$root/proc"
mkdir "$root/tmp/vgpulock"
mount --bind "$parent" "$root/tmp/vgpulock"
place=$root/tmp/vgpulock/hostpid
case $how in
ro|rw) mkdir -p "$place"; mount --bind "$broker" "$place"; mount -o "remount,bind,$how" "$place" ;;
link) mkdir "$root/elsewhere"; mount --bind "$broker" "$root/elsewhere"
      mount -o remount,bind,ro "$root/elsewhere"; ln -s /elsewhere "$place" ;;
esac
if [ -n "$limits" ]; then
    : > "$root/overrideEnv"; mount --bind "$limits" "$root/overrideEnv"
    mount -o remount,bind,ro "$root/overrideEnv"
fi
exec chroot "$root" "$@"
"""


@functools.cache
def unshare() -> tuple[str, ...]:
    """The command that makes a container's namespaces; without one the test fails and says what to do."""
    for user in ((), ("--user", "--map-root-user")):
        command = ("unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        probe = [*command, "sh", "-c", "mount -t tmpfs tmpfs /mnt && mount -t proc proc /proc"]
        if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
            return command
    pytest.fail(
        "these tests make containers (mount and PID namespaces) and may not here. Run them as root, or with "
        "user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces>0), or in a "
        "container started with: docker run --privileged",
        pytrace=False,
    )


def needs_root(what: str) -> None:
    """What is shown takes a second UID."""
    if os.geteuid() != 0:
        pytest.fail(
            f"{what}: run this test as root (sudo -E pytest ..., or docker run --privileged)", pytrace=False
        )


@dataclass
class Containers:
    """Containers of a node with a simulated driver whose host side knows every PID."""

    node: Node
    roots: int = 0

    @property
    def host_root(self) -> Path:
        """The `--host-root` of the node's broker."""
        return self.node.directory / "host"

    @property
    def broker(self) -> Path:
        """The node's broker directory."""
        return self.host_root / "var/run/hami/hostpid"

    @property
    def socket(self) -> Path:
        return self.broker / "broker.sock"

    @property
    def parent(self) -> Path:
        """The node's `/tmp/vgpulock`, which every container shares."""
        return self.node.directory / "vgpulock"

    def prefix(self, how: str = "ro", limits: str = "", program: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The command line before a program that runs in a container of its own."""
        self.broker.mkdir(parents=True, exist_ok=True)
        self.parent.mkdir(exist_ok=True)
        self.parent.chmod(0o1777)
        root = self.node.directory / f"root{self.roots}"
        self.roots += 1
        root.mkdir()
        visible = [
            self.node.directory,
            self.node.build.directory,
            Path(__file__).parents[2],
            Path(sys.prefix),
        ]
        places = ":".join(str(path) for path in visible if path.is_relative_to("/tmp"))
        arguments = (str(root), str(self.parent), str(self.broker), how, limits, places)
        return (*unshare(), "sh", "-c", _CONTAINER, "sh", *arguments, *program)

    def shell(
        self, name: str = "a", how: str = "ro", limits: str = "", gate: str | None = "1", **env: str
    ) -> Shell:
        """A CUDA program in a container of its own; nothing is initialised yet."""
        extra = {"LD_PRELOAD": ""} | ({} if gate is None else {GATE: gate})
        preload = env.pop("LD_PRELOAD", self.node.environment(name)["LD_PRELOAD"])
        prefix = self.prefix(how, limits, ("env", f"LD_PRELOAD={self.patient}:{preload}"))
        return self.node.shell(name, prefix=prefix, extra=extra, **env)

    @property
    def patient(self) -> Path:
        """With this preloaded a client waits for an answer as long as it takes, however busy the machine."""
        return self.node.build.program("libvgpu_patient.so")

    def client(
        self, *arguments: str, how: str = "ro", program: tuple[str, ...] = (), in_time: bool = False
    ) -> list[list[int]]:
        """The client alone (`vgpu_broker`) in a container; the numbers of each line of its output.

        `in_time`: it waits no longer than it does in use.
        """
        preload = [] if in_time else ["env", f"LD_PRELOAD={self.patient}"]
        client = str(self.node.build.program("vgpu_broker"))
        command = [*self.prefix(how), *program, *preload, client, *arguments]
        environment = {
            "PATH": os.environ["PATH"],
            "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
            "TSAN_OPTIONS": "report_thread_leaks=0",
        }
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=100, check=False, env=environment
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]

    def ask(self, how: str = "ro", *, in_time: bool = False) -> tuple[str, int, float]:
        """One question: the client's error as a name or "", the PID, milliseconds. No descriptor stays."""
        ((error, pid, nanoseconds, descriptors),) = self.client(how=how, in_time=in_time)
        assert descriptors == 0
        assert (error == 0) == (pid != 0)
        return errno.errorcode[error] if error else "", pid, nanoseconds / 1e6


def inside(shell: Shell) -> int:
    """The PID, in our namespace, of the program in the shell's container."""
    parent = shell.process.pid
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(child)


def kernel_pids(pid: int) -> list[int]:
    """The numbers of a process in our namespace and in those below it, as the kernel shows them."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return [int(number) for number in line.split()[1:]]
    raise AssertionError(f"no NSpid of {pid}")


@dataclass(frozen=True)
class Slot:
    """What a process has told the region about its host PID."""

    pid: int
    host_pid: int
    path: int
    error: int
    used: int


def slots(node: Node, container: str = "a") -> list[Slot]:
    """The live slots of a container's region."""
    data, found = node.region(container).read_bytes(), []
    for k in range(layout.V1.proc_num.read(data)):
        base, extra = layout.V1.procs.base(k), layout.EXTENSION_OFFSET + layout.Extension.slots.base(k)
        if layout.V1Slot.status.read(data, base) != layout.SLOT_FREE:
            found.append(
                Slot(
                    layout.V1Slot.pid.read(data, base),
                    layout.V1Slot.hostpid.read(data, base),
                    layout.ExtensionSlot.host_pid_path.read(data, extra),
                    layout.ExtensionSlot.broker_error.read(data, extra),
                    layout.V1Slot.used_context.read(data, base, 0),
                )
            )
    return found


def only_slot(node: Node, container: str = "a") -> Slot:
    (slot,) = slots(node, container)
    return slot


def events(node: Node, container: str = "a") -> list[tuple[int, int]]:
    """Type and value of each event of a region."""
    data = node.region(container).read_bytes()
    count = layout.Extension.next_event.read(data, layout.EXTENSION_OFFSET)
    bases = [layout.EXTENSION_OFFSET + layout.Extension.events.base(i) for i in range(count)]
    return [
        (layout.ExtensionEvent.type.read(data, b), layout.ExtensionEvent.value.read(data, b)) for b in bases
    ]


def counters(node: Node, container: str = "a") -> tuple[int, int]:
    """Processes of a region that the broker answered, and that fell back."""
    data = node.region(container).read_bytes()
    base = layout.EXTENSION_OFFSET
    return layout.Extension.broker_answers.read(data, base), layout.Extension.broker_fallbacks.read(
        data, base
    )


Behaviour = Callable[[socket.socket], None]


@dataclass
class StandIn:
    """A server in this process that does with each connection what a test wants."""

    path: Path
    behaviour: Behaviour
    backlog: int = 64
    connections: int = 0
    received: list[bytes] = field(default_factory=list)
    _held: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> StandIn:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self.path.chmod(0o666)
        self._listener.listen(self.backlog)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._held.append(connection)
            connection.settimeout(60)
            with contextlib.suppress(OSError):
                self.behaviour(connection)

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for connection in self._held:  # it may wait for a request that does not come
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=60)
        self._listener.close()
        for connection in self._held:
            connection.close()
        self.path.unlink(missing_ok=True)

    def take(self, connection: socket.socket) -> bytes:
        """What the client sends until it has sent a request or closes."""
        data = b""
        while len(data) < len(REQUEST):
            part = connection.recv(64)
            if not part:
                break
            data += part
        self.received.append(data)
        return data


def answering(
    server: Callable[[], StandIn], answer: bytes, *, pause: float = 0.0, size: int = 0
) -> Behaviour:
    """Take the request, then send `answer`, `size` bytes at a time (0: all) with pauses, and close."""

    def behave(connection: socket.socket) -> None:
        server().take(connection)
        step = size or max(1, len(answer))
        for at in range(0, len(answer), step):
            connection.sendall(answer[at : at + step])
            if pause:
                time.sleep(pause)
        connection.shutdown(socket.SHUT_RDWR)

    return behave


@contextlib.contextmanager
def stand_in(path: Path, answer: bytes, *, pause: float = 0.0, size: int = 0) -> Iterator[StandIn]:
    """A server that answers each request with these bytes."""
    made: list[StandIn] = []
    server = StandIn(path, answering(lambda: made[0], answer, pause=pause, size=size))
    made.append(server)
    with server:
        yield server


@contextlib.contextmanager
def real_broker(containers: Containers) -> Iterator[subprocess.Popen[bytes]]:
    """The broker of the product, as a process of its own below the containers' host root; only that it
    gives a client more time.
    """
    containers.host_root.mkdir(exist_ok=True)
    with (containers.node.directory / f"broker-{time.monotonic_ns()}.log").open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT_BROKER, "--host-root", str(containers.host_root)],
            stdout=stream,
            stderr=stream,
        )
    try:
        wait_for_socket(containers.socket, process)
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, SIGKILL if that is not enough; it is waited for in any case."""
    process.terminate()
    try:
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()


def wait_for_socket(path: Path, process: subprocess.Popen[bytes]) -> None:
    """Until something listens there."""
    deadline = time.monotonic() + 60
    while True:
        assert process.poll() is None, "the server has ended"
        assert time.monotonic() < deadline, f"nobody listens on {path}"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(str(path))
            return
        time.sleep(0.02)


def containers_on(node: Node) -> Containers:
    """Containers of a node whose driver names host PIDs and whose contexts take 300 MiB."""
    node.settings["FAKEGPU_CONTEXT_MIB"] = "300"
    return Containers(node)


@contextlib.contextmanager
def host_side(build: NativeBuild, node: Node) -> Iterator[None]:
    """The simulated driver's host side, which knows every client's host PID."""
    process = subprocess.Popen(
        [str(build.driver / "fakegpud"), "serve"],
        env={**node.environment(), "LD_PRELOAD": "", **node.settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not any(path.is_socket() for path in node.state.iterdir()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield
    finally:
        stop(process)
