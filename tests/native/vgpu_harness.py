"""Parts of the native tests: the build, a simulated node, CUDA programs that do what they are told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hami.protocol import region_layout as layout

HOOKS = Path(__file__).resolve().parents[2] / "native/vgpu/hooks.toml"
MIB = 1024 * 1024
SUCCESS = 0
OUT_OF_MEMORY = 2
UNKNOWN = 999
FORBIDDEN = {
    "exit",
    "_exit",
    "abort",
    "umask",
    "signal",
    "sigaction",
    "setenv",
    "putenv",
    "printf",
    "system",
    "sleep",
}
"""Functions with which a library would end its process, change it or write: libvgpu.so calls none of them."""


@dataclass(frozen=True)
class NativeBuild:
    """Where the native parts are."""

    directory: Path

    @property
    def libvgpu(self) -> Path:
        return self.directory / "libvgpu.so"

    @property
    def driver(self) -> Path:
        """Directory with the simulated libcuda.so.1 and libnvidia-ml.so.1."""
        return self.directory / "fakegpu"

    def program(self, name: str) -> Path:
        """A test program of native/vgpu/test."""
        return self.directory / "vgpu-test" / name

    def sanitized(self, kind: str) -> NativeBuild:
        """The build with a sanitizer, `asan` (with UBSan) or `tsan`; `make sanitized` makes it."""
        build = NativeBuild(self.directory.with_name(f"{self.directory.name}-{kind}"))
        if not build.libvgpu.is_file():
            raise FileNotFoundError(f"{build.libvgpu} is not built: run make sanitized")
        return build


@dataclass
class Shell:
    """A running vgpu_shell: one CUDA process that does what it is told."""

    process: subprocess.Popen[str]
    errors: Path

    def ask(self, command: str) -> tuple[int, int, int]:
        """CUDA result and up to two values of one command."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait()}: {self.stderr()}"
        result, first, second = (int(part) for part in line.split())
        return result, first, second

    def must(self, command: str) -> int:
        """The first value of a command that has to succeed."""
        result, value, _ = self.ask(command)
        assert result == 0, f"{command}: CUDA result {result}: {self.stderr()}"
        return value

    def start(self, device: int = 0) -> Shell:
        """cuInit and a primary context."""
        self.must("init")
        self.must(f"retain {device}")
        return self

    def stderr(self) -> str:
        return self.errors.read_text()

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """An orderly end for a program that is not busy, else SIGKILL."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self.kill()

    def leave(self) -> int:
        """End of input: the program returns from main. Its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


@dataclass
class Node:
    """One simulated driver (a state of its own) and the containers on it."""

    build: NativeBuild
    directory: Path
    settings: dict[str, str] = field(default_factory=dict)
    shells: list[Shell] = field(default_factory=list)
    preload: list[str] = field(default_factory=list)

    def environment(self, container: str = "a", **variables: str) -> dict[str, str]:
        """Environment of a process of a container: its region, the driver, the preload, then `variables`."""
        region = self.region(container)
        region.parent.mkdir(exist_ok=True)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.directory),
            "FAKEGPU_STATE": str(self.state),
            "FAKEGPU_CONTEXT_MIB": "0",
            "FAKEGPU_CONTAINER": container,
            "LD_LIBRARY_PATH": str(self.build.driver),
            "LD_PRELOAD": ":".join([*self.preload, str(self.build.libvgpu)]),
            "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region),
            "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",
            **self.settings,
            **variables,
        }

    @property
    def state(self) -> Path:
        state = self.directory / "driver"
        state.mkdir(exist_ok=True)
        return state

    def region(self, container: str = "a") -> Path:
        """Path of a container's shared region."""
        return self.directory / container / "vgpu.cache"

    def shell(
        self,
        container: str = "a",
        *,
        reach: str = "link",
        prefix: tuple[str, ...] = (),
        extra: Mapping[str, str] | None = None,
        **env: str,
    ) -> Shell:
        """Start a CUDA program in a container; `reach` is how it finds the driver's functions.

        Environment variables are keywords, or in `extra`; `prefix` is a command that starts the program.
        """
        errors = self.directory / f"stderr-{len(self.shells)}"
        with errors.open("w") as stream:
            process = subprocess.Popen(
                [*prefix, str(self.build.program("vgpu_shell")), reach],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=self.environment(container, **(extra or {}), **env),
            )
        shell = Shell(process, errors)
        self.shells.append(shell)
        return shell

    def run(self, *command: str, container: str = "a", **env: str) -> subprocess.CompletedProcess[str]:
        """Run any program in a container and wait for it."""
        return subprocess.run(
            command,
            env=self.environment(container, **env),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def driver_state(self) -> Any:
        """Cards, processes and containers as the simulated driver sees them."""
        done = subprocess.run(
            [str(self.build.driver / "fakegpud"), "stat"],
            env={"FAKEGPU_STATE": str(self.state)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return json.loads(done.stdout)

    def engine_ns(self) -> dict[str, int]:
        """Time that the simulated cards have spent for each container."""
        return {c["name"]: sum(c["engine_ns"]) for c in self.driver_state()["containers"]}

    def python(self, code: str, container: str = "a", **env: str) -> str:
        """Output of a Python program in a container; it has to succeed."""
        done = self.run(sys.executable, "-c", code, container=container, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        for shell in self.shells:
            if shell.process.poll() is None:
                shell.process.send_signal(signal.SIGCONT)  # a test may have stopped it
                shell.end()
            for stream in (shell.process.stdin, shell.process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def wait_until(condition: Callable[[], bool]) -> None:
    """Until it holds. The limit only ends a test that fails: on a busy machine much takes long."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.02)


def read_usage(region: Path, device: int = 0) -> dict[int, int]:
    """Bytes on a device by PID, as a monitor reads them: slots below proc_num whose status is not free.

    Raises ValueError while the file is being made.
    """
    data = region.read_bytes()
    if len(data) < layout.V1.SIZE:
        raise ValueError(f"{region} has {len(data)} bytes")
    used: dict[int, int] = {}
    for k in range(layout.V1.proc_num.read(data)):
        base = layout.V1.procs.base(k)
        if layout.V1Slot.status.read(data, base) != layout.SLOT_FREE:
            used[layout.V1Slot.pid.read(data, base)] = layout.V1Slot.used_total.read(data, base, device)
    return used


def has_moved(shell: Shell, region: Path, used: int) -> bool:
    """Whether a program whose region was exchanged is the one process in the new one, with its bytes."""
    shell.must("launch 1 1 32")
    try:
        return read_usage(region) == {shell.process.pid: used}
    except (OSError, ValueError):  # just being made
        return False


def poke(region: Path, offset: int, value: bytes) -> None:
    """Write into a region from outside."""
    with region.open("r+b") as stream:
        stream.seek(offset)
        stream.write(value)


def declared_symbols() -> set[str]:
    """What libvgpu.so exports: the hooks of the list, and the look-up."""
    declared = {"dlsym"}
    for hook in tomllib.loads(HOOKS.read_text())["hook"]:
        for variant in hook["variants"]:
            declared.add(variant["symbol"])
            if "twin" in variant:
                declared.add(variant["symbol"] + "_ptsz")
    return declared
