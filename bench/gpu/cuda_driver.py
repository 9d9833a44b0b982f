"""The few driver calls that the GPU checks need, through ctypes: no toolkit, no package.

The kernel is PTX that the driver compiles: it keeps each block busy for as many nanoseconds as its argument
says. On the simulated driver a kernel of that name costs the same, so the checks run there too.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p

PTX = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry spin_argument(.param .u64 duration)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [duration];
    mov.u64 %rd1, %globaltimer;
again:
    mov.u64 %rd2, %globaltimer;
    sub.u64 %rd3, %rd2, %rd1;
    setp.lt.u64 %p0, %rd3, %rd0;
    @%p0 bra again;
    ret;
}
.visible .entry empty()
{
    ret;
}
"""

OUT_OF_MEMORY = 2


class CudaError(Exception):
    """A call failed; `code` is the driver's."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: CUDA error {code}")
        self.call, self.code = call, code


class ArrayShape(ctypes.Structure):
    """CUDA_ARRAY_DESCRIPTOR."""

    _fields_ = [("width", c_size_t), ("height", c_size_t), ("format", c_uint), ("channels", c_uint)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: pinned memory of one device."""

    _fields_ = [("type", c_int), ("handles", c_int), ("location", c_int * 2), ("rest", ctypes.c_char * 16)]


class Driver:
    """One process's driver with the primary context of a device, once it is started."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.context, self.stream = c_void_p(), c_void_p()
        self.functions: dict[str, c_void_p] = {}

    def call(self, name: str, *arguments: object) -> None:
        """Call a function; raises CudaError unless it answers 0."""
        code = int(getattr(self.cuda, name)(*arguments))
        if code != 0:
            raise CudaError(name, code)

    def init(self) -> None:
        self.call("cuInit", 0)

    def retain(self, device: int = 0) -> None:
        """The primary context, current in this thread."""
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)

    def load(self) -> None:
        """Kernels and a stream."""
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), PTX)
        for name in ("spin_argument", "empty"):
            self.functions[name] = c_void_p()
            self.call("cuModuleGetFunction", byref(self.functions[name]), module, name.encode())
        self.call("cuStreamCreate", byref(self.stream), 1)

    def multiprocessors(self) -> int:
        """How many blocks of the spinning kernel fill the card once."""
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), 16, 0)
        return value.value

    def launch(self, nanoseconds: int, blocks: int, *, cooperative: bool = False) -> None:
        """One spinning kernel."""
        duration = c_uint64(nanoseconds)
        parameters = (c_void_p * 1)(ctypes.addressof(duration))
        shape = [c_uint(n) for n in (blocks, 1, 1, 32, 1, 1, 0)]
        function = self.functions["spin_argument"]
        if cooperative:
            self.call("cuLaunchCooperativeKernel", function, *shape, self.stream, parameters)
        else:
            self.call("cuLaunchKernel", function, *shape, self.stream, parameters, None)

    def graph(self, nanoseconds: int, blocks: int, nodes: int) -> c_void_p:
        """An executable graph of so many kernels."""
        graph, executable = c_void_p(), c_void_p()
        self.call("cuStreamBeginCapture_v2", self.stream, 2)
        for _ in range(nodes):
            self.launch(nanoseconds, blocks)
        self.call("cuStreamEndCapture", self.stream, byref(graph))
        self.call("cuGraphInstantiateWithFlags", byref(executable), graph, c_uint64(0))
        return executable

    def launch_graph(self, executable: c_void_p) -> None:
        self.call("cuGraphLaunch", executable, self.stream)

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes as a program sees them."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def total_memory(self) -> int:
        total = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(total), 0)
        return total.value

    def allocate(self, kind: str, size: int) -> int:
        """A block of `size` bytes; the handle that `release` takes."""
        pointer, handle, pitch, array = c_uint64(), c_uint64(), c_size_t(), c_void_p()
        if kind == "linear":
            self.call("cuMemAlloc_v2", byref(pointer), c_size_t(size))
        elif kind == "managed":
            self.call("cuMemAllocManaged", byref(pointer), c_size_t(size), 1)
        elif kind == "pitch":
            self.call(
                "cuMemAllocPitch_v2", byref(pointer), byref(pitch), c_size_t(4096), c_size_t(size // 4096), 4
            )
        elif kind == "async":
            self.call("cuMemAllocAsync", byref(pointer), c_size_t(size), self.stream)
        elif kind == "array":
            shape = ArrayShape(4096, size // 16384, 0x20, 1)
            self.call("cuArrayCreate_v2", byref(array), byref(shape))
            return array.value or 0
        elif kind == "physical":
            properties = AllocationProperties(1, 0, (1, 0), b"")
            self.call("cuMemCreate", byref(handle), c_size_t(size), byref(properties), c_uint64(0))
            return handle.value
        else:
            raise ValueError(kind)
        return pointer.value

    def release(self, kind: str, handle: int) -> None:
        """Give a block back."""
        if kind == "async":
            self.call("cuMemFreeAsync", c_uint64(handle), self.stream)
            self.synchronize()
        elif kind == "array":
            self.call("cuArrayDestroy", c_void_p(handle))
        elif kind == "physical":
            self.call("cuMemRelease", c_uint64(handle))
        else:
            self.call("cuMemFree_v2", c_uint64(handle))


class ProcessRecord(ctypes.Structure):
    """nvmlProcessInfo_t."""

    _fields_ = [("pid", c_uint), ("used", c_uint64), ("gpu", c_uint), ("compute", c_uint)]


class Nvml:
    """What NVML says of the first card."""

    def __init__(self) -> None:
        self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self.card = c_void_p()
        for code in (self.nvml.nvmlInit_v2(), self.nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(self.card))):
            if code != 0:
                raise CudaError("nvml", int(code))

    def cards(self) -> int:
        count = c_uint()
        if self.nvml.nvmlDeviceGetCount_v2(byref(count)) != 0:
            raise CudaError("nvmlDeviceGetCount_v2", 1)
        return count.value

    def memory(self) -> tuple[int, int]:
        """Total and used bytes."""
        words = (c_uint64 * 3)()
        if self.nvml.nvmlDeviceGetMemoryInfo(self.card, words) != 0:
            raise CudaError("nvmlDeviceGetMemoryInfo", 1)
        return words[0], words[2]

    def utilization(self) -> int:
        """Percent of the last sampling period in which a kernel ran."""
        words = (c_uint * 2)()
        if self.nvml.nvmlDeviceGetUtilizationRates(self.card, words) != 0:
            raise CudaError("nvmlDeviceGetUtilizationRates", 1)
        return int(words[0])

    def processes(self) -> dict[int, int]:
        """Bytes by PID."""
        records, count = (ProcessRecord * 64)(), c_uint(64)
        ask = self.nvml.nvmlDeviceGetComputeRunningProcesses_v3
        if ask(self.card, byref(count), records) != 0:
            raise CudaError("nvmlDeviceGetComputeRunningProcesses_v3", 1)
        return {record.pid: record.used for record in records[: count.value]}
