"""Faults that users of HAMi met and that no other test of ours shows; `tests/known_faults.toml` lists all."""

from __future__ import annotations

import time

import pytest
from vgpu_harness import MIB, Node

from hami.protocol import region_layout as layout

PRELUDE = """
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
def good(result):
    assert result == 0, result
def start(device=0):
    context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    good(cuda.cuInit(0))
    good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    good(cuda.cuCtxSetCurrent(context))
    good(cuda.cuModuleLoadData(ctypes.byref(module), b"image"))
    good(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_us_100"))
    return kernel
def launch(kernel):
    return cuda.cuLaunchKernel(kernel, 10, 1, 1, 128, 1, 1, 0, None, None, None)
def cooperative(kernel):
    return cuda.cuLaunchCooperativeKernel(kernel, 10, 1, 1, 128, 1, 1, 0, None, None)
"""

VERSIONS = [
    10000, 10010, 10020, 11000, 11010, 11020, 11030, 11040, 11050, 11060,
    11070, 11080, 12000, 12020, 12040, 12060, 12080, 12090, 13000, 13050,
]  # fmt: skip


def allowed(limit: float, seconds: float) -> float:
    """Seconds of the card for a share: the burst of an idle bucket and what is queued come on top."""
    return limit * (seconds + 0.5) + 0.25


def test_cuinit_returns_with_every_driver(node: Node) -> None:
    """B1: twenty versions; each hides what is newer than itself."""
    assert len(VERSIONS) == 20
    for version in VERSIONS:
        shell = node.shell(f"v{version}", FAKEGPU_CUDA_VERSION=str(version), CUDA_DEVICE_MEMORY_LIMIT_0="64m")
        shell.start().must(f"alloc {MIB}")
        assert shell.leave() == 0


def test_an_export_table_asked_for_in_every_order_starts_nothing(node: Node) -> None:
    """B1: the hang came from an initialisation inside the driver's own look-ups."""
    code = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
table, identity, found, status = ctypes.c_void_p(), (ctypes.c_ubyte * 16)(), ctypes.c_void_p(), ctypes.c_int()
for _ in range(2):
    print(cuda.cuGetExportTable(ctypes.byref(table), identity), end=" ")
    print(cuda.cuGetProcAddress_v2(
        b"cuGetExportTable", ctypes.byref(found), 12000, ctypes.c_uint64(0), ctypes.byref(status)), end=" ")
    exists = __import__("os").path.exists(__import__("os").environ["CUDA_DEVICE_MEMORY_SHARED_CACHE"])
    print(exists, end=" ")
    cuda.cuInit(0)
"""
    ours, plain = node.python(code), node.python(code, container="b", LD_PRELOAD="")
    assert ours.split()[:3] == plain.split()[:3]
    assert ours.split()[2] == "False"


def test_cooperative_kernels_are_limited(node: Node) -> None:
    """B62."""
    code = PRELUDE + (
        "kernel, begin = start(), time.monotonic()\n"
        "while time.monotonic() - begin < 2:\n"
        "    good(cooperative(kernel))\n"
    )
    begin = time.monotonic()
    node.python(code, CUDA_DEVICE_SM_LIMIT="20")
    assert 0.05 < node.engine_ns()["a"] / 1e9 < allowed(0.2, time.monotonic() - begin)


def test_forked_workers_share_the_limit(node: Node) -> None:
    """B74: each child starts CUDA itself, as workers of a data loader do."""
    code = PRELUDE + (
        "begin = time.monotonic()\n"
        "children = []\n"
        "for _ in range(3):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        kernel = start()\n"
        "        while time.monotonic() - begin < 2:\n"
        "            good(launch(kernel))\n"
        "        os._exit(0)\n"
        "    children.append(child)\n"
        "print([os.waitpid(child, 0)[1] for child in children])\n"
    )
    begin = time.monotonic()
    assert node.python(code, CUDA_DEVICE_SM_LIMIT="20").strip() == "[0, 0, 0]"
    assert 0.05 < node.engine_ns()["a"] / 1e9 < allowed(0.2, time.monotonic() - begin)


@pytest.mark.parametrize(("visible", "ordinal"), [("1,0", 0), ("0,1", 1), ("1", 0)])
def test_a_launch_is_charged_to_its_own_card(node: Node, visible: str, ordinal: int) -> None:
    """B67: whatever number the program has for the card."""
    node.settings["FAKEGPU_DEVICES"] = "2"
    code = PRELUDE + f"kernel = start({ordinal})\nfor _ in range(20):\n    good(launch(kernel))\n"
    node.python(code, CUDA_VISIBLE_DEVICES=visible, CUDA_DEVICE_SM_LIMIT="50")
    data = node.region().read_bytes()
    charged = [
        layout.ExtensionDevice.charged.read(data, layout.EXTENSION_OFFSET + layout.Extension.devices.base(d))
        for d in (0, 1)
    ]
    assert charged[0] == 0
    assert charged[1] > 0


def test_the_card_is_as_large_as_the_limit_by_every_name(node: Node) -> None:
    """B84: first-generation names, look-ups and NVML included."""
    code = (
        PRELUDE
        + """
import pynvml
start()
small, large, free = ctypes.c_uint(), ctypes.c_size_t(), ctypes.c_size_t()
sizes = []
good(cuda.cuDeviceTotalMem(ctypes.byref(small), 0)); sizes.append(small.value)
good(cuda.cuDeviceTotalMem_v2(ctypes.byref(large), 0)); sizes.append(large.value)
good(cuda.cuMemGetInfo(ctypes.byref(ctypes.c_uint()), ctypes.byref(small))); sizes.append(small.value)
good(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(large))); sizes.append(large.value)
for version, kind in ((2000, ctypes.c_uint), (3020, ctypes.c_size_t)):
    at, value, status = ctypes.c_void_p(), kind(), ctypes.c_int()
    good(cuda.cuGetProcAddress_v2(
        b"cuDeviceTotalMem", ctypes.byref(at), version, ctypes.c_uint64(0), ctypes.byref(status)))
    good(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)(at.value)(ctypes.addressof(value), 0))
    sizes.append(value.value)
pynvml.nvmlInit()
card = pynvml.nvmlDeviceGetHandleByIndex(0)
sizes += [pynvml.nvmlDeviceGetMemoryInfo(card).total]
sizes += [pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2).total]
print(set(sizes))
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="1g").strip() == str({1024 * MIB})
