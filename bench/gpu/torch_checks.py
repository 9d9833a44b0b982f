"""Checks with PyTorch, where it is installed: one program for each."""

from __future__ import annotations

import importlib.util
import shutil
import sys

from bench_setup import GIB, MIB, NotRunError, Setup, require
from checks import Check, usage

TENSORS = """
import torch
held = []
try:
    while True:
        held.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
except torch.cuda.OutOfMemoryError:
    got = len(held) * 64
held.clear()
torch.cuda.empty_cache()
again = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
assert int(again[:10].sum()) == 10
print(got, torch.cuda.mem_get_info()[1])
"""

LIBRARIES = """
import torch
x = torch.randn(512, 512, device="cuda")
assert torch.allclose((x @ x).cpu(), x.cpu() @ x.cpu(), rtol=1e-2, atol=1e-1)  # cuBLAS
y = torch.nn.functional.conv2d(x[None, None], torch.ones(1, 1, 3, 3, device="cuda"))  # cuDNN
assert y.shape[-1] == 510
assert torch.allclose(torch.fft.ifft(torch.fft.fft(x)).real, x, atol=1e-3)  # cuFFT
torch.cuda.synchronize()
print("libraries")
"""

COMPILED = """
import torch
def f(x):
    return torch.sin(x) * 2 + torch.cos(x)
x = torch.randn(1 << 20, device="cuda")
assert torch.allclose(torch.compile(f)(x), f(x), atol=1e-5)
print("compiled")
"""

SPAWNED = """
import torch
import torch.multiprocessing as mp
def child(tensor, queue):
    queue.put(int(tensor.sum().item()))
    del tensor
if __name__ == "__main__":
    mp.set_start_method("spawn")
    queue, tensor = mp.Queue(), torch.ones(1 << 20, device="cuda")
    process = mp.Process(target=child, args=(tensor, queue))
    process.start()
    print(queue.get(timeout=60))
    process.join()
    data = torch.utils.data.DataLoader(list(range(64)), batch_size=8, num_workers=2)
    print(sum(int(batch.cuda().sum()) for batch in data))
"""


def python(setup: Setup, code: str, timeout: float = 90, **limits: str) -> str:
    """Output of a PyTorch program under the library; it has to succeed and to print nothing else."""
    if importlib.util.find_spec("torch") is None:
        raise NotRunError("no PyTorch")
    script = setup.work / f"torch-{setup.regions}.py"
    script.write_text(code)
    region = setup.region()
    done = setup.run(sys.executable, str(script), region=region, timeout=timeout, **limits)
    require(done.returncode == 0, f"ended with {done.returncode}: {done.stderr[-300:]}")
    require("HAMI-core" not in done.stderr or "refused" in done.stderr, f"printed {done.stderr[-200:]}")
    require(usage(region) <= 4 * MIB, f"{usage(region) // MIB} MiB are charged after the end")
    return done.stdout


def tensors(setup: Setup) -> str:
    """G5, and G4 with expandable segments: to the limit, caught, freed, once more."""
    told = []
    for segments in ("False", "True"):
        allocator = f"expandable_segments:{segments}"
        out = python(
            setup,
            TENSORS,
            CUDA_DEVICE_MEMORY_LIMIT_0="6g",
            LIBCUDA_LOG_LEVEL="0",
            PYTORCH_CUDA_ALLOC_CONF=allocator,
        )
        got, total = (int(word) for word in out.split())
        require(total == 6 * GIB, f"total {total}")
        require(3 * 1024 <= got <= 6 * 1024, f"{got} MiB of tensors under 6 GiB")
        told.append(f"expandable_segments={segments}: {got} MiB")
    return ", ".join(told)


def libraries(setup: Setup) -> str:
    """G15: cuBLAS, cuDNN, cuFFT."""
    require(python(setup, LIBRARIES, CUDA_DEVICE_MEMORY_LIMIT_0="8g").strip() == "libraries", "no answer")
    return "cuBLAS, cuDNN, cuFFT"


def compiled(setup: Setup) -> str:
    """G15: a kernel that Triton makes."""
    if shutil.which("cc") is None and shutil.which("gcc") is None:
        raise NotRunError("no C compiler, Triton needs one")
    require(python(setup, COMPILED, CUDA_DEVICE_MEMORY_LIMIT_0="8g").strip() == "compiled", "no answer")
    return "torch.compile"


def spawned(setup: Setup) -> str:
    """G13, G14: a tensor shared with a spawned process, workers of a data loader."""
    out = python(setup, SPAWNED, CUDA_DEVICE_MEMORY_LIMIT_0="8g")
    require(out.split() == [str(1 << 20), "2016"], out)
    return "spawn, shared tensor, two workers"


CHECKS: list[tuple[str, str, Check, float]] = [
    ("G5", "tensors up to the limit", tensors, 100),
    ("G13t", "processes of PyTorch", spawned, 60),
    ("G15", "libraries of CUDA", libraries, 60),
    ("G15c", "torch.compile", compiled, 90),
]
