"""Processes as containers: started through the launcher, in namespaces of their own where they are allowed.

The image is not used: programs run on the file system of this machine, with the container's mounts over it
and a /tmp of their own. They can change what the user who started the cluster can change.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from hami.local.kubelet import launcher
from hami.local.kubelet.container_log import LogWriter
from hami.protocol.errors import HamiError

_LAUNCHER = Path(launcher.__file__)
_ENV_LIMIT = 1 << 20
_TOLD_AGAIN_S = 0.1
PID_FILE = "pid"
_PRELOAD = "/etc/ld.so.preload"


class Isolation(Enum):
    """How containers are kept apart from the machine; the value is the launcher's word."""

    ROOT = "root"
    USER = "user"
    NONE = "none"

    def describe(self) -> str:
        return {
            Isolation.ROOT: "mount, PID and host name namespaces",
            Isolation.USER: "mount, PID and host name namespaces in a user namespace",
            Isolation.NONE: "no namespaces: mounts are emulated through the environment",
        }[self]


class ContainerStartError(HamiError):
    """The container could not be set up; the text says why."""


@dataclass(frozen=True, slots=True)
class Mount:
    """``source`` on the host appears at ``target`` in the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class ContainerPlan:
    """Everything a container is started from. ``visible`` are paths below /tmp that it can still see."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str = "/"
    mounts: tuple[Mount, ...] = ()
    visible: tuple[str, ...] = ()
    hostname: str = ""


@dataclass(slots=True)
class Container:
    """A started container. ``exit_code`` is None while it runs; after signal n it is 128 + n.

    ``plan`` is what it was started from; ``directory`` holds its working files.
    """

    plan: ContainerPlan
    directory: Path
    isolation: Isolation
    process: asyncio.subprocess.Process
    log_path: Path
    _error_file: Path
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    exit_code: int | None = None

    async def wait(self) -> int:
        """The exit code, after the output has been written to the log (at most 10 s later).

        Raises :class:`ContainerStartError` if the program never ran.
        """
        code = await self.process.wait()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)
        error = self._error_file.read_text() if self._error_file.exists() else ""
        self.exit_code = code if code >= 0 else 128 - code
        if error:
            raise ContainerStartError(error)
        return self.exit_code

    async def ended(self) -> None:
        """Wait until the process has ended and nobody holds its output: then asyncio lets go of it."""
        await self.process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def signal(self, number: int) -> None:
        """Send a signal to the container's first process; a container that has ended is left alone."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # Not Process.send_signal: that reaps a child that has just died, and its exit code is lost.
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """End every process of the container now: of its namespace, or all that descend from its launcher.

        A launcher that has only just been started by a program under nohup ignores SIGHUP: it is told again.
        """
        if self.isolation is not Isolation.NONE:
            self.signal(signal.SIGKILL)
            return
        self.signal(signal.SIGHUP)
        if self.process.returncode is None:
            with contextlib.suppress(RuntimeError):  # no loop runs: nobody waits for the end either
                asyncio.get_running_loop().call_later(_TOLD_AGAIN_S, self.kill)


def launcher_command(spec: Path) -> list[str]:
    """The command line that runs ``spec`` (see ``launcher``)."""
    return [sys.executable, "-I", "-S", str(_LAUNCHER), str(spec)]


async def start_container(plan: ContainerPlan, directory: Path, isolation: Isolation, log: Path) -> Container:
    """Start ``plan``; its working files go to ``directory`` (made), its output to ``log``.

    Raises :class:`ContainerStartError` where the process cannot even be created.
    """
    if not plan.argv:
        raise ContainerStartError("failed to generate container spec: no command specified")
    if sum(len(key) + len(value) for key, value in plan.env.items()) > _ENV_LIMIT:
        raise ContainerStartError(f"the environment is larger than {_ENV_LIMIT} bytes")
    if isolation is Isolation.NONE:
        plan = emulate(plan)
    spec, error_file = write_spec(plan, directory, isolation, {"pid_file": str(directory / PID_FILE)})
    try:
        process = await asyncio.create_subprocess_exec(
            *launcher_command(spec),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath},
        )
    except OSError as error:
        raise ContainerStartError(f"cannot start the container: {error}") from error
    container = Container(plan, directory, isolation, process, log, error_file)
    container._tasks.append(asyncio.create_task(_copy_output(process, log)))
    return container


def write_spec(
    plan: ContainerPlan, directory: Path, isolation: Isolation, more: Mapping[str, Any]
) -> tuple[Path, Path]:
    """The launcher's file with the entries ``more``, and the one where it writes what went wrong."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / PID_FILE).unlink(missing_ok=True)
    error_file = directory / "error"
    error_file.unlink(missing_ok=True)
    spec = directory / "spec.json"
    spec.touch(mode=0o600)
    spec.write_text(
        json.dumps(
            {
                "argv": plan.argv,
                "env": dict(plan.env),
                "cwd": plan.cwd,
                "parent": os.getpid(),
                "isolation": isolation.value,
                "watch": True,
                "mounts": [[mount.source, mount.target, mount.read_only] for mount in plan.mounts],
                "private_tmp": plan.visible,
                "hostname": plan.hostname,
                "error_file": str(error_file),
                **more,
            }
        )
    )
    return spec, error_file


async def _copy_output(process: asyncio.subprocess.Process, log: Path) -> None:
    writer = LogWriter(log)
    try:
        streams = [(process.stdout, "stdout"), (process.stderr, "stderr")]
        await asyncio.gather(*(writer.copy(stream, name) for stream, name in streams if stream is not None))
    finally:
        writer.close()


def emulate(plan: ContainerPlan) -> ContainerPlan:
    """The plan for a machine without namespaces.

    Values that name a mounted path are rewritten to the host's; ``/etc/ld.so.preload`` becomes LD_PRELOAD.
    """
    env = {key: _to_host(value, plan.mounts) for key, value in plan.env.items()}
    for mount in plan.mounts:
        if mount.target == _PRELOAD:
            listed = Path(mount.source).read_text().split() if Path(mount.source).is_file() else []
            libraries = [_to_host(library, plan.mounts) for library in listed]
            before = env.get("LD_PRELOAD")
            env["LD_PRELOAD"] = ":".join([*libraries, *([before] if before else [])])
    return replace(plan, env=env, mounts=())


def _to_host(value: str, mounts: tuple[Mount, ...]) -> str:
    """``value`` with the longest mounted prefix replaced by its source."""
    for mount in sorted(mounts, key=lambda mount: -len(mount.target)):
        if value == mount.target or value.startswith(mount.target.rstrip("/") + "/"):
            return mount.source.rstrip("/") + value[len(mount.target.rstrip("/")) :]
    return value


async def probe_isolation(directory: Path) -> Isolation:
    """The strongest isolation that works here, found by trying it with a mount of each kind."""
    source = _probe_file(directory)
    plan = ContainerPlan(
        argv=("grep", "-q", "probe", "/hami-probe/inside/file"),
        env={"PATH": os.defpath},
        mounts=(Mount(str(source), "/hami-probe/inside/file", read_only=True),),
        visible=(str(directory),),
    )
    candidates = [Isolation.ROOT, Isolation.USER] if os.geteuid() == 0 else [Isolation.USER]
    for isolation in candidates:
        container = await start_container(plan, directory / isolation.value, isolation, directory / "log")
        try:
            async with asyncio.timeout(30.0):
                if await container.wait() == 0:
                    return isolation
        except (ContainerStartError, TimeoutError):
            container.kill()
            await container.ended()
    return Isolation.NONE


def _probe_file(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / "probe"
    source.write_text("probe\n")
    return source
