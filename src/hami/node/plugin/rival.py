"""Another device plugin on the node: two cannot offer one resource, and two of ours not keep one state.

One of somebody else is behind the socket that we want to serve; of ours the one that works holds a lock.
"""

from __future__ import annotations

import os
import posixpath
import socket
import struct
from pathlib import Path
from typing import Final

from hami.node.errors import NodeError, UnsafePathError
from hami.node.files import ensure_directory, open_directory, read_regular
from hami.node.lockfile import try_lock
from hami.node.paths import HostPaths

LOCK_NAME: Final = "device-plugin.lock"
CONNECT_LIMIT_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")
_NAME_CHARS: Final = 64
_HOLDER_BYTES: Final = 512


class OtherPluginError(NodeError):
    """A living program serves our socket."""


def check_unserved(path: str, proc: str = "/proc") -> None:
    """Raise :class:`OtherPluginError`, which names the program, if somebody answers on ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_LIMIT_S)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):  # its queue is full
            who = "a program that does not accept"
        except OSError:
            return
        else:
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            who = _describe(_CREDENTIALS.unpack(raw)[0], proc)
    raise OtherPluginError(
        f"{who} already serves {path}: two device plugins cannot offer the same resource on one node; "
        "remove the other one (GPU Operator: devicePlugin.enabled=false), this one then starts by itself"
    )


class PluginLock:
    """The lock of the device plugin of a node; methods block and raise ``OSError`` or
    :class:`UnsafePathError`.
    """

    def __init__(self, paths: HostPaths) -> None:
        self._folder = paths.host(paths.vgpu)
        self._owner = paths.trusted_uid
        self._lock: int | None = None
        self.path = posixpath.join(self._folder, LOCK_NAME)

    def take(self) -> bool:
        """Whether it is ours now: no other process has it. Its file then names us."""
        ensure_directory(self._folder, 0o755, self._owner)
        with open_directory(self._folder, self._owner) as directory:
            self._lock = try_lock(directory, LOCK_NAME, self.path, self._owner)
        if self._lock is None:
            return False
        name = f"process {os.getpid()} of {socket.gethostname()}".encode()
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, name, 0)
        return True

    def holder(self) -> str:
        """Who has it, in the words of its file."""
        try:
            said = read_regular(self.path, _HOLDER_BYTES).decode("utf-8", "replace")
        except (OSError, UnsafePathError):
            said = ""
        return said if said and said.isprintable() else "another process"

    def release(self) -> None:
        """Give it back; without it nothing happens."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _describe(pid: int, proc: str) -> str:
    """The program by PID and name; a PID of 0 lies outside of our PID namespace."""
    if pid <= 0:
        return "a program of another PID namespace"
    try:
        name = Path(proc, str(pid), "comm").read_text("utf-8", "replace").strip()
    except OSError:
        name = ""
    shown = "".join(character for character in name if character.isprintable())[:_NAME_CHARS]
    return f"process {pid} ({shown})" if shown else f"process {pid}"
