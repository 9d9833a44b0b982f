"""CPU and memory of nodes: what pods ask of them and how much is taken.

kube-scheduler alone decides whether a pod fits there. The policy `fragmentation-aware` looks at it because a
free card on a node without free CPU serves nobody.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec

from hami.protocol import views
from hami.protocol.errors import QuantityError
from hami.protocol.quantity import Quantity, milli, value
from hami.vendors.types import PodShape, SlotKind

_MIB: Final = 1 << 20
_MOST: Final = 2**40  # no sum of so many can overflow


class HostAmount(NamedTuple):
    """CPU in thousandths and memory in MiB; of a node: 0 where it reports none."""

    cpu: int = 0
    mem: int = 0


NOTHING: Final = HostAmount()


class HostCharge(msgspec.Struct, frozen=True, gc=False):
    """What one pod holds of one node."""

    node: str
    amount: HostAmount


def capacity_of(node: views.Node) -> HostAmount:
    """What the node can give to pods."""
    return _amount(node.allocatable)


def need_of(pod: views.Pod, shape: PodShape) -> HostAmount:
    """The pod's effective request, by the formula of Kubernetes; a container without requests asks for
    its limits."""
    each = [_of_container(one) for one in pod.slots]
    if len(each) == 1:
        return _shared(*each[0])
    return _shared(
        effective_amount(shape, [one.cpu for one in each]), effective_amount(shape, [one.mem for one in each])
    )


def effective_amount(shape: PodShape, amounts: Iterable[int]) -> int:
    """Kubernetes' effective request of one amount per slot: the larger of the start and the steady state
    (D4)."""
    peak = sidecars = apps = 0
    for kind, amount in zip(shape.kinds, amounts, strict=True):
        if kind is SlotKind.SIDECAR:
            sidecars += amount
        elif kind is SlotKind.INIT:
            peak = max(peak, sidecars + amount)
        else:
            apps += amount
    return max(peak, sidecars + apps)


class HostBook:
    """Sums of what pods hold, per node; `set` and the sums agree after every call."""

    def __init__(self) -> None:
        self._charges: dict[str, HostCharge] = {}
        self._used: dict[str, HostAmount] = {}

    def set(self, uid: str, charge: HostCharge | None) -> tuple[str, ...]:
        """Make `charge` (None: nothing) what the pod holds; the nodes whose sums changed."""
        before = self._charges.get(uid)
        if before == charge:
            return ()
        changed = []
        if before is not None:
            del self._charges[uid]
            self._add(before.node, before.amount, -1)
            changed.append(before.node)
        if charge is not None and charge.amount != NOTHING:
            self._charges[uid] = charge
            self._add(charge.node, charge.amount, 1)
            changed.append(charge.node)
        return tuple(changed)

    def used(self, node: str) -> HostAmount:
        """What is taken of a node, known or not."""
        return self._used.get(node, NOTHING)

    def _add(self, node: str, amount: HostAmount, sign: int) -> None:
        held = self._used.get(node, NOTHING)
        total = HostAmount(held.cpu + sign * amount.cpu, held.mem + sign * amount.mem)
        if total == NOTHING:
            self._used.pop(node, None)
        else:
            self._used[node] = total


def _of_container(container: views.Container) -> HostAmount:
    limits, requests = container.limits, container.requests
    if not limits and not requests:
        return NOTHING
    return _amount({**limits, **requests} if limits and requests else limits or requests)


def _amount(quantities: Mapping[str, Quantity]) -> HostAmount:
    """An amount that nobody can read counts as none."""
    return HostAmount(
        _whole(quantities.get("cpu"), milli, 1),
        _whole(quantities.get("memory"), value, _MIB),
    )


@lru_cache(maxsize=1024)
def _whole(quantity: Quantity | None, read: Callable[[Quantity], int], unit: int) -> int:
    if quantity is None:
        return 0
    try:
        return min(max(0, -(-read(quantity) // unit)), _MOST)
    except QuantityError:
        return 0


@lru_cache(maxsize=4096)
def _shared(cpu: int, mem: int) -> HostAmount:
    """One object for the many pods that ask for the same."""
    return HostAmount(cpu, mem)
