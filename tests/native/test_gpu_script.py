"""The logic of `bench/gpu/run.py` on the simulated driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from vgpu_harness import Node

ROOT = Path(__file__).resolve().parents[2]
SURE = ["G2", "G3", "G4", "G6", "G7", "G12", "G13", "G17", "G19", "G20", "G21", "G22"]
"""Checks that ask for no time."""


def run(node: Node, library: Path, only: list[str]) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status and results by check."""
    output = node.directory / "results.json"
    command = [sys.executable, str(ROOT / "bench" / "gpu" / "run.py"), "--library", str(library)]
    done = subprocess.run(
        [*command, "--scale", "0.1", "--only", ",".join(only), "--output", str(output)],
        env=node.environment(LD_PRELOAD="", CUDA_DEVICE_MEMORY_SHARED_CACHE="", FAKEGPU_CONTEXT_MIB="300"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert output.is_file(), done.stderr
    found = {row["check"]: row for row in json.loads(output.read_text())["checks"]}
    assert sorted(found) == sorted(only), done.stdout
    return done.returncode, found


def test_checks_pass_with_the_library(node: Node) -> None:
    status, found = run(node, node.build.libvgpu, SURE)
    assert {
        check: row["detail"] for check, row in found.items() if row["verdict"] not in ("PASS", "INFO")
    } == {}
    assert status == 0


def test_checks_fail_with_a_library_that_does_nothing(node: Node) -> None:
    """A check that cannot fail would show nothing on a GPU either."""
    status, found = run(
        node, node.build.program("libvgpu_next.so"), ["G3", "G4", "G7", "G12", "G19", "G21", "G22"]
    )
    assert {check for check, row in found.items() if row["verdict"] == "PASS"} == set()
    assert status == 1


def test_what_is_missing_is_said_and_is_no_failure(node: Node) -> None:
    """The simulated driver shares no memory by handle; nvcc and PyTorch are not in the environment."""
    status, found = run(node, node.build.libvgpu, ["G14", "G5", "G15"])
    assert {row["verdict"] for row in found.values()} <= {"NOT RUN", "PASS"}
    assert found["G14"]["verdict"] == "NOT RUN"
    assert status == 0


def test_a_check_that_takes_too_long_is_ended(node: Node) -> None:
    node.settings["FAKEGPU_DELAY_US"] = "cuInit=30000000"
    output = node.directory / "results.json"
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import run, checks; from pathlib import Path\n"
        "from bench_setup import Setup\n"
        "setup = Setup(Path(sys.argv[2]), Path(sys.argv[3]))\n"
        "result = run.one(setup, 'G3', 'the size', checks.sizes, 1.0)\n"
        "print(result.verdict, result.detail, len(setup.running))\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            str(ROOT / "bench" / "gpu"),
            str(node.build.libvgpu),
            str(output.parent),
        ],
        env=node.environment(LD_PRELOAD=""),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.strip() == "FAIL not done after 1 s 0", done.stderr
