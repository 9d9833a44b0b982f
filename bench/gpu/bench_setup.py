"""What the GPU checks share: where the library is, processes under it, results."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MIB = 1 << 20
GIB = 1 << 30


class CheckFailedError(Exception):
    """A check has seen what it must not see."""


class NotRunError(Exception):
    """A check cannot be made here; the text says what is missing."""


@dataclass
class Result:
    """One line of the table. `verdict`: PASS, FAIL, INFO or NOT RUN."""

    check: str
    title: str
    verdict: str
    detail: str
    seconds: float


def load_layout() -> ModuleType:
    """The layout of the region, without the package around it."""
    path = ROOT / "src" / "hami" / "protocol" / "region_layout.py"
    spec = importlib.util.spec_from_file_location("region_layout", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["region_layout"] = module
    spec.loader.exec_module(module)
    return module


def require(condition: bool, message: str) -> None:
    """Fail the check unless the condition holds."""
    if not condition:
        raise CheckFailedError(message)


@dataclass
class Setup:
    """Where everything is, how long the loops may take, and the processes that run."""

    library: Path
    work: Path
    environment: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    """Loops of N seconds take N times this."""
    regions: int = 0
    running: list[Process] = field(default_factory=list)

    def variables(self, region: Path | None, **limits: str) -> dict[str, str]:
        """Environment of a program: with a region the library is preloaded, without one it is not."""
        variables = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **self.environment}
        if region is not None:
            variables |= {"LD_PRELOAD": str(self.library), "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region)}
        return variables | limits

    def region(self) -> Path:
        """A region that nobody has made yet."""
        self.regions += 1
        return self.work / f"{self.regions}.cache"

    def process(self, region: Path | None, **limits: str) -> Process:
        """A worker in the container of that region, or outside of any."""
        process = Process(self, self.variables(region, **limits))
        self.running.append(process)
        return process

    def run(
        self, *command: str, region: Path | None = None, timeout: float = 120, **limits: str
    ) -> subprocess.CompletedProcess[str]:
        """Another program, to its end."""
        variables = self.variables(region, **limits)
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=timeout, check=False
        )

    def end(self) -> None:
        """Stop whatever a check has left behind."""
        for process in self.running:
            process.kill()
        self.running.clear()


class Process:
    """One worker."""

    def __init__(self, setup: Setup, variables: dict[str, str]) -> None:
        self.errors = setup.work / f"errors-{time.monotonic_ns()}"
        with self.errors.open("w") as stream:
            self.child = subprocess.Popen(
                [sys.executable, str(HERE / "worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env=variables,
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.leave()
        else:
            self.kill()

    def send(self, do: str, **arguments: object) -> None:
        """Ask without waiting for the answer."""
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.child.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            said = self.errors.read_text().splitlines() or ["it said nothing"]
            raise CheckFailedError(f"a process ended with {self.child.wait()}: {said[-1][:300]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """The answer, whatever its code is."""
        self.send(do, **arguments)
        return self.answer()

    def must(self, do: str, **arguments: object) -> dict[str, Any]:
        """The answer of a command that has to succeed."""
        answer = self.ask(do, **arguments)
        if answer["code"] == 801:
            raise NotRunError(f"the driver does not support it: {answer.get('error')}")
        require(answer["code"] == 0, f"{do}: {answer.get('error')}")
        return answer

    def leave(self) -> int:
        """End of input: the program returns from main; its exit status."""
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.close()
        try:
            return self.child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            return -9

    def kill(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def find_library(work: Path) -> Path:
    """The release build where there is one, else the native build, else one made here with the C compiler."""
    for path in (
        ROOT / "build" / "release" / platform.machine() / "libvgpu.so",
        ROOT / "build" / "native" / "libvgpu.so",
    ):
        if path.is_file():
            return path
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("no libvgpu.so and no C compiler: run make release where there is one")
    vgpu, target = ROOT / "native" / "vgpu", work / "libvgpu.so"
    sources = [*vgpu.glob("src/*.c"), *vgpu.glob("generated/*.c"), vgpu / "src" / "entry.S"]
    options = "-std=gnu11 -O3 -fPIC -shared -fvisibility=hidden -ftls-model=initial-exec -fno-builtin"
    map_file = f"-Wl,--version-script={vgpu / 'generated' / 'libvgpu.map'}"
    include = [f"-I{vgpu / 'src'}", f"-I{vgpu / 'generated'}"]
    command = [
        compiler,
        *options.split(),
        "-Wl,-Bsymbolic",
        "-Wl,-z,now",
        map_file,
        *include,
        "-o",
        str(target),
        *map(str, sources),
        *("-Wl,--as-needed", "-lpthread", "-ldl"),
    ]
    subprocess.run(command, check=True)
    return target


def write_results(path: Path, facts: dict[str, str], results: list[Result]) -> None:
    """All results as one JSON object."""
    path.write_text(
        json.dumps({"machine": facts, "checks": [asdict(result) for result in results]}, indent=1)
    )
