"""cuda-bindings (driver module), unmodified, on the simulated driver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakegpu_harness import MIB, Cards

START = """
import ctypes, json
from cuda.bindings import driver as d
def ok(answer):
    assert answer[0] == d.CUresult.CUDA_SUCCESS, answer
    return None if len(answer) == 1 else answer[1] if len(answer) == 2 else answer[1:]
def code(answer):
    return int(answer[0])
ok(d.cuInit(0))
context = ok(d.cuDevicePrimaryCtxRetain(0))
ok(d.cuCtxSetCurrent(context))
def kernel(name):
    return ok(d.cuModuleGetFunction(ok(d.cuModuleLoadData(b"any image\\0")), name.encode()))
def launch(function, stream=0, params=0):
    return d.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, params, 0)
def used():
    free, total = ok(d.cuMemGetInfo())
    return total - free
GLOBAL = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
"""


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    made = Cards(tmp_path / "s", devices=2, memory_mib=4096, reserved_mib=0, context_mib=0)
    yield made
    made.close()


def run(cards: Cards, body: str, **settings: object) -> Any:
    return cards.python(START + body, **settings)


def test_data_goes_to_the_card_and_comes_back(cards: Cards) -> None:
    result = run(
        cards,
        """
p, q = ok(d.cuMemAlloc(4096)), ok(d.cuMemAlloc(4096))
ok(d.cuMemcpyHtoD(p, bytes(range(256)) * 16, 4096))
ok(d.cuMemcpyDtoD(q, p, 4096))
ok(d.cuMemsetD32(q, 0x01020304, 2))
back = bytearray(16)
ok(d.cuMemcpyDtoH(back, q, 16))
outside = code(d.cuMemcpyDtoH(back, int(p) + 4090, 16))
print(json.dumps([back.hex(), outside]))
""",
    )
    assert result == ["040302010403020108090a0b0c0d0e0f", 1]


def test_freeing_twice_inside_or_nothing(cards: Cards) -> None:
    result = run(
        cards,
        """
p = ok(d.cuMemAlloc(1 << 21))
inside = code(d.cuMemFree(int(p) + 512))
first, second = code(d.cuMemFree(p)), code(d.cuMemFree(p))
print(json.dumps([inside, first, second, code(d.cuMemFree(0)), used()]))
""",
    )
    assert result == [1, 0, 1, 0, 0]


def test_a_context_that_ends_takes_its_memory_along(cards: Cards) -> None:
    result = run(
        cards,
        """
ok(d.cuMemAlloc(1 << 30)); ok(d.cuMemAllocManaged(1 << 20, 1)); ok(d.cuMemAllocAsync(1 << 20, 0))
before = used()
ok(d.cuDevicePrimaryCtxReset(0))
dead = code(d.cuMemAlloc(1))
ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(0))))
print(json.dumps([before, dead, used()]))
""",
    )
    assert result == [1024 * MIB + 2 * MIB + 32 * MIB, 709, 0]


def test_contexts_cost_memory_each(cards: Cards, tmp_path: Path) -> None:
    costly = Cards(tmp_path / "t", memory_mib=1024, reserved_mib=0, context_mib=300)
    result = run(
        costly,
        """
one = used()
again = code(d.cuDevicePrimaryCtxRetain(0))
c = ctypes.CDLL("libcuda.so.1"); made = ctypes.c_void_p()
second = c.cuCtxCreate_v2(ctypes.byref(made), 0, 0); two = used()
fourth = [c.cuCtxCreate_v2(ctypes.byref(ctypes.c_void_p()), 0, 0) for _ in range(2)]
c.cuCtxDestroy_v2(made)
print(json.dumps([one >> 20, again, second, two >> 20, fourth, used() >> 20]))
""",
    )
    assert result == [300, 0, 0, 600, [0, 2], 600]


def test_managed_memory_beyond_the_card_is_served(cards: Cards) -> None:
    assert run(
        cards, "print(json.dumps([code(d.cuMemAllocManaged(8 << 30, 1)), code(d.cuMemAlloc(8 << 30))]))"
    ) == [0, 2]


def test_an_event_pair_measures_the_kernel_between(cards: Cards) -> None:
    ready, times = run(
        cards,
        """
