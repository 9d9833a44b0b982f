"""Memory limits of libvgpu.so on the simulated driver (A<n>: acceptance cases of libvgpu)."""

from __future__ import annotations

import random
import signal

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, SUCCESS, Node, read_usage, wait_until

GIB = 1024 * MIB


@pytest.mark.parametrize("reach", ["link", "dlsym", "proc1", "proc2"])
def test_over_the_limit_is_refused_however_the_driver_is_reached(node: Node, reach: str) -> None:
    """A1, A2."""
    shell = node.shell(reach=reach, CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    assert shell.ask(f"alloc {GIB + 1}") == (OUT_OF_MEMORY, 77, 0)
    shell.must(f"alloc {GIB}")
    assert read_usage(node.region()) == {shell.process.pid: GIB}
    assert shell.ask("alloc 1")[0] == OUT_OF_MEMORY
    assert "request 1 refused" in shell.stderr()


def test_freed_memory_can_be_used_again(node: Node) -> None:
    """A3."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    blocks = [shell.must(f"alloc {256 * MIB}") for _ in range(4)]
    assert shell.ask(f"alloc {256 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"free {blocks[1]}")
    shell.must(f"alloc {256 * MIB}")
    assert read_usage(node.region()) == {shell.process.pid: GIB}


def test_a_neighbour_in_another_container_keeps_working(node: Node) -> None:
    greedy = node.shell("a", CUDA_DEVICE_MEMORY_LIMIT_0="512m").start()
    other = node.shell("b", CUDA_DEVICE_MEMORY_LIMIT_0="2048m").start()
    assert greedy.ask(f"alloc {GIB}")[0] == OUT_OF_MEMORY
    other.must(f"alloc {GIB}")
    assert greedy.ask(f"alloc {512 * MIB}")[0] == SUCCESS
    assert other.ask("info")[1:] == (GIB, 2 * GIB)


def test_two_processes_share_the_limit_of_their_container(node: Node) -> None:
    first = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    second = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    first.must(f"alloc {600 * MIB}")
    assert second.ask(f"alloc {600 * MIB}")[0] == OUT_OF_MEMORY
    second.must(f"alloc {424 * MIB}")
    assert sum(read_usage(node.region()).values()) == GIB


def test_the_first_process_sets_the_limit_of_the_container(node: Node) -> None:
    """A7: a joiner's own variables are only logged, at info level."""
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    joiner = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="4g", LIBCUDA_LOG_LEVEL="1").start()
    assert joiner.ask("info")[2] == GIB
    assert joiner.stderr() == ""


def test_memory_of_a_killed_process_is_given_back_at_the_next_request(node: Node) -> None:
    """A16."""
    holder = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    holder.must(f"alloc {GIB}")
    holder.process.send_signal(signal.SIGKILL)
    holder.process.wait()
    other.must(f"alloc {512 * MIB}")
    assert read_usage(node.region()) == {other.process.pid: 512 * MIB}


def test_memory_of_a_killed_process_disappears_without_any_request(node: Node) -> None:
    """A17: the leader clears the slot."""
    leader = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    holder = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    holder.must(f"alloc {GIB}")
    holder.kill()
    wait_until(lambda: holder.process.pid not in read_usage(node.region()))
    assert read_usage(node.region()) == {leader.process.pid: 0}


def test_slots_of_others_stay_where_they_are_when_a_process_exits(node: Node) -> None:
    """A15."""
    shells = [node.shell().start() for _ in range(3)]
    for shell in shells:
        shell.must(f"alloc {100 * MIB}")
    assert list(read_usage(node.region())) == [s.process.pid for s in shells]
    assert shells[1].leave() == 0
    assert read_usage(node.region()) == {
        shells[0].process.pid: 100 * MIB,
        shells[2].process.pid: 100 * MIB,
    }


def test_zero_means_no_limit_for_that_device_and_no_message(node: Node) -> None:
    """A5."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="0m", CUDA_DEVICE_MEMORY_LIMIT="1g").start()
    shell.must(f"alloc {2 * GIB}")
    assert read_usage(node.region()) == {shell.process.pid: 2 * GIB}
    assert shell.stderr() == ""


@pytest.mark.parametrize(
    ("text", "limit", "lines"),
    [("1Gi", GIB, 0), ("1.5g", GIB * 3 // 2, 0), ("010m", 10 * MIB, 0), ("abc", 16 * GIB, 1)],
)
def test_sizes_are_read_as_written(node: Node, text: str, limit: int, lines: int) -> None:
    """A6, A89."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0=text).start()
    assert shell.must("total 0") == min(limit, shell.must("total 0"))
    assert shell.ask("info")[2] == limit or lines == 1
    assert len(shell.stderr().splitlines()) == lines


