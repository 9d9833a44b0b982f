"""Descriptor-based file work for a privileged process: no symlink is followed, files change by rename.

A directory is opened once and judged on its descriptor; everything in it is reached relative to that
descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from hami.node.errors import UnsafePathError

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH: Final = 40
_MAX_ENTRIES: Final = 100_000
"""More are not removed at once: others wait meanwhile."""
_NAMES_AT_ONCE: Final = 1000


@contextlib.contextmanager
def open_directory(path: str | Path, owner: int | None = None, parent: int | None = None) -> Iterator[int]:
    """A descriptor of the directory ``path``, whose last component is not a symlink.

    With ``owner`` it must belong to that UID; with ``parent``, the descriptor of its parent, it is found
    there. Raises :class:`UnsafePathError`, and ``FileNotFoundError`` if absent.
    """
    name = path if parent is None else Path(path).name
    try:
        descriptor = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
            raise UnsafePathError(f"{path} is a {kind_name(found.st_mode)}, not a directory") from error
        raise
    try:
        if owner is not None:
            require_owner(os.fstat(descriptor), str(path), owner)
        yield descriptor
    finally:
        os.close(descriptor)


def require_owner(found: os.stat_result, path: str, owner: int) -> None:
    """Check that what was found at ``path`` belongs to the UID ``owner`` (:class:`UnsafePathError`)."""
    if found.st_uid != owner:
        raise UnsafePathError(
            f"{path} belongs to UID {found.st_uid}, expected {owner}; remove it, or, if nobody planted it: "
            f"chown {owner} {path}"
        )


def is_entry(descriptor: int, directory: int, name: str) -> bool:
    """Whether the open file or directory is still the one that others find by ``name`` in ``directory``."""
    try:
        found = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), found)


def ensure_directory(path: str, mode: int, owner: int) -> None:
    """Make ``path`` and missing parents (parents 0755); the last component is a real directory of ``owner``.

    The mode is set even if the directory exists. Raises :class:`UnsafePathError` or ``OSError``.
    """
    Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        Path(path).mkdir(mode=mode)
    with open_directory(path, owner) as descriptor:
        if stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
            os.fchmod(descriptor, mode)


def make_directory_at(parent: int, name: str, mode: int, owner: int, path: str) -> int:
    """A descriptor of the directory ``name`` in ``parent``, made if absent: no symlink, of ``owner``, with
    exactly ``mode``, and still the entry of that name after all was judged.

    ``path`` names it in errors: :class:`UnsafePathError`, which says what was found and how to get rid of it,
    or ``OSError``. A directory that is not right keeps its mode.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=parent)
    try:
        directory = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            _check_directory(os.stat(name, dir_fd=parent, follow_symlinks=False), path, owner)
        raise OSError(error.errno, error.strerror, path) from error
    try:
        _check_directory(os.fstat(directory), path, owner)
        os.fchmod(directory, mode)
        _check_entry(directory, parent, name, mode, owner, path)
    except BaseException:
        os.close(directory)
        raise
    return directory


def _check_entry(directory: int, parent: int, name: str, mode: int, owner: int, path: str) -> None:
    opened, entry = os.fstat(directory), os.stat(name, dir_fd=parent, follow_symlinks=False)
    for found in (opened, entry):
        _check_directory(found, path, owner)
        if stat.S_IMODE(found.st_mode) != mode:
            raise UnsafePathError(f"{path} has mode {stat.S_IMODE(found.st_mode):04o}, not {mode:04o}")
    if (opened.st_dev, opened.st_ino) != (entry.st_dev, entry.st_ino):
        raise UnsafePathError(f"{path} was exchanged while it was prepared")


def _check_directory(found: os.stat_result, path: str, owner: int) -> None:
    is_directory = stat.S_ISDIR(found.st_mode)
    if not is_directory or found.st_uid != owner:
        raise UnsafePathError(
            f"{path} is a {kind_name(found.st_mode)} of UID {found.st_uid} with mode "
            f"{stat.S_IMODE(found.st_mode):04o}, expected a directory of UID {owner}; "
            f"{f'move it away with: mv {path} {path}.old' if is_directory else f'remove it with: rm {path}'}"
        )


def require_regular(path: str) -> None:
    """Check, without following a symlink, that ``path`` is a regular file (:class:`UnsafePathError`)."""
    try:
        mode = os.lstat(path).st_mode
    except OSError as error:
        raise UnsafePathError(f"{path} is not a regular file: {error.strerror or error}") from error
    if not stat.S_ISREG(mode):
        raise UnsafePathError(f"{path} is not a regular file: it is a {kind_name(mode)}")


def kind_name(mode: int) -> str:
    """What a mode stands for, in words."""
    names = {
        stat.S_IFLNK: "symlink",
        stat.S_IFDIR: "directory",
        stat.S_IFIFO: "fifo",
        stat.S_IFSOCK: "socket",
        stat.S_IFCHR: "character device",
        stat.S_IFBLK: "block device",
        stat.S_IFREG: "regular file",
    }
    return names.get(stat.S_IFMT(mode), "thing of unknown type")


