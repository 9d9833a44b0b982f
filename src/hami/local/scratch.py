"""Working folders that are removed even after their owner was killed: by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

_PREFIX = "hami-"
_LOCK = "owner.lock"


class Scratch:
    """A new folder below the system's temporary folder, held by a file lock until ``remove``."""

    def __init__(self) -> None:
        # Socket paths are limited to 107 characters: the folder's name is kept short.
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = self._take_lock()
        remove_abandoned(self.path.parent)

    def _take_lock(self) -> IO[bytes]:
        """The lock appears under its name only when it is held, so nobody can take it for abandoned."""
        waiting = self.path / f"{_LOCK}.new"
        lock = waiting.open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waiting.rename(self.path / _LOCK)
        return lock

    def remove(self) -> None:
        """Delete the folder and give up the lock; a second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned(parent: Path) -> list[Path]:
    """Delete the folders of ours in ``parent`` whose owner has ended without doing it. Returns them."""
    removed = []
    for lock_path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        folder = lock_path.parent
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with lock_path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed
