#!/usr/bin/env python3
"""How long a killed process holds others up, in milliseconds, on the simulated driver.

Two processes of a container allocate and free without pause, one far below the limit and one that needs the
slow path at its edge. Beside them writers do the same and are killed by SIGKILL at random instants: anywhere
in admission, with locks held or flags set. The figure is the longest single call of the two, allocation and
free together; what the machine's own scheduling costs stands beside it.

  writer_killed_delay_ms           the longest call while writers are killed
  writer_killed_delay_ms_quiet     the longest call in the same time without kills, with as many writers
  writer_killed_waited_ms, _quiet  the same without the time in which the caller itself waited for a core
  kills                            writers killed

Needs the native build (make native); HAMI_NATIVE_BUILD names another build directory.
"""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from pathlib import Path

from parts import command

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
WRITERS = 4


class Shell:
    """One vgpu_shell in the container."""

    def __init__(self, build: Path, directory: Path) -> None:
        self.process = subprocess.Popen(
            [str(build / "vgpu-test" / "vgpu_shell")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={
                "FAKEGPU_STATE": str(directory), "FAKEGPU_CONTEXT_MIB": "0",
                "LD_LIBRARY_PATH": str(build / "fakegpu"), "LD_PRELOAD": str(build / "libvgpu.so"),
                "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(directory / "kills.cache"),
                "CUDA_DEVICE_MEMORY_LIMIT_0": "96m", "LIBCUDA_LOG_LEVEL": "0",
            },
        )  # fmt: skip
        self.tell("init")
        self.tell("retain 0")

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def answer(self) -> tuple[int, int, int]:
        assert self.process.stdout is not None
        result, first, second = self.process.stdout.readline().split()
        return int(result), int(first), int(second)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def longest_ms(
    build: Path, directory: Path, seconds: float, choose: random.Random | None
) -> tuple[float, float, int]:
    """The longest call of both watchers, the same without waits for a core, and the number of kills."""
    directory.mkdir()
    watchers = [Shell(build, directory) for _ in range(2)]
    writers = [Shell(build, directory) for _ in range(WRITERS)]
    kills = 0
    try:
        for shell in watchers:
            assert [shell.answer()[0], shell.answer()[0]] == [0, 0]
        for writer in writers:
            writer.tell(f"churn 600000 {2 * MIB}")
        for shell, size in zip(watchers, (MIB, 48 * MIB), strict=True):
            shell.tell(f"slowest {int(seconds * 1000)} {size}")
        end = time.monotonic() + seconds - 0.2
        while time.monotonic() < end:
            time.sleep(0.01 if choose is None else choose.random() * 0.02)
            if choose is not None:
                writers.pop(choose.randrange(len(writers))).kill()
                writers.append(Shell(build, directory))
                writers[-1].tell(f"churn 600000 {2 * MIB}")
                kills += 1
        answers = [shell.answer() for shell in watchers]
        assert all(result == 0 for result, _, _ in answers), answers
        for shell in watchers:
            shell.tell("slowest-on-core")
        waited = max(shell.answer()[1] for shell in watchers)
        return max(longest for _, longest, _ in answers) / 1e6, waited / 1e6, kills
    finally:
        for shell in (*watchers, *writers):
            shell.kill()


def main() -> None:
    parser = command.parser(__doc__, "3 seconds instead of 20")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    build = command.native_build()
    seconds = 3.0 if options.quick else 20.0
    with tempfile.TemporaryDirectory() as name:
        quiet, quiet_waited, _ = longest_ms(build, Path(name) / "quiet", seconds, None)
        choose = random.Random(options.seed)
        killed, killed_waited, kills = longest_ms(build, Path(name) / "kills", seconds, choose)
    figures = {
        "writer_killed_delay_ms": round(killed, 2),
        "writer_killed_delay_ms_quiet": round(quiet, 2),
        "writer_killed_waited_ms": round(killed_waited, 2),
        "writer_killed_waited_ms_quiet": round(quiet_waited, 2),
        "kills": kills,
    }
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:<30} {value:>10}")


if __name__ == "__main__":
    main()
