"""Processes that allocate, free, launch, fork and are killed at random: the accounts equal the driver's.

`make stress` runs it with 64 processes for 60 s; `HAMI_STRESS_SECONDS` and `HAMI_STRESS_PROCESSES` choose.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from pathlib import Path

from vgpu_harness import MIB, Node, Shell, read_usage

from hami.protocol import region_layout as layout

SECONDS = float(os.environ.get("HAMI_STRESS_SECONDS", "5"))
PROCESSES = int(os.environ.get("HAMI_STRESS_PROCESSES", "24"))
ROUND_MS = 700
THREADS = 4
LARGEST = 3 * MIB
LIMIT_MIB = PROCESSES * 40
"""Small enough that requests are refused now and then."""


def worker(node: Node, number: int) -> Shell:
    errors = node.directory / f"worker-{number}"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [str(node.build.program("vgpu_stress")), str(THREADS), str(LARGEST)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
            env=node.environment(
                CUDA_DEVICE_MEMORY_LIMIT_0=f"{LIMIT_MIB}m", CUDA_DEVICE_SM_LIMIT="80", LIBCUDA_LOG_LEVEL="0"
            ),
        )  # fmt: skip
    shell = Shell(process, errors)
    node.shells.append(shell)
    return shell


def start_round(shell: Shell) -> None:
    assert shell.process.stdin is not None
    shell.process.stdin.write(f"run {ROUND_MS}\n")
    shell.process.stdin.flush()


def end_round(shell: Shell) -> None:
    """The worker is quiet, and the driver gave it no answer but success and out of memory."""
    assert shell.process.stdout is not None
    answer = shell.process.stdout.readline().split()
    assert answer[:1] == ["0"], f"unexpected results, the last one: {answer}"


def in_driver_units(node: Node) -> dict[int, int]:
    """Bytes by PID as the simulated driver counts them in our units."""
    return {
        process["pid"]: sum(on["unit_bytes"] for on in process["on"])
        for process in node.driver_state()["processes"]
    }


def admitted(region: Path) -> tuple[int, int]:
    """Sum of what admission counts, and of the attempts that are not decided."""
    data, mask = region.read_bytes(), layout.ATTEMPT_MASK
    count = layout.V1.proc_num.read(data)
    totals = [layout.Extension.totals.read(data, layout.EXTENSION_OFFSET, k) for k in range(count)]
    return sum(total & ~mask for total in totals), sum(total & mask for total in totals)


def test_the_accounts_equal_the_driver_s_at_every_quiet_point(node: Node) -> None:
    choose = random.Random(11)
    workers = [worker(node, number) for number in range(PROCESSES)]
    started, end = PROCESSES, time.monotonic() + SECONDS
    rounds = 0
    while time.monotonic() < end or rounds < 3:
        for shell in workers:
            start_round(shell)
        victims = choose.sample(workers, max(1, PROCESSES // 16))
        for victim in victims:
            time.sleep(choose.random() * ROUND_MS / 1000 / len(victims))
            victim.kill()
        workers = [shell for shell in workers if shell not in victims]
        for shell in workers:
            end_round(shell)
        used, driver = read_usage(node.region()), in_driver_units(node)
        pids = [shell.process.pid for shell in workers]
        assert {pid: used[pid] for pid in pids} == {pid: driver[pid] for pid in pids}
        total, _ = admitted(node.region())
        assert total >= sum(used[pid] for pid in pids)
        assert total <= LIMIT_MIB * MIB + PROCESSES * 32 * MIB  # a pool may overshoot by one step
        workers += [worker(node, started + number) for number in range(len(victims))]
        started += len(victims)
        rounds += 1
    for shell in workers:
        assert shell.leave() == 0, shell.stderr()
    last = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0=f"{LIMIT_MIB}m").start()
    last.must(f"alloc {LIMIT_MIB * MIB}")
    assert read_usage(node.region()) == {last.process.pid: LIMIT_MIB * MIB}
    assert admitted(node.region()) == (LIMIT_MIB * MIB, 0)


def test_a121_who_asks_for_what_fits_is_never_refused_and_who_asks_for_more_always(node: Node) -> None:
    """A121: as many askers for 1 MiB as there are free MiB, four that ask for one more, and kills."""
    choose = random.Random(5)
    env = {"CUDA_DEVICE_MEMORY_LIMIT_0": "16m", "LIBCUDA_LOG_LEVEL": "0"}
    end = time.monotonic() + SECONDS

    def asking(size: int, all_or_none: int) -> Shell:
        shell = node.shell(extra=env).start()
        assert shell.process.stdin is not None
        left_ms = max(1, int(1000 * (end - time.monotonic())))
        shell.process.stdin.write(f"slowest {left_ms} {size} {all_or_none}\n")
        shell.process.stdin.flush()
        return shell

    holder = node.shell(extra=env).start()
    holder.must(f"alloc {8 * MIB}")
    greedy = [asking(9 * MIB, 2) for _ in range(4)]
    modest = [asking(MIB, 1) for _ in range(8)]
    while time.monotonic() < end:
        time.sleep(0.05 + choose.random() * 0.1)
        modest.pop(choose.randrange(len(modest))).kill()
        modest.append(asking(MIB, 1))
    for shell in (*greedy, *modest):
        assert shell.process.stdout is not None
        assert shell.process.stdout.readline().split()[:1] == ["0"]