def test_a_bad_value_gives_way_to_the_unsuffixed_one(node: Node) -> None:
    """A89."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="abc", CUDA_DEVICE_MEMORY_LIMIT="1g").start()
    assert shell.ask("info")[2] == GIB
    assert len(shell.stderr().splitlines()) == 1


def test_limits_go_to_their_devices(node: Node) -> None:
    """A4."""
    node.settings["FAKEGPU_DEVICES"] = "2"
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT="2g", CUDA_DEVICE_MEMORY_LIMIT_1="512m").start(1)
    assert shell.must("total 0") == 2 * GIB
    assert shell.must("total 1") == 512 * MIB
    assert shell.ask(f"alloc {513 * MIB}")[0] == OUT_OF_MEMORY
    shell.must("retain 0")
    shell.must(f"alloc {513 * MIB}")


def test_limits_follow_the_allocation_order_by_uuid(node: Node) -> None:
    """A70, A91: entry i of HAMI_DEVICE_UUIDS has limit i, whatever order the driver has."""
    first, second = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
    node.settings |= {"FAKEGPU_DEVICES": "2", "FAKEGPU_UUIDS": f"{first},{second}"}
    shell = node.shell(
        HAMI_DEVICE_UUIDS=f"{second},{first}",
        CUDA_DEVICE_MEMORY_LIMIT_0="1g",
        CUDA_DEVICE_MEMORY_LIMIT_1="2g",
    ).start()
    assert shell.must("total 0") == 2 * GIB
    assert shell.must("total 1") == GIB


def test_managed_memory_counts(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    block = shell.must(f"managed {64 * MIB}")
    assert shell.ask("managed 1")[0] == OUT_OF_MEMORY
    shell.must(f"free {block}")
    shell.must(f"managed {64 * MIB}")


def test_pitched_memory_counts_with_its_pitch(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    result, pointer, pitch = shell.ask("pitch 1000 1024")
    assert result == SUCCESS
    assert read_usage(node.region()) == {shell.process.pid: pitch * 1024}
    assert shell.ask(f"pitch {64 * MIB} 2")[0] == OUT_OF_MEMORY
    shell.must(f"free {pointer}")
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_a_pitch_that_overflows_is_refused(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert shell.ask(f"pitch {2**63} {2**40}")[0] == OUT_OF_MEMORY


@pytest.mark.parametrize("size", [2**64 - 1, 2**63, 2**46])
def test_a_size_near_the_end_of_the_numbers_is_refused(node: Node, size: int) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert shell.ask(f"alloc {size}")[0] == OUT_OF_MEMORY
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_stream_ordered_memory_is_charged_by_pool(node: Node) -> None:
    """A51: over the limit is 2."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="256m").start()
    block = shell.must(f"async {10 * MIB}")
    charged = read_usage(node.region())[shell.process.pid]
    assert 10 * MIB <= charged <= 64 * MIB
    assert shell.ask(f"async {512 * MIB}")[0] == OUT_OF_MEMORY
    shell.must(f"freeasync {block}")
    shell.must("sync")
    assert shell.ask("info")[1] == 256 * MIB
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_plain_memory_can_be_freed_in_stream_order(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    block = shell.must(f"alloc {64 * MIB}")
    shell.must(f"freeasync {block}")
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_physical_memory_is_charged_until_handle_and_mapping_are_gone(node: Node) -> None:
    """A48."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    handle = shell.must(f"create {64 * MIB} 1 0")
    assert shell.ask(f"create {2 * MIB} 1 0")[0] == OUT_OF_MEMORY
    address = shell.must(f"map {64 * MIB} {handle}")
    shell.must(f"hrelease {handle}")
    assert shell.ask(f"create {2 * MIB} 1 0")[0] == OUT_OF_MEMORY
    shell.must(f"unmap {address} {64 * MIB}")
    assert read_usage(node.region()) == {shell.process.pid: 0}
    shell.must(f"create {64 * MIB} 1 0")


@pytest.mark.parametrize("reach", ["link", "proc2"])
def test_an_own_export_that_comes_back_keeps_the_memory_charged(node: Node, reach: str) -> None:
    """The memory lives as long as any of its handles and mappings, in whatever order they go."""
    shell = node.shell(reach=reach, CUDA_DEVICE_MEMORY_LIMIT_0="96m").start()
    for order in ("original first", "copy first", "mapped copy"):
        original = shell.must(f"create {64 * MIB} 1 0")
        other = shell.must(f"create {16 * MIB} 1 0")
        files = [shell.must(f"export {handle}") for handle in (other, original)]
        copy = shell.must(f"import {files[1]} {int(order == 'copy first')}")
        assert read_usage(node.region()) == {shell.process.pid: 80 * MIB}
        assert shell.ask(f"create {32 * MIB} 1 0")[0] == OUT_OF_MEMORY
        address = shell.must(f"map {64 * MIB} {copy}") if order == "mapped copy" else 0
        handles = [copy, original] if order == "copy first" else [original, copy]
        shell.must(f"hrelease {handles[0]}")
        assert shell.ask(f"create {32 * MIB} 1 0")[0] == OUT_OF_MEMORY, order
        shell.must(f"hrelease {handles[1]}")
        if address:
            assert shell.ask(f"create {32 * MIB} 1 0")[0] == OUT_OF_MEMORY, order
            shell.must(f"unmap {address} {64 * MIB}")
        assert read_usage(node.region()) == {shell.process.pid: 16 * MIB}, order
        (process,) = node.driver_state()["processes"]
        assert process["on"][0]["unit_bytes"] == 16 * MIB, order
        shell.must(f"hrelease {other}")
        assert read_usage(node.region()) == {shell.process.pid: 16 * MIB}, "its file keeps it"
        shell.must(f"closefile {files[0]}")
        shell.must("info")
        assert read_usage(node.region()) == {shell.process.pid: 0}


def test_memory_that_only_a_file_keeps_stays_charged(node: Node) -> None:
    """cuMemRelease: the memory goes when its shareable counterparts are gone too."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    for first_again in (True, False):
        handle = shell.must(f"create {48 * MIB} 1 0")
        files = [shell.must(f"export {handle}") for _ in range(2)]
        shell.must(f"hrelease {handle}")
        assert shell.ask(f"create {32 * MIB} 1 0")[0] == OUT_OF_MEMORY
        if first_again:
            copy = shell.must(f"import {files[0]}")
            shell.must(f"closefile {files[1]}")
            assert shell.ask(f"create {32 * MIB} 1 0")[0] == OUT_OF_MEMORY
            shell.must(f"hrelease {copy}")
        else:
            for file in files:
                shell.must(f"closefile {file}")
        shell.must(f"hrelease {shell.must(f'create {64 * MIB} 1 0')}")
    assert read_usage(node.region()) == {shell.process.pid: 0}


@pytest.mark.parametrize("at_once", [False, True])
def test_more_exports_than_marks_lose_no_byte(node: Node, at_once: bool) -> None:
    shell = node.shell().start()
    originals = [shell.must(f"create {2 * MIB * (1 + each % 3)} 1 0") for each in range(150)]
    copies = []
    if at_once:
        files = [shell.must(f"export {original}") for original in originals]
        copies = [shell.must(f"import {file}") for file in files]
    for original in originals:
        if not at_once:
            copies.append(shell.must(f"import {shell.must(f'export {original}')} 1"))
        shell.must(f"hrelease {original}")
    assert read_usage(node.region()) == {shell.process.pid: 600 * MIB}
    for copy in copies:
        shell.must(f"hrelease {copy}")
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_physical_memory_counts_on_the_device_it_names(node: Node) -> None:
    """A47."""
    node.settings["FAKEGPU_DEVICES"] = "2"
    shell = node.shell().start(0)
    shell.must(f"create {64 * MIB} 1 1")
    assert read_usage(node.region(), 0) == {shell.process.pid: 0}
    assert read_usage(node.region(), 1) == {shell.process.pid: 64 * MIB}


def test_arrays_count(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    array = shell.must("array 4096 4096")
    assert shell.ask("array 64 64")[0] == OUT_OF_MEMORY
    shell.must(f"arraydestroy {array}")
    shell.must("array 64 64")
    assert read_usage(node.region()) == {shell.process.pid: 65536}


def test_free_memory_is_never_more_than_the_card_has(node: Node) -> None:
    """A39: a neighbour's use is not promised twice."""
    shell = node.shell("a", CUDA_DEVICE_MEMORY_LIMIT_0="4g").start()
    shell.must(f"alloc {GIB}")
    assert shell.ask("info")[1:] == (3 * GIB, 4 * GIB)
    neighbour = node.shell("b").start()
    free = neighbour.ask("info")[1]
    neighbour.must(f"alloc {free - 2 * GIB}")
    assert shell.ask("info")[1:] == (2 * GIB, 4 * GIB)


def test_memory_info_accepts_a_null_pointer(node: Node) -> None:
    """A41."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1g").start()
    assert shell.ask("infonull") == (SUCCESS, 0, GIB)


def test_a_limit_above_the_card_does_not_make_the_card_larger(node: Node) -> None:
    """A42."""
    limited = node.shell("a", CUDA_DEVICE_MEMORY_LIMIT_0="64g").start()
    free = node.shell("b").start()
    assert limited.must("total 0") == free.must("total 0")
    assert limited.ask("info")[2] == free.ask("info")[2]


def test_a_context_counts_and_is_never_refused(node: Node) -> None:
    """A40."""
    node.settings["FAKEGPU_CONTEXT_MIB"] = "400"
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="300m").start()
    assert shell.ask("info") == (SUCCESS, 0, 300 * MIB)
    assert shell.ask("alloc 1")[0] == OUT_OF_MEMORY
    assert read_usage(node.region()) == {shell.process.pid: 400 * MIB}


def test_a_reset_device_gives_everything_back(node: Node) -> None:
    """A54."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1g").start()
    for _ in range(3):
        shell.must(f"alloc {100 * MIB}")
    shell.must("reset 0")
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_freeing_what_is_not_ours_reaches_the_driver(node: Node) -> None:
    """A52: its own error comes back and nothing is given back."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    block = shell.must(f"alloc {32 * MIB}")
    assert shell.ask(f"free {block + 512}")[0] == 1
    shell.must("free 0")
    shell.must(f"free {block}")
    assert shell.ask(f"free {block}")[0] != SUCCESS
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_a_failed_free_keeps_the_charge(node: Node) -> None:
    """A53."""
    node.settings["FAKEGPU_FAULTS"] = "cuMemFree_v2:1=700"
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    block = shell.must(f"alloc {32 * MIB}")
    assert shell.ask(f"free {block}")[0] == 700
    assert read_usage(node.region()) == {shell.process.pid: 32 * MIB}


def test_a_forked_child_leaves_its_parent_alone(node: Node) -> None:
    """A56."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="2g").start()
    shell.must(f"alloc {GIB}")
    assert shell.ask("fork 0")[0] == 0
    assert read_usage(node.region()) == {shell.process.pid: GIB}
    shell.must(f"alloc {GIB}")
    assert shell.ask("alloc 1")[0] == OUT_OF_MEMORY


def test_a_child_forked_before_cuinit_has_limits_of_its_own(node: Node) -> None:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m")
    assert shell.ask(f"fork {65 * MIB}")[0] == 3  # the driver is not initialised in the child
    shell.start()
    assert shell.ask(f"alloc {65 * MIB}")[0] == OUT_OF_MEMORY


def test_a_thread_that_is_cancelled_while_it_asks_for_memory_leaves_no_lock_behind(node: Node) -> None:
    """Neither for its own process, which would stop, nor for the container's others."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    shell.must("alloc 512")
    shell.must(f"cancel 1 {64 * MIB}")
    assert shell.ask(f"alloc {64 * MIB}")[0] == OUT_OF_MEMORY
    other.must(f"alloc {32 * MIB}")
    assert shell.ask("fork 0")[0] == 0
    assert sum(read_usage(node.region()).values()) == 32 * MIB + 512


def test_a_program_that_closes_all_descriptors_keeps_its_slot(node: Node) -> None:
    """A76."""
    holder = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    holder.must(f"alloc {700 * MIB}")
    holder.must("closeall")
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start()
    assert other.ask(f"alloc {512 * MIB}")[0] == OUT_OF_MEMORY
    assert read_usage(node.region())[holder.process.pid] == 700 * MIB


def test_many_processes_race_for_the_last_bytes_and_one_wins(node: Node) -> None:
    """A80, a few rounds of it."""
    shells = [node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="1024m").start() for _ in range(4)]
    for _ in range(25):
        for shell in shells:
            assert shell.process.stdin is not None
            shell.process.stdin.write(f"alloc {600 * MIB}\n")
        for shell in shells:
            assert shell.process.stdin is not None
            shell.process.stdin.flush()
        won = []
        for shell in shells:
            assert shell.process.stdout is not None
            result, pointer, _ = (int(part) for part in shell.process.stdout.readline().split())
            assert result in (SUCCESS, OUT_OF_MEMORY)
            if result == SUCCESS:
                won.append((shell, pointer))
        assert len(won) == 1
        won[0][0].must(f"free {won[0][1]}")


def test_the_driver_counts_the_same_bytes(node: Node) -> None:
    """17.3: after any mixture of calls our usage is the simulated driver's count in our units."""
    node.settings["FAKEGPU_CONTEXT_MIB"] = "123"
    choose = random.Random(11)
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="2g").start()
    live: list[tuple[str, int]] = []
    for step in range(300):
        if len(live) > 20 or (live and choose.random() < 0.4):
            free, pointer = live.pop(choose.randrange(len(live)))
            shell.must(f"{free} {pointer}")
        else:
            command, free, most = choose.choice(
                [("alloc", "free", 8 * MIB), ("managed", "free", MIB), ("async", "freeasync", 4 * MIB)]
            )
            result, pointer, _ = shell.ask(f"{command} {choose.randint(1, most)}")
            assert result in (SUCCESS, OUT_OF_MEMORY)
            if result == SUCCESS:
                live.append((free, pointer))
        if step % 25 == 24:
            shell.must("sync")
            shell.ask("info")
            (process,) = node.driver_state()["processes"]
            assert read_usage(node.region()) == {shell.process.pid: process["on"][0]["unit_bytes"]}


