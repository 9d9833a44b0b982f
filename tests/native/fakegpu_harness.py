"""Simulated cards of one test: a state path of its own, programs on it, everything stopped at the end."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024 * 1024
Json = dict[str, Any]


class Cards:
    """Settings are ``FAKEGPU_<NAME>`` of all programs: ``devices=2`` means ``FAKEGPU_DEVICES=2``."""

    def __init__(self, state: Path, /, flavour: str = "", **settings: object) -> None:
        """``flavour`` is the suffix of a sanitized build: ``-asan`` or ``-tsan``."""
        build = Path(os.environ.get("HAMI_NATIVE_BUILD", str(ROOT / "build" / "native"))).resolve()
        self.programs = build.with_name(build.name + flavour) / "fakegpu"
        self.state = state
        self._running: list[subprocess.Popen[str]] = []
        self._settings = settings

    def environment(self, **more: object) -> dict[str, str]:
        """Environment of a program; names in lower case are settings, others are taken as they are."""
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith(("FAKEGPU_", "CUDA_", "NVIDIA_", "LD_"))
        }
        values = {"state": self.state, **self._settings, **more}
        named = {f"FAKEGPU_{k.upper()}" if k.islower() else k: str(v) for k, v in values.items()}
        options = {"ASAN_OPTIONS": "detect_leaks=1", "TSAN_OPTIONS": "halt_on_error=1"}
        return {**inherited, **options, "LD_LIBRARY_PATH": str(self.programs), **named}

    def run(self, *words: str, program: object = "gpuprog", **settings: object) -> list[Json]:
        """The results of a program that succeeds or is refused by the driver (exit status 0 or 1)."""
        done = self.attempt(*words, program=program, **settings)
        assert done.returncode in (0, 1), f"{words}: status {done.returncode}: {done.stderr}"
        return [json.loads(line) for line in done.stdout.splitlines()]

    def attempt(
        self, *words: str, program: object = "gpuprog", **settings: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.programs / str(program)), *words],
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            timeout=100,
        )

    def start(self, *words: str, program: object = "gpuprog", **settings: object) -> subprocess.Popen[str]:
        """A program that runs on; it is killed at the end of the test."""
        process = subprocess.Popen(
            [str(self.programs / str(program)), *words],
            env=self.environment(**settings),
            stdout=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def first(self, process: subprocess.Popen[str]) -> Json:
        """The next line of a running program."""
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"ended with {process.wait()}"
        result: Json = json.loads(line)
        return result

    def python(self, script: str, **settings: object) -> Any:
        """Run a script with this Python in a process of its own; the JSON of its last line."""
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            env=self._python_environment(**settings),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.strip().splitlines()[-1])

    def start_python(self, script: str) -> subprocess.Popen[str]:
        """A script that runs on; it is killed at the end of the test."""
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env=self._python_environment(),
            stdout=subprocess.DEVNULL,
            text=True,
        )
        self._running.append(process)
        return process

    def _python_environment(self, **settings: object) -> dict[str, str]:
        """The interpreter is not instrumented: a sanitizer comes by preload and its leaks are not ours."""
        preload = os.environ.get("HAMI_NATIVE_PRELOAD", "")
        added = {"LD_PRELOAD": preload} if preload else {}
        return {**self.environment(**settings), "ASAN_OPTIONS": "detect_leaks=0", **added}

    def stat(self) -> Json:
        """What the state holds."""
        (result,) = self.run("stat", program="fakegpud")
        return result

    def close(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Poll until the condition holds; a test that waits for ever fails with its subject."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)
