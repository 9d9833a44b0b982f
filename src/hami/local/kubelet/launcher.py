"""Starts one process of the embedded cluster so that it cannot outlive it, in namespaces of its own if asked.

Run as ``python -I -S launcher.py SPEC.json``; standard library only, so that a start costs little.

SPEC: ``argv``, ``env``, ``cwd``, ``parent`` (PID that must still be our parent), ``isolation`` (``root``,
``user`` or ``none``), ``watch`` (without isolation: stay, and end all descendants with the program, on SIGHUP
and when our parent ends; else this process becomes the program), ``mounts`` ([host path, container path,
read-only]), ``private_tmp`` (paths under /tmp that stay visible), ``hostname``, ``error_file`` (what went
wrong before the program ran), ``pid_file`` (gets the PID of the container's first process), ``join`` (that
PID: run in its namespaces instead of in new ones), ``tty`` (standard input is a terminal: make it ours).

Exit status: that of the program, 128 + n after signal n, 125 if the container could not be set up,
127 if its program does not exist, 126 if it cannot be executed.
"""

# Plain os calls, as each path step here is a system call to be seen; /tmp is the container's own.
# ruff: noqa: PTH102, PTH103, PTH110, PTH112, PTH115, PTH118, PTH120, PTH208, PTH211, S108, S606

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import signal
import stat
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x4000000, 0x10000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18
# statvfs flag -> mount flag: a bind mount made in a user namespace must keep those it inherits
_KEPT = ((os.ST_NOSUID, _MS_NOSUID), (4, _MS_NODEV), (8, _MS_NOEXEC), (1024, 1024), (2048, 2048))
_SETUP_FAILED = 125
_HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Be killed when our parent ends; exit at once if ``parent`` has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:
        sys.exit(_SETUP_FAILED)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {source} on {target}")


def enter_namespaces(isolation: str) -> None:
    """New mount, PID and host name namespaces; with ``user`` in a user namespace where we are root."""
    uid, gid = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWUTS
    if isolation == "user":
        flags |= _CLONE_NEWUSER
    _check(_libc.unshare(flags), "unshare")
    if isolation == "user":
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def join_namespaces(pid: int, isolation: str) -> None:
    """Enter the namespaces and the root directory of ``pid``; children are in its PID namespace."""
    kinds = (["user"] if isolation == "user" else []) + ["pid", "uts", "mnt"]
    handles = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
    for kind, handle in zip(kinds, handles, strict=True):
        _check(_libc.setns(handle, 0), f"setns {kind}")
    os.fchdir(root)
    os.chroot(".")


class _View:
    """The file system of the container, made out of that of the host by mounts in our own namespace."""

    def __init__(self) -> None:
        self._ours: list[str] = []

    def private_tmp(self, visible: list[str]) -> None:
        """An empty /tmp in which only ``visible`` (paths below it) can be seen, at their own places."""
        kept = [path for path in dict.fromkeys(map(os.path.realpath, visible)) if path.startswith("/tmp/")]
        handles = [
            (path, os.open(path, os.O_PATH)) for path in sorted(kept, key=len) if os.path.lexists(path)
        ]
        _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=1777")
        self._ours.append("/tmp")
        for path, handle in handles:
            if not os.path.lexists(path):
                self._make(path, os.path.isdir(f"/proc/self/fd/{handle}"))
                _mount(f"/proc/self/fd/{handle}", path, "", _MS_BIND | _MS_REC)
            os.close(handle)

    def bind(self, handle: int, target: str, *, read_only: bool) -> None:
        """Make the file of ``handle`` visible at ``target``, made in a copy of its parent if missing."""
        directory = stat.S_ISDIR(os.fstat(handle).st_mode)
        target = os.path.realpath(target)
        if not os.path.exists(target):
            self._prepare(target)
            self._make(target, directory)
        _mount(f"/proc/self/fd/{handle}", target, "", _MS_BIND | _MS_REC)
        os.close(handle)
        self._ours.append(target)
        if read_only:
            flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY
            inherited = os.statvfs(target).f_flag
            for seen, kept in _KEPT:
                flags |= kept if inherited & seen else 0
            _mount("none", target, "", flags)

    def _prepare(self, target: str) -> None:
        """Make the nearest directory above ``target`` ours, so that writing it leaves the host alone."""
        above = os.path.dirname(target)
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        if any(above == mine or above.startswith(f"{mine}/") for mine in self._ours):
            return
        if above == "/":
            self._writable_root()
            return
        handle = os.open(above, os.O_PATH | os.O_DIRECTORY)
        mode = stat.S_IMODE(os.fstat(handle).st_mode)
        _mount("tmpfs", above, "tmpfs", _MS_NOSUID | _MS_NODEV, f"mode={mode:o}")
        _mirror(f"/proc/self/fd/{handle}", above)
        os.close(handle)
        self._ours.append(above)

    def _writable_root(self) -> None:
        """Put a tmpfs with everything of the old root bound into it in the place of the root."""
        base = "/mnt" if os.path.isdir("/mnt") else "/run"
        _mount("tmpfs", base, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
        os.mkdir(f"{base}/r", 0o755)
        _mount("tmpfs", f"{base}/r", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
        _mirror("/", f"{base}/r", skip=base.lstrip("/"))
        os.makedirs(f"{base}/r{base}", exist_ok=True)
        os.chdir(f"{base}/r")
        os.chroot(f"{base}/r")
        self._ours.append("/")

    @staticmethod
    def _make(path: str, directory: bool) -> None:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        if directory:
            os.makedirs(path, mode=0o755, exist_ok=True)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o644))


