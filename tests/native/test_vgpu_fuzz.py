"""The readers of what others write, fed with changed inputs under ASan and UBSan.

The long runs with libFuzzer are made by hand (tests/fuzz/README.md).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from vgpu_harness import NativeBuild


def run(build: NativeBuild, folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(build.program(f"vgpu_fuzz_{name}")), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"TMPDIR": str(folder)},
    )


@pytest.mark.parametrize(("name", "count"), [("size", 50_000), ("limits", 20_000), ("region", 1_500)])
@pytest.mark.parametrize("seed", [1, 2])
def test_changed_inputs_are_survived(
    native: NativeBuild, tmp_path: Path, name: str, count: int, seed: int
) -> None:
    done = run(native.sanitized("asan"), tmp_path, name, "runs", str(count), str(seed))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["size", "limits", "region"])
def test_the_seeds_are_a_corpus_that_can_be_replayed(native: NativeBuild, tmp_path: Path, name: str) -> None:
    assert run(native, tmp_path, name, "corpus", str(tmp_path)).returncode == 0
    seeds = sorted(str(path) for path in tmp_path.iterdir())
    assert len(seeds) >= 5
    assert run(native, tmp_path, name, "replay", *seeds).returncode == 0
    assert run(native, tmp_path, name, "replay", str(tmp_path / "absent")).returncode == 1