stream = ok(d.cuStreamCreate(0)); a, b = ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))
f = kernel("spin_ms_200")
ok(launch(f, stream)); ok(d.cuEventRecord(a, stream)); ok(launch(f, stream)); ok(d.cuEventRecord(b, stream))
early = [code(d.cuEventQuery(b)), code(d.cuEventElapsedTime(a, b)), code(d.cuStreamQuery(stream))]
ok(d.cuEventSynchronize(b))
late = [code(d.cuEventQuery(b)), code(d.cuStreamQuery(stream))]
print(json.dumps([early + late, ok(d.cuEventElapsedTime(a, b))]))
""",
    )
    assert ready == [600, 600, 600, 0, 0]
    assert times == 200.0  # the queue's own clock: back to back, to half a microsecond


def test_kernel_names_and_arguments_carry_the_cost(cards: Cards) -> None:
    result = run(
        cards,
        """
import numpy as np
a, b = ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))
first = kernel("spin_ms_50")
out = []
for f, params, blocks in ((kernel("spin_us_1500_b"), 0, 1), (kernel("spin_block_ns_1000"), 0, 250),
                          (kernel("spin_argument"), ((3_000_000,), (ctypes.c_uint64,)), 1),
                          (kernel("other"), 0, 1)):
    ok(launch(first)); ok(d.cuEventRecord(a, 0))
    ok(d.cuLaunchKernel(f, blocks, 1, 1, 1, 1, 1, 0, 0, params, 0)); ok(d.cuEventRecord(b, 0))
    ok(d.cuCtxSynchronize())
    out.append(ok(d.cuEventElapsedTime(a, b)))
print(json.dumps([round(x, 4) for x in out]))
""",
        kernel_ns=7000,
    )
    assert result == [1.5, 0.25, 3.0, 0.007]


def test_a_kernel_can_wait_for_the_next_launch(cards: Cards) -> None:
    result = run(
        cards,
        """
event = ok(d.cuEventCreate(0))
ok(launch(kernel("wait_for_next"))); ok(d.cuEventRecord(event, 0))
before = code(d.cuEventQuery(event))
ok(launch(kernel("spin_us_1"))); ok(d.cuCtxSynchronize())
print(json.dumps([before, code(d.cuEventQuery(event))]))
""",
    )
    assert result == [600, 0]


def test_a_captured_graph_runs_as_one_piece_of_work(cards: Cards) -> None:
    result = run(
        cards,
        """
stream = ok(d.cuStreamCreate(0)); f = kernel("spin_ms_40")
a, b = ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))
ok(d.cuStreamBeginCapture(stream, GLOBAL))
status = int(ok(d.cuStreamIsCapturing(stream)))
for _ in range(3):
    ok(launch(f, stream))
idle = used()
graph = ok(d.cuStreamEndCapture(stream))
nodes = ok(d.cuGraphGetNodes(graph))[1]
g = ok(d.cuGraphInstantiate(graph, 0))
ok(launch(f, stream)); ok(d.cuEventRecord(a, stream)); ok(d.cuGraphLaunch(g, stream))
ok(d.cuEventRecord(b, stream))
ok(d.cuStreamSynchronize(stream))
print(json.dumps([status, nodes, ok(d.cuEventElapsedTime(a, b))]))
""",
    )
    assert result == [1, 3, 120.0]


@pytest.mark.parametrize(
    ("call", "mode", "expected"),
    [
        ("d.cuMemAlloc(512)", "GLOBAL", 900),
        ("d.cuEventQuery(event)", "GLOBAL", 900),
        ("d.cuStreamSynchronize(stream)", "GLOBAL", 900),
        ("d.cuCtxSynchronize()", "GLOBAL", 900),
        ("launch(f, 0)", "GLOBAL", 906),
        ("d.cuMemAlloc(512)", "RELAXED", 0),
        ("d.cuEventQuery(event)", "RELAXED", 0),
    ],
)
def test_what_capture_forbids_spoils_it(cards: Cards, call: str, mode: str, expected: int) -> None:
    answer, end = run(
        cards,
        f"""