def _mirror(source: str, target: str, skip: str = "") -> None:
    """Bind every entry of the directory ``source`` into the empty ``target``; symbolic links are copied."""
    for name in os.listdir(source):
        if name == skip:
            continue
        old, new = os.path.join(source, name), os.path.join(target, name)
        mode = os.lstat(old).st_mode
        if stat.S_ISLNK(mode):
            os.symlink(os.readlink(old), new)
            continue
        if stat.S_ISDIR(mode):
            os.mkdir(new)
        else:
            os.close(os.open(new, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(old, new, "", _MS_BIND | _MS_REC)


def build_view(spec: dict[str, Any]) -> None:
    """All mounts of the container, parents before children as container runtimes order them."""
    _mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    view = _View()
    mounts = sorted(spec.get("mounts") or [], key=lambda mount: str(mount[1]).rstrip("/").count("/"))
    # Sources are those of the host: opened before /tmp is replaced.
    opened = [(os.open(str(source), os.O_PATH), str(target), bool(ro)) for source, target, ro in mounts]
    view.private_tmp(list(spec.get("private_tmp") or []))
    for handle, target, read_only in opened:
        view.bind(handle, target, read_only=read_only)
    _mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _program(spec: dict[str, Any]) -> None:
    """Replace this process by the program. Returns never."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    argv = [str(part) for part in spec["argv"]]
    try:
        os.chdir(str(spec.get("cwd") or "/"))
        os.execvpe(argv[0], argv, {str(key): str(value) for key, value in spec["env"].items()})
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        what = "executable file not found in $PATH" if missing else str(error.strerror)
        _fail(spec, f'exec: "{argv[0]}": {what}', 127 if missing else 126)


def _fail(spec: dict[str, Any], text: str, code: int) -> None:
    if spec.get("error_file"):
        Path(str(spec["error_file"])).write_text(text)
    else:
        sys.stderr.write(text + "\n")
    os._exit(code)


def _run_isolated(spec: dict[str, Any], error_handle: int) -> int:
    """Fork PID 1 of the container, pass signals on, and give its exit status."""
    ready, go = os.pipe()
    _hold_signals()
    child = os.fork()
    if child == 0:
        os.close(go)
        # Our parent is outside of our PID namespace: it is told apart from its death by this pipe.
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.read(ready, 1) != b"g":
            os._exit(_SETUP_FAILED)
        os.close(ready)
        try:
            if not spec.get("join"):
                build_view(spec)
                name = str(spec.get("hostname") or "container").encode()[:63]
                _check(_libc.sethostname(name, len(name)), "sethostname")
        except OSError as error:
            os.write(error_handle, str(error).encode())
            os._exit(_SETUP_FAILED)
        inside = dict(spec, error_file=f"/proc/self/fd/{error_handle}")
        _program(inside)
    os.close(ready)
    if spec.get("pid_file"):
        Path(str(spec["pid_file"])).write_text(str(child))
    os.write(go, b"g")
    os.close(go)
    return _wait(child, lambda number: os.kill(child, number))


def _run_watched(spec: dict[str, Any]) -> int:
    """Run the program as a child whose descendants, even those in sessions of their own, end with it."""
    _hold_signals()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    child = os.fork()
    if child == 0:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _program(spec)

    def act(number: int) -> None:
        if number == signal.SIGHUP:
            _kill_descendants()
            os._exit(128 + signal.SIGKILL)
        os.kill(child, number)

    if os.getppid() != int(spec.get("parent") or os.getppid()):
        act(signal.SIGHUP)
    status = _wait(child, act)
    _kill_descendants()
    return status


def _hold_signals() -> None:
    """Let signals wait for :func:`_wait`.

    A handler in Python would run only after the system call that was about to begin: a SIGTERM just before
    ``waitpid`` would reach the program after its own end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)


def _wait(child: int, act: Callable[[int], None]) -> int:
    """The exit status of ``child`` as :func:`os.waitstatus_to_exitcode` tells it; signals that come before
    its end go to ``act``, and what else ends is reaped.
    """
    while True:
        number = signal.sigwait(_HELD)
        if number != signal.SIGCHLD:
            act(number)
            continue
        while True:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child:
                return os.waitstatus_to_exitcode(status)
            if not ended:
                break


def _kill_descendants() -> None:
    """Kill our children, and theirs as they fall to us, until there are none."""
    while True:
        listed = Path(f"/proc/self/task/{os.getpid()}/children")
        children = listed.read_text().split() if listed.exists() else []
        for pid in children:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.wait()
        except ChildProcessError:
            return


def main() -> None:
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    die_with_parent(int(spec.get("parent") or 0))
    os.setsid()
    if spec.get("tty"):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    isolation = str(spec.get("isolation") or "none")
    if isolation == "none":
        if spec.get("watch"):
            code = _run_watched(spec)
            os._exit(code if code >= 0 else 128 - code)
        _program(spec)
    handle = os.open(str(spec["error_file"]), os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        if spec.get("join"):
            join_namespaces(int(spec["join"]), isolation)
        else:
            enter_namespaces(isolation)
    except OSError as error:
        _fail(spec, str(error), _SETUP_FAILED)
    code = _run_isolated(spec, handle)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
