"""The host PID broker as CUDA programs in containers see it: real client, real broker and bad ones."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostpid_harness import (
    REQUEST,
    Containers,
    Slot,
    containers_on,
    counters,
    events,
    host_side,
    inside,
    kernel_pids,
    only_slot,
    real_broker,
    slots,
    stand_in,
)
from vgpu_harness import MIB, Node, Shell

from hami.protocol import region_layout as layout

CONTEXT = 300 * MIB
VECTORS = json.loads((Path(__file__).parents[1] / "vectors/hostpid.json").read_text())
LOOK_BYTE = f"byte {layout.LOCK_HOST_PID}"


@pytest.fixture
def containers(node: Node) -> Iterator[Containers]:
    made = containers_on(node)
    with host_side(node.build, node):
        yield made


def answered(pid: int) -> bytes:
    return b"HPID\0\1\0\0" + pid.to_bytes(4)


def contexts_made(log: Path) -> list[str]:
    """The driver's calls that make a context."""
    calls = [line.split()[3] for line in log.read_text().splitlines()] if log.exists() else []
    return [call for call in calls if "CtxRetain" in call or "CtxCreate" in call]


# ---- contract: the real client and the real broker -----------------------------------------------


def test_every_container_gets_the_pid_that_the_kernel_shows_on_the_host(containers: Containers) -> None:
    """C1, and the contract: each process is PID 1 of a PID namespace of its own."""
    node = containers.node
    names = [f"c{number}" for number in range(6)]
    with real_broker(containers):
        shells = {name: containers.shell(name) for name in names}
        for shell in shells.values():
            shell.must("init")
        for name, shell in shells.items():
            pid = inside(shell)
            assert kernel_pids(pid) == [pid, 1]
            assert only_slot(node, name) == Slot(1, pid, layout.HOST_PID_BROKER, 0, 0)
            assert counters(node, name) == (1, 0)
            assert events(node, name) == []
    assert len({only_slot(node, name).host_pid for name in names}) == len(names)


def test_the_answer_makes_no_context_and_takes_no_turn(containers: Containers) -> None:
    """C1: neither cuInit nor the first context waits for another process."""
    log, calls = containers.node.directory / "driver-calls", containers.node.directory / "lock-calls"
    preload = f"{containers.node.build.program('libvgpu_calls.so')}:{containers.node.build.libvgpu}"
    with real_broker(containers):
        shell = containers.shell(LD_PRELOAD=preload, FAKEGPU_CALL_LOG=str(log), VGPU_CALLS=str(calls))
        shell.must("init")
        assert contexts_made(log) == []
        shell.must("retain 0")
    assert contexts_made(log) == ["cuDevicePrimaryCtxRetain"]
    taken = calls.read_text().splitlines()
    assert any(line.startswith("byte ") for line in taken)
    assert LOOK_BYTE not in taken
    assert not [line for line in taken if line.startswith("flock")]


def test_bytes_of_every_client_into_the_real_broker(containers: Containers) -> None:
    """P1, P22: the shared vectors, as HAMi's client and bad ones send them."""
    own = Path("/proc/self").resolve().name
    with real_broker(containers):
        for vector in VECTORS["requests"]:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(20)
                client.connect(str(containers.socket))
                client.sendall(bytes.fromhex(vector["bytes"]))
                client.shutdown(socket.SHUT_WR)
                got = b""
                with contextlib.suppress(ConnectionResetError):
                    while part := client.recv(64):
                        got += part
            expected = (vector["answer"] or "").replace("pid", f"{int(own):08x}")
            assert got.hex() == expected, vector["name"]


