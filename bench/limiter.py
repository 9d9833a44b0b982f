#!/usr/bin/env python3
"""How exactly libvgpu.so holds core limits, by the simulated cards' own engine time.

A cell is one simulated card with one or more containers, each with its limit and a program that keeps the
card busy in one way (native/vgpu/test/limiter_load.c). After a warm-up a container's share of the card is
measured over a window; the error of a cell is the mean over its containers of |share - expected|, in points.
Expected is the limit, or what the same program gets alone without the library when that is less: one that
waits for each millisecond of work never fills a card. Cells run a few at a time, each
with a driver of its own; the machine must not be busy with other things.

  limiter_mae_points            mean error of the cells with one container: limits 10, 30, 50, 90, kernels of
                                10 us to 200 ms, bursts, graphs, programs that never synchronise
  limiter_mae_points_contended  mean error of containers that share a card: 10+90, 30+30+30, 50+50, 10+30+50
  limiter_worst_points          the largest error of a container in either set
  unlimited_loss_percent        engine time that a program without a limit loses by the library, against the
                                same program without it, measured in turn
  limiter_step_error_points     share in the 5 s that follow 5 s after a change of the limit at run time,
                                against the new limit; the course as an SVG with --plot FILE

Needs the native build (make native); HAMI_NATIVE_BUILD names another build directory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from parts import command

from hami.protocol import region_layout as layout

ROOT = Path(__file__).resolve().parents[1]
STEPS = ((20, 15.0), (70, 10.0), (30, 10.0))  # limit, seconds
STEP_SAMPLE_S = 0.25


@dataclass(frozen=True)
class Container:
    """One container of a cell."""

    limit: int  # percent, 0 for none
    kind: str  # as of limiter_load
    kernel_ns: int
    processes: int = 1

    def expected(self, alone: Mapping[tuple[str, int], float]) -> float:
        """Percent of the card it should get; `alone`: what programs get without limit and library."""
        return min(self.limit or 100.0, alone.get((self.kind, self.kernel_ns), 100.0))


@dataclass(frozen=True)
class Cell:
    """One card and its containers."""

    containers: tuple[Container, ...]

    @property
    def name(self) -> str:
        kinds = {f"{one.kind} {_duration(one.kernel_ns)}" for one in self.containers}
        limits = "+".join(str(one.limit) for one in self.containers)
        return f"{limits} {' / '.join(sorted(kinds))}"


@dataclass(frozen=True)
class Outcome:
    """Shares of a cell's containers, percent."""

    cell: Cell
    shares: tuple[float, ...]

    def errors(self, alone: Mapping[tuple[str, int], float]) -> list[float]:
        """Points per container."""
        pairs = zip(self.shares, self.cell.containers, strict=True)
        return [abs(share - one.expected(alone)) for share, one in pairs]


