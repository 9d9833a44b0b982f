"""Preparing ``/tmp/vgpulock``, the directory that all workloads of a node share (host-pid-broker.md §7)."""

from __future__ import annotations

import contextlib
import os
import posixpath
import stat
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import kind_name

MODE: Final = 0o1777
FAILURE: Final = "failed to prepare host PID lock parent"
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def prepare_lock_parent(path: str, owner: int) -> None:
    """Make ``path`` a real directory of ``owner`` with mode exactly 01777, judged on descriptors.

    Raises :class:`UnsafePathError` whose text starts with :data:`FAILURE`; nothing unsafe is changed then.
    """
    try:
        _prepare(path, owner)
    except UnsafePathError as error:
        raise UnsafePathError(f"{FAILURE}: {error}") from error
    except OSError as error:
        raise UnsafePathError(f"{FAILURE}: {path}: {error.strerror or error}") from error


def _prepare(path: str, owner: int) -> None:
    target = posixpath.normpath(path)
    if not target.startswith("/") or target == "/":
        raise UnsafePathError(f"{path!r} is not an absolute path below /")
    parent_path, name = posixpath.split(target)
    parent = os.open(parent_path, _FLAGS)
    try:
        _check_parent(parent, parent_path, owner)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, MODE, dir_fd=parent)
        directory = os.open(name, _FLAGS, dir_fd=parent)
        try:
            _check_owner(os.fstat(directory), target, owner)
            os.fchmod(directory, MODE)
            _verify(parent, directory, name, target, owner)
        finally:
            os.close(directory)
    finally:
        os.close(parent)


def _check_parent(parent: int, path: str, owner: int) -> None:
    found = os.fstat(parent)
    # Below --host-root the parent may also belong to root; then only root could exchange entries in it.
    if found.st_uid not in (owner, 0):
        raise UnsafePathError(f"{path} belongs to UID {found.st_uid}, expected {owner}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
        raise UnsafePathError(f"{path} is writable for others without the sticky bit")


def _check_owner(found: os.stat_result, path: str, owner: int) -> None:
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafePathError(f"{path} is a {kind_name(found.st_mode)}, not a directory")
    if found.st_uid != owner:
        raise UnsafePathError(
            f"{path} belongs to UID {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}, "
            f"expected UID {owner}; remove it with: rmdir {path}"
        )


def _verify(parent: int, directory: int, name: str, path: str, owner: int) -> None:
    opened = os.fstat(directory)
    entry = os.stat(name, dir_fd=parent, follow_symlinks=False)
    for found in (opened, entry):
        _check_owner(found, path, owner)
        if stat.S_IMODE(found.st_mode) != MODE:
            raise UnsafePathError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o} instead of {MODE:04o}")
    if (opened.st_dev, opened.st_ino) != (entry.st_dev, entry.st_ino):
        raise UnsafePathError(f"{path} was exchanged while it was prepared")