stream = ok(d.cuStreamCreate(0)); f = kernel("k")
event = ok(d.cuEventCreate(0)); ok(d.cuEventRecord(event, stream))
ok(d.cuStreamBeginCapture(stream, {mode}))
answer = code({call})
print(json.dumps([answer, code(d.cuStreamEndCapture(stream))]))
""",
    )
    assert (answer, end) == (expected, 901 if expected else 0)


def test_another_threads_query_spoils_a_global_capture_only(cards: Cards) -> None:
    result = run(
        cards,
        """
import threading
ends = []
for mode in (GLOBAL, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL):
    stream = ok(d.cuStreamCreate(0)); event = ok(d.cuEventCreate(0)); ok(d.cuEventRecord(event, stream))
    ok(d.cuStreamBeginCapture(stream, mode))
    def other():
        ok(d.cuCtxSetCurrent(context)); d.cuEventQuery(event)
    t = threading.Thread(target=other); t.start(); t.join()
    ends.append(code(d.cuStreamEndCapture(stream)))
print(json.dumps(ends))
""",
    )
    assert result == [901, 0]


def test_an_event_recorded_in_a_capture_cannot_be_asked_and_joins_other_streams(cards: Cards) -> None:
    result = run(
        cards,
        """
s, t = ok(d.cuStreamCreate(1)), ok(d.cuStreamCreate(1)); event = ok(d.cuEventCreate(0)); f = kernel("k")
ok(d.cuStreamBeginCapture(s, RELAXED)); ok(d.cuEventRecord(event, s))
ok(d.cuStreamWaitEvent(t, event, 0)); ok(launch(f, t))
asked = code(d.cuEventQuery(event))
wrong = code(d.cuStreamEndCapture(t))
graph = ok(d.cuStreamEndCapture(s))
print(json.dumps([asked, wrong, ok(d.cuGraphGetNodes(graph))[1], int(ok(d.cuStreamIsCapturing(t)))]))
""",
    )
    assert result == [907, 903, 2, 0]


def test_pools_reserve_in_steps_and_trim_at_synchronisation(cards: Cards) -> None:
    result = run(
        cards,
        """
A = d.CUmemPool_attribute
pool = ok(d.cuDeviceGetDefaultMemPool(0)); stream = ok(d.cuStreamCreate(0))
def look():
    return [int(ok(d.cuMemPoolGetAttribute(pool, a))) >> 20
            for a in (A.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, A.CU_MEMPOOL_ATTR_USED_MEM_CURRENT)]
p = ok(d.cuMemAllocAsync(10 << 20, stream)); out = [look()]
q = ok(d.cuMemAllocAsync(20 << 20, stream)); out.append(look())
r = ok(d.cuMemAllocAsync(40 << 20, stream)); out.append(look())
for x in (p, q, r):
    ok(d.cuMemFreeAsync(x, stream))
out.append(look()); ok(d.cuStreamSynchronize(stream)); out.append(look())
out.append([used() >> 20, code(d.cuMemAllocAsync(5 << 30, stream))])
print(json.dumps(out))
""",
        pool_step_mib=64,
    )
    assert result == [[64, 10], [64, 30], [128, 70], [128, 0], [0, 0], [0, 2]]


def test_mapped_memory_lives_until_release_and_unmap(cards: Cards) -> None:
    result = run(
        cards,
        """
