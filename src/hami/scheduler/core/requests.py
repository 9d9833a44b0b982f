"""From a pod object to its device requests (scheduler.md §6.2)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from hami.protocol import keys, views
from hami.protocol.errors import ObjectError
from hami.scheduler.core.answers import PlacementError, PodRequest
from hami.scheduler.core.hosts import effective_amount, need_of
from hami.scheduler.core.pods import shape_of
from hami.scheduler.core.policies import is_fragmentation_aware, parse_weights
from hami.vendors.request import checked_request, containers_of
from hami.vendors.selection import MAX_STEERING_TEXT, steering_keys
from hami.vendors.types import AdmissionRejected, ContainerRequest, PodInfo, VendorProfile

MAX_CONTAINERS: Final = 128
"""Containers, init containers included, of a pod that asks for devices."""

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
    info = PodInfo(view.uid, view.namespace, view.name, annotations, shape_of(view))
    slots: list[dict[str, ContainerRequest]] = []
    invalid = ""
    for container in containers_of(pod):
        slot = {}
        for word in sorted(profiles):
            try:
                request = checked_request(profiles[word], container, pod)
            except AdmissionRejected as error:
                invalid = invalid or str(error)
                continue
            if request is not None:
                slot[word] = request
        slots.append(slot)
    if not any(slots) and not invalid:
        return None
    invalid = invalid or _too_much(slots, annotations, profiles)
    node_policy = annotations.get(keys.NODE_POLICY, node_policy)
    card_policy = annotations.get(keys.CARD_POLICY, card_policy)
    try:
        weights = parse_weights(annotations)
    except PlacementError as error:
        raise PlacementError(f"calcScore failed {error} for pod {view.name}") from None
    host = need_of(view, info.shape)
    weighs_hosts = is_fragmentation_aware(node_policy, card_policy)
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
            host if weighs_hosts else None,
        ),
        host,
    )


def too_many_containers(count: int) -> str:
    """The refusal of a pod with devices and more than `MAX_CONTAINERS` containers."""
    return f"a pod with devices has at most {MAX_CONTAINERS} containers, this one has {count}"


def _too_much(
    slots: Sequence[Mapping[str, ContainerRequest]],
    annotations: Mapping[str, str],
    profiles: Mapping[str, VendorProfile],
) -> str:
    """Why judging this pod on a node would take too long, else "": no single pod may hold up the others."""
    if len(slots) > MAX_CONTAINERS:
        return too_many_containers(len(slots))
    steering = [keys.NODE_POLICY, keys.CARD_POLICY]
    for word in sorted({word for slot in slots for word in slot}):
        steering += steering_keys(profiles[word].rules)
    for key in steering:
        length = len(annotations.get(key, ""))
        if length > MAX_STEERING_TEXT:
            return f"annotation {key} has {length} characters, at most {MAX_STEERING_TEXT} are read"
    return ""


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
