"""The pure pieces of libvgpu.so, in C: plain, under ASan and UBSan, and under TSan."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from vgpu_harness import NativeBuild

NAMES = [
    "sizes",
    "configuration",
    "records",
    "reused_address",
    "ranges",
    "bucket",
    "bucket_of_sleepers",
    "costs",
    "factor",
    "admission_race",
    "admission_exact",
    "admission_undecided",
    "without_ofd_locks",
    "admission_settles_before_it_refuses",
    "moved_numbers",
    "numbers_written_over",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sanitizer", ["", "asan", "tsan"])
def test_unit(native: NativeBuild, tmp_path: Path, sanitizer: str, name: str) -> None:
    build = native.sanitized(sanitizer) if sanitizer else native
    wrap = [str(native.program("vgpu_no_ofd"))] if name == "without_ofd_locks" else []
    done = subprocess.run(
        [*wrap, str(build.program("vgpu_unit")), name, str(tmp_path / "unit.cache")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"LIBCUDA_LOG_LEVEL": "0"},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sanitizer", ["", "asan"])
def test_the_bucket_gives_the_share_in_simulated_time(native: NativeBuild, sanitizer: str) -> None:
    """A125, A126, A127, as far as the bucket decides: kernels of known cost that wait for their end."""
    build = native.sanitized(sanitizer) if sanitizer else native
    program = str(build.program("vgpu_limiter_model"))
    done = subprocess.run([program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_unit_is_listed_here(native: NativeBuild) -> None:
    done = subprocess.run([str(native.program("vgpu_unit"))], capture_output=True, text=True, check=True)
    assert done.stdout.split() == NAMES