def test_a_process_killed_inside_the_driver_loses_its_reservation(node: Node) -> None:
    """A18: reserved, and killed before the driver answered."""
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    victim = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m", FAKEGPU_DELAY_US="cuMemAlloc_v2=30000000").start()
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert victim.process.stdin is not None
    victim.process.stdin.write(f"alloc {64 * MIB}\n")
    victim.process.stdin.flush()
    wait_until(lambda: other.ask("info")[1] == 0)
    assert other.ask("alloc 1")[0] == OUT_OF_MEMORY
    victim.kill()
    other.must(f"alloc {64 * MIB}")


def test_physical_memory_of_the_host_is_not_charged(node: Node) -> None:
    """A49: location type host-NUMA is forwarded, whatever the driver says to it."""
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    assert shell.ask(f"create {128 * MIB} 3 0")[0] != OUT_OF_MEMORY
    assert read_usage(node.region()) == {shell.process.pid: 0}


def test_host_memory_never_fails_by_quota(node: Node) -> None:
    """A55."""
    code = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, block, host = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(64 << 20)) == 0
print(cuda.cuMemAllocHost_v2(ctypes.byref(host), ctypes.c_size_t(256 << 20)))
"""
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m") == "0\n"


@pytest.mark.parametrize("visible", ["1", "GPU-00000000-0000-0000-0000-00000000000b"])
def test_visible_devices_do_not_move_the_charge(node: Node, visible: str) -> None:
    """A71: CUDA's device 0 is NVML's device 1 here."""
    uuids = ",".join(f"GPU-00000000-0000-0000-0000-00000000000{c}" for c in "ab")
    node.settings |= {"FAKEGPU_DEVICES": "2", "FAKEGPU_UUIDS": uuids}
    shell = node.shell(CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_MEMORY_LIMIT_1="64m").start()
    shell.must(f"alloc {64 * MIB}")
    assert shell.ask("alloc 1")[0] == OUT_OF_MEMORY
    assert read_usage(node.region(), 0) == {shell.process.pid: 0}
    assert read_usage(node.region(), 1) == {shell.process.pid: 64 * MIB}
