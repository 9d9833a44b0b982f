"""When a card that was marked unhealthy counts as healthy again (device-plugin.md §10.5). No I/O, no clock.

Time is in seconds of any clock that only goes forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from hami.node.errors import SettingsError

DEFAULT_TRANSIENT: Final = frozenset({8, 32, 69, 92, 94})
"""XIDs after which a card works on: a stopped or wrong command stream, contained and correctable memory
errors.
"""
DEFAULT_QUIET_S: Final = 600.0
_QUIET_RANGE_S: Final = (10.0, 86_400.0)
_MAX_XIDS: Final = 128
_LOOKS: Final = 2
"""Good looks in a row after which a card that came back counts as healthy."""
_HOLD_S: Final = 30.0
_HOLD_MAX_S: Final = 3600.0
_MEMORY_S: Final = 6 * 3600.0
"""How long a recovery counts against the next one."""


class RecoveryMode(Enum):
    """Value: text of ``HAMI_HEALTH_RECOVERY``."""

    OFF = "off"
    RESET = "reset"
    TIMED = "timed"


class Step(Enum):
    """What is to be done about a card."""

    WAIT = "wait"
    WATCH_ANEW = "watch anew"
    """Its events must be subscribed to again."""
    PROBE = "probe"
    HEALTHY = "healthy"


@dataclass(frozen=True, slots=True)
class RecoveryRules:
    """Rules of the environment."""

    mode: RecoveryMode = RecoveryMode.OFF
    transient: frozenset[int] = DEFAULT_TRANSIENT
    quiet_s: float = DEFAULT_QUIET_S


@dataclass(frozen=True, slots=True)
class Sight:
    """A card as one look found it.

    ``answers``: NVML finds it and reads its memory. ``suspect``: why it must stay out whatever else holds
    (row remapping that failed, page retirement that is pending), or empty. ``generation`` names this
    enumeration of the card and this load of its driver. ``watched``: its events arrive.
    """

    answers: bool
    suspect: str = ""
    generation: str = ""
    watched: bool = True


@dataclass(slots=True)
class _Case:
    """An unhealthy card. ``xids`` is empty where the watch itself failed."""

    reason: str
    last: float
    generation: str
    not_before: float
    xids: set[int] = field(default_factory=set)
    was_lost: bool = False
    watched_anew: bool = False
    good: int = 0
    probes: int = 0
    probe_after: float = 0.0


def parse_recovery(mode: str, transient: str, quiet_s: float | None) -> RecoveryRules:
    """Rules from ``HAMI_HEALTH_RECOVERY``, a comma list of XIDs (empty: the default list) and a quiet period.

    Raises :class:`SettingsError`.
    """
    try:
        chosen = RecoveryMode(mode.strip() or RecoveryMode.OFF.value)
    except ValueError as error:
        raise SettingsError(f"HAMI_HEALTH_RECOVERY {mode[:32]!r} must be off, reset or timed") from error
    xids = [token.strip() for token in transient.split(",") if token.strip()]
    if len(xids) > _MAX_XIDS or not all(
        token.isascii() and token.isdigit() and len(token) < 10 for token in xids
    ):
        raise SettingsError(
            f"HAMI_HEALTH_TRANSIENT_XIDS {transient[:64]!r} must be a comma list of XIDs, at most {_MAX_XIDS}"
        )
    quiet = DEFAULT_QUIET_S if quiet_s is None else quiet_s
    if not _QUIET_RANGE_S[0] <= quiet <= _QUIET_RANGE_S[1]:
        raise SettingsError(f"HAMI_HEALTH_QUIET_PERIOD must be 10s to 24h, not {quiet:g} s")
    return RecoveryRules(chosen, frozenset(int(token) for token in xids) or DEFAULT_TRANSIENT, quiet)


class Recovery:
    """The unhealthy cards of a node, and what has happened to them since.

    A card comes back after it was seen lost, enumerated anew or under a driver loaded anew, and then answers
    twice in a row with its events watched; in mode ``timed`` also when all its XIDs are transient, none came
    for the quiet period, and a probe succeeds. Each recovery within six hours doubles the wait before the
    next one.
    """

    def __init__(self, rules: RecoveryRules) -> None:
        self._rules = rules
        self._cases: dict[str, _Case] = {}
        self._recovered: dict[str, list[float]] = {}

    @property
    def unhealthy(self) -> Mapping[str, str]:
        """Why cards are unhealthy, by UUID."""
        return {uuid: case.reason for uuid, case in self._cases.items()}

    def keep(self, uuids: Iterable[str]) -> None:
        """Forget every card that is not among ``uuids``: it is healthy for another reason."""
        kept = set(uuids)
        self._cases = {uuid: case for uuid, case in self._cases.items() if uuid in kept}

    def fault(self, uuid: str, xid: int | None, reason: str, generation: str, now: float) -> None:
        """A fault was reported; ``xid`` is None where the card cannot be watched, which counts as lost."""
        case = self._cases.get(uuid)
        if case is None:
            case = self._cases[uuid] = _Case(reason, now, generation, now + self._hold(uuid, now))
        case.last = now
        case.generation = generation
        case.was_lost = xid is None
        case.watched_anew = False
        case.good = 0
        if xid is not None:
            case.xids.add(xid)

    def sighted(self, uuid: str, sight: Sight, now: float) -> Step:
        """What follows from a look at an unhealthy card."""
        case = self._cases.get(uuid)
        if case is None:
            return Step.WAIT
        if not sight.answers:
            case.was_lost = True
            case.watched_anew = False
            case.good = 0
            return Step.WAIT
        returned = case.was_lost or sight.generation != case.generation
        if returned and not case.watched_anew:
            case.watched_anew = True
            return Step.WATCH_ANEW
        if sight.suspect or not sight.watched:
            case.good = 0
            return Step.WAIT
        if returned:
            case.good += 1
            return self._healthy(uuid, now) if case.good >= _LOOKS and now >= case.not_before else Step.WAIT
        return Step.PROBE if self._is_quiet(case, now) else Step.WAIT

    def probed(self, uuid: str, sound: bool, now: float) -> Step:
        """What follows from a probe; the next one waits twice as long after each that failed."""
        case = self._cases.get(uuid)
        if case is None or not self._is_quiet(case, now):
            return Step.WAIT
        if sound:
            return self._healthy(uuid, now)
        case.probes += 1
        case.probe_after = now + min(self._rules.quiet_s * 2 ** min(case.probes, 16), _HOLD_MAX_S)
        return Step.WAIT

    def _is_quiet(self, case: _Case, now: float) -> bool:
        return (
            self._rules.mode is RecoveryMode.TIMED
            and bool(case.xids)
            and case.xids <= self._rules.transient
            and now - case.last >= self._rules.quiet_s
            and now >= max(case.probe_after, case.not_before)
        )

    def _healthy(self, uuid: str, now: float) -> Step:
        del self._cases[uuid]
        self._recovered[uuid] = [*self._recent(uuid, now), now]
        return Step.HEALTHY

    def _hold(self, uuid: str, now: float) -> float:
        """Seconds before this card may recover: none the first time."""
        count = len(self._recent(uuid, now))
        return min(_HOLD_S * 2 ** min(count - 1, 16), _HOLD_MAX_S) if count else 0.0

    def _recent(self, uuid: str, now: float) -> list[float]:
        return [at for at in self._recovered.get(uuid, ()) if now - at < _MEMORY_S][-32:]
