"""Stream capture and graph launches under a core limit."""

from __future__ import annotations

import json

from vgpu_harness import Node

PRELUDE = """
import ctypes, json, threading, time
cuda = ctypes.CDLL("libcuda.so.1")
def good(result):
    assert result == 0, result
context, module, kernel, stream = (ctypes.c_void_p() for _ in range(4))
good(cuda.cuInit(0))
good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
good(cuda.cuCtxSetCurrent(context))
good(cuda.cuModuleLoadData(ctypes.byref(module), b"image"))
good(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_us_100"))
good(cuda.cuStreamCreate(ctypes.byref(stream), 1))
def launch(on):
    return cuda.cuLaunchKernel(kernel, 10, 1, 1, 128, 1, 1, 0, on, None, None)
def capture(count, pause=0):
    graph = ctypes.c_void_p()
    good(cuda.cuStreamBeginCapture_v2(stream, 0))
    for _ in range(count):
        good(launch(stream))
        time.sleep(pause)
    good(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
    return graph
"""


def test_captured_launches_are_neither_delayed_nor_charged(node: Node) -> None:
    """A64: 100 s worth of kernels at limit 10 are captured without a wait; the card has done nothing."""
    code = PRELUDE + "capture(1000)\nprint('captured')\n"
    assert node.python(code, CUDA_DEVICE_SM_LIMIT="10") == "captured\n"
    assert node.engine_ns().get("a", 0) == 0


def test_launches_of_another_thread_do_not_break_a_capture(node: Node) -> None:
    """9.4: no event is recorded or asked while a capture is in flight."""
    code = (
        PRELUDE
        + """
other, stop, counts = ctypes.c_void_p(), threading.Event(), []
good(cuda.cuStreamCreate(ctypes.byref(other), 1))
def work():
    good(cuda.cuCtxSetCurrent(context))
    done = 0
    while not stop.is_set():
        good(launch(other))
        done += 1
    counts.append(done)
thread = threading.Thread(target=work, daemon=True)
thread.start()
for _ in range(5):
    assert capture(20, 0.01).value
    time.sleep(0.05)
stop.set()
thread.join()
print(json.dumps(counts))
"""
    )
    assert json.loads(node.python(code, CUDA_DEVICE_SM_LIMIT="50"))[0] > 0


def test_graph_launches_are_limited_like_kernels(node: Node) -> None:
    """A60: graphs of 100 nodes, 10 ms each."""
    code = (
        PRELUDE
        + """
graph, executable = capture(100), ctypes.c_void_p()
good(cuda.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0)))
start = time.monotonic()
while time.monotonic() - start < 3:
    good(cuda.cuGraphLaunch(executable, stream))
print(time.monotonic() - start)
"""
    )
    elapsed = float(node.python(code, CUDA_DEVICE_SM_LIMIT="20"))
    allowed = 0.2 * (elapsed + 0.5) + 0.25  # the burst of an idle bucket, the first graphs, what is queued
    assert 0.05 < node.engine_ns()["a"] / 1e9 < allowed


def test_a_capture_that_is_left_open_does_not_end_the_limit(node: Node) -> None:
    """Functions that were not measured before are, after a while; the capture stays valid."""
    code = (
        PRELUDE
        + """
other, graph = ctypes.c_void_p(), ctypes.c_void_p()
good(cuda.cuStreamCreate(ctypes.byref(other), 1))
good(cuda.cuStreamBeginCapture_v2(stream, 0))
good(launch(stream))
good(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_ms_5"))
start = time.monotonic()
while time.monotonic() - start < 4:
    good(launch(other))
elapsed = time.monotonic() - start
good(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
print(elapsed)
"""
    )
    elapsed = float(node.python(code, CUDA_DEVICE_SM_LIMIT="10"))
    allowed = 0.1 * (elapsed + 0.5) + 0.4 + 0.05  # the burst, 64 launches without a measure, what is queued
    assert 0.05 < node.engine_ns()["a"] / 1e9 < allowed


def test_an_end_that_ends_no_capture_leaves_that_in_force(node: Node) -> None:
    """Of a stream that is not captured, and from another thread: still no event is asked about."""
    code = (
        PRELUDE
        + """
import os
other, third, graph, ends = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), []
good(cuda.cuStreamCreate(ctypes.byref(other), 1))
good(cuda.cuStreamCreate(ctypes.byref(third), 1))
good(cuda.cuStreamBeginCapture_v2(stream, 0))
def end():
    good(cuda.cuCtxSetCurrent(context))
    for each in (third, stream):
        ends.append(cuda.cuStreamEndCapture(each, ctypes.byref(graph)))
thread = threading.Thread(target=end)
thread.start()
thread.join()
os.truncate(os.environ["FAKEGPU_CALL_LOG"], 0)
for _ in range(10):
    good(launch(other))
ends.append(sum("cuEvent" in line for line in open(os.environ["FAKEGPU_CALL_LOG"])))
good(cuda.cuStreamEndCapture(stream, ctypes.byref(graph)))
print(ends)
"""
    )
    log = {"FAKEGPU_CALL_LOG": str(node.directory / "calls")}
    assert node.python(code, CUDA_DEVICE_SM_LIMIT="50", **log).strip() == "[401, 908, 0]"
