"""The CDI directory on the host: documents come by rename, what nobody holds any more goes."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from collections.abc import Collection, Iterator
from typing import Final

from hami.node.exact.cdi import document_file, name_of_file
from hami.node.files import open_directory, replace_file
from hami.node.paths import CDI_DIRECTORY, HostPaths

_MODE: Final = 0o644
_PROBE: Final = "hami.io-vgpu.probe"
_TEMPORARY_START: Final = f".{document_file('')[:-5]}"


class Documents:
    """File work in one CDI directory; methods block and raise ``OSError`` or :class:`UnsafePathError`."""

    def __init__(self, paths: HostPaths) -> None:
        self.directory = paths.host(CDI_DIRECTORY)
        self._owner = paths.trusted_uid

    def write(self, name: str, content: bytes) -> None:
        """Put the document of device ``name`` in place; whatever bore its name before is replaced, a planted
        symlink itself and never its target. A directory in its place is refused.
        """
        with self._open() as directory:
            replace_file(directory, document_file(name), content, _MODE)

    def collect(self, held: Collection[str], older_than: float) -> tuple[str, ...]:
        """Remove documents whose device name is not in ``held`` and that were written before ``older_than``
        (Unix seconds), and left-over temporary files of that age. The result is what was removed.
        """
        removed = []
        with self._open() as directory:
            for file in os.listdir(directory):  # noqa: PTH208 - a descriptor
                name = name_of_file(file)
                if name in held or not (name or file.startswith(_TEMPORARY_START)):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(file, dir_fd=directory, follow_symlinks=False)
                    if stat.S_ISDIR(found.st_mode) or found.st_mtime >= older_than:
                        continue
                    os.unlink(file, dir_fd=directory)
                    removed.append(file)
        return tuple(removed)

    def probe(self) -> str:
        """Why no document can be written, empty if one can."""
        try:
            with self._open() as directory:
                replace_file(directory, _PROBE, b"", _MODE)
                os.unlink(_PROBE, dir_fd=directory)
        except OSError as error:
            return f"{self.directory}: {error.strerror or error}"
        return ""

    @contextlib.contextmanager
    def _open(self) -> Iterator[int]:
        """The directory, made if a reboot has emptied what is above it."""
        os.makedirs(self.directory, mode=0o755, exist_ok=True)  # noqa: PTH103 - judged below
        with open_directory(posixpath.normpath(self.directory), self._owner) as directory:
            yield directory
