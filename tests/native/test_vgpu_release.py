"""The release form of libvgpu.so for both machines; `make release` makes it.

The build directory is ``HAMI_RELEASE_BUILD`` or ``build/release``.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from vgpu_harness import FORBIDDEN, MIB, OUT_OF_MEMORY, NativeBuild, Node, declared_symbols

ROOT = Path(__file__).resolve().parents[2]
VGPU = ROOT / "native" / "vgpu"
LARGEST = 400 * 1024
NEWEST_GLIBC = (2, 17)
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}


@dataclass(frozen=True)
class ReleaseBuild(NativeBuild):
    """The programs and the simulated driver of the native build, the library of the release build."""

    library: Path

    @property
    def libvgpu(self) -> Path:
        return self.library


def release_folder() -> Path:
    return Path(os.environ.get("HAMI_RELEASE_BUILD", str(ROOT / "build" / "release"))).resolve()


@pytest.fixture(params=sorted(MACHINES))
def library(request: pytest.FixtureRequest) -> Path:
    """The library for one machine; a missing one is an error, never a skipped test."""
    path = release_folder() / str(request.param) / "libvgpu.so"
    if not path.is_file():
        pytest.fail(f"not built: {path}; run make release (or set HAMI_RELEASE_BUILD)", pytrace=False)
    return path


@pytest.fixture
def release_node(native: NativeBuild, tmp_path: Path) -> Iterator[Node]:
    """A node whose containers get the release library of this machine."""
    path = release_folder() / platform.machine() / "libvgpu.so"
    if not path.is_file():
        pytest.fail(f"not built: {path}; run make release (or set HAMI_RELEASE_BUILD)", pytrace=False)
    made = Node(ReleaseBuild(native.directory, path), tmp_path, {"FAKEGPU_MEMORY_MIB": "16384"})
    yield made
    made.close()


def readelf(option: str, library: Path) -> str:
    return subprocess.run(
        ["readelf", "-W", option, str(library)], capture_output=True, text=True, check=True
    ).stdout


def symbols(library: Path, *, defined: bool) -> dict[str, str]:
    """Dynamic symbols: name to version, "" without one."""
    found: dict[str, str] = {}
    for line in readelf("--dyn-syms", library).splitlines():
        columns = line.split()
        if len(columns) >= 8 and columns[0].rstrip(":").isdigit() and (columns[6] != "UND") == defined:
            name, _, version = columns[7].partition("@")
            found[name] = version.lstrip("@")
    return found


def build_id(library: Path) -> str:
    match = re.search(r"Build ID: ([0-9a-f]+)", readelf("-n", library))
    assert match is not None
    return match[1]


def test_the_library_is_for_its_machine(library: Path) -> None:
    assert MACHINES[library.parent.name] in readelf("-h", library)


def test_the_newest_symbol_is_of_glibc_2_17(library: Path) -> None:
    """B4, B5: no private symbol either."""
    versions = {version for version in symbols(library, defined=False).values() if version}
    assert versions
    numbers = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version) for version in versions]
    assert all(number is not None for number in numbers), versions
    assert max((int(n[1]), int(n[2])) for n in numbers if n is not None) <= NEWEST_GLIBC


def test_libc_alone_is_needed(library: Path) -> None:
    """B6, B14: nothing of the driver, and no libpthread, which changes what single-threaded programs do."""
    assert re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", library)) == ["libc.so.6"]


def test_the_declared_names_alone_are_exported(library: Path) -> None:
    """B15."""
    exported = symbols(library, defined=True)
    assert set(exported) == declared_symbols()
    assert set(exported.values()) == {""}


def test_nothing_runs_when_it_is_loaded(library: Path) -> None:
    dynamic = readelf("-d", library)
    assert not re.search(r"\((INIT|INIT_ARRAY|PREINIT_ARRAY)\)", dynamic)
    assert "TEXTREL" not in dynamic


def test_thread_local_storage_is_static_and_small(library: Path) -> None:
    headers = [line.split() for line in readelf("-l", library).splitlines() if line.strip().startswith("TLS")]
    assert len(headers) == 1
    assert int(headers[0][5], 16) <= 64
    assert "STATIC_TLS" in readelf("-d", library)


def test_the_file_is_small_and_hardened(library: Path) -> None:
    assert library.stat().st_size <= LARGEST
    sections, segments = readelf("-S", library), readelf("-l", library)
    assert ".gnu.version_d" not in sections
    assert ".debug_info" not in sections
    assert "GNU_RELRO" in segments
    assert "BIND_NOW" in readelf("-d", library)
    assert not [line for line in segments.splitlines() if re.search(r"\bRWE\b|RW E", line)]


def test_it_never_ends_or_changes_its_process(library: Path) -> None:
    assert not set(symbols(library, defined=False)) & FORBIDDEN


def test_the_debug_file_belongs_to_the_library(library: Path) -> None:
    debug = library.with_name("libvgpu.so.debug")
    assert build_id(debug) == build_id(library)
    assert ".debug_info" in readelf("-S", debug)


def test_no_path_of_the_machine_that_built_it_is_inside(library: Path) -> None:
    for path in (library, library.with_name("libvgpu.so.debug")):
        assert str(ROOT).encode() not in path.read_bytes()


@pytest.fixture(params=sorted(MACHINES))
def tool(request: pytest.FixtureRequest) -> Path:
    """The program vgpu-region for one machine."""
    path = release_folder() / str(request.param) / "vgpu-region"
    if not path.is_file():
        pytest.fail(f"not built: {path}; run make release (or set HAMI_RELEASE_BUILD)", pytrace=False)
    return path


def test_the_tool_runs_in_any_container(tool: Path) -> None:
    """Static: neither a loader nor a C library is needed."""
    assert MACHINES[tool.parent.name] in readelf("-h", tool)
    assert not re.search(r"\bINTERP\b", readelf("-l", tool))
    assert "(NEEDED)" not in readelf("-d", tool)
    assert ".debug_info" not in readelf("-S", tool)
    assert tool.stat().st_size <= LARGEST
    assert str(ROOT).encode() not in tool.read_bytes()


def test_the_tool_of_this_machine_reads_a_region(release_node: Node) -> None:
    shell = release_node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m").start()
    shell.must(f"alloc {MIB}")
    program = release_folder() / platform.machine() / "vgpu-region"
    done = subprocess.run(
        [str(program), "--file", str(release_node.region())], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert str(shell.process.pid) in done.stdout


def test_a_build_from_another_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    """Sources at another path, nothing of the first build but zig's own parts of glibc."""
    machine = platform.machine()
    checkout, work = tmp_path / "elsewhere", tmp_path / "work"
    (checkout / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "release.py", checkout / "tools")
    shutil.copytree(ROOT / "native", checkout / "native")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hami"
    zig = os.environ.get("HAMI_ZIG") or next(
        (cache / "release-venv").glob("lib/python*/site-packages/ziglang/zig")
    )
    command = [sys.executable, str(checkout / "tools" / "release.py"), "--machine", machine]
    command += ["--output", str(tmp_path / "out"), "--work", str(work)]
    subprocess.run(command, env={**os.environ, "HAMI_ZIG": str(zig)}, check=True, capture_output=True)
    for name in ("libvgpu.so", "vgpu-region", "sources.sha256"):
        first, second = (folder / machine / name for folder in (release_folder(), tmp_path / "out"))
        assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()


