"""What the API server asks a node's kubelet for: logs, programs in containers, connections to pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from hami.local.api.objects import Object
from hami.local.api.podlog import LogSource


@dataclass(frozen=True, slots=True)
class ExecRequest:
    """One program to run in a running container. ``tty``: on a terminal; ``stdin``: input will come."""

    pod: Object
    container: str
    command: tuple[str, ...]
    tty: bool
    stdin: bool


class ExecSession(Protocol):
    """A running program. With a terminal everything comes through ``stdout``."""

    def stdout(self) -> AsyncIterator[bytes]: ...

    def stderr(self) -> AsyncIterator[bytes]: ...

    async def write(self, data: bytes) -> None:
        """Input for the program; after its end it is dropped."""
        ...

    def close_input(self) -> None: ...

    def resize(self, width: int, height: int) -> None:
        """The size of the terminal in characters; nothing without one."""
        ...

    async def wait(self) -> int:
        """The exit status. Raises ContainerStartError where the program could not be started."""
        ...

    def kill(self) -> None: ...


class NodeServices(LogSource, Protocol):
    """The kubelets of a cluster, as the API server sees them."""

    async def start_exec(self, request: ExecRequest) -> ExecSession:
        """Raises ApiError where the container does not run."""
        ...

    async def connect(self, pod: Object, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to a TCP port of the pod. Raises OSError where nothing listens."""
        ...
