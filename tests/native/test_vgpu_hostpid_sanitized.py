"""The host PID broker's client under sanitizers: a finding ends the program, or is in its standard error."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from hostpid_harness import (
    REQUEST,
    Containers,
    containers_on,
    inside,
    only_slot,
    real_broker,
    slots,
    stand_in,
)
from vgpu_harness import MIB, Node

from hami.protocol import region_layout as layout

ANSWER = bytes.fromhex("485049440001000000001267")
PID = 0x1267


@pytest.fixture(params=["asan_node", "tsan_node"])
def containers(request: pytest.FixtureRequest) -> Containers:
    return containers_on(request.getfixturevalue(request.param))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(ANSWER, ("", PID), id="good"),
        pytest.param(ANSWER[:5], ("ECONNRESET", 0), id="half"),
        pytest.param(b"", ("ECONNRESET", 0), id="closed"),
        pytest.param(ANSWER + ANSWER, ("EPROTO", 0), id="twice"),
        pytest.param(b"\xff" * 64, ("EPROTO", 0), id="noise"),
        pytest.param(ANSWER[:8] + bytes(4), ("ERANGE", 0), id="no-pid"),
    ],
)
def test_answers(containers: Containers, answer: bytes, expected: tuple[str, int]) -> None:
    with stand_in(containers.socket, answer) as server:
        assert containers.ask()[:2] == expected
        assert server.received == [REQUEST]


@pytest.mark.parametrize("how", ["none", "ro", "rw", "link"])
def test_places_that_are_not_the_node_s(containers: Containers, how: str) -> None:
    error, pid, _ = containers.ask(how)
    assert error in {"ENOENT", "ENOTSOCK"}
    assert pid == 0


def test_a_drip_and_signals(containers: Containers) -> None:
    with stand_in(containers.socket, ANSWER, pause=0.06, size=1):
        (error, pid, _, descriptors), (signals,) = containers.client("signals", in_time=True)
        assert (errno.errorcode[error], pid, descriptors) == ("ETIMEDOUT", 0, 0)
        assert signals > 0


def test_cancellation_and_forks_beside_questions(containers: Containers) -> None:
    with real_broker(containers):
        ((error, pid, was_cancelled, descriptors),) = containers.client("cancel")
        assert (error, was_cancelled, descriptors) == (0, 1, 0)
        assert pid > 1
        parent, child, (with_connection, left) = containers.client("fork")
        assert parent[0] == child[0] == 0
        assert (with_connection, left) == (0, 0)


def test_programs_start_with_and_without_a_broker(asan_node: Node) -> None:
    """The whole library; the look for the host PID, contexts, a child that asks for itself."""
    containers = containers_on(asan_node)
    with real_broker(containers):
        shell = containers.shell("served").start()
        assert only_slot(asan_node, "served").path == layout.HOST_PID_BROKER
        shell.must("forkinit")
        assert len({slot.host_pid for slot in slots(asan_node, "served")}) == 2
        shell.must(f"alloc {MIB}")
    alone = containers.shell("alone", VGPU_HOSTPID_NODE_LOCK="1").start()
    alone.must("release 0")
    alone.must("retain 0")
    assert only_slot(asan_node, "alone").error == errno.ENOENT
    assert inside(alone) > 1
    assert "ERROR: AddressSanitizer" not in shell.stderr() + alone.stderr()


def test_threads_that_start_at_once_ask_once(tsan_node: Node) -> None:
    """Eight threads use the driver first; one of them asks, the others wait for it."""
    containers = containers_on(tsan_node)
    with stand_in(containers.socket, ANSWER, pause=0.01, size=1) as server:
        shell = containers.shell(LIBCUDA_LOG_LEVEL="0")
        shell.must("init")
        shell.must("retain 0")
        shell.must("kernel 1000")
        shell.must(f"threads 8 200 {MIB}")
        assert server.connections == 1
        assert only_slot(tsan_node).host_pid == PID
        assert "WARNING: ThreadSanitizer" not in shell.stderr()


def test_no_answer_of_random_bytes_is_a_pid_by_chance(asan_node: Node) -> None:
    """Only bytes of the exact form are believed: one changed byte of the first eight spoils an answer."""
    program = [str(asan_node.build.program("vgpu_broker")), "answer"]
    environment = {"PATH": os.environ["PATH"], "ASAN_OPTIONS": "detect_leaks=0"}
    for at in range(8):
        changed = bytearray(ANSWER)
        changed[at] ^= 1 << (at % 8)
        done = subprocess.run(
            [*program, changed.hex()], capture_output=True, text=True, check=True, env=environment
        )
        assert done.stdout.split() == [str(errno.EPROTO), "0"], Path(program[0]).name
