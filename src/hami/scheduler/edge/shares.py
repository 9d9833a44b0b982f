"""How long the loop may judge pods of one namespace.

kube-scheduler asks about one pod after the other. Pods of a hundred containers that fit nowhere take an exact
fit on every node, which is a minute on thousands of nodes: many of them would keep everybody's pods waiting.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

FREE_S: Final = 0.1
"""Seconds of work that every decision may take; a pod that fits is placed in a few milliseconds."""
BURST_S: Final = 10.0
RATE: Final = 0.25
OTHERS_S: Final = 60.0
_NAMESPACES: Final = 1000


class Shares:
    """Seconds of work beyond ``FREE_S`` that each namespace has left: ``BURST_S``, refilled at ``RATE`` per
    second. They count while pods of other namespaces have come in the last ``OTHERS_S`` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # seconds left, as of when
        self._asked: OrderedDict[str, float] = OrderedDict()  # when a pod of it came, the last one last

    def seconds(self, namespace: str) -> float:
        """How long a decision for a pod of this namespace, which has just come, may take."""
        now = self._clock()
        self._asked[namespace] = now
        self._asked.move_to_end(namespace)
        if len(self._asked) > _NAMESPACES:
            self._asked.popitem(last=False)
        others = (at for name, at in reversed(self._asked.items()) if name != namespace)
        if now - next(others, -math.inf) > OTHERS_S:
            return math.inf
        return FREE_S + max(0.0, self._now(namespace))

    def used(self, namespace: str, seconds: float) -> None:
        """A decision has taken so long."""
        if seconds <= FREE_S:
            return
        self._left[namespace] = self._now(namespace) - (seconds - FREE_S), self._clock()
        self._left.move_to_end(namespace)
        if len(self._left) > _NAMESPACES:
            self._left.popitem(last=False)

    def _now(self, namespace: str) -> float:
        left, since = self._left.get(namespace, (BURST_S, 0.0))
        return min(BURST_S, left + (self._clock() - since) * RATE)
