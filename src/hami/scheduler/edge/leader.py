"""Who leads, and when this replica may answer `/filter` (scheduler.md §5.4, §11; decision 28).

The extender takes part in no election: it observes the Lease of the kube-scheduler beside it. The gate
opens once this replica leads and its watches have passed a quorum read made after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from hami.kube.errors import KubeError
from hami.kube.lease import LeaseObservation
from hami.protocol.views import Lease

NOT_LEADER: Final = "not the leader"
LATE_S: Final = 60.0
"""As long as an API server works on a request: so late may it carry out one that was given up."""
_RETRY_S = 1.0
_LONG_S = 3600.0

log = logging.getLogger(__name__)


class Leadership:
    """Whether this replica leads. As an informer's handler it is told about the Lease.

    ``electing`` false: this replica always leads.
    """

    def __init__(self, hostname: str, *, electing: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._hostname = hostname
        self._electing = electing
        self._clock = clock
        self._lease = LeaseObservation()
        self._tenure: tuple[str, int] | None = None
        self.term = 0  # another number whenever another replica may have led in between
        self.changed = asyncio.Event()

    def is_leader(self) -> bool:
        """Asked right before every write."""
        return not self._electing or self._lease.held_by(self._hostname, self._clock())

    def leads_since(self, term: int) -> bool:
        """Whether this replica leads, and nobody else has since it was in that ``term``."""
        return self.is_leader() and self.term == term

    def seconds_to_expiry(self) -> float:
        """Until the holder stops being believable unless its Lease changes; long when nothing can expire."""
        if not self._electing or not self._lease.holder:
            return _LONG_S
        return max(0.0, self._lease.expires_at() - self._clock())

    def on_add(self, lease: Lease) -> None:
        spec = lease.spec
        self._lease.observe(spec, self._clock())
        self._begin((spec.holder_identity or "", spec.lease_transitions or 0))

    def on_update(self, _old: Lease, lease: Lease) -> None:
        self.on_add(lease)

    def on_delete(self, _lease: Lease) -> None:
        self._lease.forget()
        self._begin(None)

    def _begin(self, tenure: tuple[str, int] | None) -> None:
        if tenure != self._tenure:
            self._tenure = tenure
            self.term += 1
        self.changed.set()


class SyncGate:
    """Closed until the state may be trusted for decisions; `/filter` waits here."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.changes = 0  # how often it was opened and closed
        self._open = asyncio.Event()
        self._clock = clock
        self._opened_at = 0.0

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        self.changes += 1
        self._opened_at = self._clock()
        self._open.set()

    def opened_within(self, seconds: float) -> bool:
        """Whether it was opened less than ``seconds`` ago: requests of whoever decided before may still
        land."""
        return self._clock() - self._opened_at < seconds

    def close(self) -> None:
        self.changes += 1
        self._open.clear()

    async def wait(self, timeout_s: float) -> bool:
        """Whether the gate is open, waiting up to ``timeout_s`` seconds for it."""
        if self._open.is_set():
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._open.wait()
        return self._open.is_set()


async def keep_gate(
    leadership: Leadership,
    gate: SyncGate,
    catch_up: Callable[[], Awaitable[None]],
    on_lost: Callable[[], None],
) -> None:
    """Open the gate whenever leadership is gained and ``catch_up`` has returned; close it when it is lost,
    for however short a time.

    ``catch_up`` returns once everything stored before its call has been delivered; on ``KubeError`` it is
    called again.
    """
    term = leadership.term
    while True:
        if gate.is_open and not leadership.leads_since(term):
            log.info("leader.lost")
            gate.close()
            on_lost()
        if leadership.is_leader() and not gate.is_open:
            log.info("leader.gained")
            term = leadership.term
            await _open_when_caught_up(leadership, term, gate, catch_up)
        leadership.changed.clear()
        is_right = leadership.leads_since(term) if gate.is_open else not leadership.is_leader()
        if not is_right:
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(leadership.seconds_to_expiry() + 0.01):
                await leadership.changed.wait()


async def _open_when_caught_up(
    leadership: Leadership, term: int, gate: SyncGate, catch_up: Callable[[], Awaitable[None]]
) -> None:
    while leadership.leads_since(term):
        try:
            await catch_up()
        except KubeError as error:
            log.warning("leader.catching_up_failed", extra={"reason": str(error)})
            await asyncio.sleep(_RETRY_S)
            continue
        if leadership.leads_since(term):
            gate.open()
            log.info("scheduler.synced")
        return
