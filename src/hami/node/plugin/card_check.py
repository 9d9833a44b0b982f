"""A look at one card, or a probe of it, in a process of its own: a driver that hangs or crashes harms nobody
else.

``python -m hami.node.plugin.card_check look|probe UUID DRIVER_ROOT`` prints one line of JSON. The UUID may
be that of a MIG device. ``look`` asks NVML; ``probe`` allocates device memory, writes it, reads it back and
frees it.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable
from typing import Any, Final

import pynvml

from hami.node.nvml import resolve_library

LOOK: Final = "look"
PROBE: Final = "probe"
MODULE: Final = "hami.node.plugin.card_check"
_PROBE_BYTES: Final = 16 << 20
_PATTERN: Final = 0xA5


class _CheckError(Exception):
    """The card does not do what it must."""


def main(arguments: list[str]) -> int:
    """Do what the arguments say; the line printed has ``problem`` (empty: none) and ``suspect``."""
    kind, uuid, root = arguments
    found = {"problem": "", "suspect": ""}
    try:
        if kind == PROBE:
            _probe(resolve_library(root, "libcuda.so.1"))
        else:
            found["suspect"] = _look(uuid, resolve_library(root))
    except (_CheckError, OSError, AttributeError) as error:
        found["problem"] = str(error)[:256] or type(error).__name__
    print(json.dumps(found))
    return 0


def _look(uuid: str, path: str) -> str:
    """Find the card and read its memory; the result says why it must stay out."""
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid.encode())
        _optional(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle))
        remapped = _optional(lambda: pynvml.nvmlDeviceGetRemappedRows(handle))
        if remapped is not None and int(remapped[3]):
            return "its row remapping has failed"
        pending = _optional(lambda: pynvml.nvmlDeviceGetRetiredPagesPendingStatus(handle))
        if pending is not None and int(pending):
            return "it has pages whose retirement is pending"
    except pynvml.NVMLError as error:
        raise _CheckError(str(error)) from error
    return ""


def _optional(query: Callable[[], Any]) -> Any:
    """The answer, None of a driver or card that does not know the question."""
    try:
        return query()
    except pynvml.NVMLError as error:
        if error.value in (
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_NO_DATA,
        ):
            return None
        raise


def _probe(path: str) -> None:
    """Use the memory of the only visible device."""
    cuda = ctypes.CDLL(path)
    context, memory = ctypes.c_void_p(), ctypes.c_uint64()
    device = ctypes.c_int()
    back = ctypes.create_string_buffer(_PROBE_BYTES)
    _call(cuda, "cuInit", ctypes.c_uint(0))
    _call(cuda, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    _call(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call(cuda, "cuCtxSetCurrent", context)
    _call(cuda, "cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_PROBE_BYTES))
    _call(cuda, "cuMemsetD8_v2", memory, ctypes.c_ubyte(_PATTERN), ctypes.c_size_t(_PROBE_BYTES))
    _call(cuda, "cuMemcpyDtoH_v2", back, memory, ctypes.c_size_t(_PROBE_BYTES))
    _call(cuda, "cuMemFree_v2", memory)
    _call(cuda, "cuDevicePrimaryCtxRelease_v2", device)
    if back.raw != bytes([_PATTERN]) * _PROBE_BYTES:
        raise _CheckError("device memory does not hold what was written")


def _call(cuda: Any, name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        raise _CheckError(f"{name} gives error {code}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
