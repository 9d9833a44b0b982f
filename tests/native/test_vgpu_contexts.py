"""What contexts leave charged: those that come and go beside others, whatever other threads do meanwhile."""

from __future__ import annotations

from vgpu_harness import Node

PRELUDE = """
import ctypes, os, threading
from hami.protocol import region_layout as layout
MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")
def good(result):
    assert result == 0, result
def made(device):
    context = ctypes.c_void_p()
    good(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
    return context
def alloc(mib):
    pointer = ctypes.c_uint64()
    good(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib * MIB)))
    return pointer
def charged(device=0, field=layout.V1Slot.used_total):
    with open(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"], "rb") as region:
        return field.read(region.read(), layout.V1.procs.base(0), device) // MIB
good(cuda.cuInit(0))
"""


def test_a_context_that_goes_leaves_the_others_charged(node: Node) -> None:
    """Of the same device and of another one; also where NVML shows no process, so that nobody can measure."""
    node.settings |= {"FAKEGPU_DEVICES": "2", "FAKEGPU_CONTEXT_MIB": "100"}
    code = (
        PRELUDE
        + """
zero, one, another = made(0), made(1), made(1)
seen = [(charged(0), charged(1))]
for context in (zero, another, one):
    good(cuda.cuCtxDestroy_v2(context))
    seen.append((charged(0), charged(1)))
print(seen)
"""
    )
    expected = "[(100, 200), (0, 200), (0, 100), (0, 0)]"
    assert node.python(code).strip() == expected
    node.settings["FAKEGPU_STATE"] = str(node.directory / "hidden")
    (node.directory / "hidden").mkdir()
    assert node.python(code, container="b", FAKEGPU_HIDE_PROCESSES="1").strip() == expected


def test_a_detached_context_that_was_pushed_twice_leaves_nothing(node: Node) -> None:
    """The driver takes it from the stack once: what is current then is a context that is gone."""
    code = (
        PRELUDE
        + """
context = made(0)
good(cuda.cuCtxPushCurrent_v2(context))
alloc(40)
good(cuda.cuCtxDetach(context))
print(charged())
"""
    )
    assert node.python(code).strip() == "0"


def test_memory_that_comes_and_goes_meanwhile_is_not_taken_for_a_context(node: Node) -> None:
    """It would stay charged, and the program would be refused what it has room for."""
    code = (
        PRELUDE
        + """
first, done, most = made(0), False, 0
def busy():
    good(cuda.cuCtxSetCurrent(first))
    while not done:
        good(cuda.cuMemFree_v2(alloc(1024)))
thread = threading.Thread(target=busy)
thread.start()
for _ in range(300):
    other = made(0)
    most = max(most, charged(field=layout.V1Slot.used_context))
    good(cuda.cuCtxDestroy_v2(other))
done = True
thread.join()
print(most)
"""
    )
    found = node.python(code, FAKEGPU_CONTEXT_MIB="100", CUDA_DEVICE_MEMORY_LIMIT_0="4g")
    assert int(found) <= 200


def test_memory_info_that_fails_the_second_time_fails(node: Node) -> None:
    code = (
        PRELUDE
        + """
made(0)
free, total = ctypes.c_size_t(), ctypes.c_size_t()
print(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)))
"""
    )
    faults = {"FAKEGPU_FAULTS": "cuMemGetInfo_v2:2=700"}
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="4g", **faults).strip() == "700"
