"""One JSON object per line on stderr: the log format of every HAMi process.

The message is a stable event name, everything else goes into ``extra``:
``log.info("pod.bound", extra={"pod": "team-a/train-0", "node": "n1"})``.
"""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
# uvicorn tells its start and end in prose, which the components log as events; grpc logs each call.
_QUIET = ("uvicorn", "grpc")
_MAX_TEXT_CHARS = 8192


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: ``ts`` (UTC), ``level``, ``logger``, ``event``, the extras,
    ``error``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _cut(record.getMessage()),
        }
        for key, value in vars(record).items():
            if key not in _STANDARD and key not in line:
                line[key] = _plain(value)
        if record.exc_info:
            line["error"] = _cut(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def setup_logging(level: int = logging.INFO) -> None:
    """Send every logger to stderr through the JSON formatter; replaces handlers that were there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    logging.captureWarnings(capture=True)


def level_from_verbosity(verbosity: int) -> int:
    """klog's ``-v``: 0-3 is info, 4 and more is debug."""
    return logging.DEBUG if verbosity >= 4 else logging.INFO


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in list(value.items())[:100]}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in list(value)[:100]]
    return _cut(str(value))


def _cut(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _MAX_TEXT_CHARS else text[:_MAX_TEXT_CHARS] + "…"
