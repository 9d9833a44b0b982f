"""Acceptance cases of libvgpu.md §20 that no other file shows, by number."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, UNKNOWN, Node, Shell, read_usage, wait_until

from hami.protocol import region_layout as layout

F_OFD_SETLK = 37
EXTENSION = layout.EXTENSION_OFFSET
OWNER = """
def owner(at):
    for line in (line.split() for line in open("/proc/self/maps")):
        low, high = (int(x, 16) for x in line[0].split("-"))
        if low <= at < high:
            return line[-1].rsplit("/", 1)[-1]
    return None
"""


def poke(region: Path, offset: int, value: bytes) -> None:
    with region.open("r+b", buffering=0) as stream:
        stream.seek(offset)
        stream.write(value)


def send(shell: Shell, command: str) -> None:
    assert shell.process.stdin is not None
    shell.process.stdin.write(command + "\n")
    shell.process.stdin.flush()


def answer(shell: Shell) -> int:
    assert shell.process.stdout is not None
    return int(shell.process.stdout.readline().split()[0])


def test_a21_without_a_free_slot_a_process_is_counted_alone_against_the_sum(node: Node) -> None:
    first = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="256m").start()
    first.must(f"alloc {100 * MIB}")
    claimed = EXTENSION + layout.Extension.claimed.offset
    poke(node.region(), claimed, b"\xff" * (layout.MAX_SLOTS // 8))
    poke(node.region(), layout.V1.proc_num.offset, layout.MAX_SLOTS.to_bytes(4, "little"))
    with node.region().open("r+b") as stream:  # every slot has a living owner
        lock = struct.pack(
            "hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_SLOT + 1, layout.MAX_SLOTS - 1, 0
        )
        fcntl.fcntl(stream, F_OFD_SETLK, lock)
        late = node.shell().start()
        assert late.ask(f"alloc {157 * MIB}")[0] == OUT_OF_MEMORY
        late.must(f"alloc {156 * MIB}")
        assert read_usage(node.region()) == {first.process.pid: 100 * MIB}
        assert len([line for line in late.stderr().splitlines() if "slots of the region" in line]) == 1
        assert late.leave() == 0


def test_a29_functions_of_other_libraries_are_not_looked_at(node: Node) -> None:
    code = OWNER + (
        "import ctypes\n"
        "for name, library in (('cos', 'libm.so.6'), ('malloc', 'libc.so.6')):\n"
        "    print(owner(ctypes.cast(getattr(ctypes.CDLL(library), name), ctypes.c_void_p).value))\n"
    )
    assert node.python(code) == node.python(code, LD_PRELOAD="")
    assert not node.region().exists()


def test_a50_a_pool_is_charged_for_what_it_reserves(node: Node) -> None:
    node.settings["FAKEGPU_POOL_STEP_MIB"] = "64"
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="256m").start()
    first = shell.must(f"async {10 * MIB}")
    assert read_usage(node.region()) == {shell.process.pid: 64 * MIB}
    second = shell.must(f"async {20 * MIB}")
    assert read_usage(node.region()) == {shell.process.pid: 64 * MIB}
    for block in (first, second):
        shell.must(f"freeasync {block}")
    shell.must("sync")
    shell.ask("info")
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_a81_a_request_that_does_not_fit_takes_no_room_from_one_that_does(node: Node) -> None:
    env = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "LIBCUDA_LOG_LEVEL": "0"}
    holder, large, small = (node.shell(extra=env).start() for _ in range(3))
    holder.must(f"alloc {512 * MIB}")
    for _ in range(400):
        send(large, f"alloc {600 * MIB}")
        send(small, f"alloc {512 * MIB}")
        assert small.process.stdout is not None
        result, block, _ = small.process.stdout.readline().split()
        assert int(result) == SUCCESS
        assert answer(large) == OUT_OF_MEMORY
        small.must(f"free {block}")


def threads(shell: Shell) -> list[str]:
    names = []
    for task in Path(f"/proc/{shell.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return names


def test_a95_one_process_of_a_container_watches_and_another_takes_over(node: Node) -> None:
    shells = [node.shell().start() for _ in range(3)]
    wait_until(lambda: sum("vgpu-watch" in threads(shell) for shell in shells) == 1)
    (leader,) = [shell for shell in shells if "vgpu-watch" in threads(shell)]
    leader.kill()
    rest = [shell for shell in shells if shell is not leader]
    assert not any("vgpu-watch" in threads(shell) for shell in rest)
    for _ in range(64):
        rest[0].must(f"free {rest[0].must('alloc 512')}")

    def tick() -> int:
        return layout.Extension.tick.read(node.region().read_bytes(), EXTENSION)

    before = tick()

    def taken_over() -> bool:
        for _ in range(64):
            rest[0].must(f"free {rest[0].must('alloc 512')}")
        return tick() > before + 1

    wait_until(taken_over)
    assert ["vgpu-watch" in threads(shell) for shell in rest] == [True, False]


def test_a103_events_that_cannot_be_made_are_nobodys_problem(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_SM_LIMIT="10", FAKEGPU_FAULTS="cuEventCreate:*=2").start()
    shell.must("kernel 1000000")
    shell.must("launchfor 1500 10 128")
    data = node.region().read_bytes()
    assert layout.ExtensionSlot.flags.read(data, EXTENSION + layout.Extension.slots.offset) & (
        layout.SLOT_FLAG_NO_MARKERS
    )
    assert layout.ExtensionDevice.core_limit.read(data, EXTENSION + layout.Extension.devices.offset) == 10
    assert shell.stderr() == ""


LAUNCH = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def good(result):
    assert result == 0, result
context, module = ctypes.c_void_p(), ctypes.c_void_p()
good(cuda.cuInit(0))
good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
good(cuda.cuCtxSetCurrent(context))
good(cuda.cuModuleLoadData(ctypes.byref(module), b"image"))
def function(name):
    kernel = ctypes.c_void_p()
    good(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, name))
    return kernel
def launch(kernel, on=None, entry=cuda.cuLaunchKernel):
    good(entry(kernel, 10, 1, 1, 128, 1, 1, 0, on, None, None))
"""


