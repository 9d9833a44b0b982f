"""Watching a Lease without taking part in the election: who holds it, and whether that is still
believable."""

from __future__ import annotations

from dataclasses import dataclass

from hami.protocol.views import LeaseSpec


@dataclass(slots=True)
class LeaseObservation:
    """What was observed of one Lease, by the observer's own clock.

    As client-go does, times written by others are not compared with ours: a holder is alive as long as the
    last *change* of the record was seen less than its duration ago.
    """

    holder: str = ""
    duration_s: float = 0.0
    _record: tuple[str, str, int] = ("", "", 0)
    _changed_at: float = 0.0

    def observe(self, lease: LeaseSpec, now: float) -> None:
        """The record as it is at monotonic time ``now`` (seconds)."""
        record = (lease.holder_identity or "", lease.renew_time or "", lease.lease_transitions or 0)
        if record != self._record:
            self._record = record
            self._changed_at = now
        self.holder = record[0]
        self.duration_s = float(max(0, lease.lease_duration_seconds or 0))

    def forget(self) -> None:
        """The Lease was deleted."""
        self.holder, self.duration_s, self._record = "", 0.0, ("", "", 0)

    def held_by(self, hostname: str, now: float) -> bool:
        """Whether ``hostname`` holds the Lease at ``now``; an identity is ``<hostname>_<uuid>``."""
        owner, separator, _ = self.holder.rpartition("_")
        return bool(separator) and owner == hostname and now < self.expires_at()

    def expires_at(self) -> float:
        """Monotonic time at which the holder stops being believable unless the record changes."""
        return self._changed_at + self.duration_s
