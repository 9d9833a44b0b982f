"""The whole library under sanitizers, preloaded into programs: a finding ends the program."""

from __future__ import annotations

import random
import subprocess
import time

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, Node, has_moved, read_usage, wait_until


@pytest.mark.parametrize("reach", ["link", "dlsym", "proc1", "proc2"])
def test_memory_calls(asan_node: Node, reach: str) -> None:
    choose = random.Random(3)
    shell = asan_node.shell(reach=reach, CUDA_DEVICE_MEMORY_LIMIT_0="256m").start()
    live: list[tuple[str, int]] = []
    kinds = [
        ("alloc {}", "free", 8 * MIB),
        ("managed {}", "free", 8 * MIB),
        ("async {}", "freeasync", 8 * MIB),
        ("array {} 700", "arraydestroy", 4096),
    ]
    for _ in range(400):
        if live and choose.random() < 0.45:
            free, pointer = live.pop(choose.randrange(len(live)))
            shell.must(f"{free} {pointer}")
        else:
            command, free, most = choose.choice(kinds)
            result, pointer, _ = shell.ask(command.format(choose.randint(1, most)))
            assert result in (SUCCESS, OUT_OF_MEMORY)
            if result == SUCCESS:
                live.append((free, pointer))
    for free, pointer in live:
        shell.must(f"{free} {pointer}")
    shell.must("sync")
    shell.ask("info")
    assert read_usage(asan_node.region()) == {shell.process.pid: 0}
    assert shell.leave() == 0


def test_virtual_memory_calls(asan_node: Node) -> None:
    shell = asan_node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="256m").start()
    ranges = []
    for _ in range(20):
        handle = shell.must(f"create {4 * MIB} 1 0")
        ranges.append(shell.must(f"map {4 * MIB} {handle}"))
        shell.must(f"hrelease {handle}")
    for address in ranges:
        shell.must(f"unmap {address} {4 * MIB}")
    assert read_usage(asan_node.region()) == {shell.process.pid: 0}
    assert shell.leave() == 0


def test_handles_that_leave_and_come_back(asan_node: Node) -> None:
    choose = random.Random(5)
    shell = asan_node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="256m").start()
    handles: list[int] = []
    ranges: list[int] = []
    for _ in range(300):
        what = choose.choice(["create", "copy", "map", "release", "release", "unmap"])
        if what == "create" and len(handles) < 20:
            handles.append(shell.must(f"create {4 * MIB} 1 0"))
        elif what == "copy" and handles:
            file = shell.must(f"export {choose.choice(handles)}")
            handles.append(shell.must(f"import {file} {choose.randrange(2)}"))
        elif what == "map" and handles:
            ranges.append(shell.must(f"map {4 * MIB} {choose.choice(handles)}"))
        elif what == "release" and handles:
            shell.must(f"hrelease {handles.pop(choose.randrange(len(handles)))}")
        elif what == "unmap" and ranges:
            shell.must(f"unmap {ranges.pop(choose.randrange(len(ranges)))} {4 * MIB}")
        used = asan_node.driver_state()["processes"][0]["on"][0]["unit_bytes"]
        assert read_usage(asan_node.region()) == {shell.process.pid: used}
    for handle in handles:
        shell.must(f"hrelease {handle}")
    for address in ranges:
        shell.must(f"unmap {address} {4 * MIB}")
    assert read_usage(asan_node.region()) == {shell.process.pid: 0}
    assert shell.leave() == 0


def test_launches_fork_and_reset(asan_node: Node) -> None:
    shell = asan_node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="256m", CUDA_DEVICE_SM_LIMIT="50").start()
    shell.must("kernel 20000")
    shell.must("launchfor 600 10 128")
    shell.must("sync")
    assert shell.ask(f"fork {MIB}")[0] == 3
    shell.must("reset 0")
    shell.must("retain 0")
    shell.must(f"alloc {MIB}")
    assert shell.leave() == 0


