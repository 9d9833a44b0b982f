"""What ``kubectl logs`` asks for, and who answers it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from hami.local.api.objects import Object


@dataclass(frozen=True, slots=True)
class LogRequest:
    """One read of a container's log. ``tail_lines`` None means all; ``since`` is seconds since the epoch."""

    pod: Object
    container: str
    follow: bool
    previous: bool
    timestamps: bool
    tail_lines: int | None
    since: float | None
    limit_bytes: int | None


class LogSource(Protocol):
    """Serves the logs of the containers of one or more nodes."""

    def read_log(self, request: LogRequest) -> AsyncIterator[bytes]:
        """Chunks of the log. Raises ApiError before the first chunk where there is none."""
        ...
