"""The files of allocations on the host: cache directories, limits files, checkpoint, lock parent, mount
sources.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import posixpath
import stat
from collections.abc import Mapping
from typing import Final

from hami.node.errors import UnsafePathError
from hami.node.files import (
    ensure_directory,
    open_directory,
    read_regular,
    remove_tree,
    replace_file,
    require_regular,
    rewrite_file,
)
from hami.node.paths import LOCK_PARENT, MIG_LOCK_NAME, HostPaths, container_directory
from hami.node.plugin.answer import HostFiles, limits_text
from hami.node.plugin.checkpoint import MAX_BYTES, Checkpoint, decode_checkpoint
from hami.node.plugin.lockparent import prepare_lock_parent

_CACHE_MODE: Final = 0o777
_LIMITS_MODE: Final = 0o644

log = logging.getLogger(__name__)


class Workspace:
    """File work of one plugin process; methods block and raise ``OSError`` or :class:`UnsafePathError`."""

    def __init__(self, paths: HostPaths) -> None:
        self._paths = paths
        self._owner = paths.trusted_uid

    def prepare_start(self) -> None:
        """Make the directories that an allocation needs; does not touch the lock parent."""
        paths = self._paths
        shared = paths.host(posixpath.dirname(LOCK_PARENT))
        if paths.root:
            ensure_directory(shared, 0o1777, self._owner)
        self._clear_mig_lock(shared)
        for directory in (paths.host(paths.vgpu), paths.containers, paths.limits):
            ensure_directory(directory, 0o755, self._owner)

    def _clear_mig_lock(self, shared: str) -> None:
        """Remove a left-over MIG lock, which would stop the monitor; what is not ours there is left alone."""
        folder = f"{shared}/hami"
        try:
            ensure_directory(folder, 0o755, self._owner)
            with open_directory(folder, self._owner) as directory, contextlib.suppress(FileNotFoundError):
                os.unlink(MIG_LOCK_NAME, dir_fd=directory)
        except (OSError, UnsafePathError) as error:
            log.warning("mig_lock.not_cleared", extra={"folder": folder, "cause": str(error)})

    def prepare_lock_parent(self) -> None:
        """Make ``/tmp/vgpulock`` safe; the error text starts with ``failed to prepare host PID lock
        parent``.
        """
        prepare_lock_parent(self._paths.host(LOCK_PARENT), self._owner)

    def find_sources(self, preload: bool) -> HostFiles:
        """The mount sources that must be regular files; ``preload``: ``ld.so.preload`` is among them."""
        paths = self._paths
        library = next((path for path in paths.library_candidates if os.path.lexists(path)), None)
        if library is None:
            library = paths.library_candidates[-1]
        require_regular(library)
        if preload:
            require_regular(paths.preload)
        return HostFiles(library, os.path.lexists(paths.host(f"{paths.vgpu}/license")))

    def make_cache_directory(self, pod_uid: str, container: str) -> None:
        """A fresh, empty cache directory with mode 0777; an older one is removed with its content."""
        name = container_directory(pod_uid, container)
        with open_directory(self._paths.containers, self._owner) as directory:
            remove_tree(directory, name)
            os.mkdir(name, _CACHE_MODE, dir_fd=directory)
            child = os.open(
                name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory
            )
            try:
                os.fchmod(child, _CACHE_MODE)
            finally:
                os.close(child)

    def ensure_cache_directory(self, pod_uid: str, container: str) -> None:
        """A cache directory with mode 0777; one that exists stays with its content (mode ``exact``)."""
        name = container_directory(pod_uid, container)
        with open_directory(self._paths.containers, self._owner) as directory:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, _CACHE_MODE, dir_fd=directory)
            _open_up(directory, name, f"{self._paths.containers}/{name}", self._owner)

    def write_limits(self, pod_uid: str, container: str, limits: Mapping[str, str]) -> None:
        """Write the limits file: in place if it exists, so that a running container sees it, else by
        rename.
        """
        name = container_directory(pod_uid, container)
        content = limits_text(limits)
        with open_directory(self._paths.limits, self._owner) as directory:
            try:
                rewrite_file(directory, name, content)
            except FileNotFoundError:
                replace_file(directory, name, content, _LIMITS_MODE)

    def check_limits(self, pod_uid: str, container: str) -> None:
        """The limits file must be a regular file right before it is mounted."""
        require_regular(f"{self._paths.limits}/{container_directory(pod_uid, container)}")

    def discard(self, pod_uid: str, container: str) -> None:
        """Remove cache directory and limits file of a container that never got its answer."""
        name = container_directory(pod_uid, container)
        with open_directory(self._paths.containers, self._owner) as directory:
            remove_tree(directory, name)
        with (
            open_directory(self._paths.limits, self._owner) as directory,
            contextlib.suppress(FileNotFoundError),
        ):
            os.unlink(name, dir_fd=directory)

    def load_checkpoint(self) -> Checkpoint:
        """The checkpoint, empty when there is none. Raises ``CheckpointError`` for an unreadable one."""
        try:
            return decode_checkpoint(read_regular(self._paths.checkpoint, MAX_BYTES))
        except FileNotFoundError:
            return Checkpoint()

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint file (0600)."""
        self.write_checkpoint(checkpoint.encode())

    def write_checkpoint(self, content: bytes) -> None:
        """Replace the checkpoint file by what :meth:`Checkpoint.encode` gave before."""
        parent, name = posixpath.split(self._paths.checkpoint)
        with open_directory(parent, self._owner) as directory:
            replace_file(directory, name, content, 0o600)

    def set_aside_checkpoint(self) -> str:
        """Rename an unreadable checkpoint so that it can be looked at; the result is its new path."""
        parent, name = posixpath.split(self._paths.checkpoint)
        with open_directory(parent, self._owner) as directory:
            os.rename(name, f"{name}.unreadable", src_dir_fd=directory, dst_dir_fd=directory)
        return f"{self._paths.checkpoint}.unreadable"


def _open_up(parent: int, name: str, path: str, owner: int) -> None:
    """Give the directory ``name`` mode 0777; anything but a directory of ``owner`` is refused."""
    try:
        child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafePathError(f"{path} is not a directory") from error
        raise
    try:
        found = os.fstat(child)
        if found.st_uid != owner:
            raise UnsafePathError(f"{path} belongs to UID {found.st_uid}, expected {owner}")
        if stat.S_IMODE(found.st_mode) != _CACHE_MODE:
            os.fchmod(child, _CACHE_MODE)
    finally:
        os.close(child)
