"""The event ring that our library keeps in a region, and which of it becomes an event on the pod. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from hami.protocol import region_layout as layout

RING_OFFSET: Final = layout.Extension.events.offset
RING_BYTES: Final = layout.EVENT_RING * layout.ExtensionEvent.SIZE
BETWEEN_S: Final = 60.0

_NS: Final = 1e9
_MIB: Final = 1 << 20
EventType = Literal["Normal", "Warning"]


@dataclass(frozen=True, slots=True)
class RingEvent:
    """One entry: its number from 0, what happened (``layout.EVENT_*``), the container PID and a value."""

    number: int
    kind: int
    device: int
    pid: int
    value: int


@dataclass(frozen=True, slots=True)
class PodEvent:
    """What is reported on a pod."""

    type: EventType
    reason: str
    message: str


def new_events(ring: bytes, written: int, seen: int) -> tuple[RingEvent, ...]:
    """The entries with numbers from ``seen`` to ``written``, at most the newest 1,024.

    ``ring`` is the whole ring, ``written`` the number of events ever written. An entry that is being written,
    or that does not carry its own number, is skipped.
    """
    first = max(seen, written - layout.EVENT_RING, 0)
    if written - first > layout.EVENT_RING or len(ring) < RING_BYTES:
        return ()
    found = []
    for number in range(first, written):
        base = (number % layout.EVENT_RING) * layout.ExtensionEvent.SIZE
        entry = layout.ExtensionEvent
        if entry.sequence.read(ring, base) != number + 1:
            continue
        found.append(
            RingEvent(
                number,
                entry.type.read(ring, base),
                entry.device.read(ring, base),
                entry.pid.read(ring, base),
                entry.value.read(ring, base),
            )
        )
    return tuple(found)


class EventLimiter:
    """At most one event per container, kind and minute; remembers how far each ring was read."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._last: dict[tuple[str, int], float] = {}
        self._started = False

    def position(self, name: str, written: int) -> int:
        """From which number on the ring of ``name`` is new; moves to ``written``.

        Rings that exist when the monitor starts were read by an earlier one; later ones are read from their
        start.
        """
        position = min(self._seen.get(name, 0 if self._started else written), written)
        self._seen[name] = written
        return position

    def end_of_tick(self, names: Iterable[str], now: float) -> None:
        """Forget containers that are gone and reports that no longer limit anything."""
        self._started = True
        kept = set(names)
        self._seen = {name: seen for name, seen in self._seen.items() if name in kept}
        self._last = {key: at for key, at in self._last.items() if now - at < BETWEEN_S}

    def reports(self, name: str, events: Iterable[RingEvent], now: float) -> tuple[PodEvent, ...]:
        """What to report of ``events``: the newest of each kind that was not reported within a minute."""
        newest = {event.kind: event for event in events if event.kind in _WORDS}
        due = [
            event for kind, event in newest.items() if now - self._last.get((name, kind), -1e18) >= BETWEEN_S
        ]
        self._last.update({(name, event.kind): now for event in due})
        return tuple(describe(event) for event in due)


def describe(event: RingEvent) -> PodEvent:
    """The pod event of an entry whose kind is known."""
    type_, reason, words = _WORDS[event.kind]
    where = f"device {event.device}, " if event.device < layout.MAX_DEVICES else ""
    return PodEvent(type_, reason, f"{where}process {event.pid}: {words(event.value)}")


def _mib(value: int) -> str:
    return f"{value / _MIB:.1f} MiB"


_Words = Callable[[int], str]
_WORDS: Final[dict[int, tuple[EventType, str, _Words]]] = {
    layout.EVENT_REFUSAL: (
        "Warning",
        "HAMiMemoryRefused",
        lambda value: f"a request for {_mib(value)} was refused, it exceeds the container's memory limit",
    ),
    layout.EVENT_THROTTLED: (
        "Normal",
        "HAMiThrottled",
        lambda value: f"launches waited {value / _NS:.1f} s within 10 s because of the core limit",
    ),
    layout.EVENT_HOST_PID_FALLBACK: (
        "Warning",
        "HAMiHostPidFallback",
        lambda value: f"the host PID broker did not answer (errno {value})",
    ),
    layout.EVENT_PRIVATE_REGION: (
        "Warning",
        "HAMiPrivateRegion",
        lambda _: "no shared region could be made; limits hold per process",
    ),
    layout.EVENT_PRIORITY_BLOCK: (
        "Normal",
        "HAMiPriorityBlock",
        lambda value: "blocked by a container of higher priority" if value else "no longer blocked",
    ),
    layout.EVENT_MANAGED_FALLBACK: (
        "Normal",
        "HAMiOversubscribed",
        lambda value: f"{_mib(value)} were placed in managed memory beyond the card's own",
    ),
    layout.EVENT_REGION_REPLACED: (
        "Warning",
        "HAMiRegionReplaced",
        lambda _: "the region file was replaced; the process moved to the new one",
    ),
}
