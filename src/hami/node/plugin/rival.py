"""Another device plugin behind the socket that we want to serve: two cannot offer one resource of a node."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Final

from hami.node.errors import NodeError

CONNECT_LIMIT_S: Final = 1.0
_CREDENTIALS: Final = struct.Struct("3i")
_NAME_CHARS: Final = 64


class OtherPluginError(NodeError):
    """A living program serves our socket."""


def check_unserved(path: str, proc: str = "/proc") -> None:
    """Raise :class:`OtherPluginError`, which names the program, if somebody answers on ``path``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_LIMIT_S)
        try:
            probe.connect(path)
        except (TimeoutError, BlockingIOError):  # its queue is full
            who = "a program that does not accept"
        except OSError:
            return
        else:
            raw = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            who = _describe(_CREDENTIALS.unpack(raw)[0], proc)
    raise OtherPluginError(
        f"{who} already serves {path}: two device plugins cannot offer the same resource on one node; "
        "remove the other one (GPU Operator: devicePlugin.enabled=false), this one then starts by itself"
    )


def _describe(pid: int, proc: str) -> str:
    """The program by PID and name; a PID of 0 lies outside of our PID namespace."""
    if pid <= 0:
        return "a program of another PID namespace"
    try:
        name = Path(proc, str(pid), "comm").read_text("utf-8", "replace").strip()
    except OSError:
        name = ""
    shown = "".join(character for character in name if character.isprintable())[:_NAME_CHARS]
    return f"process {pid} ({shown})" if shown else f"process {pid}"
