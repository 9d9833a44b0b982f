"""The mount point ``hostpid`` in the lock parent, where containers find the broker (host-pid-broker.md §7).

Every workload of the node can write in the lock parent. So what it planted there is renamed away, and our own
directory is made immutable where the file system can: else the root of a neighbour could remove it, and with
it the mount of every other container.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import is_entry, kind_name

NAME: Final = "hostpid"
MODE: Final = 0o755
_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_GET_FLAGS: Final = 0x80086601  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS of 64-bit Linux; the value is an int
_SET_FLAGS: Final = 0x40086602
_IMMUTABLE: Final = 0x10
_INT: Final = struct.Struct("i")
_CANNOT: Final = (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_ATTEMPTS: Final = 8

log = logging.getLogger(__name__)


def prepare_mount_point(parent: int, owner: int, *, immutable: bool) -> str:
    """Make ``hostpid`` in the descriptor ``parent`` a directory of ``owner`` with mode 0755.

    With ``immutable`` the flag is set where the file system and our rights allow it; the result says why it
    is not set, empty when it is or was not asked for. Raises ``OSError`` or :class:`UnsafePathError`.
    """
    for _ in range(_ATTEMPTS):
        directory = _open_own(parent, owner)
        try:
            unprotected = _arrange(directory, immutable=immutable)
            if is_entry(directory, parent, NAME):  # once it is immutable, nobody exchanges it any more
                return unprotected
        finally:
            os.close(directory)
    raise _replaced()


def _arrange(directory: int, *, immutable: bool) -> str:
    flags = _flags(directory)
    if stat.S_IMODE(os.fstat(directory).st_mode) != MODE:
        if flags is not None and flags & _IMMUTABLE:
            _set_flags(directory, flags & ~_IMMUTABLE)
            flags &= ~_IMMUTABLE
        os.fchmod(directory, MODE)
    if not immutable or (flags is not None and flags & _IMMUTABLE):
        return ""
    if flags is None:
        return "the file system has no such flag"
    try:
        _set_flags(directory, flags | _IMMUTABLE)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def release_mount_point(parent: int, owner: int) -> None:
    """Take the immutable flag off our own mount point, if there is one. Raises ``OSError``."""
    try:
        directory = os.open(NAME, _FLAGS, dir_fd=parent)
    except OSError:
        return
    try:
        flags = _flags(directory) if os.fstat(directory).st_uid == owner else None
        if flags is not None and flags & _IMMUTABLE:
            _set_flags(directory, flags & ~_IMMUTABLE)
    finally:
        os.close(directory)


def _open_own(parent: int, owner: int) -> int:
    """A descriptor of our directory; foreign entries are renamed away as often as somebody plants one."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileExistsError):
            os.mkdir(NAME, MODE, dir_fd=parent)
        try:
            directory = os.open(NAME, _FLAGS, dir_fd=parent)
        except FileNotFoundError:
            continue
        except OSError as error:
            # A symlink, a file; or a directory that we may not read, which then is not ours either.
            if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EACCES):
                raise
        else:
            if os.fstat(directory).st_uid == owner:
                return directory
            os.close(directory)
        _rename_away(parent)
    raise _replaced()


def _replaced() -> UnsafePathError:
    return UnsafePathError(f"{NAME} in the lock parent is replaced again and again")


def _rename_away(parent: int) -> None:
    foreign = f"{NAME}.foreign-{secrets.randbelow(10**12)}"
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(NAME, dir_fd=parent, follow_symlinks=False)
        os.rename(NAME, foreign, src_dir_fd=parent, dst_dir_fd=parent)
        log.warning(
            "mount_point.foreign",
            extra={"kind": kind_name(found.st_mode), "uid": found.st_uid, "renamed_to": foreign},
        )


def _flags(directory: int) -> int | None:
    """The inode flags, None where the file system has none."""
    try:
        raw = fcntl.ioctl(directory, _GET_FLAGS, _INT.pack(0))
    except OSError as error:
        if error.errno in _CANNOT:
            return None
        raise
    return int(_INT.unpack(raw)[0])


def _set_flags(directory: int, flags: int) -> None:
    fcntl.ioctl(directory, _SET_FLAGS, _INT.pack(flags))
