"""Which devices every node has: inventory decoding and handshakes, per node and vendor (scheduler.md §5.2).

Runs the vendors' handshake machines: reads devices and drops them as they say, and hands their writes to
the caller.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.scheduler.core.answers import NodeOutcome, Notice
from hami.scheduler.core.nodes import NodeFacts
from hami.vendors import handshake
from hami.vendors.engine import read_inventory
from hami.vendors.handshake import Drop, Event, Handshake, PatchNode, Refresh, Report, State, TimePassed
from hami.vendors.types import DeviceInfo, VendorProfile

Devices = Mapping[str, tuple[DeviceInfo, ...]]
_Key = tuple[str, str]  # node name, vendor


@dataclass(frozen=True, slots=True)
class Seen:
    """Nodes whose placement facts changed, each with the devices that hold now, and what to tell the
    caller."""

    changed: tuple[tuple[NodeFacts, Devices], ...] = ()
    outcome: NodeOutcome = field(default_factory=NodeOutcome)


@dataclass(frozen=True, slots=True)
class RegistryMemory:
    """First-sight times, dead marks and last good devices: what the node objects alone do not say."""

    states: Mapping[_Key, State]
    last_good: Mapping[_Key, tuple[DeviceInfo, ...]]


class Registry:
    """Devices of every node seen, registered or not."""

    def __init__(self, profiles: Mapping[str, VendorProfile]) -> None:
        self._profiles = profiles
        self._machines = {word: Handshake(profile) for word, profile in profiles.items()}
        self._quiet = frozenset(
            key for profile in profiles.values() for key in (profile.rules.handshake,) if key is not None
        )
        self._facts: dict[str, NodeFacts] = {}
        self._devices: dict[str, dict[str, tuple[DeviceInfo, ...]]] = {}
        self._states: dict[_Key, State] = {}
        self._last_good: dict[_Key, tuple[DeviceInfo, ...]] = {}
        self._timers: list[tuple[float, _Key]] = []
        self._doubtful: set[_Key] = set()

    @property
    def doubtful(self) -> int:
        """Nodes whose registered devices of some vendor could not be read, or not all of them; per vendor."""
        return len(self._doubtful)

    def names(self) -> list[str]:
        """The nodes seen."""
        return list(self._facts)

    def facts(self, name: str) -> NodeFacts | None:
        """The node as last seen."""
        return self._facts.get(name)

    def see(self, facts: NodeFacts, now: float) -> Seen:
        """Take over a node as it is now."""
        before = self._facts.get(facts.name)
        if before == facts:
            return Seen()
        self._facts[facts.name] = facts
        turn = _Turn(facts)
        for word, profile in self._profiles.items():
            self._step(turn, word, handshake.seen(profile, facts), now)
        changed = turn.devices_changed or before is None or self._visible(before) != self._visible(facts)
        return self._seen([turn], [turn] if changed else [])

    def tick(self, now: float) -> Seen:
        """Run the machines whose time has come."""
        turns: dict[str, _Turn] = {}
        while self._timers and self._timers[0][0] <= now:
            due, (name, word) = heapq.heappop(self._timers)
            facts = self._facts.get(name)
            if facts is None or self._due(name, word) != due:
                continue
            turn = turns.setdefault(name, _Turn(facts))
            self._step(turn, word, TimePassed(), now)
        done = list(turns.values())
        return self._seen(done, [turn for turn in done if turn.devices_changed])

    def next_timer(self) -> float | None:
        """When `tick` has something to do next; None: never."""
        while self._timers and self._due(*self._timers[0][1]) != self._timers[0][0]:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def writes(self, name: str, now: float) -> Seen:
        """Handshake values still to be written on a node (a new leader writes what a follower could not)."""
        facts = self._facts.get(name)
        if facts is None:
            return Seen()
        turn = _Turn(facts)
        for word, profile in self._profiles.items():
            if (name, word) in self._states:
                self._step(turn, word, handshake.seen(profile, facts), now)
        return self._seen([turn], [turn] if turn.devices_changed else [])

    def forget(self, name: str) -> None:
        """The node is gone: it starts clean when it comes back."""
        self._facts.pop(name, None)
        self._devices.pop(name, None)
        for word in self._profiles:
            self._states.pop((name, word), None)
            self._last_good.pop((name, word), None)
            self._doubtful.discard((name, word))

    def memory(self) -> RegistryMemory:
        """What a rebuilt registry needs beside the node objects."""
        return RegistryMemory(dict(self._states), dict(self._last_good))

    def adopt(self, memory: RegistryMemory) -> None:
        """Take over another registry's memory; devices are read again when their node is seen."""
        self._states = {key: replace(state, applied=None) for key, state in memory.states.items()}
        self._last_good = dict(memory.last_good)

    # --- inside -------------------------------------------------------------------------------------------

    def _step(self, turn: "_Turn", word: str, event: Event, now: float) -> None:
        key = (turn.facts.name, word)
        machine = self._machines[word]
        state = self._states.get(key)
        if state is None:
            if isinstance(event, handshake.Seen) and event.source is None:
                return
            state, _ = machine.start(now)
        state, actions = machine.step(state, event, now)
        for action in actions:
            if isinstance(action, Refresh):
                self._read(turn, word)
            elif isinstance(action, Drop):
                self._set(turn, word, ())
                turn.say("DevicesDropped", f"{word}: {action.why}")
            elif isinstance(action, PatchNode):
                turn.patch.update(action.annotations)
            elif isinstance(action, Report):
                turn.say(action.reason, f"{word}: {action.message}")
        if state.seen is not None and state.seen.source is None:
            self._states.pop(key, None)
            self._doubtful.discard(key)
            self._set(turn, word, ())
            return
        self._states[key] = state
        due = machine.due(state)
        if due is not None and due > now:
            heapq.heappush(self._timers, (due, key))

    def _read(self, turn: "_Turn", word: str) -> None:
        self._doubtful.discard((turn.facts.name, word))
        try:
            inventory = read_inventory(self._profiles[word], turn.facts)
        except DevicesAbsent:
            self._set(turn, word, ())
        except DevicesMalformed as error:
            key = turn.facts.name, word
            self._doubtful.add(key)
            if self._profiles[word].rules.register.keeps_last:
                effect, kept = "the last good devices stay in force", self._last_good.get(key, ())
            else:
                effect, kept = "the node has no such devices until it is mended", ()
            turn.say("RegistrationUnreadable", f"{word}: {error}; {effect}")
            self._set(turn, word, kept)
        else:
            if inventory.warnings:
                self._doubtful.add((turn.facts.name, word))
            for warning in inventory.warnings:
                turn.say("RegistrationDoubtful", f"{word}: {warning}")
            self._set(turn, word, tuple(inventory.devices))

    def _set(self, turn: "_Turn", word: str, devices: tuple[DeviceInfo, ...]) -> None:
        name = turn.facts.name
        there = self._devices.setdefault(name, {})
        if there.get(word, ()) != devices:
            turn.devices_changed = True
        if devices:
            there[word] = self._last_good[name, word] = devices
        else:
            there.pop(word, None)
            self._last_good.pop((name, word), None)

    def _due(self, name: str, word: str) -> float | None:
        state = self._states.get((name, word))
        return None if state is None else self._machines[word].due(state)

    def _visible(self, facts: NodeFacts) -> NodeFacts:
        """The node without what only the handshake machines look at."""
        kept = {key: text for key, text in facts.annotations.items() if key not in self._quiet}
        return replace(facts, annotations=kept)

    def _seen(self, turns: "list[_Turn]", changed: "list[_Turn]") -> Seen:
        outcome = NodeOutcome(
            tuple((turn.facts.name, turn.patch) for turn in turns if turn.patch),
            tuple(notice for turn in turns for notice in turn.notices),
        )
        now_there = tuple(
            (self._visible(turn.facts), dict(self._devices.get(turn.facts.name, {}))) for turn in changed
        )
        return Seen(now_there, outcome)


@dataclass(slots=True)
class _Turn:
    """What one event does to one node."""

    facts: NodeFacts
    devices_changed: bool = False
    patch: dict[str, str | None] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)

    def say(self, reason: str, message: str) -> None:
        self.notices.append(Notice("Node", "", self.facts.name, "", reason, message))
