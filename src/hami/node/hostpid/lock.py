"""The lock that keeps a second broker out (host-pid-broker.md §6.3).

Containers have the broker's directory mounted read-only, so root of a container can open the lock file for
reading, and with that take the very same lock or a lease, and never let go: neither the name nor the mount
is ours to change. Such a holder does not serve: what keeps others out is a broker that listens. A lock whose
holder has not listened for longer than a broker takes to start or to end is exchanged for a fresh file.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final

from hami.node.hostpid.errors import BrokerError
from hami.node.lockfile import exchange_lock, try_lock

LOCK_NAME: Final = "broker.lock"
SILENCE_S: Final = 1.0
"""How long a holder that does not listen may be a broker that starts or ends: that waits half a second for
its last transactions.
"""

_POLL_S: Final = 0.1
_ATTEMPTS: Final = 16

log = logging.getLogger(__name__)


def take_lock(directory: int, path: str, owner: int, wait_s: float, is_served: Callable[[], bool]) -> int:
    """The locked descriptor of the lock file, which is ``path`` in the descriptor ``directory``.

    Waits ``wait_s`` seconds for a holder that serves, `SILENCE_S` of them for one that does not; such a one
    loses the file. Raises ``OSError``, :class:`UnsafePathError` or :class:`BrokerError`.
    """
    now = time.monotonic()
    end, silent_until = now + wait_s, now + SILENCE_S
    while True:
        lock = try_lock(directory, LOCK_NAME, path, owner)
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


def _replace(directory: int, path: str) -> int:
    """A fresh lock file in the place of the one whose holder does not serve; somebody who watches the
    directory may be faster at one of them, but not always.
    """
    held = os.stat(LOCK_NAME, dir_fd=directory, follow_symlinks=False).st_ino
    for _ in range(_ATTEMPTS):
        lock = exchange_lock(directory, LOCK_NAME)
        if lock is not None:
            advice = (
                "a process that does not serve held it, as root of a container can; its PID: "
                f"grep ':{held} ' /proc/locks"
            )
            log.warning("hostpid.lock_replaced", extra={"lock": path, "advice": advice})
            return lock
    raise BrokerError(f"host PID broker: {path} is taken away again and again")
