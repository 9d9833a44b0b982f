"""A program in a running container, with pipes or on a terminal of its own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import shutil
import signal
import struct
import termios
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from secrets import token_hex

from hami.local.kubelet.containers import (
    PID_FILE,
    Container,
    ContainerStartError,
    Isolation,
    launcher_command,
    write_spec,
)

_CHUNK = 32 * 1024
_START_LIMIT_S = 5.0


async def start_exec(container: Container, command: Sequence[str], *, tty: bool, stdin: bool) -> ExecProcess:
    """Run ``command`` beside the container's first process, with its environment, files and PIDs.

    Without namespaces it runs on the machine as the container does. Raises ContainerStartError.
    """
    directory = container.directory / f"exec-{token_hex(4)}"
    more: dict[str, object] = {"tty": tty}
    if container.isolation is not Isolation.NONE:
        more["join"] = await _first_process(container)
    plan = replace(container.plan, argv=tuple(command), mounts=())
    spec, error_file = write_spec(plan, directory, container.isolation, more)
    master = slave = -1
    try:
        if tty:
            master, slave = os.openpty()
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *launcher_command(spec),
            stdin=slave if tty else pipe if stdin else asyncio.subprocess.DEVNULL,
            stdout=slave if tty else pipe,
            stderr=slave if tty else pipe,
            env={"PATH": os.defpath},
        )
    except OSError as error:
        if master >= 0:
            os.close(master)
        raise ContainerStartError(f"cannot start the program: {error}") from error
    finally:
        if slave >= 0:
            os.close(slave)
    return ExecProcess(process, container, error_file, master)


async def _first_process(container: Container) -> int:
    """The PID of the container's first process as this machine counts."""
    path = container.directory / PID_FILE
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_LIMIT_S):
            while container.process.returncode is None:
                with contextlib.suppress(FileNotFoundError):
                    text = path.read_text()
                    if text.isdigit():
                        return int(text)
                await asyncio.sleep(0.01)
    raise ContainerStartError("the container does not run")


class ExecProcess:
    """An `ExecSession` of the API. ``master`` is the terminal's end here, -1 for pipes."""

    def __init__(
        self, process: asyncio.subprocess.Process, container: Container, error_file: Path, master: int
    ) -> None:
        self._process = process
        self._error_file = error_file
        self._master = master
        self._killer = signal.SIGHUP if container.isolation is Isolation.NONE else signal.SIGKILL
        self._abandoned = False
        self._ended = asyncio.create_task(process.wait())
        self._ended.add_done_callback(lambda _: self._release_pipes())
        self._follower = asyncio.create_task(self._end_with(container))

    async def stdout(self) -> AsyncIterator[bytes]:
        if self._master >= 0:
            async for chunk in self._terminal():
                yield chunk
            return
        async for chunk in _chunks(self._process.stdout):
            yield chunk

    async def stderr(self) -> AsyncIterator[bytes]:
        async for chunk in _chunks(self._process.stderr):
            yield chunk

    async def write(self, data: bytes) -> None:
        if self._master >= 0:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(_write_all, self._master, data)
            return
        if self._process.stdin is not None:
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(data)
                await self._process.stdin.drain()

    def close_input(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def resize(self, width: int, height: int) -> None:
        if self._master >= 0 and 0 < width < 65536 and 0 < height < 65536:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    async def wait(self) -> int:
        code = await self._process.wait()
        self._follower.cancel()
        error = self._error_file.read_text() if self._error_file.exists() else ""
        await asyncio.to_thread(shutil.rmtree, self._error_file.parent, ignore_errors=True)
        if error:
            raise ContainerStartError(error)
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """End the program and its terminal; what it still had to say is dropped."""
        self._abandoned = True
        self._signal()
        self._close_terminal()
        if self._ended.done():
            self._release_pipes()

    def _signal(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, self._killer)

    def _release_pipes(self) -> None:
        """Let go of the pipes: children of the program may hold them open for ever.

        asyncio closes them by itself only at their end and has no public way to do it earlier.
        """
        if self._abandoned:
            self._process._transport.close()  # type: ignore[attr-defined]

    async def _end_with(self, container: Container) -> None:
        await container.process.wait()
        self._signal()
        self._close_terminal()

    async def _terminal(self) -> AsyncIterator[bytes]:
        """What the program writes on its terminal, until its last process has closed it."""
        loop = asyncio.get_running_loop()
        os.set_blocking(self._master, False)
        ready = asyncio.Event()
        loop.add_reader(self._master, ready.set)
        try:
            while self._master >= 0:
                await ready.wait()
                ready.clear()
                try:
                    data = os.read(self._master, _CHUNK)
                except BlockingIOError:
                    continue
                except OSError:
                    break  # EIO: nobody has the terminal open any more
                if not data:
                    break
                yield data
                if len(data) == _CHUNK:
                    ready.set()
        finally:
            self._close_terminal()

    def _close_terminal(self) -> None:
        if self._master >= 0:
            asyncio.get_running_loop().remove_reader(self._master)
            os.close(self._master)
            self._master = -1


async def _chunks(stream: asyncio.StreamReader | None) -> AsyncIterator[bytes]:
    while stream is not None:
        data = await stream.read(_CHUNK)
        if not data:
            return
        yield data


def _write_all(handle: int, data: bytes) -> None:
    """Write to a terminal that may be full for a moment. Raises OSError when it is closed."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(handle, view) :]
        except BlockingIOError:
            select.select([], [handle], [], 1.0)