def test_nvml_and_a_shell(asan_node: Node) -> None:
    asan_node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="256m").start().must(f"alloc {MIB}")
    code = (
        "import pynvml; pynvml.nvmlInit(); card = pynvml.nvmlDeviceGetHandleByIndex(0);"
        "print(pynvml.nvmlDeviceGetMemoryInfo(card).used);"
        "print(len(pynvml.nvmlDeviceGetComputeRunningProcesses(card)))"
    )
    assert asan_node.python(code).split() == [str(MIB), "1"]
    assert asan_node.run("/bin/sh", "-c", "exit 3").returncode == 3


def test_threads_that_allocate_and_launch(tsan_node: Node) -> None:
    """Eight threads; at the end nothing is held and no race was seen."""
    shell = tsan_node.shell(
        CUDA_DEVICE_MEMORY_LIMIT_0="64m", CUDA_DEVICE_SM_LIMIT="50", LIBCUDA_LOG_LEVEL="0"
    ).start()
    shell.must("kernel 1000")
    shell.must(f"threads 8 1500 {4 * MIB}")
    assert read_usage(tsan_node.region()) == {shell.process.pid: 0}
    assert shell.leave() == 0
    assert shell.stderr() == ""


def move_under_load(node: Node) -> None:
    """The region is removed while threads allocate and launch: it is made again and nothing is lost."""
    shell = node.shell(
        CUDA_DEVICE_MEMORY_LIMIT_0="64m", CUDA_DEVICE_SM_LIMIT="50", LIBCUDA_LOG_LEVEL="0"
    ).start()
    kept = shell.must(f"alloc {MIB}")
    shell.must("kernel 1000")
    assert shell.process.stdin is not None
    assert shell.process.stdout is not None
    shell.process.stdin.write(f"threads 8 4000 {4 * MIB}\n")
    shell.process.stdin.flush()
    time.sleep(0.5)
    node.region().unlink()
    assert shell.process.stdout.readline().split()[0] == str(SUCCESS)

    wait_until(lambda: has_moved(shell, node.region(), MIB))
    shell.must(f"free {kept}")
    shell.must(f"alloc {64 * MIB}")
    assert shell.leave() == 0
    assert shell.stderr() == ""


def test_a_region_is_removed_under_load_asan(asan_node: Node) -> None:
    move_under_load(asan_node)


def test_a_region_is_removed_under_load_tsan(tsan_node: Node) -> None:
    move_under_load(tsan_node)


def stress(node: Node) -> None:
    """One worker of the stress test: every kind of memory, launches and forks from four threads."""
    done = subprocess.run(
        [str(node.build.program("vgpu_stress")), "4", str(3 * MIB)],
        input="run 1500\nrun 500\n", capture_output=True, text=True, timeout=60, check=False,
        env=node.environment(CUDA_DEVICE_MEMORY_LIMIT_0="80m", LIBCUDA_LOG_LEVEL="0"),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "0"]


def test_every_kind_of_call_at_once_asan(asan_node: Node) -> None:
    stress(asan_node)


def test_every_kind_of_call_at_once_tsan(tsan_node: Node) -> None:
    stress(tsan_node)


def test_a_full_card_and_residual_memory_asan(asan_node: Node) -> None:
    asan_node.settings["FAKEGPU_MODULE_KIB"] = "2048"
    shell = asan_node.shell(
        CUDA_OVERSUBSCRIBE="true", CUDA_DEVICE_MEMORY_LIMIT_0="20g", VGPU_CHARGE_RESIDUAL="charge"
    ).start()
    shell.must("kernel 1000")

    def charged() -> int:
        shell.must("launch 1 1 32")
        return read_usage(asan_node.region())[shell.process.pid]

    wait_until(lambda: charged() != 0)
    assert charged() == 2 * MIB
    shell.must(f"alloc {15 << 30}")
    block = shell.must(f"alloc {3 << 30}")
    shell.must(f"free {block}")
    shell.must("reset 0")
    assert shell.leave() == 0


def test_the_tool_asan(asan_node: Node) -> None:
    asan_node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start().ask(f"alloc {65 * MIB}")
    asan_node.shell().start().kill()
    tool = [str(asan_node.build.directory / "vgpu-region"), "--file", str(asan_node.region())]
    for options in (
        ["--print"],
        ["--json", "--explain"],
        ["--explain"],
        ["--reclaim"],
        ["--set-limit", "0=1g"],
    ):
        done = subprocess.run([*tool, *options], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
