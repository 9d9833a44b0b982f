"""The broker in the life of the device plugin (host-pid-broker.md §6.6, §7, §15.2-15.4)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hostpid_world import LIMIT_S, everything, good, server_pid, socket_file, socket_path
from node_cards import U1
from plugin_world import Node

from hami.cli import device_plugin
from hami.kube import logs
from hami.node.api import deviceplugin_v1beta1_pb2 as pb
from hami.node.errors import NodeError
from hami.node.hostpid.child import BrokerChild
from hami.node.hostpid.codec import REQUEST
from hami.node.hostpid.errors import BrokerError
from hami.node.metrics_server import listen
from hami.node.paths import HostPaths
from hami.node.plugin import process as plugin_process
from hami.node.plugin.metrics import PluginMetrics

ONE = [(U1, "NVIDIA A", 1 << 30)]
GATE = "LIBVGPU_HOSTPID_BROKER"
Make = Callable[..., Any]
Until = Callable[..., Awaitable[None]]
Build = Callable[..., Node]

pytestmark = pytest.mark.usefixtures("patient_child")


@pytest.fixture
def build(cluster: Any, make_nvml: Make, folder: Path) -> Build:
    """Makes a node with a broker: the real one, or one of the given kind."""

    def make(broker: Any = None) -> Node:
        return Node(cluster, make_nvml(ONE), folder, broker or BrokerChild(HostPaths(str(folder))))

    return make


class Scripted:
    """A broker that does as it is told."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fail_start: BrokerError | None = None
        self.fail_check: BrokerError | None = None
        self.fail_stop: BrokerError | None = None
        self.start_blocks = False
        self.death: asyncio.Future[BrokerError] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        self.calls.append("start")
        if self.start_blocks:
            await asyncio.get_running_loop().create_future()
        if self.fail_start:
            raise self.fail_start

    async def ended(self) -> BrokerError:
        return await asyncio.shield(self.death)

    async def check(self) -> None:
        self.calls.append("check")
        if self.fail_check:
            raise self.fail_check

    async def stop(self) -> None:
        self.calls.append("stop")
        if self.fail_stop:
            raise self.fail_stop


async def outcome(node: Node) -> BaseException | None:
    """How the plugin ended."""
    assert node.task is not None
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait({node.task})
    return node.task.exception()


@pytest.mark.parametrize("value", [None, "true", "01", " 1"])
async def test_s1_without_the_gate_nothing_is_made_and_the_plugin_runs(
    cluster: Any,
    make_nvml: Make,
    folder: Path,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
) -> None:
    config = plugin_config(folder, monkeypatch, value)
    assert config.options.delivery.broker is False
    node = Node(cluster, make_nvml(ONE), folder)
    async with node:
        await until(lambda: node.kubelet.registered)
        assert not (folder / "var/run/hami").exists()
        assert list((folder / "tmp/vgpulock").iterdir()) == []
    assert node.task is not None
    assert node.task.exception() is None


def plugin_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gate: str | None, *flags: str
) -> plugin_process.ProcessConfig:
    (folder / "device-config.yaml").write_text("nvidia:\n  deviceSplitCount: 3\n")
    monkeypatch.setenv("NODE_NAME", "n1")
    monkeypatch.delenv(GATE, raising=False)
    if gate is not None:
        monkeypatch.setenv(GATE, gate)
    arguments = [f"--config-file={folder}/device-config.yaml", f"--host-root={folder}", *flags]
    context = device_plugin.command.make_context("device-plugin", arguments)
    config: plugin_process.ProcessConfig = device_plugin._process_config(context.params)
    return config


def test_the_gate_of_the_process_is_its_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_config(folder, monkeypatch, "1").options.delivery.broker is True
    address = plugin_config(folder, monkeypatch, "1", "--metrics-bind-address=:9396").metrics_address
    assert address == ":9396"


async def test_s2_a_broker_that_cannot_start_ends_the_plugin_before_it_registers(
    build: Build, folder: Path
) -> None:
    path = socket_file(folder)
    path.parent.mkdir(parents=True)
    path.write_text("keep")
    node = build()
    async with node:
        error = await outcome(node)
    assert isinstance(error, BrokerError)
    assert "not a socket" in str(error)
    assert node.kubelet.registered == []
    assert path.read_text("utf-8") == "keep"


