"""The broker as a child process: start, supervision, end, counters (host-pid-broker.md §6.5, §6.6)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hostpid_world import (
    LIMIT_S,
    ME,
    PATIENT,
    Running,
    accepts,
    asked,
    clients,
    good,
    running,
    server_pid,
    socket_file,
    socket_path,
    wait_until,
)
from prometheus_client.core import CollectorRegistry
from prometheus_client.exposition import generate_latest

from hami.node.hostpid import child as child_module
from hami.node.hostpid.child import BrokerChild
from hami.node.hostpid.codec import REQUEST
from hami.node.hostpid.counters import BUCKETS_S, Counters, Result, shared_memory
from hami.node.hostpid.endpoint import open_endpoint
from hami.node.hostpid.errors import BrokerError
from hami.node.hostpid.metrics import broker_metrics
from hami.node.paths import HostPaths

Until = Callable[..., Awaitable[None]]

pytestmark = pytest.mark.usefixtures("patient_child")


@pytest.fixture
async def child(folder: Path) -> AsyncIterator[BrokerChild]:
    found = BrokerChild(HostPaths(str(folder)))
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


def script(text: str) -> tuple[str, ...]:
    """A command that runs in the broker's place; ``state(...)`` tells the plugin something."""
    head = (
        "import json, os, signal, sys, time\n"
        "fd = int(sys.argv[sys.argv.index('--state-fd') + 1])\n"
        "def state(**words): os.write(fd, json.dumps(words).encode() + b'\\n')\n"
    )
    return sys.executable, "-c", head + text


async def test_it_serves_when_start_returns_and_is_gone_when_stop_does(folder: Path) -> None:
    child = BrokerChild(HostPaths(str(folder)))
    await child.start()
    assert await asyncio.to_thread(asked, socket_path(folder)) == os.getpid()
    assert server_pid(socket_path(folder)) == child.pid != os.getpid()
    await child.check()
    await child.stop()
    await child.stop()
    assert not socket_file(folder).exists()
    assert (folder / "var/run/hami/hostpid/broker.lock").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_start_that_fails_says_why_and_leaves_nothing(folder: Path) -> None:
    path = socket_file(folder)
    path.parent.mkdir(parents=True)
    path.write_text("keep")
    child = BrokerChild(HostPaths(str(folder)))
    with pytest.raises(BrokerError, match=r"broker\.sock is a regular file, not a socket"):
        await child.start()
    assert path.read_text("utf-8") == "keep"
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sys.exit(3)", "stopped unexpectedly with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "by signal SIGSEGV"),
        ("os.write(fd, b'no JSON\\n')", "exit status 0"),
        ("os.write(fd, b'[1]\\n')", "exit status 0"),
    ],
)
async def test_a_child_that_ends_at_its_start_is_an_error(folder: Path, text: str, words: str) -> None:
    with pytest.raises(BrokerError, match=words):
        await BrokerChild(HostPaths(str(folder)), script(text)).start()


async def test_a_child_that_never_serves_is_an_error_and_is_killed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "START_LIMIT_S", 0.3)
    child = BrokerChild(HostPaths(str(folder)), script("time.sleep(600)"))
    with pytest.raises(BrokerError, match="not serving"):
        await child.start()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_program_that_does_not_exist_is_an_error(folder: Path) -> None:
    with pytest.raises(BrokerError, match="cannot be started"):
        await BrokerChild(HostPaths(str(folder)), ("/does/not/exist",)).start()


async def test_before_its_start_a_child_cannot_be_asked(folder: Path) -> None:
    child = BrokerChild(HostPaths(str(folder)))
    with pytest.raises(BrokerError, match="not started"):
        child.totals()
    with pytest.raises(BrokerError, match="not started"):
        await child.check()
    await child.stop()


