"""vgpu-region and `hami region`: the same answers from one file, and the few changes that they make."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, Node, Shell, has_moved, poke, read_usage, wait_until

from hami.protocol import region_layout as layout

TOOLS = ("c", "link", "python")


def run(node: Node, tool: str, path: Path, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """One of the tools on a file; `--reclaim` of the C tool is `--repair` of the command."""
    if tool == "python":
        options = tuple("--repair" if option == "--reclaim" else option for option in options)
        options = tuple(option for option in options if option != "--print")
        command = [sys.executable, "-c", "from hami.cli.main import main; main()", "region", str(path)]
    else:
        name = "vgpu-region" if tool == "c" else "shrreg-tool"
        command = [str(node.build.directory / name), "--file", str(path)]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, env=env, timeout=60
    )


def shown(node: Node, tool: str, path: Path, *options: str, **env: str) -> Any:
    done = run(node, tool, path, "--print", "--json", *options, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def told(node: Node, tool: str, path: Path, **env: str) -> str:
    done = run(node, tool, path, "--explain", **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def old_file(
    path: Path, fields: type[layout.V0 | layout.V1], slot: type[layout.V0Slot | layout.V1Slot]
) -> Path:
    """A region as HAMi leaves it: two devices, a process on each and a free slot."""
    data = bytearray(fields.SIZE + 1)
    fields.magic.write(data, layout.MAGIC)
    fields.device_count.write(data, 2)
    for d, uuid in enumerate((b"GPU-a", b"GPU-b")):
        data[fields.uuid.offset + 96 * d :][: len(uuid)] = uuid
        data[fields.uuid.offset + 96 * d : fields.uuid.offset + 96 * d + len(uuid)] = uuid
        fields.limit.write(data, (d + 1) * 1000 * MIB, 0, d)
        fields.sm_limit.write(data, 30 + d, 0, d)
    for k, status in enumerate((1, 0, 2)):
        base = fields.procs.base(k)
        slot.pid.write(data, 100 + k, base)
        slot.hostpid.write(data, 70000 + k, base)
        slot.status.write(data, status, base)
        slot.used_data.write(data, k * MIB + 512, base, k % 2)
        slot.used_total.write(data, k * MIB + 512, base, k % 2)
    fields.proc_num.write(data, 3)
    fields.priority.write(data, 1)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("version", ["v0", "v1.1", "v1.2"])
def test_a74_files_of_every_version_are_shown_and_stay_as_they_are(
    node: Node, version: str, tool: str
) -> None:
    """A74."""
    path = node.directory / "old.cache"
    if version == "v0":
        old_file(path, layout.V0, layout.V0Slot)
    else:
        old_file(path, layout.V1, layout.V1Slot)
        poke(path, 4, (1).to_bytes(4, "little") + int(version[-1]).to_bytes(4, "little"))
    before = hashlib.sha256(path.read_bytes()).digest()
    region = shown(node, tool, path)
    assert hashlib.sha256(path.read_bytes()).digest() == before
    assert region["version"] == version
    assert [(d["uuid"], d["limit"], d["sm_limit"], d["used"]) for d in region["devices"]] == [
        ("GPU-a", 1000 * MIB, 30, 2 * MIB + 1024),
        ("GPU-b", 2000 * MIB, 31, 0),
    ]
    assert [(p["slot"], p["pid"], p["hostpid"], p["status"]) for p in region["processes"]] == [
        (0, 100, 70000, "running"),
        (2, 102, 70002, "suspended"),
    ]
    assert "GPU-a" in run(node, tool, path, "--print").stdout
    assert "only its limits" in told(node, tool, path)


@pytest.mark.parametrize("tool", TOOLS)
def test_what_is_no_region_is_refused_with_a_reason(node: Node, tool: str) -> None:
    path = node.directory / "x.cache"
    for content in (b"", b"short", bytes(layout.FILE_LENGTH), bytes(5000)):
        path.write_bytes(content)
        done = run(node, tool, path, "--json")
        assert done.returncode != 0
        assert done.stderr
    link = node.directory / "link.cache"
    link.symlink_to(path)
    assert run(node, tool, link, "--set-limit", "0=1m").returncode != 0


def refused(node: Node) -> Shell:
    """A process that was refused 2 GiB, in a container that was throttled and is blocked by priority."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1g", CUDA_DEVICE_SM_LIMIT_0="40").start()
    shell.must(f"alloc {100 * MIB}")
    assert shell.ask(f"alloc {2048 * MIB}")[0] == OUT_OF_MEMORY
    region, now = node.region(), time.time_ns()
    device = layout.Extension.devices.base(0, layout.EXTENSION_OFFSET)
    slot = layout.Extension.slots.base(0, layout.EXTENSION_OFFSET)
    poke(
        region,
        layout.EXTENSION_OFFSET + layout.Extension.heartbeat.offset,
        (now // 10**9 - 7).to_bytes(8, "little"),
    )
    poke(region, device + layout.ExtensionDevice.throttled.offset, (3 * 10**9).to_bytes(8, "little"))
    poke(region, slot + layout.ExtensionSlot.flags.offset, (3).to_bytes(4, "little"))
    poke(region, layout.V1.recent_kernel.offset, (-1).to_bytes(4, "little", signed=True))
    number = layout.Extension.next_event.read(region.read_bytes(), layout.EXTENSION_OFFSET)
    event = bytearray(layout.ExtensionEvent.SIZE)
    layout.ExtensionEvent.sequence.write(event, number + 1)
    layout.ExtensionEvent.time.write(event, now)
    layout.ExtensionEvent.type.write(event, layout.EVENT_THROTTLED)
    layout.ExtensionEvent.value.write(event, 3 * 10**9)
    poke(region, layout.Extension.events.base(number, layout.EXTENSION_OFFSET), bytes(event))
    at = layout.EXTENSION_OFFSET + layout.Extension.next_event.offset
    poke(region, at, (number + 1).to_bytes(8, "little"))
    return shell


@pytest.mark.parametrize("tool", ["c", "python"])
def test_what_is_no_regular_file_is_not_opened_at_all(node: Node, tmp_path: Path, tool: str) -> None:
    """A container may have put a device there. A writer of a FIFO goes on when somebody opens it."""
    fifo = tmp_path / "x.cache"
    os.mkfifo(fifo)
    written = threading.Thread(target=lambda: os.close(os.open(fifo, os.O_WRONLY)), daemon=True)
    written.start()
    for options in (["--print"], ["--reclaim"]):
        done = run(node, tool, fifo, *options)
        assert done.returncode == 1
        assert "not a regular file" in done.stderr
    written.join(timeout=0.3)
    assert written.is_alive()
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    written.join()
    os.close(reader)


@pytest.mark.parametrize("tool", ["c", "python"])
def test_a111_why_a_program_is_slow_or_refused(node: Node, tool: str) -> None:
    """A111: all three reasons, the host-PID path and the heartbeat's age."""
    shell = refused(node)
    text = told(node, tool, node.region(), CUDA_DEVICE_MEMORY_LIMIT_0="1g")
    assert "memory limit 1024 MiB (environment), used 100 MiB" in text
    assert "core limit 40 % (region), throttled 3.0 s in all, 5 % of the last minute" in text
    assert f"refused 1 times, last 2048 MiB to process {shell.process.pid} at 20" in text
    assert "launches are BLOCKED by a container of higher priority" in text
    age = re.search(r"heartbeat is (\d+) s old", text)
    assert age is not None
    assert 7 <= int(age[1]) < 100
    line = next(line for line in text.splitlines() if line.startswith(f"process {shell.process.pid}:"))
    assert "device 0 100 MiB; host PID " in line
    assert "blocked by priority, waiting for the core limit" in line


@pytest.mark.parametrize("tool", TOOLS)
def test_a_core_limit_that_holds_nobody_up_is_named_and_called_not_in_force(node: Node, tool: str) -> None:
    """As on a card that nobody else uses, where `none` would read as if the pod had asked for no share."""
    shell = node.shell(CUDA_DEVICE_SM_LIMIT_0="40", GPU_CORE_UTILIZATION_POLICY="disable").start()
    shell.must(f"alloc {MIB}")
    assert "core limit 40 %, not in force, throttled" in told(node, tool, node.region())


def test_both_tools_give_the_same_object_and_the_same_sentences(node: Node) -> None:
    first_shell = refused(node)
    other = node.shell().start()
    first_shell.process.send_signal(signal.SIGSTOP)  # nobody sweeps
    other.kill()
    region = node.region()
    frozen = node.directory / "frozen.cache"
    frozen.write_bytes(region.read_bytes())
    first, second = (shown(node, tool, frozen, "--explain") for tool in ("c", "python"))
    for found in (first, second):
        assert 7 <= found["explain"].pop("heartbeat_age_s") < 100
    assert first == second
    assert run(node, "c", frozen).stdout == run(node, "python", frozen).stdout
    without_age = [
        [line for line in told(node, tool, frozen).splitlines() if not line.startswith("monitor:")]
        for tool in ("c", "python")
    ]
    assert without_age[0] == without_age[1]
    live = [[p["live"] for p in shown(node, tool, region)["processes"]] for tool in ("c", "python")]
    assert live == [[True, False], [True, False]]


@pytest.mark.parametrize("tool", ["c", "python"])
def test_limits_set_by_the_tool_are_in_force(node: Node, tool: str) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert run(node, tool, node.region(), "--set-limit", "0=128m", "--set-sm-limit", "0=30").returncode == 0
    assert shell.ask("info")[2] == 128 * MIB
    assert layout.V1.sm_limit.read(node.region().read_bytes()) == 30
    for bad in (
        ("--set-limit", "3=1m"),
        ("--set-limit", "0=x"),
        ("--set-sm-limit", "0=101"),
        ("--set-sm-limit", "0"),
    ):
        assert run(node, tool, node.region(), *bad).returncode != 0
    assert shell.ask("info")[2] == 128 * MIB
    old = old_file(node.directory / "old.cache", layout.V0, layout.V0Slot)
    before = old.read_bytes()
    assert run(node, tool, old, "--set-limit", "0=1m").returncode != 0
    assert old.read_bytes() == before


@pytest.mark.parametrize("tool", ["c", "python"])
def test_on_the_node_a_limit_above_the_limits_file_is_refused(node: Node, tool: str) -> None:
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    region = node.directory / "vgpu" / "containers" / "uid_main" / "x.cache"
    limits = node.directory / "vgpu" / "limits" / "uid_main"
    for path in (region, limits):
        path.parent.mkdir(parents=True)
    region.write_bytes(node.region().read_bytes())
    before = region.read_bytes()
    uuid = layout.V1.uuid.read(before).decode()
    rows = [f"HAMI_DEVICE_UUIDS=GPU-{'0' * 36},{uuid}", "CUDA_DEVICE_MEMORY_LIMIT_1=1g"]
    limits.write_text("\n".join([*rows, "CUDA_DEVICE_SM_LIMIT_0=10", "CUDA_DEVICE_SM_LIMIT=50", ""]))
    for option, told in (
        ("--set-limit=0=2g", "device 0: 2048 MiB is above the 1024 MiB of"),
        ("--set-limit=0=0", "device 0: no limit is above the 1024 MiB of"),
        ("--set-sm-limit=0=51", "device 0: 51 % is above the 50 % of"),
    ):
        done = run(node, tool, region, option, "--set-limit=0=1g")
        assert done.returncode != 0
        assert told in done.stderr
        assert region.read_bytes() == before
    done = run(node, tool, region, "--set-limit=0=1g", "--set-sm-limit=0=50")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("device 0: programs get 1024 MiB of memory from now on; ")
    assert lines[0].endswith(" allows 1024 MiB")
    assert lines[1].startswith("device 0: programs get 50 % of the cores from now on; ")
    assert lines[1].endswith(" allows 50 %")
    data = region.read_bytes()
    assert (layout.V1.limit.read(data), layout.V1.sm_limit.read(data)) == (1024 * MIB, 50)
    limits.write_text("GPU_CORE_UTILIZATION_POLICY=disable\n")
    assert "switches core limits off" in run(node, tool, region, "--set-sm-limit=0=20").stderr
    limits.unlink()
    limits.symlink_to(region)
    assert run(node, tool, region, "--set-limit=0=1m").returncode != 0
    assert region.read_bytes() == data


@pytest.mark.parametrize("tool", ["c", "python"])
def test_suspended_processes_wait_and_no_signal_is_sent(node: Node, tool: str) -> None:
    shell = node.shell().start()
    assert run(node, tool, node.region(), "--suspend").returncode == 0
    assert shown(node, tool, node.region())["processes"][0]["status"] == "suspended"
    assert run(node, tool, node.region(), "--resume").returncode == 0
    assert read_usage(node.region()) == {shell.process.pid: 0}
    shell.must("alloc 512")


@pytest.mark.parametrize("tool", ["c", "python"])
def test_what_killed_processes_left_is_cleared_and_the_living_are_not_touched(node: Node, tool: str) -> None:
    shells = [node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1g").start() for _ in range(4)]
    for shell in shells:
        shell.must(f"alloc {MIB}")
    for shell in shells:  # nobody sweeps meanwhile
        shell.process.send_signal(signal.SIGSTOP)
    for shell in shells[1:3]:
        shell.kill()
    slow = layout.EXTENSION_OFFSET + layout.Extension.slow.offset
    poke(node.region(), slow, (4711).to_bytes(4, "little"))
    assert shown(node, tool, node.region(), "--reclaim")["repaired"] == {
        "slots_cleared": 2,
        "flags_cleared": 1,
    }
    assert read_usage(node.region()) == {shells[0].process.pid: MIB, shells[3].process.pid: MIB}
    data = node.region().read_bytes()
    totals = [layout.Extension.totals.read(data, layout.EXTENSION_OFFSET, k) for k in range(4)]
    assert sorted(totals) == [0, 0, MIB, MIB]
    assert layout.Extension.claimed.read(data, layout.EXTENSION_OFFSET).bit_count() == 2
    for shell in (shells[0], shells[3]):
        shell.process.send_signal(signal.SIGCONT)
        shell.must(f"alloc {MIB}")


@pytest.mark.parametrize("options", ["--json", "--set-limit 0=5m", "--suspend", "--reclaim"])
def test_a_file_that_is_cut_and_grown_without_pause_is_survived_by_the_c_tool(
    node: Node, options: str
) -> None:
    node.shell().start().must(f"alloc {MIB}")
    path = node.directory / "cut.cache"
    content = bytearray(node.region().read_bytes())
    layout.V1.proc_num.write(content, layout.MAX_SLOTS)  # so that a change takes a while
    for word in range(layout.MAX_SLOTS // 64):
        layout.Extension.claimed.write(content, (1 << 64) - 1, layout.EXTENSION_OFFSET, word)
    path.write_bytes(content)
    stop = threading.Event()

    def cut() -> None:
        with path.open("r+b", buffering=0) as file:
            while not stop.is_set():
                for length in (0, 1700, layout.V1.SIZE, layout.EXTENSION_OFFSET + 10, 1 << 22):
                    file.truncate(length)
                    file.seek(0)
                    file.write(content)
                    file.truncate(len(content))

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        for _ in range(60):
            done = run(node, "c", path, *options.split())
            assert done.returncode in (0, 1, 2), (done.returncode, done.stderr)
            assert done.returncode == 0 or done.stderr.startswith(f"vgpu-region: {path}: ")
    finally:
        stop.set()
        cutter.join()


def test_a_region_is_made_anew_only_with_force_while_processes_live(node: Node) -> None:
    env = {"CUDA_DEVICE_MEMORY_LIMIT_0": "64m", "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(node.region())}
    shell = node.shell(extra=env).start()
    shell.must("kernel 1000")
    shell.must(f"alloc {MIB}")
    tool = str(node.build.directory / "vgpu-region")
    before = node.region().stat().st_ino
    assert subprocess.run([tool, "--create_new"], env=env, capture_output=True, check=False).returncode != 0
    assert node.region().stat().st_ino == before
    done = subprocess.run([tool, "--create_new", "--force"], env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr

    wait_until(lambda: has_moved(shell, node.region(), MIB))
    assert layout.V1.limit.read(node.region().read_bytes()) == 64 * MIB


def test_the_tool_names_itself_as_hami_s_does(node: Node) -> None:
    tool = str(node.build.directory / "shrreg-tool")
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "shrreg size: 2008952, version 1.2\n"
    assert (
        "--create_new" in subprocess.run([tool, "--help"], capture_output=True, text=True, check=True).stdout
    )
