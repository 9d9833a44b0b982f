"""The order in which pending pods are tried: kube-scheduler's three queues. Pure; time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field

INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 10.0


@dataclass(slots=True)
class _Entry:
    uid: str
    priority: int
    since: float
    attempts: int = 0
    ready_at: float = 0.0
    parked_at: float | None = None
    moved: bool = False
    generation: int = field(default=0)


class SchedulingQueue:
    """Pods by UID: ready, backing off, or parked until a cluster event.

    A pod that failed is parked and comes back with the next event, but not before its back-off
    (1 s, doubling to 10 s) has passed, or after ``max_parked_s`` without any event.
    """

    def __init__(self, *, max_parked_s: float = 20.0) -> None:
        self._max_parked_s = max_parked_s
        self._entries: dict[str, _Entry] = {}
        self._in_flight: set[str] = set()
        self._events = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, uid: str, priority: int, now: float) -> None:
        """A pod to schedule; one that is known already is made ready (it has changed)."""
        known = self._entries.get(uid)
        if known is None:
            self._entries[uid] = _Entry(uid, priority, now)
        else:
            known.priority = priority
            known.moved = True

    def remove(self, uid: str) -> None:
        self._entries.pop(uid, None)
        self._in_flight.discard(uid)

    def cluster_event(self) -> None:
        """Something changed that may make room: every parked pod may be tried again."""
        self._events += 1
        for entry in self._entries.values():
            entry.moved = True

    def pop(self, now: float) -> str | None:
        """The next ready pod (highest priority, then oldest), marked in flight; None if there is none."""
        ready = [entry for entry in self._entries.values() if self._ready_at(entry) <= now]
        if not ready:
            return None
        chosen = min(ready, key=lambda entry: (-entry.priority, entry.since))
        chosen.generation = self._events
        chosen.moved = False
        chosen.attempts += 1
        self._in_flight.add(chosen.uid)
        return chosen.uid

    def failed(self, uid: str, now: float, *, retry: bool = False) -> None:
        """The try that ``pop`` started found no place. ``retry``: an error, tried again without an event.

        An event that came during the try counts as one after it.
        """
        entry = self._entries.get(uid)
        self._in_flight.discard(uid)
        if entry is None:
            return
        backoff = min(INITIAL_BACKOFF_S * 2.0 ** min(entry.attempts - 1, 16), MAX_BACKOFF_S)
        entry.since = now
        entry.ready_at = now + backoff
        entry.parked_at = now
        entry.moved = entry.moved or retry or entry.generation != self._events

    def next_ready(self) -> float | None:
        """When ``pop`` will give a pod if nothing else happens; None if never."""
        times = [
            self._ready_at(entry) for entry in self._entries.values() if entry.uid not in self._in_flight
        ]
        return min(times, default=None)

    def _ready_at(self, entry: _Entry) -> float:
        if entry.uid in self._in_flight:
            return float("inf")
        if entry.parked_at is None or entry.moved:
            return entry.ready_at
        return max(entry.ready_at, entry.parked_at + self._max_parked_s)