async def test_s28_a_killed_child_is_told_with_its_signal(child: BrokerChild) -> None:
    os.kill(child.pid, signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert "SIGKILL" in str(await child.ended())
    with pytest.raises(BrokerError, match="SIGKILL"):
        await child.check()
    await child.stop()


async def test_s28_a_child_that_ends_with_an_error_is_told_in_its_words(folder: Path) -> None:
    text = "state(state='serving'); state(error='host PID broker: accept: no'); sys.exit(1)"
    child = BrokerChild(HostPaths(str(folder)), script(text))
    await child.start()
    async with asyncio.timeout(LIMIT_S):
        assert str(await child.ended()) == "host PID broker: accept: no"


async def test_an_error_of_the_shutdown_is_told(folder: Path) -> None:
    text = (
        "def end(*_):\n    state(error='cannot clean up'); sys.exit(1)\n"
        "signal.signal(signal.SIGTERM, end); state(state='serving'); time.sleep(600)"
    )
    child = BrokerChild(HostPaths(str(folder)), script(text))
    await child.start()
    with pytest.raises(BrokerError, match="cannot clean up"):
        await child.stop()


async def test_a_child_that_does_not_end_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "STOP_LIMIT_S", 0.3)
    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); state(state='serving'); time.sleep(600)"
    child = BrokerChild(HostPaths(str(folder)), script(text))
    await child.start()
    with pytest.raises(BrokerError, match="after SIGTERM"):
        await child.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


async def test_a_plugin_that_logs_everything_has_a_child_that_does(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], until: Until
) -> None:
    caplog.set_level("DEBUG", logger="hami.node.hostpid.child")
    child = BrokerChild(HostPaths(str(folder)))
    await child.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_path(folder))
    await until(lambda: child.totals().results[Result.DROPPED] == 1)
    await child.stop()
    events = [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines() if line[:1] == "{"]
    assert "hostpid.dropped" in events


async def test_signals_of_a_terminal_do_not_end_a_child(child: BrokerChild) -> None:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        os.kill(child.pid, number)
    await child.check()


# ---- the check before a registration -----------------------------------------------------------------------


@pytest.mark.parametrize("state", ["absent", "stale"])
async def test_the_check_fails_where_nobody_listens(child: BrokerChild, folder: Path, state: str) -> None:
    path = socket_file(folder)
    path.unlink()
    if state == "stale":
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    with pytest.raises(BrokerError, match=r"broker\.sock"):
        await child.check()


def in_its_place(child: BrokerChild, folder: Path, **options: Any) -> Running:
    """Another server at the child's path."""
    path = socket_file(folder)
    path.unlink()
    (path.parent / "broker.lock").unlink()
    return Running(path.parent, **options)


@pytest.mark.parametrize(("pid", "words"), [(7, "answers PID 7"), (0, "does not answer")])
async def test_the_check_fails_on_a_wrong_answer(
    child: BrokerChild, folder: Path, monkeypatch: pytest.MonkeyPatch, pid: int, words: str
) -> None:
    if pid == 0:
        monkeypatch.setattr(child_module, "CHECK_LIMIT_S", 0.2)
    other = in_its_place(child, folder, read_pid=lambda _: pid)
    try:
        with pytest.raises(BrokerError, match=words):
            await child.check()
    finally:
        other.server.stop()
        await asyncio.to_thread(other.join)
        other.endpoint.close()


async def test_a_flood_is_no_reason_to_give_up(
    child: BrokerChild, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All places are taken for longer than the check waits; connections that are turned away are a sign of
    life.
    """
    monkeypatch.setattr(child_module, "CHECK_LIMIT_S", 1.0)
    other = in_its_place(child, folder, max_active=0)
    try:
        child._counters = other.counters
        await child.check()
    finally:
        other.server.stop()
        await asyncio.to_thread(other.join)
        other.endpoint.close()


# ---- a parent that dies, a parent that is busy -------------------------------------------------------------

PARENT = """
import asyncio, sys
from hami.node.hostpid.child import BrokerChild
from hami.node.paths import HostPaths

async def main():
    child = BrokerChild(HostPaths(sys.argv[1]), (sys.executable, "-c", sys.argv[3]))
    await child.start()
    print(child.pid, flush=True)
    if sys.argv[2] == "busy":
        while True:
            pass
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def parent(folder: Path, what: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process with a broker child, and that child's PID; killed at the end."""
    started = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), what, PATIENT],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert started.stdout is not None
        yield started, int(started.stdout.readline())
    finally:
        started.kill()
        started.communicate()


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_s29_a_killed_plugin_takes_the_child_with_it(folder: Path) -> None:
    with parent(folder, "idle") as (started, pid):
        assert accepts(socket_path(folder))
        started.kill()
        started.communicate(timeout=LIMIT_S)
    wait_until(lambda: not is_alive(pid))
    with (folder / "var/run/hami/hostpid/broker.lock").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    endpoint = open_endpoint(str(folder / "var/run/hami/hostpid"), ME, 0.0)
    endpoint.close()


def test_a_child_whose_parent_is_gone_already_does_not_serve(folder: Path) -> None:
    command = [sys.executable, "-m", "hami.node.hostpid", "--host-root", str(folder), "--parent", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if os.getppid() != 1:
        assert done.returncode == 1
        assert "has ended" in json.loads(done.stderr.splitlines()[-1])["reason"]
    assert not socket_file(folder).exists()


def test_p23_128_clients_are_answered_while_the_plugin_is_busy(folder: Path) -> None:
    with parent(folder, "busy"):
        assert clients(socket_path(folder), 128) == (128, 0, 0)


# ---- counters and metrics ----------------------------------------------------------------------------------


def test_counters_are_seen_by_the_other_process() -> None:
    memory = shared_memory()
    try:
        writer, reader = Counters(memory), Counters(memory)
    finally:
        os.close(memory)
    writer.started()
    writer.started()
    writer.ended(Result.OK, 0.0002)
    writer.turned_away()
    writer.accept_failed()
    found = reader.totals()
    assert found.results == {Result.OK: 1, Result.INVALID: 0, Result.DROPPED: 0, Result.SATURATED: 1}
    assert (found.active, found.accept_failures) == (1, 1)
    assert found.buckets == tuple(int(bound == 0.00025) for bound in (*BUCKETS_S, 2.0))
    assert found.seconds == pytest.approx(0.0002)


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.0001, 0), (0.5, 11), (0.50001, 12), (9.0, 13)])
def test_the_bound_of_a_bucket_belongs_to_it(seconds: float, bucket: int) -> None:
    counters = Counters()
    counters.started()
    counters.ended(Result.DROPPED, seconds)
    assert counters.totals().buckets.index(1) == bucket


class _Collected:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def collect(self) -> Any:
        return iter(broker_metrics(self._counters.totals()))


def exposed(counters: Counters) -> dict[str, float]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(counters))
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


RESULTS = ("ok", "invalid", "dropped", "saturated")


def test_the_series_of_good_invalid_dropped_and_turned_away_connections(folder: Path) -> None:
    with running(folder / "hostpid", max_active=1) as broker:
        for _ in range(3):
            assert broker.ask() == good()
        for _ in range(2):
            broker.ask(b"x" * 8)
        held = broker.connect(REQUEST[:5])
        wait_until(lambda: broker.counters.totals().active == 1)
        assert broker.ask() == b""
        assert exposed(broker.counters)["hami_hostpid_broker_active_handlers"] == 1
        held.close()
        wait_until(lambda: broker.counters.totals().active == 0)
        found = exposed(broker.counters)
    name = "hami_hostpid_broker"
    requests = {result: found[f'{name}_requests_total{{result="{result}"}}'] for result in RESULTS}
    assert requests == {"ok": 3, "invalid": 2, "dropped": 1, "saturated": 1}
    assert found[f"{name}_active_handlers"] == 0
    assert found[f"{name}_request_seconds_count"] == 6
    assert found[f'{name}_request_seconds_bucket{{le="+Inf"}}'] == 6
    assert found[f"{name}_accept_failures_total"] == 0
