"""Lines for people never stop or end the program that they are written in."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from vgpu_harness import Node

PRELUDE = """
import ctypes, os, resource, signal
MIB = 1 << 20
cuda = ctypes.CDLL("libcuda.so.1")
def good(result):
    assert result == 0, result
def start():
    context = ctypes.c_void_p()
    good(cuda.cuInit(0))
    good(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    good(cuda.cuCtxSetCurrent(context))
def refused():
    pointer = ctypes.c_uint64()
    return cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(65 * MIB))
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.alarm(60)
"""


def test_a_standard_error_that_nobody_reads_any_more_does_not_end_the_program(node: Node) -> None:
    code = (
        PRELUDE
        + """
receiver, sender = os.pipe()
os.dup2(sender, 2)
os.close(sender)
start()
os.close(receiver)
print(refused())
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").strip() == "2"


def test_a_standard_error_that_is_full_does_not_stop_the_program(node: Node) -> None:
    """What is left out is said later."""
    code = (
        PRELUDE
        + """
receiver, sender = os.pipe()
os.dup2(sender, 2)
os.close(sender)
start()
os.set_blocking(2, False)
filled = 0
try:
    while True:
        filled += os.write(2, bytes(512))
except BlockingIOError:
    os.set_blocking(2, True)
first = refused()
while filled > 0:
    filled -= len(os.read(receiver, filled))
print(first, refused(), "request 68157440 refused" in os.read(receiver, 512).decode())
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").split() == ["2", "2", "True"]


@pytest.mark.parametrize("reader", [False, True])
def test_a_pipe_in_the_place_of_the_log_file_is_left_alone(node: Node, tmp_path: Path, reader: bool) -> None:
    """To open one waits for a reader, to write to one waits for room."""
    pipe = tmp_path / "log"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if reader else -1
    code = PRELUDE + "start()\nprint(refused())"
    done = node.run(sys.executable, "-c", code, CUDA_DEVICE_MEMORY_LIMIT_0="64m", VGPU_LOG_FILE=str(pipe))
    assert done.stdout.strip() == "2"
    assert "request 68157440 refused" in done.stderr
    if reader:
        assert os.read(reading, 512) == b""
        os.close(reading)


def test_nothing_is_written_to_a_file_that_took_the_place_of_standard_error(
    node: Node, tmp_path: Path
) -> None:
    """Where the limit of descriptors leaves no number for a copy of it."""
    data = tmp_path / "data"
    code = (
        PRELUDE
        + f"""
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
start()
os.close(2)
assert os.open({str(data)!r}, os.O_CREAT | os.O_RDWR) == 2
print(refused())
"""
    )
    assert node.python(code, CUDA_DEVICE_MEMORY_LIMIT_0="64m").strip() == "2"
    assert data.read_bytes() == b""
