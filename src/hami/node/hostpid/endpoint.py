"""The broker's files: its directory, its lock, its socket (host-pid-broker.md §6.1-6.4).

Everything is reached relative to a descriptor of the directory, whose last component is no symlink and
belongs to the trusted owner. Nothing below ``/proc`` is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import posixpath
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import is_entry, kind_name, make_directory_at, require_owner
from hami.node.hostpid.errors import BrokerError
from hami.node.hostpid.lock import LOCK_NAME, take_lock

SOCKET_NAME: Final = "broker.sock"
DIRECTORY_MODE: Final = 0o711
SOCKET_MODE: Final = 0o666
BACKLOG: Final = 4096
PROBE_S: Final = 0.05
LOCK_WAIT_S: Final = 10.0
"""How long a new broker waits for the old one of a rolling update."""
_MAX_SOCKET_PATH: Final = 107
_PARENT_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Endpoint:
    """An open broker directory with its lock held and its socket listening; see :func:`open_endpoint`."""

    def __init__(
        self, path: str, directory: int, lock: int, listener: socket.socket, identity: tuple[int, int]
    ) -> None:
        self.path = path
        self.listener = listener
        self._directory = directory
        self._lock = lock
        self._identity = identity
        self._open = True

    def close(self) -> None:
        """Close the listener, remove the socket if it is still ours, free the lock, whose file stays.

        Every step is tried; raises one :class:`BrokerError` for all that failed. A second call does nothing.
        """
        if not self._open:
            return
        self._open = False
        steps: list[Callable[[], None]] = [
            self._remove_socket,
            self.listener.close,
            lambda: fcntl.flock(self._lock, fcntl.LOCK_UN),
            lambda: os.close(self._lock),
            lambda: os.close(self._directory),
        ]
        failures = []
        for step in steps:
            try:
                step()
            except OSError as error:
                failures.append(error.strerror or str(error))
        if failures:
            raise BrokerError(f"host PID broker: cannot clean up {self.path}: {'; '.join(failures)}")

    def _remove_socket(self) -> None:
        # Before the listener is closed: as long as it is open, no other file can get its inode number.
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(SOCKET_NAME, dir_fd=self._directory, follow_symlinks=False)
            if stat.S_ISSOCK(found.st_mode) and _identity(found) == self._identity:
                os.unlink(SOCKET_NAME, dir_fd=self._directory)


def open_endpoint(directory: str, owner: int, lock_wait_s: float = LOCK_WAIT_S) -> Endpoint:
    """Prepare ``directory``, take its lock, clear a stale socket, bind and listen.

    ``owner`` is the trusted UID. Raises :class:`BrokerError`; then nothing of ours is left but the directory
    and the lock file.
    """
    path = posixpath.join(directory, SOCKET_NAME)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise BrokerError(f"host PID broker: {path} is longer than the {_MAX_SOCKET_PATH} bytes of a socket")
    try:
        with contextlib.ExitStack() as undo:
            descriptor = _open_directory(directory, owner)
            undo.callback(os.close, descriptor)
            lock = take_lock(
                descriptor, f"{directory}/{LOCK_NAME}", owner, lock_wait_s, lambda: _is_served(path)
            )
            undo.callback(os.close, lock)
            _clear_stale(descriptor, path, owner)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            undo.callback(listener.close)
            listener.bind(path)
            undo.callback(os.unlink, SOCKET_NAME, dir_fd=descriptor)
            os.chmod(SOCKET_NAME, SOCKET_MODE, dir_fd=descriptor)
            listener.listen(BACKLOG)
            if not is_entry(lock, descriptor, LOCK_NAME):
                raise BrokerError(f"host PID broker: another broker took over {directory}")
            endpoint = Endpoint(path, descriptor, lock, listener, _own_socket(descriptor, path, owner))
            undo.pop_all()
            return endpoint
    except UnsafePathError as error:
        raise BrokerError(f"host PID broker: {error}") from error
    except OSError as error:
        named = f"{error.filename}: " if error.filename else f"{path}: "
        raise BrokerError(f"host PID broker: {named}{error.strerror or error}") from error


def _open_directory(directory: str, owner: int) -> int:
    """A descriptor of the directory, made with mode 0711 if absent. Only the last component is judged:
    ``/var/run`` is normally a symlink.
    """
    parent_path, name = posixpath.split(posixpath.normpath(directory))
    Path(parent_path).mkdir(mode=0o755, parents=True, exist_ok=True)
    parent = os.open(parent_path, _PARENT_FLAGS)
    try:
        return make_directory_at(parent, name, DIRECTORY_MODE, owner, directory)
    finally:
        os.close(parent)


def _clear_stale(directory: int, path: str, owner: int) -> None:
    """Remove a socket that nobody listens on; whatever else is there is an error and stays."""
    try:
        found = os.stat(SOCKET_NAME, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UnsafePathError(f"{path} is a {kind_name(found.st_mode)}, not a socket")
    require_owner(found, path, owner)
    if _is_served(path):
        raise BrokerError(f"host PID broker: another process is already listening on {path}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(SOCKET_NAME, dir_fd=directory)


def _is_served(path: str) -> bool:
    """Whether somebody listens on the socket; raises :class:`BrokerError` where nobody can tell."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError as error:
            raise BrokerError(
                f"host PID broker: cannot tell whether {path} is stale: {error.strerror or error}"
            ) from error
        return True


def _own_socket(directory: int, path: str, owner: int) -> tuple[int, int]:
    """Device and inode of the socket just bound."""
    found = os.stat(SOCKET_NAME, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != owner:
        raise UnsafePathError(
            f"{path} was exchanged: it is a {kind_name(found.st_mode)} of UID {found.st_uid}"
        )
    return _identity(found)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino
