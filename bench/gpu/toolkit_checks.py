"""Checks that need a compiler: nvcc for the CUDA runtime, cc for what a launch costs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench_setup import HERE, CheckFailedError, NotRunError, Setup, require
from checks import Check
from cuda_driver import PTX

RUNTIME = """
#include <cstdio>
#include <thread>
#include <chrono>
#include <cstring>
__global__ void add(int *value) { atomicAdd(value, 1); }
__global__ void spin(long long cycles) { long long start = clock64(); while (clock64() - start < cycles); }
static int good(cudaError_t code) {
    if (code != cudaSuccess) printf("%s\\n", cudaGetErrorName(code));
    return code != cudaSuccess;
}
static void work() {
    for (int i = 0; i < 20; i++) spin<<<1, 1>>>(20000000);
    cudaStreamSynchronize(cudaStreamPerThread);
}
int main(int argc, char **argv) {
    int *value, result = 0;
    size_t free = 0, total = 0;
    cudaDeviceProp properties;
    if (argc > 1 && strcmp(argv[1], "overlap") == 0) {
        cudaFree(0);
        auto begin = std::chrono::steady_clock::now();
        std::thread one(work), two(work);
        one.join();
        two.join();
        printf("%.3f\\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
        return 0;
    }
    if (good(cudaMalloc(&value, sizeof *value)) || good(cudaMemset(value, 0, sizeof *value))) return 1;
    add<<<4, 32>>>(value);
    if (good(cudaMemcpy(&result, value, sizeof result, cudaMemcpyDeviceToHost))) return 1;
    if (good(cudaMemGetInfo(&free, &total)) || good(cudaGetDeviceProperties(&properties, 0))) return 1;
    printf("%d %zu %zu\\n", result, total, properties.totalGlobalMem);
    return 0;
}
"""


def compiled(setup: Setup, name: str, *options: str) -> Path:
    """The CUDA program, built with these options."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        raise NotRunError("no nvcc, neither in PATH nor in /usr/local/cuda/bin")
    top = Path(nvcc).resolve().parents[1]
    libraries = [str(top / name) for name in ("lib64", "lib") if (top / name).is_dir()]
    rpath = [word for folder in libraries for word in ("-Xlinker", "-rpath", "-Xlinker", folder)]
    source, target = setup.work / "runtime.cu", setup.work / name
    source.write_text(RUNTIME)
    if not target.exists():
        done = subprocess.run(
            [nvcc, "-std=c++17", *options, *rpath, "-o", str(target), str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise CheckFailedError(f"nvcc: {done.stderr[-300:]}")
    return target


def runtimes(setup: Setup) -> str:
    """G1, and the runtime's part of G3: programs with the shared and with the static runtime."""
    told = []
    for kind in ("shared", "static"):
        program = compiled(setup, f"runtime-{kind}", f"-cudart={kind}")
        done = setup.run(str(program), region=setup.region(), CUDA_DEVICE_MEMORY_LIMIT_0="8g")
        require(
            done.returncode == 0 and done.stderr == "",
            f"{kind}: {done.returncode} {done.stdout}{done.stderr}",
        )
        require(done.stdout.split() == ["128", str(8 << 30), str(8 << 30)], f"{kind}: {done.stdout}")
        told.append(kind)
    return f"{' and '.join(told)}: the kernel ran, 8 GiB by cudaMemGetInfo and the device's properties"


def launch_overhead(setup: Setup) -> str:
    """G10: 10 ns without a limit, 20 ns with one that does not bind, or within the spread of plain runs."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NotRunError("no C compiler")
    program, image = setup.work / "launch", setup.work / "kernels.ptx"
    image.write_bytes(PTX)
    subprocess.run([compiler, "-O2", "-o", str(program), str(HERE / "launch.c"), "-ldl"], check=True)

    def median(*, preload: bool, cores: str = "0") -> int:
        region = setup.region() if preload else None
        done = setup.run(str(program), str(image), region=region, CUDA_DEVICE_SM_LIMIT=cores)
        require(done.returncode == 0, f"launch: {done.returncode} {done.stderr}")
        return int(done.stdout)

    plain = [median(preload=False)]
    unlimited = median(preload=True) - plain[0]
    plain.append(median(preload=False))
    limited = median(preload=True, cores="50") - plain[1]
    spread = abs(plain[0] - plain[1])
    detail = (
        f"plain {plain[0]} and {plain[1]} ns, added {unlimited} ns unlimited, {limited} ns with a limit of 50"
    )
    require(unlimited <= max(10, 3 * spread) and limited <= max(20, 3 * spread), detail)
    return detail


def per_thread_streams(setup: Setup) -> str:
    """G11: two threads of a per-thread-stream build overlap as they do without the library."""
    program = compiled(setup, "overlap", "--default-stream=per-thread")
    times = []
    for region in (None, setup.region()):
        done = setup.run(str(program), "overlap", region=region)
        require(done.returncode == 0, done.stderr)
        times.append(float(done.stdout))
    require(times[1] <= 1.2 * times[0], f"{times[1]} s with the library, {times[0]} s without")
    return f"{times[0]} s without, {times[1]} s with the library"


def tools(setup: Setup) -> str:
    """G20: compute-sanitizer and nsys start, where they are."""
    told = []
    for tool, options in (
        ("compute-sanitizer", []),
        ("nsys", ["profile", "--output", str(setup.work / "nsys")]),
    ):
        if shutil.which(tool) is None:
            told.append(f"no {tool}")
            continue
        program = compiled(setup, "runtime-shared", "-cudart=shared")
        done = setup.run(tool, *options, str(program), region=setup.region(), timeout=60)
        require(done.returncode == 0, f"{tool}: {done.returncode} {done.stdout[-200:]}{done.stderr[-200:]}")
        told.append(tool)
    if all(text.startswith("no ") for text in told):
        raise NotRunError(", ".join(told))
    return ", ".join(told)


CHECKS: list[tuple[str, str, Check, float]] = [
    ("G1", "CUDA runtime, shared and static", runtimes, 60),
    ("G10", "cost of a launch", launch_overhead, 30),
    ("G11", "per-thread streams", per_thread_streams, 30),
    ("G20t", "compute-sanitizer and nsys", tools, 60),
]