def test_a104_a_kernel_that_waits_for_the_next_launch_is_no_dead_lock(node: Node) -> None:
    code = LAUNCH + (
        "waiting, work = function(b'wait_for_next'), function(b'spin_us_10')\n"
        "for _ in range(3):\n"
        "    launch(waiting)\n"
        "    launch(work)\n"
        "good(cuda.cuCtxSynchronize())\n"
        "print('done')\n"
    )
    assert node.python(code, CUDA_DEVICE_SM_LIMIT="10") == "done\n"


@pytest.mark.parametrize("entry", ["cuLaunchKernel", "cuLaunchKernel_ptsz"])
@pytest.mark.parametrize("user_stream", [True, False])
def test_a102_launches_on_any_stream_do_what_they_do_without_the_library(
    node: Node, entry: str, user_stream: bool
) -> None:
    """Markers go to the stream of the launch: what was launched is over when that stream is."""
    code = LAUNCH + (
        "import time\n"
        f"entry, user = cuda.{entry}, {user_stream}\n"
        "stream = ctypes.c_void_p()\n"
        "if user:\n"
        "    good(cuda.cuStreamCreate(ctypes.byref(stream), 1))\n"
        "kernel = function(b'spin_ms_20')\n"
        "for _ in range(3):\n"
        "    launch(kernel, stream if user else None, entry)\n"
        "good(cuda.cuStreamSynchronize(stream))\n"
        "print(cuda.cuStreamQuery(stream))\n"
    )
    assert node.python(code, CUDA_DEVICE_SM_LIMIT="50") == node.python(code, LD_PRELOAD="") == "0\n"
    assert node.engine_ns()["a"] == 2 * 3 * 20_000_000


