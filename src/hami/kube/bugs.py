"""Exceptions that nobody expected: told in full once, then counted, so that a bug on every request or object
fills no disk and is not overlooked."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

_AGAIN_S = 60.0
_KINDS = 256

_Kind = tuple[str, str, str, int]


@dataclass(slots=True)
class _Seen:
    told_at: float
    since: int = 0


class BugLog:
    """Logs each kind of exception (event, type, line of code) with its traceback, at most once a minute."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = 0
        self._log = log
        self._clock = clock
        self._seen: OrderedDict[_Kind, _Seen] = OrderedDict()

    def note(self, event: str, error: BaseException, **about: str) -> None:
        """It has happened again; ``about`` says where: route, pod, part. Never raises."""
        self.total += 1
        kind = (event, type(error).__name__, *_line_of(error.__traceback__))
        now = self._clock()
        seen = self._seen.get(kind)
        if seen is not None and now - seen.told_at < _AGAIN_S:
            seen.since += 1
            return
        untold = 0 if seen is None else seen.since
        self._seen[kind] = _Seen(now)
        self._seen.move_to_end(kind)
        if len(self._seen) > _KINDS:
            self._seen.popitem(last=False)
        self._log.error(event, extra={**about, "untold_before": untold}, exc_info=error)


def _line_of(trace: TracebackType | None) -> tuple[str, int]:
    """File and line where the exception was raised."""
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno
