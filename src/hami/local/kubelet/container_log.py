"""Container logs in the format of the CRI: ``<time> stdout F <line>``; how to write and read them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from hami.local.api.objects import parse_time, rfc3339_micro
from hami.local.api.podlog import LogRequest

MAX_LINE_BYTES = 16 * 1024
MAX_FILE_BYTES = 10 * 1024 * 1024
_POLL_S = 0.1


class LogWriter:
    """Copies a container's output into one file; past 10 MiB it becomes ``.1`` and a new one starts."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._size = path.stat().st_size

    async def copy(self, stream: asyncio.StreamReader, name: str) -> None:
        """Until the stream ends. Lines over 16 KiB are written in pieces (tag P)."""
        partial = b""
        while True:
            chunk = await stream.read(MAX_LINE_BYTES)
            if not chunk:
                break
            lines = (partial + chunk).split(b"\n")
            partial = lines.pop()
            for line in lines:
                self._write(name, b"F", line)
            if len(partial) >= MAX_LINE_BYTES:
                self._write(name, b"P", partial)
                partial = b""
        if partial:
            self._write(name, b"F", partial)

    def _write(self, name: str, tag: bytes, line: bytes) -> None:
        if self._size > MAX_FILE_BYTES:
            self._file.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._file = self._path.open("ab", buffering=0)
            self._size = 0
        stamp = rfc3339_micro(self._clock()).encode()
        record = b" ".join((stamp, name.encode(), tag, line)) + b"\n"
        self._file.write(record)
        self._size += len(record)

    def close(self) -> None:
        self._file.close()


def _render(record: bytes, request: LogRequest) -> bytes | None:
    """What ``kubectl logs`` prints for one record; None if it is older than asked for."""
    stamp, _, rest = record.partition(b" ")
    _, _, rest = rest.partition(b" ")
    tag, _, text = rest.partition(b" ")
    if request.since is not None:
        written = parse_time(stamp.decode(errors="replace"))
        if written is not None and written < request.since:
            return None
    line = text + (b"" if tag == b"P" else b"\n")
    return stamp + b" " + line if request.timestamps else line


async def read_log(path: Path, request: LogRequest, ended: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The log at ``path`` as ``request`` wants it; with ``follow`` until ``ended()`` and all is read."""
    left = request.limit_bytes if request.limit_bytes is not None else 1 << 62
    position, records = _records_from(path, 0)
    shown = _render_all(records, request)
    if request.tail_lines is not None:
        shown = shown[-request.tail_lines :] if request.tail_lines else []
    last = not request.follow
    while True:
        for line in shown:
            if left <= 0:
                return
            yield line[:left]
            left -= len(line)
        if last:
            return
        last = ended()
        if not last:
            await asyncio.sleep(_POLL_S)
        position, records = _records_from(path, position)
        shown = _render_all(records, request)


def _render_all(records: list[bytes], request: LogRequest) -> list[bytes]:
    return [line for record in records if (line := _render(record, request)) is not None]


def _records_from(path: Path, position: int) -> tuple[int, list[bytes]]:
    """The complete records after ``position`` and where they end; from the start if the file is a new one."""
    if not path.exists():
        return 0, []
    if path.stat().st_size < position:
        position = 0
    with path.open("rb") as file:
        file.seek(position)
        complete, newline, _ = file.read().rpartition(b"\n")
    return (position + len(complete) + 1, complete.split(b"\n")) if newline else (position, [])
