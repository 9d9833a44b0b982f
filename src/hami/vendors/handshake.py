"""Whether a vendor's node plugin is alive: one state machine per (node, vendor), without I/O (README R8).

The register text says what devices there are; the handshake annotation only that the plugin lives. A plugin
that died leaves its register text behind, so the machine remembers it (dead mark) and takes the devices
back only on evidence of life. It never keeps a clock: every step gets the time, and `due` says when time
alone matters next.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from hami.protocol.errors import TimestampError
from hami.protocol.timestamps import age, format_handshake, is_skewed, parse_handshake
from hami.vendors.discovery import register_source
from hami.vendors.types import NodeView, VendorProfile

EXPIRY_SECONDS: Final = 60.0
"""A `Requesting` value unanswered for longer means a dead plugin, unless devices are allocatable."""

REQUESTING: Final = "Requesting"


@dataclass(frozen=True, slots=True)
class Seen:
    """The node as the API server shows it."""

    source: Hashable  # `register_source`; None: nothing of this vendor on the node
    handshake: str | None  # value of the handshake annotation
    allocatable: int | None  # of the count resource; None: not reported
    announced: bool = True  # by the vendor's register annotation: only then there is a handshake
    text: str | None = None  # of that annotation, where the source is more than what the plugin writes

    @property
    def words(self) -> Hashable:
        """What only the plugin changes."""
        return self.source if self.text is None else self.text


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Nothing changed, but `due` has come."""


Event = Seen | TimePassed


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read the devices again and replace the cached ones."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Remove the vendor's cached devices from the node."""

    why: str


@dataclass(frozen=True, slots=True)
class PatchNode:
    """Write node annotations; None removes the key."""

    annotations: Mapping[str, str | None] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Report:
    """Something an operator should know: an event on the node."""

    reason: str
    message: str


Action = Refresh | Drop | PatchNode | Report


@dataclass(frozen=True, slots=True)
class State:
    """Memory of the machine."""

    seen: Seen | None = None
    applied: Hashable = None  # source of the cached devices; None: none cached
    dead: Hashable = None  # source when the plugin was declared dead; None: no dead mark
    first_seen: float = 0.0  # when the current handshake value was first seen, Unix seconds
    written: float | None = None  # time in the current value, read as UTC
    proof: float | None = None  # when the source last changed under our eyes: somebody wrote it


def seen(p: VendorProfile, node: NodeView) -> Seen:
    """What the machine looks at."""
    rules = p.rules
    source = register_source(p, node)
    allocatable = p.names.reported_count(node.allocatable)
    if allocatable is None and rules.health == "capacity":
        allocatable = p.names.reported_count(node.capacity)
    if source is not None and rules.register.key and rules.register.key not in node.annotations:
        return Seen(source, None, allocatable, announced=False)
    handshake = node.annotations.get(rules.handshake) if rules.handshake else None
    text = node.annotations.get(rules.register.key) if p.names.also_counted else None
    return Seen(source, handshake, allocatable, text=text)