def test_a105_the_legacy_flag_gives_the_same_functions_as_none(node: Node) -> None:
    code = OWNER + (
        "import ctypes, json\n"
        "cuda = ctypes.CDLL('libcuda.so.1')\n"
        "rows = []\n"
        f"for name, version in json.loads({json.dumps(json.dumps(hooked_versions()))}):\n"
        "    found = []\n"
        "    for flags in (0, 1):\n"
        "        at, status = ctypes.c_void_p(), ctypes.c_int(-1)\n"
        "        result = cuda.cuGetProcAddress_v2(name.encode(), ctypes.byref(at), version,\n"
        "                                          ctypes.c_uint64(flags), ctypes.byref(status))\n"
        "        found.append((result, status.value, at.value))\n"
        "    rows.append((name, version, found[0] == found[1], found[0][0], owner(found[0][2] or 0)))\n"
        "print(json.dumps(rows))\n"
    )
    rows = json.loads(node.python(code, FAKEGPU_CUDA_VERSION="13990"))
    assert [row[:2] for row in rows if not row[2]] == []
    assert {row[4] for row in rows if row[3] == 0} == {"libvgpu.so"}
    assert sum(row[3] == 0 for row in rows) > 40


def hooked_versions() -> list[tuple[str, int]]:
    """Name and version of every CUDA hook."""
    import tomllib

    text = (Path(__file__).resolve().parents[2] / "native/vgpu/hooks.toml").read_text()
    return [
        (hook["base"], variant["version"])
        for hook in tomllib.loads(text)["hook"]
        for variant in hook["variants"]
        if "version" in variant and hook["base"].startswith("cu")
    ]


def test_a107_a_driver_is_recognised_by_its_own_name_not_by_the_files(node: Node, tmp_path: Path) -> None:
    other = tmp_path / "driver-of-the-day.so"
    other.write_bytes((node.build.driver / "libcuda.so.1").read_bytes())
    source = tmp_path / "helper.c"
    source.write_text("int cuMemAlloc_v2(void) { return 4711; }\n")
    helper = tmp_path / "libcuda.so.1.helper"
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libhelper.so", str(source), "-o", str(helper)]
    subprocess.run(command, check=True)
    code = OWNER + (
        "import ctypes\n"
        f"for path in ({str(helper)!r}, {str(other)!r}):\n"
        "    at = ctypes.cast(ctypes.CDLL(path).cuMemAlloc_v2, ctypes.c_void_p).value\n"
        "    print(owner(at))\n"
    )
    assert node.python(code).split() == [helper.name, "libvgpu.so"]


