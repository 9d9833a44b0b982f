"""What a program may try that wants more than its container was given; its own calls, no library left out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vgpu_harness import MIB, OUT_OF_MEMORY, NativeBuild, Node, Shell, read_usage, wait_until


@pytest.fixture
def plain_node(native: NativeBuild, tmp_path: Path) -> Iterator[Node]:
    made = Node(native, tmp_path, {"FAKEGPU_MEMORY_MIB": "16384", "FAKEGPU_CUDA_VERSION": "13000"})
    made.settings["LIBCUDA_LOG_LEVEL"] = "0"
    yield made
    made.close()


@pytest.fixture(params=["plain", "asan"])
def node(request: pytest.FixtureRequest) -> Node:
    """A node, and one with everything built with ASan and UBSan."""
    found: Node = request.getfixturevalue("plain_node" if request.param == "plain" else "asan_node")
    found.settings["FAKEGPU_CUDA_VERSION"] = "13000"
    found.settings["LIBCUDA_LOG_LEVEL"] = "0"
    return found


PRELUDE = """
import ctypes, os, resource, sys
MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")
context, pointer, more = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
def good(result):
    assert result == 0, result
def alloc(mib, where=pointer):
    return cuda.cuMemAlloc_v2(ctypes.byref(where), ctypes.c_size_t(mib * MIB))
def start():
    good(cuda.cuInit(0))
    good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    good(cuda.cuCtxSetCurrent(context))
"""
POOL = """
class Props(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int * 2),
                ("rest", ctypes.c_char * 72)]
def pool(kind=1, location=(1, 0)):
    made = ctypes.c_void_p()
    good(cuda.cuMemPoolCreate(ctypes.byref(made), ctypes.byref(Props(kind, 0, location))))
    return made
def take(pool, mib, where=pointer):
    return cuda.cuMemAllocFromPoolAsync(ctypes.byref(where), ctypes.c_size_t(mib * MIB), pool, None)
start()
"""


def test_a_destroyed_pool_counts_until_its_last_block_is_freed(node: Node) -> None:
    """The driver keeps its memory that long."""
    code = (
        PRELUDE
        + POOL
        + """
mine = pool()
good(take(mine, 40))
good(take(mine, 1, more))
good(cuda.cuMemPoolDestroy(mine))
print(alloc(40), end=" ")
good(cuda.cuMemFreeAsync(pointer, None))
print(alloc(40), end=" ")
good(cuda.cuMemFree_v2(more))
print(alloc(64))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["2", "2", "0"]