class Handshake:
    """The machine of one vendor; the state belongs to the caller."""

    def __init__(self, p: VendorProfile) -> None:
        self._p = p
        self._rules = p.rules

    def start(self, _now: float) -> tuple[State, tuple[Action, ...]]:
        """The state of a node not seen yet."""
        return State(), ()

    def step(self, state: State, event: Event, now: float) -> tuple[State, tuple[Action, ...]]:
        """The next state and what to do, in order. Equal inputs give equal outputs."""
        actions: list[Action] = []
        if isinstance(event, Seen):
            state = self._notice(state, event, now, actions)
        now_seen = state.seen
        if now_seen is None:
            return state, ()
        if now_seen.source is None:
            return self._without_source(state, actions)
        if self._is_dead(state, now_seen, now):
            return self._bury(state, now_seen, actions)
        if state.dead is not None and not self._shows_life(state.dead, now_seen):
            return state, tuple(actions)
        if state.applied != now_seen.source:
            actions.append(Refresh())
        if self._rules.handshake and now_seen.announced and REQUESTING not in (now_seen.handshake or ""):
            value = f"{REQUESTING}_{format_handshake(now)}"
            actions.append(PatchNode({self._rules.handshake: value}))
        return replace(state, applied=now_seen.source, dead=None), tuple(actions)

    def due(self, state: State) -> float | None:
        """When the answer may change although nothing on the node does (Unix seconds); None: never."""
        if state.seen is None or state.dead is not None or REQUESTING not in (state.seen.handshake or ""):
            return None
        if self._rules.health in ("capacity", "always") or (state.seen.allocatable or 0) > 0:
            return None
        if state.applied is None:
            return None
        if state.written is None:  # expired already, only the proof of life holds it up
            since = state.first_seen if state.proof is None else state.proof
        else:
            since = min(state.first_seen, state.written)
        return max(since, state.proof or since) + EXPIRY_SECONDS + 1

    # --- rules ------------------------------------------------------------------------------------------

    def _notice(self, state: State, now_seen: Seen, now: float, actions: list[Action]) -> State:
        value, before = now_seen.handshake, state.seen
        if before is not None:
            if now_seen.words not in (None, before.words) and before.words is not None:
                state = replace(state, proof=now)
            if value == before.handshake:
                return replace(state, seen=now_seen)
        written = _written_time(value)
        if written is not None and is_skewed(written, now):
            text = f"{self._rules.handshake} is {written - now:.0f} s ahead of this clock and not trusted"
            actions.append(Report("ClockSkew", text))
        return replace(state, seen=now_seen, first_seen=now, written=written)

    def _without_source(self, state: State, actions: list[Action]) -> tuple[State, tuple[Action, ...]]:
        if state.applied is not None:
            actions.append(Drop("the node no longer registers devices"))
        return replace(state, applied=None, dead=None), tuple(actions)

    def _is_dead(self, state: State, now_seen: Seen, now: float) -> bool:
        allocatable = now_seen.allocatable
        if self._rules.health == "always" or (allocatable or 0) > 0:
            return False
        if self._rules.health == "capacity" or (self._rules.health == "allocatable" and allocatable == 0):
            return True
        value = now_seen.handshake
        if not self._rules.handshake or value is None or REQUESTING not in value:
            return False
        if state.proof is not None and now - state.proof <= EXPIRY_SECONDS:
            return False
        if state.written is None:
            return True  # `Requesting`, `Requesting_garbage`: expired
        return age(state.written, state.first_seen, now) > EXPIRY_SECONDS

    def _bury(self, state: State, now_seen: Seen, actions: list[Action]) -> tuple[State, tuple[Action, ...]]:
        if state.applied is not None:
            actions.append(Drop("the device plugin no longer answers and nothing is allocatable"))
            key = self._cleanup_key(now_seen)
            if key:
                actions.append(PatchNode({key: None}))
        return replace(state, applied=None, dead=now_seen.source), tuple(actions)

    def _cleanup_key(self, now_seen: Seen) -> str | None:
        key = self._rules.cleanup
        if key is None or (key == self._rules.handshake and now_seen.handshake is None):
            return None
        return key

    def _shows_life(self, dead: Hashable, now_seen: Seen) -> bool:
        """An answer of the plugin, other devices, or devices that kubelet can give out."""
        value = now_seen.handshake
        answered = value is not None and REQUESTING not in value
        return answered or now_seen.source != dead or (now_seen.allocatable or 0) > 0


def _written_time(value: str | None) -> float | None:
    """Time in a `Requesting_<time>` value; None for anything else or unreadable."""
    if value is None or REQUESTING not in value:
        return None
    _, underscore, text = value.partition("_")
    if not underscore:
        return None
    try:
        return parse_handshake(text)
    except TimestampError:
        return None