def replace_file(directory: int, name: str, content: bytes, mode: int) -> None:
    """Write ``name`` in the directory descriptor: temporary name, fsync, rename. Raises ``OSError``, which
    names the whole path.
    """
    temporary = f".{name[:100]}.{secrets.token_hex(8)}"
    with _errors_named(directory, name):
        descriptor = os.open(
            temporary,
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            mode,
            dir_fd=directory,
        )
        try:
            try:
                os.fchmod(descriptor, mode)
                _write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise


def rewrite_file(directory: int, name: str, content: bytes) -> None:
    """Change an existing regular file in place, so that bind mounts of it see the change.

    Raises ``FileNotFoundError``, :class:`UnsafePathError` for anything but a regular file, or ``OSError``,
    which names the whole path.
    """
    with _errors_named(directory, name):
        descriptor = open_regular(name, os.O_RDWR, dir_fd=directory)
        try:
            if os.pread(descriptor, len(content) + 1, 0) != content:
                os.pwrite(descriptor, content, 0)
                os.ftruncate(descriptor, len(content))
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _errors_named(directory: int, name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        folder = os.readlink(f"/proc/self/fd/{directory}")  # noqa: PTH115
        raise OSError(error.errno, error.strerror, f"{folder}/{name}") from error


def open_regular(path: str | Path, access: int, *, dir_fd: int | None = None) -> int:
    """A descriptor of the regular file ``path`` that a workload may have made, not through a symlink.

    Anything else is not opened at all: to open a device can start it, to open a FIFO lets its writer go on.
    ``access`` is ``os.O_RDONLY`` or ``os.O_RDWR``. Raises ``OSError``, and :class:`UnsafePathError` for
    anything but a regular file; somebody's lease on the file is a ``BlockingIOError``.
    """
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        mode = os.fstat(place).st_mode
        if not stat.S_ISREG(mode):
            raise UnsafePathError(f"{path} is not a regular file: it is a {kind_name(mode)}")
        return os.open(f"/proc/self/fd/{place}", access | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(place)


def read_regular(path: str, max_bytes: int) -> bytes:
    """The whole regular file ``path``, not through a symlink.

    Raises :class:`UnsafePathError` when it is something else or longer than ``max_bytes``, or ``OSError``.
    """
    descriptor = open_regular(path, os.O_RDONLY)
    try:
        pieces = bytearray()
        while len(pieces) <= max_bytes:
            piece = os.read(descriptor, min(1 << 20, max_bytes + 1 - len(pieces)))
            if not piece:
                return bytes(pieces)
            pieces += piece
        raise UnsafePathError(f"{path} is longer than {max_bytes} bytes")
    finally:
        os.close(descriptor)


def remove_tree(parent: int, name: str) -> None:
    """Remove ``name`` in the directory descriptor ``parent``, with everything in it; absent is fine.

    No symlink is followed and no other file system is entered. Any depth is handled with a bounded number of
    descriptors: a deep directory is moved up first. Raises ``OSError`` or :class:`UnsafePathError`.
    """
    try:
        top = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        os.unlink(name, dir_fd=parent)
        return
    try:
        _Remover(top).empty(top, 0)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=parent)


class _Remover:
    def __init__(self, top: int) -> None:
        self._top = top
        self._device = os.fstat(top).st_dev
        self._entries = 0

    def empty(self, directory: int, depth: int) -> None:
        # Entries that were moved up appear in the top directory while it is read, so it is read until it
        # is empty.
        while names := _some_names(directory):
            for name in names:
                self._remove(directory, name, depth)

    def _remove(self, directory: int, name: str, depth: int) -> None:
        self._entries += 1
        if self._entries > _MAX_ENTRIES:
            raise UnsafePathError(f"it has more than {_MAX_ENTRIES} entries: the others go next time")
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM):
                raise
        else:
            return
        if depth >= _MAX_DEPTH:
            moved = f".deep-{secrets.token_hex(8)}"
            os.rename(name, moved, src_dir_fd=directory, dst_dir_fd=self._top)
            return
        child = os.open(name, _DIRECTORY_FLAGS, dir_fd=directory)
        try:
            if os.fstat(child).st_dev != self._device:
                raise UnsafePathError(f"{name} is on another file system")
            self.empty(child, depth + 1)
        finally:
            os.close(child)
        os.rmdir(name, dir_fd=directory)


def _some_names(directory: int) -> list[str]:
    """Names in a directory, none if it is empty; a workload can make more of them than fit into memory."""
    with os.scandir(directory) as entries:
        return [entry.name for entry in itertools.islice(entries, _NAMES_AT_ONCE)]


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
