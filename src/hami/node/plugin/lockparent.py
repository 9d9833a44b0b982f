"""Preparing ``/tmp/vgpulock``, the directory that all workloads of a node share (host-pid-broker.md §7)."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import make_directory_at

MODE: Final = 0o1777
FAILURE: Final = "failed to prepare host PID lock parent"
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def prepare_lock_parent(path: str, owner: int) -> None:
    """Make ``path`` a real directory of ``owner`` with mode exactly 01777, judged on descriptors.

    Raises :class:`UnsafePathError` whose text starts with :data:`FAILURE`; nothing unsafe is changed then.
    """
    os.close(open_lock_parent(path, owner))


def open_lock_parent(path: str, owner: int) -> int:
    """A descriptor of the directory, after what :func:`prepare_lock_parent` does."""
    try:
        return _prepare(path, owner)
    except UnsafePathError as error:
        raise UnsafePathError(f"{FAILURE}: {error}") from error
    except OSError as error:
        hint = f"; if lsattr -d shows i or a: chattr -ia {path}" if error.errno == errno.EPERM else ""
        raise UnsafePathError(
            f"{FAILURE}: {error.filename or path}: {error.strerror or error}{hint}"
        ) from error


def _prepare(path: str, owner: int) -> int:
    target = posixpath.normpath(path)
    if not target.startswith("/") or target == "/":
        raise UnsafePathError(f"{path!r} is not an absolute path below /")
    parent_path, name = posixpath.split(target)
    parent = os.open(parent_path, _FLAGS)
    try:
        _check_parent(parent, parent_path, owner)
        return make_directory_at(parent, name, MODE, owner, target)
    finally:
        os.close(parent)


def _check_parent(parent: int, path: str, owner: int) -> None:
    found = os.fstat(parent)
    # Below --host-root the parent may also belong to root; then only root could exchange entries in it.
    if found.st_uid not in (owner, 0):
        raise UnsafePathError(f"{path} belongs to UID {found.st_uid}, expected {owner}: chown {owner} {path}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise UnsafePathError(f"{path} is writable for others without the sticky bit: chmod +t {path}")
