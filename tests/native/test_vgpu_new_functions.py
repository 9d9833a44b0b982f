"""Functions of later CUDA releases: green contexts, pools set by location, imports, graphs that change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vgpu_harness import NativeBuild, Node

from hami.protocol import region_layout as layout


@pytest.fixture
def plain_node(native: NativeBuild, tmp_path: Path) -> Iterator[Node]:
    made = Node(native, tmp_path, {"FAKEGPU_MEMORY_MIB": "16384"})
    yield made
    made.close()


@pytest.fixture(params=["plain", "asan"])
def node(request: pytest.FixtureRequest) -> Node:
    """A node, and one with everything built with ASan and UBSan."""
    found: Node = request.getfixturevalue("plain_node" if request.param == "plain" else "asan_node")
    return found


PRELUDE = """
import ctypes, json, os
cuda = ctypes.CDLL("libcuda.so.1")
def good(result):
    assert result == 0, result
def usage():
    data = open(os.environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"], "rb").read()
    from hami.protocol import region_layout as layout
    return layout.V1Slot.used_total.read(data, layout.V1.procs.base(0), 0) // (1 << 20)
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
good(cuda.cuInit(0))
"""
START = (
    PRELUDE
    + """
good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
good(cuda.cuCtxSetCurrent(context))
"""
)
GREEN = """
green, inside = ctypes.c_void_p(), ctypes.c_void_p()
good(cuda.cuGreenCtxCreate(ctypes.byref(green), None, 0, 0))
good(cuda.cuCtxFromGreenCtx(ctypes.byref(inside), green))
good(cuda.cuCtxSetCurrent(inside))
good(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(10 << 20)))
seen = [usage()]
"""


def test_a_green_context_is_measured_and_its_memory_goes_with_it(node: Node) -> None:
    """B79: it holds the primary context of its device."""
    code = PRELUDE + GREEN + "good(cuda.cuGreenCtxDestroy(green))\nprint(seen + [usage()])"
    assert node.python(code, FAKEGPU_CONTEXT_MIB="100").strip() == "[110, 0]"


def test_memory_of_a_green_context_lives_as_long_as_the_primary_context(node: Node) -> None:
    """The driver keeps it: a charge given back with the green context would let a program pass its limit."""
    code = (
        START
        + GREEN
        + (
            "good(cuda.cuGreenCtxDestroy(green))\n"
            "seen.append(usage())\n"
            "good(cuda.cuDevicePrimaryCtxRelease_v2(0))\n"
            "print(seen + [usage()])"
        )
    )
    assert node.python(code, FAKEGPU_CONTEXT_MIB="100").strip() == "[110, 110, 0]"


def test_memory_of_a_green_context_is_limited(node: Node) -> None:
    code = PRELUDE + GREEN + ("print(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(60 << 20)))")
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m", LIBCUDA_LOG_LEVEL="0").strip() == "2"


POOL = """
class Props(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int * 2),
                ("rest", ctypes.c_char * 72)]
props, pool = Props(1, 0, (1, 0)), ctypes.c_void_p()
good(cuda.cuMemPoolCreate(ctypes.byref(pool), ctypes.byref(props)))
"""
SET = {
    "device": "good(cuda.cuDeviceSetMemPool(0, pool))\n",
    "location": "good(cuda.cuMemSetMemPool((ctypes.c_int * 2)(1, 0), 1, pool))\n",
}


def test_allocations_from_a_pool_made_current_are_charged(node: Node) -> None:
    for name, code in SET.items():
        allocate = (
            "print(cuda.cuMemAllocAsync(ctypes.byref(pointer), ctypes.c_size_t(%d << 20), None), usage())\n"
        )
        out = node.python(
            START + POOL + code + allocate % 10 + allocate % 100,
            container=name,
            CUDA_DEVICE_MEMORY_LIMIT_0="64m",
            FAKEGPU_CUDA_VERSION="13000",
            LIBCUDA_LOG_LEVEL="0",
        )
        assert out.split() == ["0", "32", "2", "32"], name


def test_an_imported_handle_is_the_exporters_charge(node: Node) -> None:
    """7.2: releasing the import gives nothing back that was not taken."""
    code = (
        START
        + """
