"""The mix of requests seen lately: what the policy `fragmentation-aware` keeps capacity usable for.

A request of a pod counts once, however often the pod comes to `/filter`. Older requests fade: after 7,000
newer ones a request has half of its weight. Running pods count as requests when they are first seen, so a
restarted scheduler knows the mix from the cluster.
"""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from hami.scheduler.core.hosts import HostAmount
from hami.vendors.selection import select
from hami.vendors.types import (
    NO_PERCENT,
    Allocation,
    ContainerRequest,
    PodInfo,
    VendorProfile,
)

_FADING: Final = 1.0001  # how much heavier each request is than the one before
_RENORMALISED: Final = 1e9
_KINDS: Final = 512  # of one vendor; the lightest are forgotten
_UIDS: Final = 16_384
_BUILT_EVERY: Final = 8  # a new picture after an eighth of the weight is new ...
_BUILT_AT_LEAST: Final = 200  # ... or so many requests


class RequestKind(NamedTuple):
    """What one container asks of one vendor, with the CPU and memory of its pod."""

    nums: int
    memreq: int  # MiB of each card; 0: `mem_percent`
    mem_percent: int
    cores: int
    host: HostAmount
    use_types: tuple[str, ...] | None = None  # as in vendors.selection
    no_use_types: tuple[str, ...] = ()
    modes: frozenset[str] | None = None


class VendorMix:
    """Weights of the kinds of one vendor's requests."""

    def __init__(self) -> None:
        self.version = 0  # changes when the weights have changed enough to look again
        self._weights: dict[RequestKind, float] = {}
        # the lightest first, the older one of equal weight; weights as they were when the entry was made
        self._light: list[tuple[float, int, RequestKind]] = []
        self._age = itertools.count()
        self._unit = 1.0
        self._seen = 0
        self._seen_at_version = 0

    def add(self, kind: RequestKind) -> None:
        weight = self._weights.get(kind)
        if weight is None:
            heapq.heappush(self._light, (self._unit, next(self._age), kind))
        self._weights[kind] = (weight or 0.0) + self._unit
        self._unit *= _FADING
        self._seen += 1
        if len(self._weights) > _KINDS:
            self._forget_lightest()
        if self._unit > _RENORMALISED:
            self._weights = {one: weight / self._unit for one, weight in self._weights.items()}
            self._light = [(weight, next(self._age), one) for one, weight in self._weights.items()]
            heapq.heapify(self._light)
            self._unit = 1.0
        new = self._seen - self._seen_at_version
        if new >= min(_BUILT_AT_LEAST, 1 + self._seen_at_version // _BUILT_EVERY):
            self._seen_at_version = self._seen
            self.version += 1

    def _forget_lightest(self) -> None:
        """Weights only grow: an entry that is out of date is put where it belongs when it comes up."""
        while True:
            weight, age, kind = self._light[0]
            if weight == self._weights[kind]:
                heapq.heappop(self._light)
                del self._weights[kind]
                return
            heapq.heapreplace(self._light, (self._weights[kind], age, kind))

    def shares(self) -> Mapping[RequestKind, float]:
        """Kind -> its share of all requests; the shares sum to 1 unless there is none."""
        total = sum(self._weights.values())
        return {kind: weight / total for kind, weight in self._weights.items()}


class RequestMix:
    """The mixes of all vendors."""

    def __init__(self) -> None:
        self._vendors: dict[str, VendorMix] = {}
        self._uids: OrderedDict[str, None] = OrderedDict()

    def of(self, word: str) -> VendorMix:
        """The mix of one vendor's requests."""
        return self._vendors.setdefault(word, VendorMix())

    def note_request(
        self,
        profiles: Mapping[str, VendorProfile],
        info: PodInfo,
        slots: Sequence[Mapping[str, ContainerRequest]],
        host: HostAmount,
    ) -> None:
        """A pod asks for devices."""
        if not self._is_new(info.uid):
            return
        for slot in slots:
            for word, wanted in slot.items():
                chosen = select(profiles[word].rules, info.annotations)
                self.of(word).add(
                    RequestKind(
                        wanted.nums,
                        max(0, wanted.memreq),
                        0 if wanted.mem_percent == NO_PERCENT else wanted.mem_percent,
                        wanted.cores,
                        host,
                        chosen.use_types,
                        chosen.no_use_types,
                        chosen.modes,
                    )
                )

    def note_placed(self, uid: str, allocations: Mapping[str, Allocation], host: HostAmount) -> None:
        """A pod that some scheduler placed."""
        if not self._is_new(uid):
            return
        for word, allocation in allocations.items():
            for devices in allocation:
                if devices:
                    mem = max(device.usedmem for device in devices)
                    cores = max(device.usedcores for device in devices)
                    self.of(word).add(RequestKind(len(devices), mem, 0, cores, host))

    def _is_new(self, uid: str) -> bool:
        if uid in self._uids:
            return False
        self._uids[uid] = None
        if len(self._uids) > _UIDS:
            self._uids.popitem(last=False)
        return True
