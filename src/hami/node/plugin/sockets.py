"""Which socket files there are, so that a restart of kubelet and the loss of our own sockets are seen."""

from __future__ import annotations

import os
from dataclasses import dataclass

Identity = tuple[int, int, int]
"""Device, inode and change time of a socket file."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Our sockets as we made them, and kubelet's as it was right before we registered or tried."""

    sockets: tuple[tuple[str, Identity | None], ...] = ()
    kubelet: Identity | None = None

    @property
    def is_lost(self) -> bool:
        """Whether one of our sockets is gone or another program's."""
        return any(inode(identity(path)) != inode(own) for path, own in self.sockets)


def identity(path: str) -> Identity | None:
    """What makes one socket file different from its successor, None where there is none."""
    if not path:
        return None
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def inode(found: Identity | None) -> tuple[int, int] | None:
    """Enough to know a socket that is served: nobody else gets its inode. Its ctime may change by a label."""
    return None if found is None else found[:2]
