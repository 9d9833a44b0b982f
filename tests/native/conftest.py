"""Fixtures of the native tests: the built libraries, and containers on a simulated driver of their own.

The build directory is ``HAMI_NATIVE_BUILD`` or ``build/native``; ``make native`` makes it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from vgpu_harness import NativeBuild, Node  # noqa: E402

ROOT = HERE.parents[1]


@pytest.fixture(scope="session")
def native() -> NativeBuild:
    """The build; a missing one is an error, never a skipped test."""
    build = NativeBuild(Path(os.environ.get("HAMI_NATIVE_BUILD", str(ROOT / "build" / "native"))).resolve())
    needed = (build.libvgpu, build.driver / "libcuda.so.1", build.driver / "libnvidia-ml.so.1")
    missing = [str(path) for path in needed if not path.is_file()]
    if missing:
        pytest.fail(
            f"not built: {', '.join(missing)}; run make native (or set HAMI_NATIVE_BUILD)", pytrace=False
        )
    return build


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of the test's own. Names of sockets in it stay below the 107 bytes that they may have, which
    those below ``tmp_path`` do not when tests run in several processes.
    """
    with tempfile.TemporaryDirectory(prefix="hn-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def node(native: NativeBuild, short_path: Path) -> Iterator[Node]:
    """A node with one card of 16 GiB and no context overhead."""
    made = Node(native, short_path, {"FAKEGPU_MEMORY_MIB": "16384"})
    yield made
    made.close()


def sanitizer_runtime(name: str) -> str:
    """Path of the compiler's run-time library, which has to be loaded before libvgpu.so."""
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.fixture
def asan_node(native: NativeBuild, short_path: Path) -> Iterator[Node]:
    """The same with everything built with ASan and UBSan."""
    settings = {"FAKEGPU_MEMORY_MIB": "16384"}
    made = Node(native.sanitized("asan"), short_path, settings, preload=[sanitizer_runtime("libasan.so")])
    yield made
    made.close()


@pytest.fixture
def tsan_node(native: NativeBuild, short_path: Path) -> Iterator[Node]:
    """The same with everything built with TSan."""
    settings = {"FAKEGPU_MEMORY_MIB": "16384"}
    made = Node(native.sanitized("tsan"), short_path, settings, preload=[sanitizer_runtime("libtsan.so")])
    yield made
    made.close()
