"""Which container a PreStartContainer call is about. Pure.

Kubelet's PodResources API lists the containers that hold ids, but no ordinary init containers; those stand
in kubelet's own device checkpoint. A later container of the pod takes over the ids of its init containers,
so the same set may stand for several containers of one pod; which one is being started follows from what
was answered before and from the pod's status. Nothing is guessed: what cannot be told yet is
:class:`NotYetError`; kubelet then calls again and says in the pod's status which container it is starting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from hami.node.exact.errors import NotYetError
from hami.protocol.errors import TimestampError
from hami.protocol.timestamps import parse_rfc3339
from hami.protocol.views import ContainerStatus, Pod, Terminated

_BEGINNING: Final = (None, "", "PodInitializing", "ContainerCreating")
_SANDBOX_READY: Final = "PodReadyToStartContainers"
_State = Literal["new", "running", "stale", "failed", "done"]


@dataclass(frozen=True, slots=True)
class Holding:
    """The device ids of one resource that one container holds, as PodResources lists it."""

    namespace: str
    pod: str
    container: str
    device_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The same in kubelet's device checkpoint, init containers among them."""

    pod_uid: str
    container: str
    device_ids: frozenset[str]


def holding_of(holdings: Iterable[Holding], device_ids: Collection[str]) -> Holding | None:
    """The container that holds exactly ``device_ids``; None if there is none.

    Raises :class:`NotYetError` for several: one of them has ended and kubelet has not noticed yet.
    """
    wanted = frozenset(device_ids)
    found = [holding for holding in holdings if holding.device_ids == wanted]
    if len(found) > 1:
        names = ", ".join(sorted(f"{item.namespace}/{item.pod}" for item in found))
        raise NotYetError(f"kubelet lists the same devices for {names}")
    return found[0] if found else None


def recorded_of(records: Iterable[Recorded], device_ids: Collection[str]) -> tuple[Recorded, ...]:
    """The containers with exactly ``device_ids`` in kubelet's checkpoint."""
    wanted = frozenset(device_ids)
    return tuple(record for record in records if record.device_ids == wanted)


def sharing_init_containers(pod: Pod, records: Iterable[Recorded]) -> tuple[str, ...]:
    """The ordinary init containers of ``pod`` among ``records``, in the order in which they run."""
    names = {record.container for record in records if record.pod_uid == pod.uid}
    return tuple(
        container.name
        for container in pod.init_containers
        if container.name in names and not container.is_sidecar
    )


def container_to_start(
    pod: Pod, init_containers: Sequence[str], listed: str, answered: Mapping[str, int]
) -> str:
    """The container that kubelet is about to start.

    ``init_containers`` are the ordinary ones that hold the ids, in order; ``listed`` the container that
    PodResources names (empty: none); ``answered`` the containers of the pod that got an answer before, with
    the Unix seconds of the last one. A new sandbox (after a reboot) starts the init containers again.
    Raises :class:`NotYetError` while the pod's status does not tell.
    """
    new_sandbox = any(
        condition.type == _SANDBOX_READY and condition.status == "False"
        for condition in pod.status.conditions or ()
    )
    for name in init_containers:
        state = _state(pod, name, answered.get(name, 0))
        if state == "done":
            if new_sandbox:
                return name
            continue
        if state == "failed" or (state == "new" and name not in answered):
            return name
        raise NotYetError(
            f"the status of pod {pod.namespace}/{pod.name} does not tell yet whether init container {name} "
            "has ended"
        )
    if listed:
        return listed
    if init_containers:
        return init_containers[-1]
    raise NotYetError(f"pod {pod.namespace}/{pod.name} has no container with these devices")


def _state(pod: Pod, name: str, answered_at: int) -> _State:
    """``stale``: the end that the status tells is older than our last answer."""
    status = next((item for item in pod.status.init_container_statuses or [] if item.name == name), None)
    state = (status or ContainerStatus()).state
    if state is None:
        return "new"
    if state.terminated is not None:
        if _ended_before(state.terminated, answered_at):
            return "stale"
        return "failed" if state.terminated.exit_code else "done"
    if state.running is not None:
        return "running"
    return "new" if (state.waiting or {}).get("reason") in _BEGINNING else "failed"


def _ended_before(end: Terminated, seconds: int) -> bool:
    """Whether a container ended in a second before ``seconds``; False where the time is not known."""
    if not end.finished_at:
        return False
    try:
        return parse_rfc3339(end.finished_at) < seconds
    except TimestampError:
        return False
