"""Files of which one process of a node at a time has the lock, until it ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import is_entry, kind_name, require_owner

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MODE: Final = 0o600


def try_lock(directory: int, name: str, path: str, owner: int) -> int | None:
    """A descriptor of the lock file ``name`` in the descriptor ``directory`` that has its lock, None while
    somebody else has a lock or a lease on it. The file is made with mode 0600 if absent.

    ``path`` names it in errors: :class:`UnsafePathError` for anything but a regular file of ``owner`` that
    nobody else may open, or ``OSError``.
    """
    try:
        lock = os.open(name, _FLAGS, _MODE, dir_fd=directory)
    except BlockingIOError:
        _check(os.stat(name, dir_fd=directory, follow_symlinks=False), path, owner)
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePathError(f"{path} is a symlink") from error
        raise OSError(error.errno, error.strerror, path) from error
    taken = False
    try:
        _check(os.fstat(lock), path, owner)
        taken = _flock(lock) and is_entry(lock, directory, name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        if not taken:
            os.close(lock)
    return lock if taken else None


def exchange_lock(directory: int, name: str) -> int | None:
    """Put a fresh lock file, whose lock we have, in the place of ``name``, whoever holds that.

    Its descriptor, None where somebody was faster. Raises ``OSError``.
    """
    temporary = f".{name}.{secrets.token_hex(8)}"
    lock = os.open(temporary, _FLAGS | os.O_EXCL, _MODE, dir_fd=directory)
    taken = False
    try:
        if _flock(lock):
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            taken = True
    finally:
        if not taken:
            os.close(lock)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)
    return lock if taken else None


def _flock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check(found: os.stat_result, path: str, owner: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePathError(f"{path} is a {kind_name(found.st_mode)}, not a regular file")
    require_owner(found, path, owner)
    if found.st_mode & 0o077:
        raise UnsafePathError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: group and others may have no access; "
            f"mend it with: chmod 600 {path}"
        )
