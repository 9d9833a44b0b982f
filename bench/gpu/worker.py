#!/usr/bin/env python3
"""One CUDA process of the GPU checks: a JSON object {"do": NAME, ...} a line in, its answer a line out."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_driver import CudaError, Driver, Nvml

Answer = dict[str, Any]


class Worker:
    """The state of the process: its driver and what it holds."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.held: list[tuple[str, int]] = []

    def start(self, *, load: bool = True) -> Answer:
        """cuInit and the primary context, timed apart, ms."""
        begin = time.perf_counter()
        self.driver.init()
        middle = time.perf_counter()
        self.driver.retain()
        end = time.perf_counter()
        if load:
            self.driver.load()
        return {"init_ms": (middle - begin) * 1000, "context_ms": (end - middle) * 1000, "pid": os.getpid()}

    def sizes(self) -> Answer:
        """The card's size by every name, bytes."""
        free, total = self.driver.memory()
        nvml_total, nvml_used = Nvml().memory()
        return {
            "free": free, "total": total, "device_total": self.driver.total_memory(),
            "nvml_total": nvml_total, "nvml_used": nvml_used,
        }  # fmt: skip

    def alloc(self, *, kind: str, size: int) -> Answer:
        self.held.append((kind, self.driver.allocate(kind, size)))
        return {}

    def free(self) -> Answer:
        """Everything that is held."""
        while self.held:
            self.driver.release(*self.held.pop())
        return {}

    def fill_checked(self, *, kind: str, step: int, most: int) -> Answer:
        """Blocks of `step` bytes until one is refused: what fitted, the refusal's code; all is freed."""
        got, code = 0, 0
        while got < most and code == 0:
            try:
                self.alloc(kind=kind, size=step)
                got += step
            except CudaError as error:
                code = error.code
        self.free()
        self.driver.memory()  # the library looks at its pools
        return {"bytes": got, "refusal": code}

    def spin(
        self,
        *,
        seconds: float,
        ns: int,
        mode: str = "kernel",
        counter: str = "",
        warm: float = 0.0,
        queue_ms: float = 20.0,
    ) -> Answer:
        """Launches for so many seconds: kernels completed a second, those of the first `warm` seconds aside.

        The program waits for the card whenever `queue_ms` of work are launched.
        """
        blocks = self.driver.multiprocessors() * (1 if mode == "cooperative" else 8)
        launch: Callable[[], None]
        kernels = 1
        if mode == "graph":
            kernels = 20
            graph = self.driver.graph(ns, blocks, kernels)
            launch = lambda: self.driver.launch_graph(graph)  # noqa: E731
        else:
            together = mode == "cooperative"
            launch = lambda: self.driver.launch(ns, blocks, cooperative=together)  # noqa: E731
        shared = self.counter(counter)
        batch = max(1, int(queue_ms * 1e6 / (ns * kernels)))
        begin, done, counted = time.monotonic(), 0, 0
        while time.monotonic() - begin < seconds:
            for _ in range(batch):
                launch()
            self.driver.synchronize()
            done += batch * kernels
            if time.monotonic() - begin <= warm:
                counted = done
            if shared is not None:
                shared[:8] = done.to_bytes(8, "little")
        elapsed = time.monotonic() - begin - warm
        return {"rate": (done - counted) / elapsed}

    @staticmethod
    def counter(path: str) -> mmap.mmap | None:
        """A file of 8 bytes in which the number of launches can be watched."""
        if not path:
            return None
        with Path(path).open("r+b") as stream:
            return mmap.mmap(stream.fileno(), 8)

    def utilization(self) -> Answer:
        return {"percent": Nvml().utilization()}

    def cards(self) -> Answer:
        """How many cards NVML has."""
        return {"count": Nvml().cards()}

    def processes(self) -> Answer:
        """PIDs that NVML names, with their bytes."""
        return {"processes": {str(pid): used for pid, used in Nvml().processes().items()}}

    def pointers(self) -> Answer:
        """For some functions whether look-up and dlsym name the same address."""
        same: dict[str, bool] = {}
        for name, version, symbol in (
            ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
            ("cuLaunchKernel", 4000, "cuLaunchKernel"),
            ("cuMemGetInfo", 3020, "cuMemGetInfo_v2"),
            ("cuMemcpyHtoD", 3020, "cuMemcpyHtoD_v2"),
        ):
            found, status = ctypes.c_void_p(), ctypes.c_int()
            arguments = (
                name.encode(),
                ctypes.byref(found),
                version,
                ctypes.c_uint64(0),
                ctypes.byref(status),
            )
            self.driver.call("cuGetProcAddress_v2", *arguments)
            direct = ctypes.cast(getattr(self.driver.cuda, symbol), ctypes.c_void_p).value
            same[symbol] = found.value == direct
        return {"same": same}

    def share(self) -> Answer:
        """A block of 64 MiB and the handle by which another process opens it."""
        handle = (ctypes.c_char * 64)()
        self.alloc(kind="linear", size=64 << 20)
        self.driver.call("cuIpcGetMemHandle", handle, ctypes.c_uint64(self.held[-1][1]))
        return {"handle": handle.raw.hex()}

    def open(self, *, handle: str) -> Answer:
        """Another process's block."""

        class Handle(ctypes.Structure):
            _fields_ = [("bytes", ctypes.c_char * 64)]

        pointer = ctypes.c_uint64()
        given = Handle.from_buffer_copy(bytes.fromhex(handle))
        self.driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, 1)
        return {}

    def fork(self) -> Answer:
        """A child that only ends, by way of exit handlers: its status."""
        child = os.fork()
        if child == 0:
            sys.exit(0)
        return {"status": os.waitpid(child, 0)[1], "threads": len(list(Path("/proc/self/task").iterdir()))}


def main() -> None:
    """Obey until the input ends; a line "exit N" of a command ends the program with that status."""
    worker = Worker()
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if name == "exit":
            sys.exit(command["status"])
        try:
            answer = {"code": 0, **getattr(worker, name)(**command)}
        except CudaError as error:
            answer = {"code": error.code, "error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