def test_a_restarted_broker_is_reached_through_the_old_mount(containers: Containers) -> None:
    """X13: a process that starts later in a running workload uses the new socket."""
    with real_broker(containers):
        first = containers.shell()
        first.must("init")
    assert not containers.socket.exists()
    with real_broker(containers):
        prefix = ("nsenter", f"--target={inside(first)}", "--mount", "--pid", "--root", "--")
        # nsenter's child is in the namespace, nsenter itself is not.
        second = containers.node.shell("a", prefix=prefix, LIBVGPU_HOSTPID_BROKER="1")
        second.must("init")
        pids = {slot.pid: slot.host_pid for slot in slots(containers.node)}
        assert pids == {1: inside(first), kernel_pids(inside(second))[-1]: inside(second)}
    assert counters(containers.node) == (2, 0)


def test_processes_fall_back_while_there_is_no_broker_and_are_answered_again_after(
    containers: Containers,
) -> None:
    """A broker that goes and comes back: nobody gets a wrong PID."""
    for number, serving in enumerate([True, False, True]):
        name = f"round{number}"
        with real_broker(containers) if serving else contextlib.nullcontext():
            shell = containers.shell(name).start()
            expected = layout.HOST_PID_BROKER if serving else layout.HOST_PID_NVML
            slot = only_slot(containers.node, name)
            assert (slot.host_pid, slot.path) == (inside(shell), expected)
            assert slot.error == (0 if serving else errno.ENOENT)
            shell.end()


def test_a_killed_broker_costs_nothing_but_the_look(containers: Containers) -> None:
    """Its socket stays behind and nobody listens."""
    with real_broker(containers) as broker:
        broker.kill()
        broker.wait()
        shell = containers.shell().start()
        assert only_slot(containers.node) == Slot(
            1, inside(shell), layout.HOST_PID_NVML, errno.ECONNREFUSED, CONTEXT
        )


def test_a_child_of_a_fork_asks_for_itself(containers: Containers) -> None:
    """C23."""
    with real_broker(containers):
        shell = containers.shell().start()
        child = shell.must("forkinit")
        found = {slot.pid: slot for slot in slots(containers.node)}
        parent = inside(shell)
        (child_outside,) = (
            int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        )
        assert kernel_pids(child_outside)[-1] == child
        assert found[1] == Slot(1, parent, layout.HOST_PID_BROKER, 0, CONTEXT)
        assert found[child] == Slot(child, child_outside, layout.HOST_PID_BROKER, 0, CONTEXT)
    assert counters(containers.node) == (2, 0)


# ---- when it is asked ----------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [None, "", "0", "true", "TRUE", "yes", "01", "1 ", " 1", "1\n", "11"])
def test_only_the_exact_one_enables_it(containers: Containers, gate: str | None) -> None:
    """C2."""
    with stand_in(containers.socket, answered(4711)) as server:
        shell = containers.shell(gate=gate).start()
        assert server.connections == 0
        slot = only_slot(containers.node)
        assert (slot.host_pid, slot.path, slot.error) == (inside(shell), layout.HOST_PID_NVML, 0)
        assert counters(containers.node) == (0, 0)


@pytest.mark.parametrize(
    ("file_says", "environment_says", "asked"),
    [
        pytest.param("1", "0", True, id="C26-on"),
        pytest.param("0", "1", False, id="C26-off"),
        pytest.param("1", None, True, id="file-alone"),
        pytest.param("true", "1", False, id="file-not-exact"),
        pytest.param(None, "1", True, id="file-without-the-key"),
        pytest.param(None, "0", False, id="file-without-the-key-off"),
    ],
)
def test_the_limits_file_decides(
    containers: Containers, file_says: str | None, environment_says: str | None, asked: bool
) -> None:
    """C26, C27: the plugin always writes the key; in mode exact it replaces the variable too."""
    limits = containers.node.directory / "limits"
    lines = [f"CUDA_DEVICE_MEMORY_SHARED_CACHE={containers.node.region()}"]
    if file_says is not None:
        lines.append(f"LIBVGPU_HOSTPID_BROKER={file_says}")
    limits.write_text("\n".join(lines) + "\n")
    with stand_in(containers.socket, answered(4711)) as server:
        containers.shell(limits=str(limits), gate=environment_says).must("init")
        assert server.connections == int(asked)
        assert only_slot(containers.node).host_pid == (4711 if asked else 0)


