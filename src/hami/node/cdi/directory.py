"""The directory in which runtimes look for CDI documents: files come by rename and belong to root."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import open_directory, replace_file
from hami.node.paths import CDI_DIRECTORY, HostPaths

MODE: Final = 0o644
"""Runtimes of other users may read a document; only its owner may change it."""
_TEMPORARY_S: Final = 60.0


class CdiDirectory:
    """File work in the CDI directory; methods block and raise ``OSError`` or :class:`UnsafePathError`."""

    def __init__(self, paths: HostPaths) -> None:
        self.path = paths.host(CDI_DIRECTORY)
        self._owner = paths.trusted_uid

    def write(self, file: str, content: bytes) -> None:
        """Put a document in place; whatever bore its name before is replaced, a planted symlink itself and
        never its target. A directory in its place is refused.
        """
        with self.open() as directory:
            replace_file(directory, file, content, MODE)

    def remove(self, file: str) -> None:
        """Remove a document; absent is fine."""
        with self.open() as directory, contextlib.suppress(FileNotFoundError):
            os.unlink(file, dir_fd=directory)

    def publish(self, documents: Mapping[str, bytes], ours: Collection[str]) -> tuple[str, ...]:
        """Write these documents by file name, then remove the other ones of ``ours`` and what writes of such
        names that broke off have left. The result is what was removed.
        """
        with self.open() as directory:
            for file, content in documents.items():
                replace_file(directory, file, content, MODE)
            before = time.time() - _TEMPORARY_S

            def age(file: str) -> float | None:
                if file in ours:
                    return None if file in documents else float("inf")
                return before if any(file.startswith(f".{own}.") for own in ours) else None

            return remove_files(directory, age)

    @contextlib.contextmanager
    def open(self) -> Iterator[int]:
        """The directory, made if a reboot has emptied what is above it. One that others may write to is
        refused: they could exchange what containers get.
        """
        os.makedirs(self.path, mode=0o755, exist_ok=True)  # noqa: PTH103 - judged below
        with open_directory(posixpath.normpath(self.path), self._owner) as directory:
            mode = stat.S_IMODE(os.fstat(directory).st_mode)
            if mode & stat.S_IWOTH:
                raise UnsafePathError(
                    f"{self.path} has mode {mode:04o}: everybody could exchange what containers get; "
                    f"change it with: chmod o-w {self.path}"
                )
            yield directory


def remove_files(directory: int, older_than: Callable[[str], float | None]) -> tuple[str, ...]:
    """Remove the files of the directory descriptor that were written before ``older_than(name)`` (Unix
    seconds; None: it stays), no directories. The result is what was removed. Raises ``OSError``.
    """
    removed = []
    for file in os.listdir(directory):
        before = older_than(file)
        if before is None:
            continue
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(file, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) or found.st_mtime >= before:
                continue
            os.unlink(file, dir_fd=directory)
            removed.append(file)
    return tuple(removed)
