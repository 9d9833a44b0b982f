"""Working folders of clusters that were killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hami.local.scratch import Scratch, remove_abandoned

KILLED = """
import os, signal
from hami.local.scratch import Scratch
print(Scratch().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_folder_goes_with_its_owner(temporary: Path) -> None:
    scratch = Scratch()
    (scratch.path / "file").write_text("x")
    scratch.remove()
    assert list(temporary.iterdir()) == []


def test_the_folder_of_a_killed_owner_is_removed_by_the_next(temporary: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60)
    assert Path(killed.stdout.strip()).is_dir()
    scratch = Scratch()
    assert list(temporary.iterdir()) == [scratch.path]
    scratch.remove()


def test_the_folder_of_a_living_owner_stays(temporary: Path) -> None:
    first, second = Scratch(), Scratch()
    assert remove_abandoned(temporary) == []
    assert sorted(temporary.iterdir()) == sorted([first.path, second.path])
    first.remove()
    second.remove()


def test_folders_of_others_are_left_alone(temporary: Path) -> None:
    (temporary / "hami-mine").mkdir()
    (temporary / "hami-mine" / "data").write_text("x")
    assert remove_abandoned(temporary) == []
    assert (temporary / "hami-mine" / "data").exists()
