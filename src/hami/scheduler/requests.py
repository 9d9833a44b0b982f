"""From a pod object to its device requests (scheduler.md §6.2)."""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hami.protocol import keys, views
from hami.protocol.errors import ObjectError
from hami.scheduler.answers import PlacementError, PodRequest
from hami.scheduler.pods import info_of
from hami.scheduler.policies import parse_weights
from hami.vendors.request import container_request, containers_of
from hami.vendors.types import AdmissionRejected, ContainerRequest, PodInfo, PodShape, SlotKind, VendorProfile

_BOOKKEEPING = frozenset(
    {
        keys.REQUEUE,
        keys.ASSIGNED_NODE,
        keys.ASSIGNED_TIME,
        keys.BIND_PHASE,
        keys.BIND_TIME,
        keys.ALLOCATE_ERROR,
    }
)


def parse_pod(
    pod: Mapping[str, Any], profiles: Mapping[str, VendorProfile], node_policy: str, card_policy: str
) -> PodRequest | None:
    """The device requests of a pod, None when it names none; the policies are the flags' defaults.

    Raises `ObjectError` for what is no pod, `PlacementError` for bad scoring weights.
    """
    view = _view(pod)
    annotations = {key: text for key, text in view.annotations.items() if key not in _BOOKKEEPING}
    info = PodInfo(view.uid, view.namespace, view.name, annotations, info_of(view).shape)
    slots: list[dict[str, ContainerRequest]] = []
    invalid = ""
    for container in containers_of(pod):
        slot = {}
        for word in sorted(profiles):
            try:
                request = container_request(profiles[word], container, pod)
            except AdmissionRejected as error:
                invalid = invalid or str(error)
                continue
            if request is not None:
                slot[word] = request
        slots.append(slot)
    if not any(slots) and not invalid:
        return None
    node_policy = annotations.get(keys.NODE_POLICY, node_policy)
    card_policy = annotations.get(keys.CARD_POLICY, card_policy)
    try:
        weights = parse_weights(annotations)
    except PlacementError as error:
        raise PlacementError(f"calcScore failed {error} for pod {view.name}") from None
    return PodRequest(
        info,
        tuple(slots),
        node_policy,
        card_policy,
        weights,
        invalid,
        keys.MIG_ALLOCATIONS in annotations,
        (
            tuple(tuple(sorted(slot.items())) for slot in slots),
            info.shape.kinds,
            frozenset(annotations.items()),
            node_policy,
            card_policy,
            invalid,
        ),
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


def slots_needed(request: PodRequest, word: str) -> int:
    """Devices of one vendor the pod holds at once, as kubelet counts them (D31)."""
    return effective_amount(
        request.info.shape, (slot[word].nums if word in slot else 0 for slot in request.slots)
    )


def _view(pod: Mapping[str, Any]) -> views.Pod:
    try:
        return msgspec.convert(pod, views.Pod)
    except msgspec.ValidationError as error:
        raise ObjectError(f"invalid Pod: {error}") from None
