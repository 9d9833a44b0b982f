"""The documents of mode ``exact``: they come by rename, what nobody holds any more goes."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

from hami.node.cdi.directory import MODE, CdiDirectory, remove_files
from hami.node.errors import UnsafePathError
from hami.node.exact.cdi import document_file, name_of_file
from hami.node.files import replace_file
from hami.node.paths import HostPaths

_PROBE: Final = "hami.io-vgpu.probe"
_TEMPORARY_START: Final = f".{document_file('')[:-5]}"


class Documents:
    """File work in one CDI directory; methods block and raise ``OSError`` or :class:`UnsafePathError`."""

    def __init__(self, paths: HostPaths) -> None:
        self._place = CdiDirectory(paths)

    @property
    def directory(self) -> str:
        """Path of the CDI directory on the host."""
        return self._place.path

    def write(self, name: str, content: bytes) -> None:
        """Put the document of device ``name`` in place; whatever bore its name before is replaced, a planted
        symlink itself and never its target. A directory in its place is refused.
        """
        self._place.write(document_file(name), content)

    def collect(self, held: Collection[str], older_than: float) -> tuple[str, ...]:
        """Remove documents whose device name is not in ``held`` and that were written before ``older_than``
        (Unix seconds), and left-over temporary files of that age. The result is what was removed.
        """

        def age(file: str) -> float | None:
            name = name_of_file(file)
            if name in held or not (name or file.startswith(_TEMPORARY_START)):
                return None
            return older_than

        with self._place.open() as directory:
            return remove_files(directory, age)

    def probe(self) -> str:
        """Why no document can be written, empty if one can."""
        try:
            with self._place.open() as directory:
                replace_file(directory, _PROBE, b"", MODE)
                os.unlink(_PROBE, dir_fd=directory)
        except OSError as error:
            return f"{self.directory}: {error.strerror or error}"
        except UnsafePathError as error:
            return str(error)
        return ""