def test_a110_a_child_of_a_raw_system_call_leaves_its_parent_alone(node: Node) -> None:
    code = LAUNCH + (
        "import os\n"
        "block = ctypes.c_uint64()\n"
        "good(cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20)))\n"
        "child = ctypes.CDLL(None).syscall(57)  # fork, without the handlers of libc\n"
        "if child == 0:\n"
        "    cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20))\n"
        "    cuda.cuMemFree_v2(block)\n"
        "    ctypes.CDLL(None).exit(0)  # destructors run\n"
        "status = os.waitpid(child, 0)[1]\n"
        "print(os.getpid(), status, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=node.environment(CUDA_DEVICE_MEMORY_LIMIT_0="64m"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        pid, status = (int(word) for word in process.stdout.readline().split())
        assert status == 0
        assert read_usage(node.region())[pid] == MIB
        assert layout.V1Slot.pid.read(node.region().read_bytes(), layout.V1.procs.base(0)) == pid
    finally:
        process.communicate("\n")


@pytest.mark.parametrize(("age_s", "waits"), [(31, False), (5, True), (None, True)])
def test_a112_a_block_is_obeyed_while_the_monitor_lives(node: Node, age_s: int | None, waits: bool) -> None:
    """monitor.md 57: without a heartbeat for 30 s a blocked container goes on. None: no monitor of ours."""
    shell = node.shell().start()
    shell.must("kernel 1000")
    shell.must("launch 1 1 32")
    heartbeat = 0 if age_s is None else int(time.time()) - age_s
    offset = EXTENSION + layout.Extension.heartbeat.offset
    poke(node.region(), offset, heartbeat.to_bytes(8, "little"))
    poke(node.region(), layout.V1.recent_kernel.offset, (-1).to_bytes(4, "little", signed=True))
    send(shell, "launch 1 1 32")
    if waits:
        slot = EXTENSION + layout.Extension.slots.offset
        wait_until(
            lambda: bool(
                layout.ExtensionSlot.flags.read(node.region().read_bytes(), slot)
                & layout.SLOT_FLAG_PRIORITY_BLOCKED
            )
        )
        poke(node.region(), layout.V1.recent_kernel.offset, bytes(4))
    assert answer(shell) == SUCCESS


def test_a118_sizes_near_the_end_of_the_numbers_never_lower_the_total(node: Node) -> None:
    env = {"CUDA_DEVICE_MEMORY_LIMIT_0": "1g", "LIBCUDA_LOG_LEVEL": "0"}
    holder, absurd, honest = (node.shell(extra=env).start() for _ in range(3))
    holder.must(f"alloc {512 * MIB}")
    for index in range(300):
        send(absurd, f"alloc {(2**64 - 1, 2**64 - 2**30, 2**63)[index % 3]}")
        send(honest, f"alloc {600 * MIB}")
        data = node.region().read_bytes() if index % 20 == 0 else b""
        assert answer(absurd) == OUT_OF_MEMORY
        assert answer(honest) == OUT_OF_MEMORY
        if data:
            total = sum(layout.Extension.totals.read(data, EXTENSION, slot) for slot in range(3))
            assert total & ~layout.ATTEMPT_MASK >= 512 * MIB


def test_a123_a_flag_left_by_a_killed_holder_is_cleared_by_the_next(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    offset = EXTENSION + layout.Extension.slow.offset
    poke(node.region(), offset, (4_000_000).to_bytes(4, "little"))
    shell.must(f"alloc {MIB}")
    assert layout.Extension.slow.read(node.region().read_bytes(), EXTENSION) == 0


def test_a24_a_region_of_another_user_is_refused(node: Node) -> None:
    """Outside of a directory that the host mounted; only root can make such a file."""
    region = node.region()
    region.parent.mkdir()
    region.write_bytes(b"")
    if os.geteuid() != 0:
        assert region.stat().st_uid == os.geteuid()
        return
    os.chown(region, 1001, 1001)
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m")
    assert shell.ask("init")[0] == UNKNOWN
    assert len([line for line in shell.stderr().splitlines() if "belongs to another user" in line]) == 1
    assert region.read_bytes() == b""


@pytest.mark.parametrize("rate", [100_000, 300_000])
def test_a98_a_storm_of_tiny_kernels_on_an_idle_card_is_not_slowed(node: Node, rate: int) -> None:
    """What the events measure is charged, about nothing. The storm keeps its rate by pauses.

    One that is charged too much waits for nearly all of the three seconds. On a busy machine short
    interruptions of a measured launch count as its cost, and the program waits now and then.
    """
    code = LAUNCH + (
        "import time\n"
        "kernel, call = function(b'spin_ns_100'), cuda.cuLaunchKernel\n"
        "def storm(seconds):\n"
        "    end = time.monotonic() + seconds\n"
        "    due = time.monotonic()\n"
        "    while due < end:\n"
        f"        for _ in range({rate // 1000}):\n"
        "            call(kernel, 1, 1, 1, 32, 1, 1, 0, None, None, None)\n"
        "        due = max(due + 0.001, time.monotonic() - 0.001)\n"
        "        time.sleep(max(0.0, due - time.monotonic()))\n"
        "storm(5)\n"
        "print('warm', flush=True)\n"
        "sys.stdin.readline()\n"
        "storm(3)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=node.environment(CUDA_DEVICE_SM_LIMIT="10"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    device = EXTENSION + layout.Extension.devices.offset

    def throttled() -> int:
        return layout.ExtensionDevice.throttled.read(node.region().read_bytes(), device)

    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "warm\n"
        before = throttled()
    finally:
        process.communicate("\n")
    assert throttled() - before < 1_500_000_000


def test_a100_events_stay_within_their_budget(node: Node, tmp_path: Path) -> None:
    """A thousand functions, then very many launches of one: few events, each measured launch has two."""
    log = tmp_path / "calls"
    code = LAUNCH + (
        "for index in range(1000):\n"
        "    launch(function(f'spin_us_1_{index}'.encode()))\n"
        "kernel = function(b'spin_ns_500')\n"
        "for _ in range(50000):\n"
        "    launch(kernel)\n"
        "good(cuda.cuCtxSynchronize())\n"
    )
    node.python(code, CUDA_DEVICE_SM_LIMIT="90", FAKEGPU_CALL_LOG=str(log))
    calls = [line.split()[3] for line in log.read_text().splitlines()]
    assert calls.count("cuEventCreate") <= 16
    assert 2 <= calls.count("cuEventRecord") < 51_000 * 2 / 20
    open_now = most = 0
    for name in calls:
        open_now += (name == "cuEventRecord") - 2 * (name == "cuEventElapsedTime")
        most = max(most, open_now)
    assert most <= 2 * 8


def test_a108_a_program_of_an_old_glibc_reaches_our_dlsym(node: Node, tmp_path: Path) -> None:
    """Built against glibc before 2.34 a program asks for dlsym of version GLIBC_2.2.5."""
    source = tmp_path / "old.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n"
        'extern void *old_dlsym(void *, const char *);\n__asm__(".symver old_dlsym,dlsym@GLIBC_2.2.5");\n'
        "int main(void) {\n"
        '    void *library = dlopen("libcuda.so.1", RTLD_NOW);\n'
        "    Dl_info info;\n"
        '    if (library == 0 || dladdr(old_dlsym(library, "cuMemAlloc_v2"), &info) == 0)\n'
        "        return 1;\n"
        "    return puts(info.dli_fname) < 0;\n}\n"
    )
    program = tmp_path / "old"
    subprocess.run(["gcc", "-o", str(program), str(source), "-ldl"], check=True)
    done = node.run(str(program))
    assert (done.returncode, done.stdout.strip()) == (0, str(node.build.libvgpu))


def test_a119_a_process_that_allocates_while_it_exits_stays_counted_to_its_end(
    node: Node, tmp_path: Path
) -> None:
    """One thread goes on while the main thread is in exit(), where a destructor behind ours takes time."""
    source, slow = tmp_path / "slow.c", tmp_path / "slow.so"
    gone = tmp_path / "gone"
    source.write_text(
        "#include <unistd.h>\n__attribute__((destructor)) static void wait_long(void) {\n"
        f'    for (int i = 0; i < 6000 && access("{gone}", F_OK) != 0; i++) usleep(10000);\n}}\n'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(slow)], check=True)
    code = LAUNCH + (
        "import threading\n"
        "held, block = ctypes.c_uint64(), ctypes.c_uint64()\n"
        "good(cuda.cuMemAlloc_v2(ctypes.byref(held), ctypes.c_size_t(512 << 20)))\n"
        "def work():\n"
        "    cuda.cuCtxSetCurrent(context)\n"
        "    while True:\n"
        "        if cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(1 << 20)) == 0:\n"
        "            cuda.cuMemFree_v2(block)\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "ctypes.CDLL(None).exit(0)\n"
    )
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1g", LIBCUDA_LOG_LEVEL="0").start()
    env = node.environment()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**env, "LD_PRELOAD": f"{env['LD_PRELOAD']}:{slow}"},  # ends behind us
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    node.shells.append(Shell(process, tmp_path / "none"))
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    assert read_usage(node.region())[process.pid] >= 512 * MIB
    process.stdin.write("\n")
    process.stdin.flush()
    wait_until(lambda: process.pid not in read_usage(node.region()))
    during = []
    for _ in range(50):
        totals = layout.Extension.totals.read(node.region().read_bytes(), EXTENSION, 1)
        during.append((other.ask(f"alloc {1024 * MIB}")[0], totals >= 512 * MIB))
    assert process.poll() is None
    gone.touch()
    assert set(during) == {(OUT_OF_MEMORY, True)}
    process.communicate()
    other.must(f"alloc {1024 * MIB}")
