"""The broker as a supervised child process of the device plugin (host-pid-broker.md §6.5, §6.6).

The child is started by the main thread, since it is killed when the thread that started it ends. It says in
one JSON line each that it serves, or why it cannot.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hami.node.hostpid.codec import ANSWER_BYTES, REQUEST, BrokerProtocolError, decode_answer
from hami.node.hostpid.counters import Counters, Result, Totals, shared_memory
from hami.node.hostpid.endpoint import LOCK_WAIT_S, SOCKET_NAME
from hami.node.hostpid.errors import BrokerError
from hami.node.hostpid.serving import DEADLINE_S
from hami.node.paths import BROKER_DIRECTORY, HostPaths

START_LIMIT_S: Final = LOCK_WAIT_S + 20.0
STOP_LIMIT_S: Final = 3.0
CHECK_LIMIT_S: Final = 5.0
_PAUSE_S: Final = 0.05
_MAX_LINE: Final = 64 << 10
_INITIAL_PID_NAMESPACE: Final = 0xEFFFFFFC

log = logging.getLogger(__name__)


class BrokerChild:
    """One broker process; started once, never restarted."""

    def __init__(self, paths: HostPaths, command: Sequence[str] = ()) -> None:
        self._paths = paths
        self._command = tuple(command) or (sys.executable, "-P", "-m", "hami.node.hostpid")
        self._socket = paths.host(f"{BROKER_DIRECTORY}/{SOCKET_NAME}")
        self._process: asyncio.subprocess.Process | None = None
        self._counters: Counters | None = None
        self._ended: asyncio.Task[BrokerError] | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """PID of the child; raises :class:`BrokerError` before :meth:`start`."""
        return self._started().pid

    async def start(self) -> None:
        """Start the child and wait until it serves. Call it in the main thread.

        Raises :class:`BrokerError` with the child's own words; nothing is left running then.
        """
        memory = shared_memory()
        reading, writing = os.pipe()
        try:
            self._counters = Counters(memory)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--host-root", self._paths.root, "--parent", str(os.getpid())),
                *("--counters-fd", str(memory), "--state-fd", str(writing)),
                *(("--debug",) if log.isEnabledFor(logging.DEBUG) else ()),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(memory, writing),
            )
        except OSError as error:
            os.close(reading)
            raise BrokerError(f"host PID broker: cannot be started: {error.strerror or error}") from error
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(memory)
            os.close(writing)
        states = await _reader(reading)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                first = await _state(states)
                problem = None if first.get("state") == "serving" else await self._verdict(first)
        except TimeoutError:
            problem = BrokerError(f"host PID broker: not serving after {START_LIMIT_S:.0f} s")
        except BaseException:
            await self._kill()
            raise
        if problem is not None:
            await self._kill()
            raise problem
        self._ended = asyncio.create_task(self._watch(states))
        _warn_if_nested()
        log.info("hostpid.started", extra={"socket": self._socket, "child": self._process.pid})

    async def ended(self) -> BrokerError:
        """Wait until the child has ended; the result says why."""
        self._started()
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    async def check(self) -> None:
        """Ask the child for our own PID; raises :class:`BrokerError` if it does not live and answer.

        A flood may have taken every place: then it is enough that connections are still turned away.
        """
        if self._started().returncode is not None:
            raise await self.ended()
        await asyncio.to_thread(self._exchange)

    def totals(self) -> Totals:
        """What the child has counted; raises :class:`BrokerError` before :meth:`start`."""
        if self._counters is None:
            raise BrokerError("host PID broker: not started")
        return self._counters.totals()

    async def stop(self) -> None:
        """End the child and wait for it; a second call does nothing. Raises :class:`BrokerError` with what
        went wrong.
        """
        process = self._process
        if process is None or self._stopping:
            return
        self._stopping = True
        ran = process.returncode is None
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_LIMIT_S):
                error = await self.ended()
        except TimeoutError:
            await self._kill()
            raise BrokerError(f"host PID broker: still there {STOP_LIMIT_S:.0f} s after SIGTERM") from None
        if ran and process.returncode != 0:
            raise error

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise BrokerError("host PID broker: not started")
        return self._process

    async def _watch(self, states: asyncio.StreamReader) -> BrokerError:
        last: dict[str, str] = {}
        while state := await _state(states):
            last = state
        return await self._verdict(last)

    async def _verdict(self, last: dict[str, str]) -> BrokerError:
        """Why the child ended: its own last words, else its signal or exit status."""
        status = await self._started().wait()
        if "error" in last:
            return BrokerError(last["error"])
        how = f"by signal {signal.Signals(-status).name}" if status < 0 else f"with exit status {status}"
        return BrokerError(f"host PID broker: stopped unexpectedly {how}")

    async def _kill(self) -> None:
        process = self._started()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _exchange(self) -> None:
        before = self.totals().results[Result.SATURATED]
        end = time.monotonic() + CHECK_LIMIT_S
        while True:
            try:
                found = ask(self._socket)
            except (ConnectionRefusedError, FileNotFoundError) as error:
                raise BrokerError(f"host PID broker: {self._socket}: {error.strerror}") from error
            except (OSError, BrokerProtocolError) as error:
                if time.monotonic() >= end:
                    if self.totals().results[Result.SATURATED] > before:
                        log.warning("hostpid.saturated", extra={"socket": self._socket})
                        return
                    raise BrokerError(f"host PID broker: {self._socket} does not answer: {error}") from error
                time.sleep(_PAUSE_S)
            else:
                if found != os.getpid():
                    raise BrokerError(
                        f"host PID broker: {self._socket} answers PID {found} to process {os.getpid()}"
                    )
                return


def ask(path: str, timeout_s: float = DEADLINE_S) -> int:
    """Our PID as the broker at ``path`` sees it. Raises ``OSError`` or :class:`BrokerProtocolError`."""
    answer = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        connection.connect(path)
        connection.sendall(REQUEST)
        while len(answer) < ANSWER_BYTES:
            piece = connection.recv(ANSWER_BYTES - len(answer))
            if not piece:
                break
            answer += piece
    return decode_answer(answer)


def _warn_if_nested() -> None:
    """A node in a container is legal, so this is no error."""
    if Path("/proc/self/ns/pid").stat().st_ino != _INITIAL_PID_NAMESPACE:
        advice = "PIDs are those of this PID namespace; on a real node the pod needs hostPID: true"
        log.warning("hostpid.nested_namespace", extra={"advice": advice})


async def _reader(descriptor: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=_MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    return reader


async def _state(states: asyncio.StreamReader) -> dict[str, str]:
    """The next thing the child says, empty when it has closed its end."""
    line = await states.readline()
    if not line:
        return {}
    try:
        found = json.loads(line)
    except ValueError:
        found = {}
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
