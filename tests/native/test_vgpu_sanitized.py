"""The whole library under sanitizers, preloaded into programs: a finding ends the program."""

from __future__ import annotations

import random

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, Node, read_usage


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