prop, handle, copy, fd = (ctypes.c_int * 8)(1, 1, 1, 0), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_int()
good(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(32 << 20), prop, ctypes.c_uint64(0)))
good(cuda.cuMemExportToShareableHandle(ctypes.byref(fd), handle, 1, ctypes.c_uint64(0)))
seen = [usage()]
good(cuda.cuMemImportFromShareableHandle(ctypes.byref(copy), ctypes.c_void_p(fd.value), 1))
seen.append(usage())
good(cuda.cuMemRelease(copy))
seen.append(usage())
os.close(fd.value)
good(cuda.cuMemRelease(handle))
print(seen + [usage()])
"""
    )
    assert node.python(code).strip() == "[32, 32, 32, 0]"


def test_memory_in_a_part_of_a_device_counts_on_the_device(node: Node) -> None:
    """CUDA 13.5 has locations below a device; a refusal before the driver shows that they are charged."""
    code = (
        START
        + """
prop, handle = (ctypes.c_int * 8)(1, 0, 6, 0x0100), ctypes.c_uint64()
for mib in (32, 64):
    print(cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(mib << 20), prop, ctypes.c_uint64(0)))
"""
    )
    bare, limited = (
        node.python(code, container=name, LIBCUDA_LOG_LEVEL="0", **env).split()
        for name, env in (("a", {}), ("b", {"CUDA_DEVICE_MEMORY_LIMIT_0": "48m"}))
    )
    assert bare[0] == bare[1] == limited[0]
    assert limited[1] == "2" != bare[1]


def test_a_graph_that_was_updated_is_measured_anew(node: Node, tmp_path: Path) -> None:
    """9.4: its cost is unknown again, so the next launch gets a marker."""
    log = tmp_path / "calls"
    code = (
        START
        + """
module, kernel, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
good(cuda.cuModuleLoadData(ctypes.byref(module), b"image"))
good(cuda.cuStreamCreate(ctypes.byref(stream), 1))
good(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_us_1"))
def graph(nodes):
    made = ctypes.c_void_p()
    good(cuda.cuStreamBeginCapture_v2(stream, 0))
    for _ in range(nodes):
        good(cuda.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, None, None))
    good(cuda.cuStreamEndCapture(stream, ctypes.byref(made)))
    return made
executable, first, second = ctypes.c_void_p(), graph(2), graph(2)
good(cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), first, ctypes.c_uint64(0)))
def launch(times):
    for _ in range(times):
        good(cuda.cuGraphLaunch(executable, stream))
        good(cuda.cuStreamSynchronize(stream))
launch(1)   # unknown: measured
launch(20)  # known, short: not every one is
good(cuda.cuGraphExecUpdate_v2(executable, second, None))
launch(1)
good(cuda.cuGraphExecDestroy(executable))
"""
    )
    node.python(code, CUDA_DEVICE_SM_LIMIT="50", FAKEGPU_CALL_LOG=str(log), FAKEGPU_ZERO_COST="1")
    calls = [line.split()[3] for line in log.read_text().splitlines()]
    calls = [call for call in calls if call in ("cuEventRecord", "cuGraphLaunch", "cuGraphExecUpdate_v2")]
    update = calls.index("cuGraphExecUpdate_v2")
    assert calls[update - 1] == calls[update - 2] == "cuGraphLaunch"
    assert calls[update + 1 : update + 4] == ["cuEventRecord", "cuGraphLaunch", "cuEventRecord"]


def test_a_launch_on_several_devices_is_paid_on_each(node: Node) -> None:
    """B62, and the multi-device form: each device's bucket is charged, no marker is made."""
    node.settings["FAKEGPU_DEVICES"] = "2"
    code = (
        PRELUDE
        + """
class Launch(ctypes.Structure):
    _fields_ = [("function", ctypes.c_void_p), ("shape", ctypes.c_uint * 7), ("stream", ctypes.c_void_p),
                ("params", ctypes.c_void_p)]
launches = (Launch * 2)()
for device in (0, 1):
    module, kernel, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    good(cuda.cuCtxSetCurrent(context))
    good(cuda.cuModuleLoadData(ctypes.byref(module), b"image"))
    good(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    good(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_us_100"))
    launches[device] = Launch(kernel, (ctypes.c_uint * 7)(1000, 1, 1, 1024, 1, 1, 0), stream, None)
good(cuda.cuLaunchCooperativeKernelMultiDevice(launches, 2, 0))
current = ctypes.c_int()
good(cuda.cuCtxGetDevice(ctypes.byref(current)))
print(current.value, cuda.cuLaunchCooperativeKernelMultiDevice(None, 2, 0))
"""
    )
    assert node.python(code, CUDA_DEVICE_SM_LIMIT="50").split() == ["1", "1"]
    data = node.region().read_bytes()
    for device in (0, 1):
        at = layout.EXTENSION_OFFSET + layout.Extension.devices.base(device)
        assert layout.ExtensionDevice.charged.read(data, at) > 0
