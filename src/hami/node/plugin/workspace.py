"""The files of allocations on the host: cache directories, limits files, checkpoint, lock parent, mount
sources.
"""

from __future__ import annotations

import contextlib
import logging
import os
import posixpath
import stat
from collections.abc import Iterator, Mapping
from typing import Final

from hami.node.cluster import Cluster
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
from hami.node.plugin.lockparent import open_lock_parent
from hami.node.plugin.mountpoint import NAME as MOUNT_POINT
from hami.node.plugin.mountpoint import prepare_mount_point, release_mount_point

LOCK_PARENT_UNSAFE: Final = "HAMiLockParentUnsafe"
"""Reason of the events about ``/tmp/vgpulock`` and what is in it."""
_CACHE_MODE: Final = 0o777
_LIMITS_MODE: Final = 0o644

log = logging.getLogger(__name__)


def tell_mount_point(cluster: Cluster, workspace: Workspace) -> None:
    """An event on the node if the broker's mount point could not be prepared the last time."""
    if workspace.mount_point_problem:
        cluster.node_event("Warning", LOCK_PARENT_UNSAFE, workspace.mount_point_problem)


class Workspace:
    """File work of one plugin process; methods block and raise ``OSError`` or :class:`UnsafePathError`."""

    def __init__(self, paths: HostPaths) -> None:
        self._paths = paths
        self._owner = paths.trusted_uid
        self.mount_point_problem = ""
        """What was wrong with the broker's mount point the last time, empty when nothing was."""
        self._unprotected = ""

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

    @contextlib.contextmanager
    def mig_lock(self) -> Iterator[None]:
        """The MIG lock while MIG mode of a card changes: the monitor lets go of NVML. Without it the change
        may be refused, so what is wrong with the file is only told.
        """
        folder = f"{self._paths.host(posixpath.dirname(LOCK_PARENT))}/hami"
        try:
            ensure_directory(folder, 0o755, self._owner)
            with open_directory(folder, self._owner) as directory:
                replace_file(directory, MIG_LOCK_NAME, b"", 0o644)
        except (OSError, UnsafePathError) as error:
            log.warning("mig_lock.not_made", extra={"folder": folder, "cause": str(error)})
        try:
            yield
        finally:
            self._clear_mig_lock(self._paths.host(posixpath.dirname(LOCK_PARENT)))

    def prepare_lock_parent(self, broker: bool) -> bool:
        """Make ``/tmp/vgpulock`` safe; the error text starts with ``failed to prepare host PID lock
        parent``.

        With the ``broker`` also its mount point in there; what is wrong with that only is
        :attr:`mount_point_problem`. True: the broker can be mounted there. On anything else than a directory
        of ours a runtime would fail, or mount it wherever a symlink leads in the container.
        """
        path = self._paths.host(LOCK_PARENT)
        directory = open_lock_parent(path, self._owner)
        problem = ""
        try:
            if broker:
                # Below --host-root nobody else is kept out, and whoever made the directory must be able to
                # remove it.
                self._tell_unprotected(
                    prepare_mount_point(directory, self._owner, immutable=not self._paths.root)
                )
        except (OSError, UnsafePathError) as error:
            place = f"{path}/{MOUNT_POINT}"
            problem = (
                f"{place}: {error}; containers fall back to slower host PID discovery; if there is space, "
                f"remove it with: chattr -ia {place}; rm -r {place}"
            )
            log.warning("mount_point.not_prepared", extra={"cause": problem})
        finally:
            os.close(directory)
        self.mount_point_problem = problem
        return broker and not problem

    def _tell_unprotected(self, why: str) -> None:
        """One line when it changes: without the flag root of a container can exchange the mount point."""
        if why and why != self._unprotected:
            advice = (
                "root of any container here can put a symlink in its place, and GPU containers that restart "
                "then get the broker's directory mounted over what it leads to; put /tmp on a file system "
                "with inode flags and give the plugin CAP_LINUX_IMMUTABLE, or turn the broker off"
            )
            log.warning("mount_point.not_immutable", extra={"cause": why, "advice": advice})
        self._unprotected = why

    def release_mount_point(self) -> None:
        """With the broker off, after the lock parent was prepared: let the mount point be removed again."""
        path = self._paths.host(LOCK_PARENT)
        try:
            with open_directory(path, self._owner) as directory:
                release_mount_point(directory, self._owner)
        except (OSError, UnsafePathError) as error:
            advice = f"chattr -i {path}/{MOUNT_POINT}"
            log.warning("mount_point.still_immutable", extra={"cause": str(error), "advice": advice})

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
            _open_up(directory, f"{self._paths.containers}/{name}", self._owner)

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


def _open_up(parent: int, path: str, owner: int) -> None:
    """Give a directory in ``parent`` back to ``owner`` and mode 0777: the container may have changed both."""
    with open_directory(path, parent=parent) as child:
        found = os.fstat(child)
        if found.st_uid != owner:
            os.fchown(child, owner, -1)
        if stat.S_IMODE(found.st_mode) != _CACHE_MODE:
            os.fchmod(child, _CACHE_MODE)
