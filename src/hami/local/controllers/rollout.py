"""The arithmetic of a rolling update: how many pods each ReplicaSet may have next. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """One ReplicaSet: pods asked for and pods available."""

    wanted: int
    available: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """``replicas`` of the Deployment and how far it may be above (``surge``) and below (``unavailable``)."""

    replicas: int
    surge: int
    unavailable: int

    @property
    def most(self) -> int:
        return self.replicas + self.surge

    @property
    def least_available(self) -> int:
        return max(self.replicas - self.unavailable, 0)


def next_new(bounds: Bounds, new: Size, old: Sequence[Size]) -> int:
    """What the newest ReplicaSet is to have: never more in total than ``bounds.most``."""
    if new.wanted >= bounds.replicas:
        return bounds.replicas
    total = new.wanted + sum(size.wanted for size in old)
    return min(new.wanted + max(bounds.most - total, 0), bounds.replicas)


def next_old(bounds: Bounds, new: Size, old: Sequence[Size]) -> list[int]:
    """What the older ReplicaSets (oldest first) are to have: pods that are not available go first,
    then others as long as ``bounds.least_available`` stay available.
    """
    total = new.wanted + sum(size.wanted for size in old)
    left = total - bounds.least_available - max(new.wanted - new.available, 0)
    wanted = [size.wanted for size in old]
    if left <= 0:
        return wanted
    for index, size in enumerate(old):
        dropped = min(max(size.wanted - size.available, 0), left)
        wanted[index] -= dropped
        left -= dropped
    spare = new.available + sum(min(size.available, size.wanted) for size in old) - bounds.least_available
    spare = min(spare, left)
    for index in range(len(old)):
        dropped = min(wanted[index], max(spare, 0))
        wanted[index] -= dropped
        spare -= dropped
    return wanted
