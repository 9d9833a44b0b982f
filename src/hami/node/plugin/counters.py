"""What the device plugin counts about itself. Touched only from the event loop."""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from hami.node.errors import NoBindingPodError
from hami.node.exact.errors import NotYetError
from hami.protocol.errors import HamiError

BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
OK: Final = "ok"
FAILED: Final = "failed"
RETRIED: Final = "retried"
"""Kubelet asks again."""
_REASONS: Final = (
    ("device number not matched", "device_number"),
    ("failed to prepare host PID lock parent", "lock_parent"),
    ("not a regular file", "mount_source"),
    ("no pending device allocation", "nothing_left"),
    ("device request not found", "annotation"),
    ("has no device allocation", "annotation"),
    ("somebody changed the annotation", "annotation"),
    ("no scheduler writes that", "annotation"),
    ("which is unhealthy", "unhealthy_card"),
    ("no CDI document describes", "cdi"),
)


def reason_of(error: HamiError) -> str:
    """A word for the cause of a failed allocation, out of a closed set."""
    if isinstance(error, NoBindingPodError):
        return "no_pod"
    if isinstance(error, NotYetError):
        return "not_yet"
    text = str(error)
    return next((word for part, word in _REASONS if part in text), "other")


class PluginCounters:
    """Allocations, the last registration, and cards that became unhealthy and healthy."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.allocations: Counter[tuple[str, str]] = Counter()
        """By result and reason; the reason of ``ok`` is empty."""
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.seconds = 0.0
        self.transitions: Counter[tuple[str, str]] = Counter()
        """By UUID of a card and ``healthy`` or ``unhealthy``."""
        self.faults: Mapping[str, str] = {}
        """Why cards are unhealthy now, by UUID."""
        self._registered: float | None = None

    @contextlib.contextmanager
    def allocation(self) -> Iterator[None]:
        """Around the answer to kubelet; a :class:`HamiError` that passes is counted as its failure."""
        begin = self._clock()
        try:
            yield
        except HamiError as error:
            result = RETRIED if isinstance(error, NotYetError) else FAILED
            self.allocations[result, reason_of(error)] += 1
            self._took(self._clock() - begin)
            raise
        self.allocations[OK, ""] += 1
        self._took(self._clock() - begin)

    def health(self, faults: Mapping[str, str]) -> None:
        """What is unhealthy now."""
        for uuid in faults.keys() - self.faults.keys():
            self.transitions[uuid, "unhealthy"] += 1
        for uuid in self.faults.keys() - faults.keys():
            self.transitions[uuid, "healthy"] += 1
        self.faults = dict(faults)

    def registered(self) -> None:
        """The node shows what it should."""
        self._registered = self._clock()

    @property
    def registration_age_s(self) -> float | None:
        """Seconds since the node's registration was last seen right, None: never."""
        return None if self._registered is None else self._clock() - self._registered

    def _took(self, seconds: float) -> None:
        self.buckets[bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds += seconds
