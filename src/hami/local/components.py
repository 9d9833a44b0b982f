"""The programs under test as real processes: started, watched, restarted, killed, their JSON logs read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hami.local.kubelet.containers import launcher_command
from hami.protocol.errors import HamiError

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02
_TAIL_LINES = 8
_RESTART_DELAY_S = 1.0
_MAX_RESTART_DELAY_S = 30.0
_STEADY_S = 10.0  # a run of this length ends the back-off


class ComponentError(HamiError):
    """A component does not run or does not become ready; the text ends with the end of its log."""


def hami_command(*words: str) -> list[str]:
    """The command line of ``hami WORDS`` with the interpreter that runs us."""
    return [sys.executable, "-c", "from hami.cli.main import main; main(prog_name='hami')", *words]


class Component:
    """One process with its log file ``<directory>/<name>.log`` (appended to over restarts).

    ``command`` is asked at every start, so that a port learnt before can be kept. After a crash the
    process is started again (after a second, doubling to 30 s), unless ``stop`` or
    ``kill(stay_down=True)`` came before.
    """

    def __init__(
        self, name: str, command: Callable[[], Sequence[str]], env: Mapping[str, str], directory: Path
    ) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        self._command = command
        self._env = dict(env)
        self._directory = directory
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._mark = 0
        self.starts = 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process ID of the present run. Raises :class:`ComponentError` if it does not run."""
        if self._process is None or self._process.returncode is not None:
            raise self.error("it does not run")
        return self._process.pid

    async def start(self) -> None:
        """Start the process and watch over it."""
        await self._spawn()
        self._watcher = asyncio.create_task(self._watch(), name=f"watch-{self.name}")

    async def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, after ``grace_s`` SIGKILL to the whole process group. A stopped component stays down."""
        await self._unwatch()
        if self._process is None:
            return
        if self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        self._signal(signal.SIGKILL)
        await self._process.wait()

    async def kill(self, *, stay_down: bool = False) -> None:
        """SIGKILL to the process group, as a crash; it comes back by itself unless ``stay_down``."""
        if stay_down:
            await self._unwatch()
        if self._process is not None:
            process = self._process
            self._signal(signal.SIGKILL)
            await process.wait()

    def pause(self) -> None:
        """SIGSTOP: the process hangs, its sockets stay open, until ``resume``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    async def restart(self) -> None:
        """A clean restart."""
        await self.stop()
        await self.start()

    async def wait_event(self, event: str, timeout_s: float, **fields: Any) -> Mapping[str, Any]:
        """The first log line of the present run with this event name and these fields.

        Raises :class:`ComponentError` after ``timeout_s`` or when the process ends before.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ended = not self.running
            for line in self._events():
                if line.get("event") == event and all(
                    line.get(key) == value for key, value in fields.items()
                ):
                    return line
            if ended:
                raise self.error(f"it ended before it logged {event!r}")
            if time.monotonic() > deadline:
                raise self.error(f"it did not log {event!r} within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)

    def error(self, what: str) -> ComponentError:
        """An error about this component that names its log and shows the end of it."""
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        tail = "\n".join(f"    {line[:400]}" for line in lines[-_TAIL_LINES:])
        return ComponentError(f"{self.name}: {what}; log: {self.log_path}\n{tail}".rstrip())

    def _events(self) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = []
        with self.log_path.open("rb") as file:
            file.seek(self._mark)
            for line in file:
                with contextlib.suppress(ValueError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        found.append(value)
        return found

    async def _spawn(self) -> None:
        spec = self._directory / f"{self.name}.spec.json"
        spec.touch(mode=0o600)
        spec.write_text(
            json.dumps({"argv": list(self._command()), "env": self._env, "parent": os.getpid(), "cwd": "/"})
        )
        log = self._open_log()
        self._mark = self.log_path.stat().st_size
        try:
            self._process = await asyncio.create_subprocess_exec(
                *launcher_command(spec), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                env={"PATH": os.defpath},
            )  # fmt: skip
        finally:
            log.close()
        self.starts += 1

    def _open_log(self) -> IO[bytes]:
        return self.log_path.open("ab")

    async def _watch(self) -> None:
        delay = _RESTART_DELAY_S
        while self._process is not None:
            began = time.monotonic()
            code = await self._process.wait()
            _LOG.info("component %s ended with status %s; see %s", self.name, code, self.log_path)
            if time.monotonic() - began > _STEADY_S:
                delay = _RESTART_DELAY_S
            await asyncio.sleep(delay)
            delay = min(delay * 2, _MAX_RESTART_DELAY_S)
            await self._spawn()

    async def _unwatch(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None

    def _signal(self, number: int) -> None:
        if self._process is None:
            return
        if number == signal.SIGKILL:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
        # Also for SIGKILL: a process that has just been started leads no group yet.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)
