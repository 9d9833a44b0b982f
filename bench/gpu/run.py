#!/usr/bin/env python3
"""All checks of libvgpu.so that need a real GPU, in one run of at most eight minutes.

Usage: run.py [--output FILE] [--only G3,G8] [--minutes 8] [--scale 1.0]

Needs a Linux machine with one NVIDIA GPU, its driver and Python 3.11; nvcc and PyTorch add the checks
that need them. The library is build/release/<machine>/libvgpu.so, else build/native/libvgpu.so, else it
is compiled with cc. Prints a line for each check and, to FILE, all of it as JSON after each check; the exit
status is 1 if one failed and 2 if no GPU can be used. Where there are several GPUs the first is tested.
--scale shortens the loops (0.1: a tenth), for a try on the simulated driver.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType

import checks
import toolkit_checks
import torch_checks
from bench_setup import CheckFailedError, NotRunError, Result, Setup, find_library, write_results


class OutOfTimeError(Exception):
    """A check took longer than it may."""


def ring(_number: int, _frame: FrameType | None) -> None:
    raise OutOfTimeError


def one(setup: Setup, check: str, title: str, function: checks.Check, seconds: float) -> Result:
    """Run one check within its time; whatever it leaves is ended."""
    begin = time.monotonic()
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        verdict, detail = "INFO" if check in ("G2", "G17") else "PASS", function(setup)
    except NotRunError as reason:
        verdict, detail = "NOT RUN", str(reason)
    except OutOfTimeError:
        verdict, detail = "FAIL", f"not done after {seconds:.0f} s"
    except CheckFailedError as reason:
        verdict, detail = "FAIL", str(reason)
    except Exception as error:  # a check that breaks is a finding too, the others go on
        verdict, detail = "FAIL", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        setup.end()
    return Result(check, title, verdict, detail, round(time.monotonic() - begin, 1))


def keep_awake() -> None:
    """Hold the cards' device files open: without a persistence daemon the driver shuts a card down whenever
    its last process ends, and every check would wait seconds for it to start.
    """
    for path in Path("/dev").glob("nvidia[0-9]*"):
        with contextlib.suppress(OSError):
            os.open(path, os.O_RDWR | os.O_CLOEXEC)


def require_a_card(setup: Setup) -> None:
    """End in words unless a program without the library can use the first card."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    try:
        with setup.process(None) as process:
            process.must("start")
            count = process.must("cards")["count"]
    except (CheckFailedError, NotRunError) as error:
        raise SystemExit(f"no GPU can be used here: {error}") from error
    if count > 1 and chosen != "0":
        raise SystemExit(
            f"CUDA_VISIBLE_DEVICES={chosen} on a machine with {count} GPUs: NVML would be asked about "
            "another card. Set it to 0, or run in a container that has only the card to test"
        )


def machine(setup: Setup) -> dict[str, str]:
    """What the results are of."""
    done = setup.run("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return {
        "gpu": done.stdout.strip(),
        "kernel": platform.release(),
        "cores": str(os.cpu_count()),
        "library": str(setup.library),
    }


def described(setup: Setup) -> dict[str, str]:
    try:
        return machine(setup)
    except FileNotFoundError:
        return {"gpu": "no nvidia-smi", "kernel": platform.release(), "library": str(setup.library)}


def main() -> int:
    """Command line; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("gpu-checks.json"))
    parser.add_argument("--only", default="", help="comma-separated checks")
    parser.add_argument("--minutes", type=float, default=8.0, help="no check starts that could end later")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--library", type=Path)
    arguments = parser.parse_args()
    wanted = set(arguments.only.split(",")) - {""}
    end = time.monotonic() + 60 * arguments.minutes
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="hami-gpu-") as folder:
        work = Path(folder)
        setup = Setup((arguments.library or find_library(work)).resolve(), work, scale=arguments.scale)
        keep_awake()
        try:
            require_a_card(setup)
        except SystemExit as reason:
            print(reason, file=sys.stderr)
            return 2
        facts = described(setup)
        print(", ".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
        for check, title, function, seconds in [*toolkit_checks.CHECKS, *checks.CHECKS, *torch_checks.CHECKS]:
            if wanted and check not in wanted:
                continue
            left = end - time.monotonic()
            if left < 10:
                result = Result(check, title, "NOT RUN", f"{arguments.minutes:.0f} minutes are over", 0.0)
            else:
                result = one(setup, check, title, function, min(seconds, left))
            results.append(result)
            told = " ".join(result.detail.split())
            print(f"{result.verdict:8} {check:5} {title:45} {result.seconds:6.1f} s  {told}", flush=True)
            write_results(arguments.output, facts, results)
    verdicts = [result.verdict for result in results]
    passed, failed, skipped = (verdicts.count(word) for word in ("PASS", "FAIL", "NOT RUN"))
    print(f"{passed} passed, {failed} failed, {skipped} not run")
    return 1 if "FAIL" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
