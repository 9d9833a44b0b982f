#!/usr/bin/env python3
"""What libvgpu.so adds to the start of a program, on the simulated driver.

New processes time their own cuInit and first primary context, with and without the library in turn. N
processes are all ready before one signal lets them go, into a region that none has made yet, and a second
one to their contexts: contexts that others make meanwhile would count as time of cuInit. The region lies on
the disk, as on a node: a start now and then waits for the file system to make the file.

A figure is the 99th percentile with the library less the one without: of all starts of one process, and of
the 128 of a round in the median round. In a round the last processes wait for the cores that the others use,
and a core that is taken away for a moment moves all of them: `pooled` is over all rounds together.

  cuinit_added_p99_ms_1, _128    cuInit of one process, of each of 128 that start at once
  context_added_p99_ms_1, _128   the same for the first primary context after it
  ..._p99_pooled_ms_128          the same over all rounds together
  ..._p50_ms_1, _128             the same of the median start
  exec_added_mean_us             /bin/true, a program without CUDA: mean over all runs
  fork_storm_added_percent       a shell that starts 300 others, one after another

Needs the native build (make native); HAMI_NATIVE_BUILD names another build directory, --library another
library.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from parts import command

ROOT = Path(__file__).resolve().parents[1]
STORM = "i=0; while [ $i -lt 300 ]; do /bin/sh -c :; i=$((i+1)); done"

Times = tuple[list[float], list[float]]
"""Milliseconds of cuInit and of the first context, one pair a process."""

STEPS = ("cuinit", "context")


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def pooled_percentile(rounds: list[list[float]], percent: float) -> float:
    """Of all rounds together."""
    return percentile([value for values in rounds for value in values], percent)


def median_percentile(rounds: list[list[float]], percent: float) -> float:
    """Of each round, in the median round."""
    return statistics.median(percentile(values, percent) for values in rounds)


class Bench:
    """The build to measure and a folder for what the programs leave."""

    def __init__(self, build: Path, library: Path, folder: Path) -> None:
        self.build, self.library, self.folder = build, library, folder
        self.regions = 0

    def environment(self, *, preload: bool) -> dict[str, str]:
        """A container that nobody has used yet, with limits."""
        self.regions += 1
        environment = {
            "PATH": os.environ["PATH"],
            "FAKEGPU_STATE": str(self.folder),
            "LD_LIBRARY_PATH": str(self.build / "fakegpu"),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(self.folder / f"{self.regions}.cache"),
            "CUDA_DEVICE_MEMORY_LIMIT_0": "8g",
            "CUDA_DEVICE_SM_LIMIT": "50",
            "FAKEGPU_CONTEXT_MIB": "16",
        }
        if preload:
            environment["LD_PRELOAD"] = str(self.library)
        return environment

    def start_together(self, count: int, *, preload: bool) -> Times:
        """Each of `count` processes that start at once."""
        environment = self.environment(preload=preload)
        pipes = [os.pipe() for _ in range(3)]
        (go, _), (context, _), (stay, _) = pipes
        ends = [end for _, end in pipes]
        processes = [
            subprocess.Popen(
                [str(self.build / "vgpu-test" / "vgpu_startup"), str(context), str(stay)],
                stdin=go,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                pass_fds=[context, stay],
            )
            for _ in range(count)
        ]
        for end in (go, context, stay):
            os.close(end)
        streams = [process.stdout for process in processes if process.stdout is not None]
        steps: list[list[str]] = []
        try:
            for _ in range(3):  # ready, cuInit, context; the end of a pipe lets all go on at once
                steps.append([stream.readline() for stream in streams])
                os.close(ends.pop(0))
        finally:
            for end in ends:
                os.close(end)
            for process, stream in zip(processes, streams, strict=True):
                process.wait(timeout=60)
                stream.close()
            Path(environment["CUDA_DEVICE_MEMORY_SHARED_CACHE"]).unlink(missing_ok=True)
        if steps[0] != ["ready\n"] * count or not all(steps[1]) or not all(steps[2]):
            raise SystemExit("vgpu_startup failed")
        initialised, retained = ([int(line) / 1e6 for line in step] for step in steps[1:])
        return initialised, retained

    def start_up(self, count: int, rounds: int) -> dict[str, float]:
        """Added percentiles of cuInit and of the first context, ms; the first round of the simulated driver,
        which makes its state, does not count."""
        self.start_together(1, preload=False)
        found: dict[bool, list[Times]] = {True: [], False: []}
        for number in range(rounds):
            for preload in (True, False) if number % 2 == 0 else (False, True):
                found[preload].append(self.start_together(count, preload=preload))
        figures: dict[str, float] = {}
        for i, step in enumerate(STEPS):
            ours, plain = ([times[i] for times in found[preload]] for preload in (True, False))
            pooled = pooled_percentile(ours, 99) - pooled_percentile(plain, 99)
            name = f"{step}_added_p99_ms_{count}"
            figures[name] = (
                pooled if count == 1 else median_percentile(ours, 99) - median_percentile(plain, 99)
            )
            if count > 1:
                figures[f"{step}_added_p99_pooled_ms_{count}"] = pooled
            figures[f"{step}_added_p50_ms_{count}"] = pooled_percentile(ours, 50) - pooled_percentile(
                plain, 50
            )
        return figures

    def run_ns(self, command: list[str], *, preload: bool) -> int:
        """Wall time of one program that has nothing to do with CUDA."""
        environment = {"PATH": os.environ["PATH"]}
        if preload:
            environment["LD_PRELOAD"] = str(self.library)
        start = time.perf_counter_ns()
        child = os.posix_spawn(command[0], command, environment)
        _, status = os.waitpid(child, 0)
        taken = time.perf_counter_ns() - start
        if status != 0:
            raise SystemExit(f"{command[0]} ended with status {status}")
        return taken

    def programs(self, command: list[str], rounds: int) -> tuple[float, float]:
        """Mean time of a program with and without the library, us; the slowest 2 in 100 do not count."""
        found: dict[bool, list[int]] = {True: [], False: []}
        for number in range(rounds):
            for preload in (True, False) if number % 2 == 0 else (False, True):
                found[preload].append(self.run_ns(command, preload=preload))
        ours, plain = (
            statistics.fmean(sorted(found[key])[: max(1, rounds * 98 // 100)]) / 1000 for key in (True, False)
        )
        return ours, plain


def measure(bench: Bench, *, quick: bool) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for count, rounds in ((1, 400 if quick else 1000), (128, 7 if quick else 25)):
        figures |= bench.start_up(count, rounds)
    ours, plain = bench.programs(["/bin/true"], 200 if quick else 1000)
    figures["exec_added_mean_us"] = ours - plain
    ours, plain = bench.programs(["/bin/sh", "-c", STORM], 3 if quick else 15)
    figures["fork_storm_added_percent"] = 100 * (ours - plain) / plain
    return {name: round(value, 2) for name, value in figures.items()}


def targets(cores: int) -> dict[str, float]:
    """What the figures should stay below; for 128 processes it depends on the machine."""
    return {
        "cuinit_added_p99_ms_1": 2.0,
        "cuinit_added_p99_ms_128": 0.1 * 128 / cores + 2,
        "exec_added_mean_us": 150.0,
    }


def main() -> int:
    """Print a table, and with --json one JSON object as the last line."""
    parser = command.parser(__doc__, "fewer rounds; ends within 50 s")
    parser.add_argument("--library", type=Path, help="libvgpu.so to measure (default: the native build's)")
    arguments = parser.parse_args()
    other = arguments.library and arguments.library.resolve()
    build = command.native_build("vgpu-test/vgpu_startup", str(other or "libvgpu.so"))
    library = other or build / "libvgpu.so"
    with tempfile.TemporaryDirectory(prefix="hami-startup-") as folder:
        figures = measure(Bench(build, library, Path(folder)), quick=arguments.quick)
    wanted = targets(os.cpu_count() or 1)
    for name, value in figures.items():
        print(f"{name:32} {value:8.2f}" + (f"   target <= {wanted[name]:.1f}" if name in wanted else ""))
    if arguments.json:
        print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
