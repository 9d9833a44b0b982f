"""Which containers are blocked and which have their core limit enforced (monitor.md §8.2). Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

BLOCKED: Final = -1
ACTIVITY_S: Final = 10


@dataclass(frozen=True, slots=True)
class Activity:
    """One container at the start of a tick; ``last_kernel`` is Unix seconds, 0 when unknown."""

    uuids: frozenset[str]
    recent_kernel: int
    utilization_switch: int
    priority: int
    last_kernel: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The two fields after the tick; ``blocked`` and ``enforced`` are what the rules say."""

    recent_kernel: int
    utilization_switch: int
    blocked: bool
    enforced: bool


def judge(containers: Mapping[str, Activity], now: float, from_last_kernel: bool) -> dict[str, Verdict]:
    """One tick over all containers, by name. ``now`` is Unix seconds.

    With ``from_last_kernel`` a container whose counter stands at 0 also counts as active if its last kernel
    is at most 10 s old (libraries that stop to refresh the counter).
    """
    aged = {
        name: max(item.recent_kernel - 1, 0) if item.recent_kernel > 0 else item.recent_kernel
        for name, item in containers.items()
    }
    active: dict[str, Counter[int]] = {}
    for name, item in containers.items():
        by_time = from_last_kernel and item.recent_kernel == 0 and _is_recent(item.last_kernel, now)
        if item.priority >= 0 and (aged[name] > 0 or by_time):
            for uuid in item.uuids:
                active.setdefault(uuid, Counter())[item.priority] += 1
    return {name: _verdict(item, aged[name], active) for name, item in containers.items()}


def _verdict(item: Activity, aged: int, active: Mapping[str, Counter[int]]) -> Verdict:
    counts = [active[uuid] for uuid in item.uuids if uuid in active]
    blocked = any(_smaller(count, item.priority) for count in counts)
    enforced = blocked or any(count[item.priority] > 1 for count in counts)
    recent = aged
    if blocked and aged >= 0:
        recent = BLOCKED
    elif not blocked and aged < 0:
        recent = 0
    return Verdict(recent, int(enforced), blocked, enforced)


def _is_recent(last_kernel: int, now: float) -> bool:
    return last_kernel > 0 and 0 <= now - last_kernel <= ACTIVITY_S


def _smaller(counts: Counter[int], priority: int) -> bool:
    return any(other < priority and number > 0 for other, number in counts.items())