def test_too_few_open_files_are_said_before_anything_is_built(tmp_path: Path) -> None:
    """As in a build container with a low limit, where zig would end amid a thousand messages."""
    command = [sys.executable, str(ROOT / "tools" / "release.py"), "--output", str(tmp_path / "out")]
    limited = ["prlimit", "--nofile=1024:1024", *command, "--work", str(tmp_path / "work")]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "this process may have 1024: raise the limit" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reach", ["link", "dlsym", "proc1", "proc2"])
def test_it_limits_like_the_build_of_this_machine(release_node: Node, reach: str) -> None:
    shell = release_node.shell(reach=reach, CUDA_DEVICE_MEMORY_LIMIT_0="64m", LIBCUDA_LOG_LEVEL="0").start()
    block = shell.must(f"alloc {64 * MIB}")
    assert shell.ask("alloc 1")[0] == OUT_OF_MEMORY
    shell.must(f"free {block}")
    assert shell.ask("fork 1")[0] == 3
    assert shell.must(f"alloc {32 * MIB}")
    assert shell.leave() == 0
    assert shell.stderr() == ""


def test_threads_under_a_core_limit_work_with_it(release_node: Node) -> None:
    shell = release_node.shell(CUDA_DEVICE_MEMORY_LIMIT_0="64m", CUDA_DEVICE_SM_LIMIT="50").start()
    shell.must("kernel 10000")
    shell.must(f"threads 4 300 {MIB}")
    assert shell.leave() == 0


def test_a_shell_sees_nothing_of_it(release_node: Node) -> None:
    done = release_node.run("/bin/sh", "-c", "exit 7", LD_LIBRARY_PATH="")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")