class Card:
    """A running cell."""

    def __init__(self, build: Path, directory: Path, cell: Cell, *, preload: bool = True) -> None:
        self._build = build
        self._state = directory / "driver"
        self._state.mkdir(parents=True)
        self._directory = directory
        self._programs: list[subprocess.Popen[str]] = []
        for at, one in enumerate(cell.containers):
            for _ in range(one.processes):
                self._programs.append(self._start(f"c{at}", one, preload=preload))

    def _start(self, label: str, one: Container, *, preload: bool) -> subprocess.Popen[str]:
        environment = {
            "FAKEGPU_STATE": str(self._state),
            "FAKEGPU_CONTEXT_MIB": "0",
            "FAKEGPU_CONTAINER": label,
            "LD_LIBRARY_PATH": str(self._build / "fakegpu"),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(self.region(label)),
            "GPU_CORE_UTILIZATION_POLICY": "force",
        }
        self.region(label).parent.mkdir(exist_ok=True)
        if one.limit:
            environment["CUDA_DEVICE_SM_LIMIT"] = str(one.limit)
        if preload:
            environment["LD_PRELOAD"] = str(self._build / "libvgpu.so")
        return subprocess.Popen(
            [str(self._build / "vgpu-test" / "vgpu_limiter_load"), one.kind, str(one.kernel_ns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def region(self, label: str) -> Path:
        """Path of a container's shared region."""
        return self._directory / label / "vgpu.cache"

    def engine_s(self) -> dict[str, float]:
        """Seconds that the card has spent for each container."""
        done = subprocess.run(
            [str(self._build / "fakegpu" / "fakegpud"), "stat"],
            env={"FAKEGPU_STATE": str(self._state)},
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        containers = json.loads(done.stdout)["containers"]
        return {one["name"]: sum(one["engine_ns"]) / 1e9 for one in containers}

    def shares(self, seconds: float) -> dict[str, float]:
        """Percent of the card that each container gets in the next so many seconds."""
        before, start = self.engine_s(), time.monotonic()
        time.sleep(seconds)
        after, length = self.engine_s(), time.monotonic() - start
        return {name: 100 * (spent - before.get(name, 0.0)) / length for name, spent in after.items()}

    def close(self) -> None:
        for program in self._programs:
            if program.poll() not in (None, 0):
                raise SystemExit(f"vgpu_limiter_load ended with status {program.returncode}")
            program.kill()
            program.wait()


def measure(build: Path, cell: Cell, warm_s: float, window_s: float, *, preload: bool = True) -> Outcome:
    """Run one cell."""
    with tempfile.TemporaryDirectory(prefix="hami-limiter-") as path:
        card = Card(build, Path(path), cell, preload=preload)
        try:
            time.sleep(warm_s)
            shares = card.shares(window_s)
        finally:
            card.close()
    return Outcome(cell, tuple(shares.get(f"c{at}", 0.0) for at in range(len(cell.containers))))


def alone(*, quick: bool) -> list[Cell]:
    """Cells of one container."""
    kernels = [("sync", 1_000_000), ("never", 100_000), ("burst", 5_000_000), ("graph", 50_000)]
    if not quick:
        kernels += [
            ("sync", 10_000),
            ("sync", 100_000),
            ("sync", 20_000_000),
            ("sync", 200_000_000),
            ("never", 10_000),
            ("never", 20_000_000),
            ("graph", 500_000),
        ]
    limits = (10, 90) if quick else (10, 30, 50, 90)
    return [Cell((Container(limit, kind, ns),)) for kind, ns in kernels for limit in limits]


def contended(*, quick: bool) -> list[Cell]:
    """Cells of containers that share a card."""
    sets = ((10, 90), (30, 30, 30), (50, 50), (10, 30, 50))
    kernels = [("never", 1_000_000)]
    if not quick:
        kernels += [("never", 100_000), ("never", 20_000_000), ("graphs", 50_000)]
    cells = [
        Cell(tuple(Container(limit, kind, ns) for limit in limits)) for kind, ns in kernels for limits in sets
    ]
    if not quick:
        mixed = (("never", 100_000), ("never", 20_000_000), ("graphs", 50_000))
        for limits in ((30, 30, 30), (10, 30, 50)):
            pairs = zip(limits, mixed, strict=True)
            cells.append(Cell(tuple(Container(limit, kind, ns) for limit, (kind, ns) in pairs)))
        cells.append(Cell((Container(30, "never", 1_000_000, processes=4), Container(50, "never", 100_000))))
    return cells


def run_all(
    build: Path, cells: Sequence[Cell], warm_s: float, window_s: float, at_once: int
) -> list[Outcome]:
    """Every cell, a few at a time, with progress on standard error."""
    lock, done = threading.Lock(), 0

    def one(cell: Cell) -> Outcome:
        nonlocal done
        found = measure(build, cell, warm_s, window_s)
        with lock:
            done += 1
            shares = " ".join(f"{share:5.1f}" for share in found.shares)
            print(f"{done:3}/{len(cells)}  {cell.name:40} {shares}", file=sys.stderr)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(one, cells))


def alone_shares(build: Path, cells: Sequence[Cell], window_s: float) -> dict[tuple[str, int], float]:
    """What each kind of program gets of an idle card without limit and library, percent; one at a time."""
    kinds = sorted({(one.kind, one.kernel_ns) for cell in cells for one in cell.containers})
    shares = {}
    for kind, ns in kinds:
        cell = Cell((Container(0, kind, ns),))
        shares[kind, ns] = measure(build, cell, 0.5, window_s, preload=False).shares[0]
        print(f"alone    {kind} {_duration(ns):10} {shares[kind, ns]:6.1f}", file=sys.stderr)
    return shares


def unlimited_loss(build: Path, rounds: int, window_s: float) -> float:
    """Percent of engine time lost by the library without a limit; the median over alternating rounds."""
    cell = Cell((Container(0, "sync", 10_000),))
    losses = []
    for _ in range(rounds):
        plain = measure(build, cell, 0.5, window_s, preload=False).shares[0]
        ours = measure(build, cell, 0.5, window_s).shares[0]
        losses.append(100 * (plain - ours) / plain)
    return statistics.median(losses)


def step_response(build: Path) -> list[tuple[float, int, float]]:
    """(seconds, limit in force, share in the sample that ends then) over the changes of `STEPS`."""
    course: list[tuple[float, int, float]] = []
    cell = Cell((Container(STEPS[0][0], "never", 1_000_000),))
    with tempfile.TemporaryDirectory(prefix="hami-limiter-") as path:
        card = Card(build, Path(path), cell)
        try:
            while not card.region("c0").exists():
                time.sleep(0.05)
            time.sleep(0.5)
            start = time.monotonic()
            for limit, seconds in STEPS:
                with card.region("c0").open("r+b") as stream:
                    stream.seek(layout.V1.sm_limit.offset)
                    stream.write(limit.to_bytes(8, "little"))
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    share = card.shares(STEP_SAMPLE_S)["c0"]
                    course.append((time.monotonic() - start, limit, share))
        finally:
            card.close()
    return course


def step_error(course: Sequence[tuple[float, int, float]]) -> float:
    """The largest distance of the mean of the last 5 s of a step to its limit, points."""
    errors, end = [], 0.0
    for limit, seconds in STEPS:
        end += seconds
        late = [share for at, _, share in course if end - 5.0 < at <= end]
        errors.append(abs(statistics.mean(late) - limit))
    return max(errors)


def plot(course: Sequence[tuple[float, int, float]]) -> str:
    """The course as an SVG: the limit and the share over time."""
    width, height, left, top = 720, 280, 46, 16
    length = course[-1][0]

    def point(at: float, percent: float) -> str:
        return f"{left + at / length * width:.1f},{top + height - min(percent, 100) / 100 * height:.1f}"

    shares = " ".join(point(at, share) for at, _, share in course)
    limits = " ".join(point(at, limit) for at, limit, _ in course)
    lines = [
        f'<line x1="{left}" x2="{left + width}" y1="{top + height * (100 - percent) / 100}" '
        f'y2="{top + height * (100 - percent) / 100}" stroke="#ddd"/>'
        f'<text x="4" y="{top + height * (100 - percent) / 100 + 4}">{percent} %</text>'
        for percent in range(0, 101, 25)
    ]
    marks = [
        f'<text x="{left + second / length * width - 6:.0f}" y="{top + height + 18}">{second} s</text>'
        for second in range(0, int(length) + 1, 5)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 20}" height="{height + 50}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        + "".join(lines + marks)
        + f'<polyline points="{limits}" fill="none" stroke="#c33" stroke-dasharray="6 3"/>'
        f'<polyline points="{shares}" fill="none" stroke="#36c" stroke-width="1.5"/>'
        f'<text x="{left + 8}" y="{top + 14}" fill="#c33">limit</text>'
        f'<text x="{left + 48}" y="{top + 14}" fill="#36c">share of the card</text></svg>\n'
    )


def _duration(ns: int) -> str:
    return f"{ns // 1_000_000} ms" if ns >= 1_000_000 else f"{ns // 1000} us"


TARGETS = {
    "limiter_mae_points": 3.0,
    "limiter_mae_points_contended": 3.0,
    "limiter_worst_points": None,
    "unlimited_loss_percent": 2.0,
    "limiter_step_error_points": 10.0,
}


def main() -> int:
    """Print the cells and the figures, and with --json one JSON object as the last line."""
    parser = command.parser(__doc__, "fewer cells, shorter; ends within 70 s")
    parser.add_argument("--at-once", type=int, default=4, help="cells at a time (default 4)")
    parser.add_argument("--plot", type=Path, help="write the step response as an SVG")
    arguments = parser.parse_args()
    build = command.native_build("vgpu-test/vgpu_limiter_load")
    quick = arguments.quick
    warm_s, window_s = (4.0, 4.0) if quick else (10.0, 10.0)
    programs = [*alone(quick=quick), *contended(quick=quick)]
    capacity = alone_shares(build, programs, 1.5 if quick else 3.0)
    one = run_all(build, alone(quick=quick), warm_s, window_s, arguments.at_once)
    many = run_all(build, contended(quick=quick), warm_s, window_s, arguments.at_once)
    course = step_response(build)
    if arguments.plot:
        arguments.plot.write_text(plot(course))
    figures = {
        "limiter_mae_points": statistics.mean(statistics.mean(found.errors(capacity)) for found in one),
        "limiter_mae_points_contended": statistics.mean(
            statistics.mean(found.errors(capacity)) for found in many
        ),
        "limiter_worst_points": max(error for found in (*one, *many) for error in found.errors(capacity)),
        "unlimited_loss_percent": unlimited_loss(build, 2 if quick else 5, 1.0 if quick else 2.0),
        "limiter_step_error_points": step_error(course),
    }
    print(f"{'cell':42} share of each container, percent")
    for found in (*one, *many):
        shares = " ".join(f"{share:6.1f}" for share in found.shares)
        print(
            f"{found.cell.name:42} {shares}{'   <- over 3 points' if max(found.errors(capacity)) > 3 else ''}"
        )
    for name, value in figures.items():
        target = TARGETS[name]
        print(f"{name:32} {value:8.2f}{'' if target is None else f'   target <= {target:.0f}'}")
    if arguments.json:
        print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