size = 64 << 20
prop = d.CUmemAllocationProp(); prop.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
prop.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE; prop.location.id = 1
handle = ok(d.cuMemCreate(size, prop, 0)); at = ok(d.cuMemAddressReserve(size, 0, 0, 0))
ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(1))))
out = [used() >> 20]
ok(d.cuMemMap(at, size, 0, handle, 0)); ok(d.cuMemRelease(handle)); out.append(used() >> 20)
ok(d.cuMemsetD8(at, 5, size)); again = ok(d.cuMemRetainAllocationHandle(at))
ok(d.cuMemUnmap(at, size)); out.append(used() >> 20)
ok(d.cuMemRelease(again)); out.append(used() >> 20)
ok(d.cuMemAddressFree(at, size)); out.append(code(d.cuMemRelease(handle)))
print(json.dumps(out))
""",
    )
    assert result == [64, 64, 64, 0, 1]


def test_procaddress_answers_by_name_version_and_stream_flag(cards: Cards) -> None:
    result = cards.python(
        """
        import ctypes, json
        c = ctypes.CDLL("libcuda.so.1")
        def at(name): return ctypes.cast(getattr(c, name), ctypes.c_void_p).value
        def get(name, version, flags=0):
            out, status = ctypes.c_void_p(1), ctypes.c_int(9)
            where, result = ctypes.byref(out), ctypes.byref(status)
            code = c.cuGetProcAddress_v2(name.encode(), where, version, ctypes.c_uint64(flags), result)
            return code, out.value, status.value
        assert get("cuMemAlloc", 2000)[1] == at("cuMemAlloc")
        assert get("cuMemAlloc", 3020)[1] == get("cuMemAlloc", 12080, 1)[1] == at("cuMemAlloc_v2")
        assert get("cuLaunchKernel", 7000, 2)[1] == at("cuLaunchKernel_ptsz") != at("cuLaunchKernel")
        assert get("cuLaunchKernel", 4000, 2)[1] == get("cuLaunchKernel", 7000, 1)[1] == at("cuLaunchKernel")
        assert get("cuMemPrefetchAsync", 8000)[1] != get("cuMemPrefetchAsync", 12020)[1]
        assert get("cuGetProcAddress", 11030)[1] == at("cuGetProcAddress")
        assert get("cuGetProcAddress", 12000)[1] == at("cuGetProcAddress_v2")
        old = ctypes.c_void_p(1)
        v1 = c.cuGetProcAddress(b"noSuch", ctypes.byref(old), 12000, ctypes.c_uint64(0))
        assert get("cuIpcOpenMemHandle", 4010)[1] != get("cuIpcOpenMemHandle", 11000)[1]
        print(json.dumps([get("noSuch", 12000), get("cuMemAllocAsync", 11010), get("", 0)[0], v1, old.value]))
        """
    )
    assert result == [[0, None, 1], [0, None, 2], 1, 500, None]


def test_a_driver_of_an_older_version_hides_newer_functions(cards: Cards) -> None:
    result = cards.python(
        """
        import ctypes, json
        c = ctypes.CDLL("libcuda.so.1")
        out, status = ctypes.c_void_p(), ctypes.c_int(9)
        where, result = ctypes.byref(out), ctypes.byref(status)
        c.cuGetProcAddress_v2(b"cuMemAllocAsync", where, 12000, ctypes.c_uint64(0), result)
        version = ctypes.c_int()
        c.cuDriverGetVersion(ctypes.byref(version))
        print(json.dumps([out.value, status.value, version.value]))
        """,
        cuda_version=11010,
    )
    assert result == [None, 1, 11010]


def test_calls_before_cuinit_and_without_a_context_are_refused(cards: Cards) -> None:
    result = cards.python(
        """
        import json
        from cuda.bindings import driver as d
        a = int(d.cuMemAlloc(1)[0]); d.cuInit(0); b = int(d.cuMemAlloc(1)[0])
        print(json.dumps([a, b, int(d.cuDeviceGet(2)[0]), int(d.cuGetExportTable(d.CUuuid())[0])]))
        """
    )
    assert result == [3, 201, 101, 500]


def test_zero_cost_mode_takes_no_time_and_keeps_the_books(cards: Cards) -> None:
    result = run(
        cards,
        """
f = kernel("spin_ms_1000")
for _ in range(5000):
    ok(launch(f))
ok(d.cuCtxSynchronize())
p = ok(d.cuMemAlloc(1 << 30)); held = used() >> 20; ok(d.cuMemFree(p))
print(json.dumps([held, used()]))
""",
        zero_cost=1,
    )
    assert result == [1024, 0]
