"""Putting ``libvgpu.so`` on the host and checking it (device-plugin.md §12). Blocking.

An init container installs; the plugin only verifies. Versions live side by side and none is ever removed
here, because running containers hold the file of the version they were started with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import stat
from dataclasses import replace
from pathlib import Path
from typing import Final

import hami
from hami.node.errors import NodeError, UnsafePathError
from hami.node.files import ensure_directory, open_directory, read_regular, replace_file
from hami.node.paths import HostPaths

MAX_LIBRARY_BYTES: Final = 64 << 20
_MODE: Final = 0o644


class LibraryError(NodeError):
    """The library on the host is missing or is not the one that belongs to this program."""


def packaged_library() -> Path:
    """Where the wheel carries the library; there is none in a source tree."""
    return Path(hami.__file__).with_name("lib") / "libvgpu.so"


def install(source: Path, paths: HostPaths) -> HostPaths:
    """Copy ``source`` and write ``ld.so.preload``; the result names the version directory that was used.

    Nothing is written if it is right already. Raises ``OSError`` or :class:`UnsafePathError`.
    """
    content = read_regular(str(source), MAX_LIBRARY_BYTES)
    for path in (paths.library_candidates[0], paths.preload):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106 - an empty one is what a runtime makes of a missing mount source
    placed = _place(paths, hashlib.sha256(content).hexdigest())
    target = placed.library_candidates[0]
    for directory in (paths.host(paths.vgpu), paths.host(paths.library_folder), posixpath.dirname(target)):
        ensure_directory(directory, 0o755, paths.trusted_uid)
    _write_if_different(target, content, paths.trusted_uid)
    _write_if_different(paths.preload, f"{paths.vgpu}/libvgpu.so\n".encode(), paths.trusted_uid)
    return placed


def verify(source: Path, paths: HostPaths) -> HostPaths:
    """Check that the library of ``source`` is installed; the result names its version directory.

    Raises :class:`LibraryError` naming the expected and the found SHA-256.
    """
    expected = hashlib.sha256(read_regular(str(source), MAX_LIBRARY_BYTES)).hexdigest()
    suffixed = replace(paths, library_version=_suffixed(paths, expected))
    found = {}
    for candidate in (paths, suffixed):
        target = candidate.library_candidates[0]
        found[target] = _sum(target)
        if found[target] == expected:
            return candidate
    target, actual = next(iter(found.items()))
    raise LibraryError(
        f"{target} has SHA-256 {actual or 'none (it is missing)'}, expected {expected}; "
        "run the installer of this version again"
    )


def _place(paths: HostPaths, digest: str) -> HostPaths:
    """The plain version directory if it is free or has this content, else one named after the digest."""
    present = _sum(paths.library_candidates[0])
    if present in ("", digest):
        return paths
    return replace(paths, library_version=_suffixed(paths, digest))


def _suffixed(paths: HostPaths, digest: str) -> str:
    return f"{paths.version}-{digest[:12]}"


def _sum(path: str) -> str:
    """SHA-256 of a regular file, empty when it is absent. Raises :class:`UnsafePathError`."""
    try:
        return hashlib.sha256(read_regular(path, MAX_LIBRARY_BYTES)).hexdigest()
    except FileNotFoundError:
        return ""


def _write_if_different(path: str, content: bytes, owner: int) -> None:
    folder, name = posixpath.split(path)
    with open_directory(folder, owner) as directory:
        if not _is_right(path, content):
            replace_file(directory, name, content, _MODE)


def _is_right(path: str, content: bytes) -> bool:
    """Whether a file has this content, and users without rights in containers can read it."""
    try:
        return (
            read_regular(path, MAX_LIBRARY_BYTES) == content and stat.S_IMODE(os.lstat(path).st_mode) == _MODE
        )
    except (FileNotFoundError, UnsafePathError):
        return False
