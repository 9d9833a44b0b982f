"""The lock that keeps a second broker out (host-pid-broker.md §6.3).

Containers have the broker's directory mounted read-only, so root of a container can open the lock file for
reading, and with that take the very same lock or a lease, and never let go: neither the name nor the mount
is ours to change. Such a holder does not serve: what keeps others out is a broker that listens. A lock whose
holder has not listened for longer than a broker takes to start or to end is exchanged for a fresh file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import is_entry, kind_name, require_owner
from hami.node.hostpid.errors import BrokerError

LOCK_NAME: Final = "broker.lock"
LOCK_MODE: Final = 0o600
SILENCE_S: Final = 1.0
"""How long a holder that does not listen may be a broker that starts or ends: that waits half a second for
its last transactions.
"""

_POLL_S: Final = 0.1
_ATTEMPTS: Final = 16
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

log = logging.getLogger(__name__)


def take_lock(directory: int, path: str, owner: int, wait_s: float, is_served: Callable[[], bool]) -> int:
    """The locked descriptor of the lock file, which is ``path`` in the descriptor ``directory``.

    Waits ``wait_s`` seconds for a holder that serves, `SILENCE_S` of them for one that does not; such a one
    loses the file. Raises ``OSError``, :class:`UnsafePathError` or :class:`BrokerError`.
    """
    now = time.monotonic()
    end, silent_until = now + wait_s, now + SILENCE_S
    while True:
        lock = _try_lock(directory, path, owner)
        if lock is not None:
            return lock
        now = time.monotonic()
        if now >= end:
            if is_served():
                raise BrokerError(f"host PID broker: another broker holds {path}")
            return _replace(directory, path)
        if _may_serve(is_served):
            silent_until = now + SILENCE_S
        elif now >= silent_until:
            return _replace(directory, path)
        time.sleep(_POLL_S)


def _may_serve(is_served: Callable[[], bool]) -> bool:
    try:
        return is_served()
    except BrokerError:  # nobody can tell: a broker in a flood
        return True


def _try_lock(directory: int, path: str, owner: int) -> int | None:
    """The locked descriptor, None while somebody else has a lock or a lease on the file."""
    try:
        lock = os.open(LOCK_NAME, _FLAGS, LOCK_MODE, dir_fd=directory)
    except BlockingIOError:
        _check(os.stat(LOCK_NAME, dir_fd=directory, follow_symlinks=False), path, owner)
        return None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnsafePathError(f"{path} is a symlink") from error
        raise OSError(error.errno, error.strerror, path) from error
    taken = False
    try:
        _check(os.fstat(lock), path, owner)
        taken = _lock(lock) and is_entry(lock, directory, LOCK_NAME)
    finally:
        if not taken:
            os.close(lock)
    return lock if taken else None


def _lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _replace(directory: int, path: str) -> int:
    """A fresh lock file in the place of the one whose holder does not serve; somebody who watches the
    directory may be faster at one of them, but not always.
    """
    held = os.stat(LOCK_NAME, dir_fd=directory, follow_symlinks=False).st_ino
    for _ in range(_ATTEMPTS):
        name = f".{LOCK_NAME}.{secrets.token_hex(8)}"
        lock = os.open(name, _FLAGS | os.O_EXCL, LOCK_MODE, dir_fd=directory)
        taken = False
        try:
            if _lock(lock):
                os.rename(name, LOCK_NAME, src_dir_fd=directory, dst_dir_fd=directory)
                taken = True
        finally:
            if not taken:
                os.close(lock)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
        if taken:
            advice = (
                "a process that does not serve held it, as root of a container can; its PID: "
                f"grep ':{held} ' /proc/locks"
            )
            log.warning("hostpid.lock_replaced", extra={"lock": path, "advice": advice})
            return lock
    raise BrokerError(f"host PID broker: {path} is taken away again and again")


def _check(found: os.stat_result, path: str, owner: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UnsafePathError(f"{path} is a {kind_name(found.st_mode)}, not a regular file")
    require_owner(found, path, owner)
    if found.st_mode & 0o077:
        raise UnsafePathError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):04o}: group and others may have no access"
        )