@pytest.mark.parametrize(("gate", "asked"), [("0", False), ("1", True)])
def test_without_a_limits_file_the_pod_s_own_value_counts(
    containers: Containers, gate: str, asked: bool
) -> None:
    """C27, first half."""
    with stand_in(containers.socket, answered(4711)) as server:
        containers.shell(gate=gate).must("init")
        assert server.connections == int(asked)


def test_a_process_asks_once(containers: Containers) -> None:
    with stand_in(containers.socket, answered(4711)) as server:
        shell = containers.shell()
        for command in ("init", "init", "retain 0", "release 0", "retain 0", "init"):
            shell.must(command)
        assert server.connections == 1


# ---- after a failure -----------------------------------------------------------------------------


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


FAILURES = {
    "no mount": ("none", None, errno.ENOENT),
    "no socket": ("ro", None, errno.ENOENT),
    "symlink": ("link", answered(4711), errno.ENOTSOCK),
    "writable mount": ("rw", answered(4711), errno.EPERM),
    "wrong magic": ("ro", b"BPID" + answered(4711)[4:], errno.EPROTO),
    "version 2": ("ro", b"HPID\0\2\0\0" + answered(4711)[8:], errno.EPROTO),
    "refused": ("ro", bytes.fromhex("485049440001000100000000"), errno.EPROTO),
    "PID 0": ("ro", answered(0), errno.ERANGE),
    "PID too large": ("ro", answered(0x80000000), errno.ERANGE),
    "half an answer": ("ro", answered(4711)[:5], errno.ECONNRESET),
    "saturated": ("ro", b"", errno.ECONNRESET),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_leaves_the_existing_path_to_the_first_context(
    containers: Containers, failure: str
) -> None:
    """C25: cuInit makes no context; then one look finds the PID; the core limit is in force."""
    how, sent, expected = FAILURES[failure]
    log, calls = containers.node.directory / "driver-calls", containers.node.directory / "lock-calls"
    preload = f"{containers.node.build.program('libvgpu_calls.so')}:{containers.node.build.libvgpu}"
    with stand_in(containers.socket, sent) if sent is not None else nothing():
        shell = containers.shell(
            how=how,
            LD_PRELOAD=preload,
            FAKEGPU_CALL_LOG=str(log),
            VGPU_CALLS=str(calls),
            CUDA_DEVICE_SM_LIMIT="50",
        )
        shell.must("init")
        assert only_slot(containers.node) == Slot(1, 0, layout.HOST_PID_UNKNOWN, expected, 0)
        assert contexts_made(log) == []
        assert events(containers.node) == [(layout.EVENT_HOST_PID_FALLBACK, expected)]
        assert counters(containers.node) == (0, 1)
        for command in ("retain 0", "release 0", "retain 0"):
            shell.must(command)
    assert only_slot(containers.node) == Slot(1, inside(shell), layout.HOST_PID_NVML, expected, CONTEXT)
    assert calls.read_text().splitlines().count(LOOK_BYTE) == 1
    assert counters(containers.node) == (0, 1)
    assert throttled(containers.node, shell) > 0


def throttled(node: Node, shell: Shell) -> int:
    """Nanoseconds that a program which always launches was held back."""
    shell.must("kernel 5000000")
    shell.must("launch 400 1 32")
    base = layout.EXTENSION_OFFSET + layout.Extension.devices.base(0)
    return int(layout.ExtensionDevice.throttled.read(node.region().read_bytes(), base))


def test_a_mount_point_that_a_neighbour_removes_is_a_fallback_that_is_told(containers: Containers) -> None:
    """C28: one warning, event 4, and a counter of the region."""
    with real_broker(containers):
        victim = containers.shell(LIBCUDA_LOG_LEVEL="2")
        deadline = time.monotonic() + 20
        while not (containers.parent / "hostpid").is_dir() or victim_is_starting(victim):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        subprocess.run([*containers.prefix("none"), "rmdir", "/tmp/vgpulock/hostpid"], check=True)
        victim.start()
        slot = only_slot(containers.node)
        assert (slot.host_pid, slot.path, slot.error) == (inside(victim), layout.HOST_PID_NVML, errno.ENOENT)
        assert events(containers.node) == [(layout.EVENT_HOST_PID_FALLBACK, errno.ENOENT)]
        assert counters(containers.node) == (0, 1)
        warnings = [line for line in victim.stderr().splitlines() if "host PID broker" in line]
        assert len(warnings) == 1
        assert f"errno {errno.ENOENT}" in warnings[0]


def victim_is_starting(shell: Shell) -> bool:
    """Its mounts are not all made."""
    with contextlib.suppress(OSError, ValueError):
        return Path(f"/proc/{inside(shell)}/comm").read_text().strip() != "vgpu_shell"
    return True


def test_the_default_log_level_says_nothing(containers: Containers) -> None:
    shell = containers.shell("a", "none").start()
    assert only_slot(containers.node).error == errno.ENOENT
    assert shell.stderr() == ""


@pytest.mark.parametrize(("switch", "expected"), [("0", []), ("1", ["flock /tmp/vgpulock/hostpid"] * 2)])
def test_the_node_wide_lock_is_on_the_read_only_directory_alone(
    containers: Containers, switch: str, expected: list[str]
) -> None:
    """C29: off by default; on, it is taken once and given back."""
    calls = containers.node.directory / "lock-calls"
    preload = f"{containers.node.build.program('libvgpu_calls.so')}:{containers.node.build.libvgpu}"
    shell = containers.shell(LD_PRELOAD=preload, VGPU_CALLS=str(calls), VGPU_HOSTPID_NODE_LOCK=switch).start()
    assert [line for line in calls.read_text().splitlines() if line.startswith("flock")] == expected
    assert only_slot(containers.node) == Slot(1, inside(shell), layout.HOST_PID_NVML, errno.ENOENT, CONTEXT)


@pytest.mark.parametrize("how", ["rw", "none", "link"])
def test_the_node_wide_lock_needs_a_directory_to_trust(containers: Containers, how: str) -> None:
    """C29: else the existing path is used unchanged."""
    calls = containers.node.directory / "lock-calls"
    preload = f"{containers.node.build.program('libvgpu_calls.so')}:{containers.node.build.libvgpu}"
    shell = containers.shell(
        how=how, LD_PRELOAD=preload, VGPU_CALLS=str(calls), VGPU_HOSTPID_NODE_LOCK="1"
    ).start()
    assert "flock" not in calls.read_text()
    assert only_slot(containers.node).host_pid == inside(shell)


def test_with_the_node_wide_lock_two_containers_that_start_together_find_themselves(
    containers: Containers,
) -> None:
    """16, item 1: without it both may see two new PIDs. Contexts take 200 ms here."""
    for attempt in range(3):
        names = [f"{attempt}{which}" for which in "abc"]
        shells = {
            name: containers.shell(
                name, VGPU_HOSTPID_NODE_LOCK="1", FAKEGPU_DELAY_US="cuDevicePrimaryCtxRetain=200000"
            )
            for name in names
        }
        for shell in shells.values():
            shell.must("init")
            assert shell.process.stdin is not None
        for shell in shells.values():
            assert shell.process.stdin is not None
            shell.process.stdin.write("retain 0\n")
            shell.process.stdin.flush()
        for shell in shells.values():
            assert shell.process.stdout is not None
            assert shell.process.stdout.readline().split()[0] == "0"
        for name, shell in shells.items():
            assert only_slot(containers.node, name).host_pid == inside(shell)
            shell.end()


# ---- what contexts take --------------------------------------------------------------------------


@pytest.mark.parametrize("serving", [False, True])
def test_contexts_are_counted_alike_with_and_without_the_broker(
    containers: Containers, serving: bool
) -> None:
    """9.4, X17: charged once at the first of nested retains, given back at the last release."""
    used = []
    with real_broker(containers) if serving else nothing():
        shell = containers.shell(gate="1" if serving else "0")
        for command in ("init", "retain 0", "retain 0", "release 0", "release 0", "retain 0", "reset 0"):
            shell.must(command)
            used.append(only_slot(containers.node).used)
    assert used == [0, CONTEXT, CONTEXT, CONTEXT, 0, CONTEXT, 0]


def listed(node: Node, shell: Shell) -> list[int]:
    """What a program in the shell's container sees as the card's processes."""
    code = (
        "import json, pynvml; pynvml.nvmlInit(); card = pynvml.nvmlDeviceGetHandleByIndex(0);"
        "print(json.dumps([p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(card)]))"
    )
    enter = ("nsenter", f"--target={inside(shell)}", "--mount", "--pid", "--root", "--")
    done = node.run(*enter, sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    return [int(pid) for pid in json.loads(done.stdout)]


@pytest.mark.parametrize("serving", [False, True])
@pytest.mark.parametrize("convention", ["host", "namespace"])
def test_either_convention_of_the_driver_is_noticed(node: Node, convention: str, serving: bool) -> None:
    """A94: the broker's PID is the kernel's with both; NVML's records are matched by the driver's number."""
    node.settings["FAKEGPU_PID_CONVENTION"] = convention
    containers = containers_on(node)
    with real_broker(containers) if serving else nothing(), host_side(node.build, node):
        containers.shell("neighbour").start()
        shell = containers.shell().start()
        slot = only_slot(node)
        assert slot.host_pid == (inside(shell) if serving or convention == "host" else 0)
        assert slot.used == CONTEXT
        assert listed(node, shell) == [1]
    flags = layout.Extension.flags.read(node.region().read_bytes(), layout.EXTENSION_OFFSET)
    own = layout.FLAG_NVML_OWN_NAMESPACE if convention == "namespace" else 0
    assert flags == layout.FLAG_NVML_SETTLED | own


@pytest.mark.parametrize("serving", [False, True])
def test_a_driver_that_lists_no_process_is_measured_by_the_card_s_memory(node: Node, serving: bool) -> None:
    """7.5: the second process knows that, and takes its turn."""
    node.settings["FAKEGPU_HIDE_PROCESSES"] = "1"
    containers = containers_on(node)
    with real_broker(containers) if serving else nothing(), host_side(node.build, node):
        shell = containers.shell().start()
        assert only_slot(node).used == CONTEXT
        second = node.shell(
            "a", prefix=("nsenter", f"--target={inside(shell)}", "--mount", "--pid", "--root", "--")
        ).start()
        assert sorted(slot.used for slot in slots(node)) == [CONTEXT, CONTEXT]
        second.must("release 0")
        assert sorted(slot.used for slot in slots(node)) == [0, CONTEXT]
    assert (layout.EVENT_NO_PROCESS_DATA, 0) in events(node)


def test_the_request_is_seen_once_and_whole(containers: Containers) -> None:
    with stand_in(containers.socket, answered(4711)) as server:
        containers.shell().must("init")
        assert server.received == [REQUEST]


def test_processes_that_cannot_tell_themselves_apart_are_charged_one_context_each(
    containers: Containers,
) -> None:
    """7.5, A68: not what the others' contexts took of the card meanwhile. Contexts take 200 ms here."""
    names = [f"n{number}" for number in range(4)]
    delay = "cuDevicePrimaryCtxRetain=200000"
    shells = {name: containers.shell(name, gate="0", FAKEGPU_DELAY_US=delay) for name in names}
    for shell in shells.values():
        shell.must("init")
    for shell in shells.values():
        assert shell.process.stdin is not None
        shell.process.stdin.write("retain 0\n")
        shell.process.stdin.flush()
    for name, shell in shells.items():
        assert shell.process.stdout is not None
        assert shell.process.stdout.readline().split()[0] == "0"
        slot = only_slot(containers.node, name)
        assert slot.used == CONTEXT
        assert slot.host_pid in (0, inside(shell))