async def test_s30_directory_and_lock_parent_are_there_before_the_first_registration(
    build: Build, folder: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a reboot with everything on a tmpfs; the umask changes nothing."""
    modes: list[list[int]] = []
    node = build()
    names = ("var/run/hami/hostpid", "tmp/vgpulock", "tmp/vgpulock/hostpid")
    real = node.kubelet.Register

    async def look(request: Any, context: Any) -> Any:
        modes.append([stat.S_IMODE((folder / name).lstat().st_mode) for name in names])
        return await real(request, context)

    monkeypatch.setattr(node.kubelet, "Register", look)
    old = os.umask(0o077)
    try:
        async with node:
            await until(lambda: modes)
    finally:
        os.umask(old)
    assert modes[0] == [0o711, 0o1777, 0o755]
    assert not socket_file(folder).exists()


async def test_s24_reload_and_restart_of_kubelet_leave_the_broker_alone(
    build: Build, folder: Path, until: Until
) -> None:
    node = build()
    async with node:
        await until(lambda: len(node.kubelet.registered) == 1)
        before = socket_file(folder).lstat().st_ino, server_pid(socket_path(folder))
        node.plugin.reload()
        await until(lambda: len(node.kubelet.registered) == 2)
        await node.kubelet.stop()
        await node.kubelet.start()
        await until(lambda: len(node.kubelet.registered) == 3)
        assert (socket_file(folder).lstat().st_ino, server_pid(socket_path(folder))) == before


async def test_s28_a_killed_broker_ends_the_plugin_with_its_signal(
    build: Build, folder: Path, until: Until
) -> None:
    node = build()
    async with node:
        await until(lambda: node.kubelet.registered)
        os.kill(server_pid(socket_path(folder)), signal.SIGKILL)
        error = await outcome(node)
    assert isinstance(error, BrokerError)
    assert "host PID broker" in str(error)
    assert "SIGKILL" in str(error)
    assert not (node.kubelet.folder / "nvidia-gpu.sock").exists(), "kubelet is not served any more"


BROKEN = """
import errno, functools, os, sys
from hami.node.hostpid.__main__ import main
from hami.node.hostpid.broker import start_broker
from hami.node.hostpid.serving import Server, accept_from

def broken(listener, counters):
    def accept(listener):
        connection = accept_from(listener)
        if os.path.exists(sys.argv[2] + "/break"):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return connection
    return Server(listener, counters, accept=accept)

sys.exit(main(sys.argv[1:], functools.partial(start_broker, make_server=broken)))
"""


async def test_s23_a_broken_listener_ends_the_plugin_with_the_broker_s_words(
    build: Build, folder: Path, until: Until
) -> None:
    node = build(BrokerChild(HostPaths(str(folder)), (sys.executable, "-c", BROKEN)))
    async with node:
        await until(lambda: node.kubelet.registered)
        (folder / "break").touch()
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.connect(socket_path(folder))
        error = await outcome(node)
    assert str(error) == "host PID broker: accept: Bad file descriptor"
    assert not (node.kubelet.folder / "nvidia-gpu.sock").exists()
    assert not socket_file(folder).exists(), "the child took its socket away"


def test_an_error_of_the_broker_is_the_exit_status(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ends(_: object) -> None:
        raise BrokerError("host PID broker: stopped unexpectedly by signal SIGKILL")

    monkeypatch.setattr(plugin_process, "run_device_plugin", ends)
    monkeypatch.setattr(logs, "setup_logging", lambda *_: None)
    plugin_config(folder, monkeypatch, "1")
    with pytest.raises(SystemExit) as caught:
        device_plugin.command.main(
            [f"--config-file={folder}/device-config.yaml", f"--host-root={folder}"], standalone_mode=False
        )
    assert caught.value.code == 1
    assert "SIGKILL" in caplog.records[-1].__dict__["reason"]


async def test_a_broker_that_does_not_answer_ends_the_plugin_instead_of_a_registration(build: Build) -> None:
    broker = Scripted()
    broker.fail_check = BrokerError("host PID broker: does not answer")
    node = build(broker)
    async with node:
        assert str(await outcome(node)) == "host PID broker: does not answer"
    assert node.kubelet.registered == []
    assert broker.calls == ["start", "check", "stop"]


async def test_the_check_comes_before_every_registration(build: Build, until: Until) -> None:
    broker = Scripted()
    node = build(broker)
    async with node:
        await until(lambda: len(node.kubelet.registered) == 1)
        node.plugin.reload()
        await until(lambda: len(node.kubelet.registered) == 2)
    assert broker.calls == ["start", "check", "check", "stop"]


async def test_errors_of_broker_and_plugin_are_told_together(build: Build) -> None:
    broker = Scripted()
    broker.fail_stop = BrokerError("cannot clean up")
    node = build(broker)

    def refuse() -> Any:
        raise NodeError("bad settings")

    node.plugin._load_settings = refuse
    async with node:
        assert str(await outcome(node)) == "bad settings; cannot clean up"


async def test_an_error_of_the_broker_s_end_is_an_error_of_the_plugin(build: Build, until: Until) -> None:
    broker = Scripted()
    broker.fail_stop = BrokerError("cannot clean up")
    node = build(broker)
    async with node:
        await until(lambda: node.kubelet.registered)
        node.plugin.stop()
        assert str(await outcome(node)) == "cannot clean up"


async def test_s25_a_plugin_that_waits_for_the_old_one_can_still_be_stopped(
    build: Build, folder: Path, until: Until
) -> None:
    """The real broker waits for the lock of another one."""
    directory = socket_file(folder).parent
    directory.mkdir(parents=True)
    with (directory / "broker.lock").open("w") as lock:
        (directory / "broker.lock").chmod(0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        node = build()
        async with node:
            await until(lambda: stat.S_IMODE(directory.stat().st_mode) == 0o711)
            assert node.task is not None
            assert not node.task.done()
            node.plugin.stop()
            assert await outcome(node) is None
    assert node.kubelet.registered == []


# ---- the lock parent and its mount point -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"), [("file", "regular file"), ("symlink", "symlink"), ("fifo", "fifo")]
)
async def test_d20_an_unsafe_parent_is_told_with_owner_type_mode_and_remedy(
    build: Build, folder: Path, make_pod: Make, until: Until, kind: str, words: str
) -> None:
    (folder / "tmp").mkdir()
    path = folder / "tmp/vgpulock"
    if kind == "file":
        path.write_text("planted")
        path.chmod(0o640)
    elif kind == "symlink":
        path.symlink_to(folder)
    else:
        os.mkfifo(path, 0o640)
    node = build()
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        (event,) = [item[2] for item in node.cluster.events if item[1] == "HAMiLockParentUnsafe"]
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert f"is a {words} of UID {os.geteuid()} with mode {mode:04o}" in event
        assert f"remove it with: rm {path}" in event
        async with node.kubelet.plugin() as stub:
            with pytest.raises(Exception, match="failed to prepare host PID lock parent"):
                await stub.Allocate(call())
    assert node.cluster.notes("p")["hami.io/bind-phase"] == "failed"


def call(*ids: str) -> Any:
    request = pb.ContainerAllocateRequest(devices_ids=list(ids) or [f"{U1}-0"])
    return pb.AllocateRequest(container_requests=[request])


async def test_d19_a_planted_mount_point_is_renamed_and_the_allocation_succeeds(
    build: Build, folder: Path, make_pod: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted after the start of the plugin, as any workload can."""
    monkeypatch.setenv(GATE, "1")
    node = build()
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        place = folder / "tmp/vgpulock/hostpid"
        place.rmdir()
        place.symlink_to(folder / "usr")
        before = stat.S_IMODE((folder / "usr").stat().st_mode)
        async with node.kubelet.plugin() as stub:
            (answer,) = (await stub.Allocate(call())).container_responses
        assert answer.envs[GATE] == "1"
        assert stat.S_ISDIR(place.lstat().st_mode)
        (foreign,) = [item for item in place.parent.iterdir() if item != place]
        assert foreign.name.startswith("hostpid.foreign-")
        assert foreign.is_symlink()
        assert stat.S_IMODE((folder / "usr").stat().st_mode) == before
        assert "HAMiLockParentUnsafe" not in [item[1] for item in node.cluster.events]


async def test_a_mount_point_that_cannot_be_made_is_told_and_fails_nothing(
    build: Build, make_pod: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(GATE, "1")
    node = build()
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,3000,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        monkeypatch.setattr("hami.node.plugin.workspace.prepare_mount_point", fail)
        async with node.kubelet.plugin() as stub:
            (answer,) = (await stub.Allocate(call())).container_responses
    (event,) = [item[2] for item in node.cluster.events if item[1] == "HAMiLockParentUnsafe"]
    assert "vgpulock/hostpid: [Errno 28] No space left" in event
    assert "chattr -ia" in event
    assert mount_of(answer) is None, "a runtime could not mount it, and the container would not start"
    assert GATE not in answer.envs
    assert f"{GATE}=1\n" in (Path(node.paths.limits) / "uid-p_app").read_text("utf-8"), "asks, and is counted"


# ---- answers -----------------------------------------------------------------------------------------------


async def test_a13_a_gate_that_is_turned_off_is_off_in_the_next_answer(
    build: Build, make_pod: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GATE, "1")
    node = build()
    node.cluster.add(make_pod("p", f"{U1},NVIDIA,300,30:;"))
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            (first,) = (await stub.Allocate(call(f"{U1}-0"))).container_responses
            monkeypatch.setenv(GATE, "0")
            del node.cluster.objects[("team-a", "p")]
            node.cluster.add(make_pod("q", f"{U1},NVIDIA,300,30:;"))
            (second,) = (await stub.Allocate(call(f"{U1}-1"))).container_responses
    assert first.envs[GATE] == "1"
    assert mount_of(first) == ("/var/run/hami/hostpid", True)
    assert GATE not in second.envs
    assert mount_of(second) is None
    limits = Path(node.paths.limits)
    assert f"{GATE}=1\n" in (limits / "uid-p_app").read_text("utf-8")
    assert f"{GATE}=0\n" in (limits / "uid-q_app").read_text("utf-8")


def mount_of(answer: Any) -> tuple[str, bool] | None:
    """Where the broker is mounted from, below the host root, and whether read-only."""
    for mount in answer.mounts:
        if mount.container_path == "/tmp/vgpulock/hostpid":
            return "/" + mount.host_path.split("/", 3)[3], mount.read_only
    return None


async def test_a12_a16_each_container_with_devices_gets_a_complete_answer_of_its_own(
    build: Build, make_pod: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle container has no devices: kubelet asks nothing for it, and nothing is answered for it."""
    monkeypatch.setenv(GATE, "1")
    node = build()
    text = f"{U1},NVIDIA,300,30:;;{U1},NVIDIA,200,20:;"
    node.cluster.add(make_pod("p", text, containers=("a", "none", "b")))
    async with node:
        await until(lambda: node.kubelet.registered)
        async with node.kubelet.plugin() as stub:
            request = pb.AllocateRequest()
            for number in range(2):
                request.container_requests.add(devices_ids=[f"{U1}-{number}"])
            answers = (await stub.Allocate(request)).container_responses
    limits = node.root / "usr/local/vgpu/limits"
    assert len(answers) == 2
    for answer, memory in zip(answers, ("300m", "200m"), strict=True):
        assert answer.envs["CUDA_DEVICE_MEMORY_LIMIT_0"] == memory
        assert answer.envs[GATE] == "1"
        assert mount_of(answer) == ("/var/run/hami/hostpid", True)
    assert sorted(item.name for item in limits.iterdir()) == ["uid-p_a", "uid-p_b"]


# ---- metrics -----------------------------------------------------------------------------------------------

ONE_PLACE = f"""
import functools, sys
from hami.node.hostpid.__main__ import main
from hami.node.hostpid.broker import start_broker
from hami.node.hostpid.serving import Server

one = functools.partial(Server, max_active=1, deadline_s={LIMIT_S})
sys.exit(main(sys.argv[1:], functools.partial(start_broker, make_server=one)))
"""


def exchange(folder: Path, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LIMIT_S)
        client.connect(socket_path(folder))
        with contextlib.suppress(BrokenPipeError):
            client.sendall(data)
        return everything(client)


async def test_p26_metrics_of_the_plugin(folder: Path, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    child = BrokerChild(HostPaths(str(folder)), (sys.executable, "-c", ONE_PLACE))
    listeners: list[socket.socket] = []

    def keep(address: str) -> socket.socket:
        listeners.append(listen(address))
        return listeners[-1]

    monkeypatch.setattr(plugin_process, "listen", keep)
    await child.start()
    try:
        async with plugin_process._metrics_served("127.0.0.1:0", PluginMetrics(child.totals)):
            found = await asyncio.to_thread(p26, folder, child, listeners[0].getsockname()[1])
    finally:
        await child.stop()
    name = "hami_hostpid_broker"
    requests = {key: found[f'{name}_requests_total{{result="{key}"}}'] for key in RESULTS}
    assert requests == {"ok": 3, "invalid": 2, "dropped": 1, "saturated": 1}
    assert found[f"{name}_active_handlers"] == 0
    assert found[f"{name}_request_seconds_count"] == 6


RESULTS = ("ok", "invalid", "dropped", "saturated")


def p26(folder: Path, child: BrokerChild, port: int) -> dict[str, float]:
    """Three good, two invalid, one dropped and one saturated transaction; then the series."""
    for _ in range(3):
        assert exchange(folder, REQUEST) == good()
    for _ in range(2):
        exchange(folder, b"HPIE\0\1\0\1")
    end = time.monotonic() + LIMIT_S
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(socket_path(folder))
        while child.totals().active != 1 and time.monotonic() < end:
            time.sleep(0.005)
        assert exchange(folder, REQUEST) == b""
    while child.totals().active and time.monotonic() < end:
        time.sleep(0.005)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


async def test_a_plugin_without_a_broker_has_no_series_of_one() -> None:
    assert await PluginMetrics(None).collect() == ()
