"""`make bench` runs every script in bench/, so each must take what it gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHES = sorted((Path(__file__).resolve().parents[2] / "bench").glob("*.py"))


@pytest.mark.parametrize("script", BENCHES, ids=lambda script: str(script.stem))
def test_a_bench_prints_json_when_asked(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
