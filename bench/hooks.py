#!/usr/bin/env python3
"""What libvgpu.so adds to a driver call, in nanoseconds, on the simulated driver with zero cost.

A small C program launches a kernel and allocates and frees 4 KiB, timed in batches of 64:
once with libvgpu.so preloaded and once without it. The two are measured in turn, round by round;
a figure is the median over the rounds of the difference.

  launch_unlimited_added_ns    one cuLaunchKernel without a core limit
  launch_limited_added_ns      the same with CUDA_DEVICE_SM_LIMIT=50; the launches fit the bucket
  alloc_free_added_ns_live1, _live10000
                               cuMemAlloc and cuMemFree together, with 1 and 10,000 live blocks
  alloc_free_added_ns_procs64  the same while 63 other processes of the container are attached and idle

Needs the native build (make native); HAMI_NATIVE_BUILD names another build directory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from parts import command

ROOT = Path(__file__).resolve().parents[1]


class Probe:
    """One running vgpu_hook_bench."""

    def __init__(self, build: Path, directory: Path, *, live: int, preload: bool, sm_limit: str) -> None:
        """`live`: blocks that stay allocated; `sm_limit`: percent, 0 for none."""
        environment = {
            "FAKEGPU_STATE": str(directory),
            "FAKEGPU_ZERO_COST": "1",
            "FAKEGPU_CONTEXT_MIB": "0",
            "LD_LIBRARY_PATH": str(build / "fakegpu"),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(directory / f"limit{sm_limit}.cache"),
            "CUDA_DEVICE_MEMORY_LIMIT_0": "8g",
            "CUDA_DEVICE_SM_LIMIT": sm_limit,
        }
        if preload:
            environment["LD_PRELOAD"] = str(build / "libvgpu.so")
        self.process = subprocess.Popen(
            [str(build / "vgpu-test" / "vgpu_hook_bench"), str(live)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"vgpu_hook_bench ended with status {self.process.wait()}")
        return line

    def round(self) -> tuple[float, float]:
        """Nanoseconds of one launch and of one allocation with its free."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        launch, pair = self.line().split()
        return float(launch), float(pair)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def added(
    build: Path, directory: Path, rounds: int, *, live: int = 1, idle: int = 0, sm_limit: str = "0"
) -> tuple[float, float]:
    """Median nanoseconds that the library adds to a launch and to an allocation with its free."""
    neighbours = [
        Probe(build, directory, live=1, preload=True, sm_limit=sm_limit) for _ in range(idle)
    ]  # fmt: skip
    with_library = Probe(build, directory, live=live, preload=True, sm_limit=sm_limit)
    without = Probe(build, directory, live=live, preload=False, sm_limit=sm_limit)
    probes = [*neighbours, with_library, without]
    try:
        for probe in probes:
            probe.line()
        launches, pairs = [], []
        for number in range(rounds):
            order = (with_library, without) if number % 2 == 0 else (without, with_library)
            measured = {id(probe): probe.round() for probe in order}
            ours, plain = measured[id(with_library)], measured[id(without)]
            launches.append(ours[0] - plain[0])
            pairs.append(ours[1] - plain[1])
        return statistics.median(launches), statistics.median(pairs)
    finally:
        for probe in probes:
            probe.close()


def measure(build: Path, rounds: int) -> dict[str, float]:
    """All figures, ns."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="hami-hooks-") as path:
        directory = Path(path)
        launch, pair = added(build, directory, rounds)
        figures["launch_unlimited_added_ns"] = launch
        figures["alloc_free_added_ns_live1"] = pair
        figures["launch_limited_added_ns"], _ = added(build, directory, rounds, sm_limit="50")
        _, figures["alloc_free_added_ns_live10000"] = added(build, directory, rounds, live=10000)
        _, figures["alloc_free_added_ns_procs64"] = added(build, directory, rounds, idle=63)
    return {name: round(value, 1) for name, value in figures.items()}


TARGETS = {
    "launch_unlimited_added_ns": 10.0,
    "launch_limited_added_ns": 20.0,
    "alloc_free_added_ns_live1": 150.0,
    "alloc_free_added_ns_live10000": 150.0,
    "alloc_free_added_ns_procs64": 150.0,
}


def main() -> int:
    """Print a table, and with --json one JSON object as the last line."""
    parser = command.parser(__doc__, "fewer rounds; ends within 50 s")
    arguments = parser.parse_args()
    build = command.native_build("vgpu-test/vgpu_hook_bench")
    figures = measure(build, 50 if arguments.quick else 400)
    for name, value in figures.items():
        print(f"{name:32} {value:8.1f}   target <= {TARGETS[name]:.0f}")
    if arguments.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
