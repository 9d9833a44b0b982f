"""Processes that are killed at any moment take nothing with them."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import struct
import time

from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, Node, read_usage

from hami.protocol import region_layout as layout

SLOW = layout.EXTENSION_OFFSET + layout.Extension.slow.offset


def test_kills_under_load_leave_the_accounts_in_order(node: Node) -> None:
    """A19, A78, small: the survivors finish and every byte can be had afterwards."""
    choose = random.Random(7)
    limit = 64 * MIB
    env = {"CUDA_DEVICE_MEMORY_LIMIT_0": "64m", "LIBCUDA_LOG_LEVEL": "0"}
    victims = []
    survivors = [node.shell(extra=env).start() for _ in range(2)]
    for shell in survivors:
        assert shell.process.stdin is not None
        shell.process.stdin.write(f"churn 4000 {4 * MIB}\n")
        shell.process.stdin.flush()
    for _ in range(25):
        victim = node.shell(extra=env)
        assert victim.process.stdin is not None
        victim.process.stdin.write(f"init\nretain 0\nchurn 60000 {4 * MIB}\n")
        victim.process.stdin.flush()
        victims.append(victim)
        time.sleep(choose.random() * 0.08)
        if len(victims) > 3:
            victims.pop(choose.randrange(len(victims))).kill()
    for victim in victims:
        victim.kill()
    for shell in survivors:
        assert shell.process.stdout is not None
        assert shell.process.stdout.readline().split()[0] == str(SUCCESS)
    survivors[0].must(f"alloc {limit}")
    assert survivors[1].ask("alloc 1")[0] == OUT_OF_MEMORY
    used = read_usage(node.region())
    assert used.pop(survivors[0].process.pid) == limit
    assert set(used.values()) == {0}  # a dead slot without memory waits for the next sweep
    data = node.region().read_bytes()
    assert layout.Extension.slow.read(data, layout.EXTENSION_OFFSET) == 0
    totals = [layout.Extension.totals.read(data, layout.EXTENSION_OFFSET, k) for k in range(64)]
    assert sorted(totals, reverse=True)[:2] == [limit, 0]


def test_a_stopped_process_delays_nobody_that_fits(node: Node) -> None:
    """A79: a stopped neighbour holds what it has and no more."""
    stopped = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    stopped.must(f"alloc {32 * MIB}")
    stopped.process.send_signal(signal.SIGSTOP)
    try:
        other.must(f"alloc {32 * MIB}")
        assert other.ask("alloc 1")[0] == OUT_OF_MEMORY
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    assert stopped.ask("alloc 1")[0] == OUT_OF_MEMORY


def test_a_request_that_fits_passes_a_holder_of_the_lock_who_does_not_go_on(node: Node) -> None:
    """7.2: stopped, or killed and not yet gone; who does not fit is refused in the end, nothing is added."""
    ofd_setlk = 37
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m", LIBCUDA_LOG_LEVEL="0").start()
    with node.region().open("r+b", buffering=0) as stream:
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, layout.LOCK_ADMISSION, 1, 0)
        fcntl.fcntl(stream, ofd_setlk, lock)
        os.pwrite(stream.fileno(), (1).to_bytes(4, "little"), SLOW)
        shell.must(f"alloc {32 * MIB}")
        assert shell.ask(f"alloc {33 * MIB}")[0] == OUT_OF_MEMORY
        shell.must(f"alloc {32 * MIB}")
    assert shell.ask("alloc 1")[0] == OUT_OF_MEMORY  # clears the word that the holder left
    assert layout.Extension.slow.read(node.region().read_bytes(), layout.EXTENSION_OFFSET) == 0
    assert read_usage(node.region()) == {shell.process.pid: 64 * MIB}


def test_children_forked_under_load_do_no_harm(node: Node) -> None:
    """14: the child has neither slot nor records, and no lock of the parent is copied."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="16m", LIBCUDA_LOG_LEVEL="0").start()
    shell.must("kernel 1000")
    assert shell.ask("forkstorm 150")[0] == SUCCESS
    assert read_usage(node.region()) == {shell.process.pid: 0}
