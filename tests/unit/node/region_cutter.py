"""A container's process that cuts and grows its region without pause."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_CODE: Final = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
content = os.pread(fd, 1 << 24, 0)
print("ready", flush=True)
for turn in range(1 << 60):
    os.ftruncate(fd, (0, 100, 1700, 2008900, 2011146, len(content) - 4096)[turn % 6])
    os.ftruncate(fd, (len(content), 1 << 22)[turn % 2])
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content))
"""


@contextmanager
def cut_without_pause(path: Path) -> Iterator[None]:
    """The file at ``path`` changes its length all the time, and is whole again in between."""
    arguments = [sys.executable, "-c", _CODE, str(path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as cutter:
        try:
            assert cutter.stdout is not None
            assert cutter.stdout.readline() == "ready\n"
            yield
        finally:
            cutter.kill()