def test_a_destroyed_pool_goes_with_the_last_context(node: Node) -> None:
    """Its blocks do: nobody can free them any more."""
    code = (
        PRELUDE
        + POOL
        + """
for mib in (20, 1):
    mine = pool()
    good(take(mine, mib))
    good(cuda.cuMemPoolDestroy(mine))
print(alloc(8), end=" ")
good(cuda.cuDevicePrimaryCtxReset_v2(0))
start()
print(alloc(64))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["2", "0"]


def test_pools_come_and_go_without_a_trace(node: Node) -> None:
    """A handle that the driver gives again is another pool."""
    code = (
        PRELUDE
        + POOL
        + """
for turn in range(100):
    mine = pool()
    good(take(mine, 40))
    if turn % 2:
        good(cuda.cuMemPoolDestroy(mine))
        good(cuda.cuMemFreeAsync(pointer, None))
    else:
        good(cuda.cuMemFreeAsync(pointer, None))
        good(cuda.cuMemPoolDestroy(mine))
print(alloc(64))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").strip() == "0"


KEEPING = (
    POOL
    + """
def keeping():
    "A pool that keeps what it has when nobody uses it."
    made = pool()
    good(cuda.cuMemPoolSetAttribute(made, 4, ctypes.byref(ctypes.c_uint64(1 << 40))))
    return made
def take_and_free(pool, mib):
    result = take(pool, mib)
    if result == 0:
        good(cuda.cuMemFreeAsync(pointer, None))
        good(cuda.cuCtxSynchronize())
    return result
"""
)


def test_what_a_pool_has_in_reserve_counts_once(node: Node) -> None:
    """It is no room for a larger block if it has to go to make room for that."""
    code = PRELUDE + KEEPING + "mine = keeping()\nprint(*(take_and_free(mine, 64 * n) for n in range(1, 5)))"
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["0", "2", "2", "2"]


def test_what_a_pool_has_in_reserve_is_given_to_one_thread(node: Node) -> None:
    code = (
        PRELUDE
        + KEEPING
        + """
import threading
mine = keeping()
good(take_and_free(mine, 64))
barrier, results = threading.Barrier(8), []
def grab():
    good(cuda.cuCtxSetCurrent(context))
    barrier.wait()
    results.append(take(mine, 64, ctypes.c_uint64()))
threads = [threading.Thread(target=grab) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*sorted(results))
"""
    )
    slow = {"FAKEGPU_DELAY_US": "cuMemAllocFromPoolAsync=200000"}
    found = node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m", **slow)
    assert found.split() == ["0"] + ["2"] * 7


def test_threads_that_fit_side_by_side_into_a_pool_are_all_admitted(node: Node) -> None:
    code = (
        PRELUDE
        + KEEPING
        + """
import threading
mine, results = keeping(), []
good(take_and_free(mine, 64))
def turn():
    good(cuda.cuCtxSetCurrent(context))
    for _ in range(100):
        where = ctypes.c_uint64()
        results.append(take(mine, 16, where))
        if results[-1] == 0:
            good(cuda.cuMemFreeAsync(where, None))
threads = [threading.Thread(target=turn) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
free = ctypes.c_size_t()
good(cuda.cuMemGetInfo_v2(ctypes.byref(free), None))
print(set(results), free.value)
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["{0}", "0"]


def test_a_process_without_descriptors_still_uses_what_its_pools_have_in_reserve(node: Node) -> None:
    """It cannot lock the region then, but is alone with what it gives back itself."""
    code = (
        PRELUDE
        + KEEPING
        + """
good(take_and_free(keeping(), 40))
resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(alloc(60), alloc(60))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["0", "2"]


def test_a_pool_that_is_none_hides_no_other(node: Node) -> None:
    code = (
        PRELUDE
        + KEEPING
        + """
print(take(None, 1), end=" ")
good(take_and_free(keeping(), 40))
print(alloc(60))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["1", "0"]


def test_a_block_counts_on_the_device_of_its_stream(node: Node) -> None:
    node.settings["FAKEGPU_DEVICES"] = "2"
    code = (
        PRELUDE
        + """
start()
other, stream = ctypes.c_void_p(), ctypes.c_void_p()
good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(other), 1))
good(cuda.cuCtxSetCurrent(other))
good(cuda.cuStreamCreate(ctypes.byref(stream), 0))
good(cuda.cuCtxSetCurrent(context))
good(cuda.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(32 * MIB), stream))
print(alloc(64), end=" ")
good(cuda.cuCtxSetCurrent(other))
print(alloc(40), alloc(32))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT="64m").split() == ["0", "2", "0"]


def test_memory_of_graphs_counts_in_a_process_that_leads_nobody(node: Node) -> None:
    """The next call sees it that comes when the region's once-a-second word has moved."""
    node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="128m").start()
    other = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="128m").start()
    code = (
        PRELUDE
        + """
start()
class Parameters(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int * 2),
                ("rest", ctypes.c_char * 72), ("access", ctypes.c_void_p), ("count", ctypes.c_size_t),
                ("size", ctypes.c_size_t), ("pointer", ctypes.c_uint64)]
graph, node, executable = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
good(cuda.cuGraphCreate(ctypes.byref(graph), 0))
wanted = Parameters(1, 0, (1, 0), size=96 * MIB)
good(cuda.cuGraphAddMemAllocNode(ctypes.byref(node), graph, None, ctypes.c_size_t(0), ctypes.byref(wanted)))
good(cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0)))
good(cuda.cuGraphLaunch(executable, None))
print("launched", flush=True)
import time
while True:
    good(cuda.cuGraphLaunch(executable, None))
    time.sleep(0.1)
"""
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=node.environment(CUDA_DEVICE_MEMORY_LIMIT_0="128m"),
        stdout=subprocess.PIPE,
        text=True,
    ) as launching:
        try:
            assert launching.stdout is not None
            assert launching.stdout.readline() == "launched\n"
            wait_until(lambda: other.ask("info")[1] <= 32 * MIB)
        finally:
            launching.kill()


@pytest.mark.parametrize("function", ["cuMemGetDefaultMemPool", "cuMemGetMemPool"])
@pytest.mark.parametrize(("kind", "location"), [(1, (1, 0)), (2, (1, 0)), (2, (0, 0))])
def test_pools_that_the_driver_made_count(
    node: Node, function: str, kind: int, location: tuple[int, int]
) -> None:
    """Pinned and managed memory of a device, and managed memory of none in particular."""
    code = (
        PRELUDE
        + POOL
        + f"""
mine = ctypes.c_void_p()
good(cuda.{function}(ctypes.byref(mine), (ctypes.c_int * 2)(*{location}), {kind}))
print(take(mine, 32), take(mine, 33), alloc(40))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["0", "2", "2"]


def test_a_pool_of_managed_memory_counts_whatever_its_location(node: Node) -> None:
    code = PRELUDE + POOL + "print(take(pool(2, (0, 0)), 65), take(pool(2, (0, 0)), 60))"
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["2", "0"]


def test_a_context_that_others_are_attached_to_keeps_its_memory_charged(node: Node) -> None:
    code = (
        PRELUDE
        + """
good(cuda.cuInit(0))
good(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))
good(alloc(40))
attached = ctypes.c_void_p()
good(cuda.cuCtxAttach(ctypes.byref(attached), 0))
good(cuda.cuCtxDetach(attached))
print(alloc(40), end=" ")
good(cuda.cuCtxDetach(context))
start()
print(alloc(64))
"""
    )
    unseen = {"FAKEGPU_HIDE_PROCESSES": "1"}  # NVML cannot tell what the process holds
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m", **unseen).split() == ["2", "0"]


SHAPE = """
class Shape(ctypes.Structure):
    _fields_ = [("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t),
                ("format", ctypes.c_int), ("channels", ctypes.c_uint), ("flags", ctypes.c_uint)]
array = ctypes.c_void_p()
start()
"""
SHAPES = [
    (4096, 4096, 0, 13, 0),  # a whole chain of levels
    (256, 256, 256, 9, 0),  # three dimensions: the depth is halved too
    (1024, 1024, 48, 11, 1),  # layers are not
    (4096, 4096, 0, 13, 0x40),  # sparse: nothing is behind it yet
]


@pytest.mark.parametrize("shape", SHAPES)
def test_mipmapped_arrays_count_as_the_driver_counts_them(node: Node, shape: tuple[int, ...]) -> None:
    width, height, depth, levels, flags = shape
    code = (
        PRELUDE
        + SHAPE
        + f"""
shape = Shape({width}, {height}, {depth}, 0x20, 1, {flags})
def create():
    return cuda.cuMipmappedArrayCreate(ctypes.byref(array), ctypes.byref(shape), {levels})
good(create())
available = ctypes.c_size_t()
good(cuda.cuMemGetInfo_v2(ctypes.byref(available), None))
second = create()
print(available.value, second)
"""
    )
    bytes_of_levels = sum(
        max(1, width >> level) * max(1, height >> level) * max(1, depth if flags & 1 else depth >> level) * 4
        for level in range(levels)
    )
    taken = 0 if flags & 0x40 else -(-bytes_of_levels // 65536) * 65536
    available, second = node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="256m").split()
    assert int(available) == 256 * MIB - taken
    assert int(second) == (0 if 2 * taken <= 256 * MIB else OUT_OF_MEMORY)


BYTES_OF_4_BY_4 = {
    8: ["BC1_UNORM", "BC1_UNORM_SRGB", "BC4_UNORM", "BC4_SNORM"],
    16: ["BC2_UNORM", "BC2_UNORM_SRGB", "BC3_UNORM", "BC3_UNORM_SRGB", "BC5_UNORM", "BC5_SNORM", "BC6H_UF16",
         "BC6H_SF16", "BC7_UNORM", "BC7_UNORM_SRGB", "UNORM_INT8X1", "SNORM_INT8X1"],
    24: ["NV12", "UINT8_SEMIPLANAR_420", "UINT8_PLANAR_420"],
    32: ["NV16", "YUY2", "UINT8_SEMIPLANAR_422", "UINT8_PLANAR_422", "UNORM_INT8X2", "UNORM_INT16X1",
         "SNORM_INT8X2", "SNORM_INT16X1"],
    48: ["P010", "P016", "UINT16_SEMIPLANAR_420", "UINT16_PLANAR_420", "Y444_PLANAR8",
         "YUV444_8bit_SemiPlanar", "UINT8_SEMIPLANAR_444", "UINT8_PLANAR_444"],
    64: ["P210", "P216", "Y210", "Y216", "UINT16_SEMIPLANAR_422", "UINT16_PLANAR_422", "AYUV", "Y410",
         "UINT8_PACKED_422", "UINT8_PACKED_444", "UNORM_INT_101010_2", "UNORM_INT8X4", "UNORM_INT16X2",
         "SNORM_INT8X4", "SNORM_INT16X2"],
    96: ["Y444_PLANAR10", "YUV444_16bit_SemiPlanar", "UINT16_SEMIPLANAR_444", "UINT16_PLANAR_444"],
    128: ["Y416", "UNORM_INT16X4", "SNORM_INT16X4"],
}  # fmt: skip


def test_an_array_of_a_packed_format_counts_what_it_takes(node: Node) -> None:
    """Compressed blocks, video and normalised integers: the format says it, not the channels."""
    code = (
        PRELUDE
        + SHAPE
        + """
import json
from cuda.bindings.driver import CUarray_format as formats
available = ctypes.c_size_t()
def taken(name, width, height):
    shape = Shape(width, height, 0, getattr(formats, "CU_AD_FORMAT_" + name), 4, 0)
    good(cuda.cuArray3DCreate_v2(ctypes.byref(array), ctypes.byref(shape)))
    good(cuda.cuMemGetInfo_v2(ctypes.byref(available), None))
    good(cuda.cuArrayDestroy(array))
    return (256 << 20) - available.value
names = [f.name.removeprefix("CU_AD_FORMAT_") for f in formats]
packed = [n for n in names if n != "MAX" and not n.startswith(("SIGNED", "UNSIGNED", "HALF", "FLOAT"))]
print(json.dumps([{n: taken(n, 2048, 1024) for n in packed}, taken("BC1_UNORM", 4094, 4093)]))
"""
    )
    counted, with_broken_blocks = json.loads(node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="256m"))
    assert counted == {
        name: 2048 * 1024 * each // 16 for each, names in BYTES_OF_4_BY_4.items() for name in names
    }
    assert with_broken_blocks == 1024 * 1024 * 8


def holder(node: Node, mib: int) -> Shell:
    shell = node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    shell.must(f"alloc {mib * MIB}")
    return shell


SCARCE = """
def grown():
    "Bytes of the address space after a cuInit."
    receiver, sender = os.pipe()
    if os.fork() == 0:
        cuda.cuInit(0)
        os.write(sender, open("/proc/self/statm", "rb").read())
        os._exit(0)
    os.wait()
    return int(os.read(receiver, 100).split()[0]) * resource.getpagesize()
def attempt(amount):
    "What cuInit and an allocation say with too little of it, and what they say later."
    limit = resource.getrlimit(KIND)
    resource.setrlimit(KIND, (amount, limit[1]))
    first, now = cuda.cuInit(0), -1
    resource.setrlimit(KIND, limit)
    if first == 0:
        start()
        return [first, alloc(40), alloc(24)]
    again = cuda.cuInit(0)
    if again == 0:
        start()
        return [first, alloc(40), alloc(24)]
    return [first, again]
outcomes = set()
for amount in AMOUNTS:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        try:
            print(*attempt(amount), flush=True)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


def outcomes(node: Node, kind: str, amounts: str) -> set[str]:
    code = PRELUDE + SCARCE.replace("KIND", f"resource.{kind}").replace("AMOUNTS", amounts)
    return set(node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").splitlines())


def test_no_process_gets_a_limit_of_its_own_by_using_up_its_descriptors(plain_node: Node) -> None:
    """There is too little for cuInit, or for the region, or enough: the limit is that of the container."""
    holder(plain_node, 40)
    found = outcomes(plain_node, "RLIMIT_NOFILE", "range(3, 24)")
    assert {line.split()[-2:] == ["2", "0"] for line in found} == {True}, found
    assert "999 2 0" in found, "cuInit is refused while there is no descriptor for the region"
    assert "0 2 0" in found


def test_no_process_is_counted_alone_because_it_has_no_descriptor_for_its_slot(plain_node: Node) -> None:
    """The region was opened by NVML's start; a slot is claimed when CUDA has started. Nobody else suffers."""
    holder(plain_node, 40)
    code = (
        PRELUDE
        + """
nvml = ctypes.CDLL("libnvidia-ml.so.1")
limit = resource.getrlimit(resource.RLIMIT_NOFILE)
def init_with(descriptors):
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, limit[1]))
    result = cuda.cuInit(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    return result
for descriptors in range(3, 12):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        first = init_with(descriptors)
        good(nvml.nvmlInit_v2())
        second = init_with(3)
        start()
        print(first, second, alloc(40), alloc(24), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    )
    found = plain_node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").splitlines()
    assert "999 999 2 0" in found, "the driver had started, the region was open, there was no slot"
    assert {line.split()[-2:] == ["2", "0"] for line in found} == {True}, found
    later = holder(plain_node, 8)
    assert later.process.pid in read_usage(plain_node.region())


def test_no_process_gets_a_limit_of_its_own_by_using_up_its_address_space(plain_node: Node) -> None:
    holder(plain_node, 40)
    found = outcomes(plain_node, "RLIMIT_AS", "[grown() - kib * 1024 for kib in range(-256, 6144, 256)]")
    assert {line.split()[-2:] == ["2", "0"] for line in found} == {True}, found
    assert "999 2 0" in found, "cuInit is refused while there is no memory for the region"
    assert "0 2 0" in found


def test_the_watching_thread_is_started_later_where_none_can_be_had_at_first(plain_node: Node) -> None:
    """For want of memory for its stack, which a program can bring about."""
    code = (
        PRELUDE
        + """
import signal, time
def watchers():
    tasks = os.listdir("/proc/self/task")
    return sum(open(f"/proc/self/task/{task}/comm").read() == "vgpu-watch\\n" for task in tasks)
limit = resource.getrlimit(resource.RLIMIT_AS)
for kib in range(-64, 256, 16):
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"] += f".{kib}.cache"
        good(cuda.cuInit(0))
        size = int(open("/proc/self/statm").read().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (size + kib * 1024, limit[1]))
        result = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        resource.setrlimit(resource.RLIMIT_AS, limit)
        if result == 0:
            good(cuda.cuCtxSetCurrent(context))
            while watchers() == 0:
                for _ in range(64):
                    good(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(512)))
                    good(cuda.cuMemFree_v2(pointer))
                time.sleep(0.01)
        os._exit(0)
    print(os.waitpid(child, 0)[1], end=" ")
"""
    )
    assert set(plain_node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split()) == {"0"}


def test_handle_and_mapping_may_go_at_the_same_time(node: Node) -> None:
    """Each of two threads does what could be the last thing to the memory: it is given back once."""
    code = (
        PRELUDE
        + """
import threading
start()
prop, handle, address = (ctypes.c_int * 8)(1, 1, 1, 0), ctypes.c_uint64(), ctypes.c_uint64()
size, zero = ctypes.c_size_t(64 * MIB), ctypes.c_size_t(0)
for turn in range(3):
    good(cuda.cuMemCreate(ctypes.byref(handle), size, prop, ctypes.c_uint64(0)))
    good(cuda.cuMemAddressReserve(ctypes.byref(address), size, zero, ctypes.c_uint64(0), ctypes.c_uint64(0)))
    good(cuda.cuMemMap(address, size, zero, handle, ctypes.c_uint64(0)))
    releasing = threading.Thread(target=lambda: good(cuda.cuMemRelease(handle)))
    releasing.start()
    while "cuMemRelease" not in open(os.environ["FAKEGPU_CALL_LOG"]).read().split("cuMemAddressReserve")[-1]:
        pass
    good(cuda.cuMemUnmap(address, size))
    releasing.join()
    print(alloc(64), alloc(1), end=" ")
    good(cuda.cuMemFree_v2(pointer))
"""
    )
    slow = {"FAKEGPU_DELAY_US": "cuMemRelease=300000", "FAKEGPU_CALL_LOG": str(node.directory / "calls")}
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m", **slow).split() == ["0", "2"] * 3


def test_memory_without_a_record_stays_charged(plain_node: Node) -> None:
    """For want of memory for the record, which a program can bring about."""
    code = (
        PRELUDE
        + """
start()
prop, handle = (ctypes.c_int * 8)(1, 1, 1, 0), ctypes.c_uint64()
def create(mib):
    return cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(mib * MIB), prop, ctypes.c_uint64(0))
limit = resource.getrlimit(resource.RLIMIT_AS)
size = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size, limit[1]))
first = create(40)
resource.setrlimit(resource.RLIMIT_AS, limit)
print(first, create(40), create(24))
"""
    )
    assert plain_node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["0", "2", "0"]
