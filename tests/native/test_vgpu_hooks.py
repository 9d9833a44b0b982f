"""Every hook of the list is transparent, and says so where there is no driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vgpu_harness import Node

ROOT = Path(__file__).resolve().parents[2]

CALL = """
import ctypes, json, sys
names, libraries = {names!r}, {libraries!r}
loaded = dict((prefix, ctypes.CDLL(path)) for prefix, path in libraries.items())
if {start}:
    context = ctypes.c_void_p()
    loaded["cu"].cuInit(0)
    loaded["nv"].nvmlInit_v2()
    loaded["cu"].cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
    loaded["cu"].cuCtxSetCurrent(context)
results = dict()
for name in names:
    function = getattr(loaded[name[:2]], name)
    function.restype = ctypes.c_int
    results[name] = function(*[ctypes.c_void_p(0)] * 12)
print(json.dumps(results))
"""
DRIVER = {"cu": "libcuda.so.1", "nv": "libnvidia-ml.so.1"}


def hooked() -> list[str]:
    """Exported names but dlsym."""
    text = (ROOT / "native/vgpu/generated/libvgpu.map").read_text()
    body = text.split("global:")[1].split("local:")[0]
    return [name for name in (word.strip() for word in body.split(";")) if name[:2] in DRIVER]


def call(node: Node, libraries: dict[str, str], *, start: bool, **env: str) -> dict[str, int]:
    code = CALL.format(names=hooked(), libraries=libraries, start=start)
    results: dict[str, int] = json.loads(node.python(code, **env))
    return results


@pytest.mark.parametrize("limit", ["0", "50"])
def test_nonsense_is_the_drivers_to_refuse(node: Node, limit: str) -> None:
    """All arguments zero: each hook returns what the driver returns, with and without a core limit."""
    with_library = call(node, DRIVER, start=True, CUDA_DEVICE_SM_LIMIT=limit)
    assert len(with_library) > 80
    assert with_library == call(node, DRIVER, start=True, LD_PRELOAD="")


def test_without_a_driver_every_hook_says_so(node: Node) -> None:
    ours = str(node.build.libvgpu)
    results = call(node, {"cu": ours, "nv": ours}, start=False, LD_LIBRARY_PATH="")
    assert {name: result for name, result in results.items() if name.startswith("cu") and result != 3} == {}
    assert {name: result for name, result in results.items() if name.startswith("nv") and result != 12} == {}
