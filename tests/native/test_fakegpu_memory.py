"""The simulated card's memory: bounds, sharing between processes, what the dead leave."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakegpu_harness import MIB, Cards, wait_until


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    made = Cards(tmp_path / "s", devices=2, memory_mib=4096, reserved_mib=96, context_mib=100)
    yield made
    made.close()


def free_mib(cards: Cards, device: int = 0) -> int:
    """Free memory as a new process sees it, its own context included."""
    (result,) = cards.run("--device", str(device), "meminfo")
    assert result["total_bytes"] == 4096 * MIB
    return int(result["free_bytes"]) // MIB


def test_free_memory_is_total_less_reserve_and_contexts(cards: Cards) -> None:
    assert free_mib(cards) == 4096 - 96 - 100


def test_an_allocation_that_fills_the_card_exactly_succeeds(cards: Cards) -> None:
    assert cards.run("alloc", "3900")[0]["result"] == 0


def test_an_allocation_beyond_free_memory_is_out_of_memory_and_says_so(cards: Cards) -> None:
    done = cards.attempt("alloc", "3901")
    assert done.returncode == 1
    assert '"result": 2, "error": "CUDA_ERROR_OUT_OF_MEMORY"' in done.stdout
    assert "out of memory" in done.stderr


def test_memory_of_one_process_is_missing_to_another_on_the_same_card_only(cards: Cards) -> None:
    holder = cards.start("alloc", "1000", "--hold", "60")
    assert cards.first(holder)["result"] == 0
    assert free_mib(cards, 0) == 4096 - 96 - 2 * 100 - 1000
    assert free_mib(cards, 1) == 4096 - 96 - 100


def test_a_killed_process_gives_everything_back(cards: Cards) -> None:
    holder = cards.start("alloc", "3000", "--hold", "60")
    assert cards.first(holder)["result"] == 0
    holder.kill()
    holder.wait()
    assert cards.run("alloc", "3900")[0]["result"] == 0


def test_two_state_paths_share_nothing(cards: Cards, tmp_path: Path) -> None:
    other = Cards(tmp_path / "t", devices=2, memory_mib=4096, reserved_mib=96, context_mib=100)
    holder = cards.start("alloc", "1000", "--hold", "60")
    assert cards.first(holder)["result"] == 0
    assert free_mib(other) == 4096 - 96 - 100


def test_the_touched_memory_holds_what_was_written(cards: Cards) -> None:
    calls = [line["call"] for line in cards.run("alloc", "8", "--touch")]
    assert calls == ["cuMemAlloc", "cuMemsetD8", "cuMemFree"]


def test_units_are_counted_to_512_bytes_beside_granules_of_2_mib(cards: Cards) -> None:
    result = cards.python(
        """
        import json, subprocess, os
        from cuda.bindings import driver as d
        d.cuInit(0); c = d.cuDevicePrimaryCtxRetain(0)[1]; d.cuCtxSetCurrent(c)
        for size in (1, 512, 513):
            assert d.cuMemAlloc(size)[0] == 0
        assert d.cuMemAlloc(3 * 1024 * 1024 + 1)[0] == 0
        stream = d.cuStreamCreate(0)[1]
        assert d.cuMemAllocAsync(1, stream)[0] == 0
        print(subprocess.run([os.environ["PROGRAM"], "stat"], check=True, capture_output=True, text=True,
                             env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}).stdout)
        """,
        PROGRAM=cards.programs / "fakegpud",
    )
    (process,) = result["processes"]
    (account,) = process["on"]
    assert account["data_bytes"] == 512 + 512 + 1024 + 3 * MIB + 512
    assert account["pool_bytes"] == 32 * MIB
    assert account["context_bytes"] == 100 * MIB
    assert account["unit_bytes"] == account["data_bytes"] + 132 * MIB
    assert account["physical_bytes"] == 2 * MIB + 4 * MIB + 132 * MIB
    assert result["cards"][0]["used_bytes"] == account["physical_bytes"]


def test_many_processes_that_are_killed_leave_nothing(cards: Cards) -> None:
    holders = [cards.start("alloc", "16", "--hold", "60") for _ in range(8)]
    for holder in holders:
        assert cards.first(holder)["result"] == 0
    for holder in holders:
        holder.kill()
    for holder in holders:
        holder.wait()
    state = cards.stat()
    assert state["processes"] == []
    assert state["cards"][0]["used_bytes"] == 0


def test_a_forked_child_starts_afresh_and_leaves_its_parent_alone(cards: Cards) -> None:
    result = cards.python(
        """
        import json, os
        from cuda.bindings import driver as d
        def start():
            assert d.cuInit(0)[0] == 0
            c = d.cuDevicePrimaryCtxRetain(0)[1]; d.cuCtxSetCurrent(c)
        start()
        assert d.cuMemAlloc(1 << 30)[0] == 0
        child = os.fork()
        if child == 0:
            before = int(d.cuCtxGetDevice()[0])
            start()
            ok = before == 3 and d.cuMemAlloc(1 << 30)[0] == 0
            os._exit(0 if ok else 1)
        status = os.waitpid(child, 0)[1]
        free, total = d.cuMemGetInfo()[1:]
        print(json.dumps([status, (total - free) >> 20]))
        """
    )
    assert result == [0, 96 + 100 + 1024]


def test_the_daemon_gives_back_what_a_dead_process_held_by_itself(cards: Cards) -> None:
    daemon = cards.start("serve", program="fakegpud")
    assert cards.first(daemon)["ready"] is True
    holder = cards.start("alloc", "1000", "--hold", "60")
    assert cards.first(holder)["result"] == 0
    holder.kill()
    holder.wait()
    # `locks` proves death to whoever looks; here nobody but the daemon does.
    wait_until(lambda: (cards.stat()["cards"][0]["used_bytes"]) == 0, "memory back")


CHURN = """
from cuda.bindings import driver as d
d.cuInit(0); d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
f = d.cuModuleGetFunction(d.cuModuleLoadData(b"x")[1], b"spin_us_20")[1]
while True:
    p, q = d.cuMemAlloc(1000)[1], d.cuMemAlloc(3 << 20)[1]
    d.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    d.cuMemFree(p); d.cuMemFree(q)
"""


def test_processes_killed_at_any_instant_neither_block_nor_leak(cards: Cards) -> None:
    chance = random.Random(7)
    running = [cards.start_python(CHURN) for _ in range(3)]
    for _ in range(30):
        time.sleep(chance.uniform(0.05, 0.2))
        victim = chance.randrange(len(running))
        running[victim].kill()
        running[victim].wait()
        running[victim] = cards.start_python(CHURN)
    wait_until(lambda: len(cards.stat()["processes"]) == 3, "three of them at work")
    assert cards.run("alloc", "64")[0]["result"] == 0
    cards.close()
    state = cards.stat()
    assert state["processes"] == []
    assert state["cards"][0]["used_bytes"] == 0
    assert state["containers"][0]["engine_ns"][0] > 0
