"""Group ``allocate``: what the device plugin does with the annotations, one container after the other."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hami.node.errors import AllocateError, NoBindingPodError
from hami.node.plugin.pending import failure, find_pod, next_count, take
from hami.protocol import keys
from hami.protocol.allocation import decode_allocation
from hami.protocol.errors import AllocationError, LockFormatError
from hami.protocol.lock import Done, LockOwner, NodeRead, Patched, PatchNode, Release, parse_lock
from hami.protocol.views import Pod

from .cases import NOW, Case
from .compare import difference
from .setup import pod_view

_NVIDIA = keys.VENDOR_KEYS[keys.NVIDIA]


class Allocate:
    """Group ``allocate``."""

    def run(self, case: Case) -> Any:
        """Per step the pod found, what was popped, and the annotations and the lock afterwards."""
        return _run(case, case.input["node"])

    def compare(self, expected: Any, got: Any, case: Case) -> str:
        """Slots instead of texts, of an error only the fact.

        HAMi fails on a lock whose holder is gone; ours works as without that lock and leaves it
        (device-plugin.md §7.2): the answer must then be the one without the lock.
        """
        lock = case.input["node"]["metadata"].get("annotations", {}).get(keys.NODE_LOCK)
        if lock is not None and _holder_is_gone(lock, case.input["pods"]):
            node = copy.deepcopy(case.input["node"])
            del node["metadata"]["annotations"][keys.NODE_LOCK]
            expected = _run(case, node)
            expected["steps"] = [
                {**step, "lock": lock} if "lock" in step else step for step in expected["steps"]
            ]
        return difference(_plain(expected), _plain(got))


def _run(case: Case, node: Mapping[str, Any]) -> dict[str, Any]:
    stored = copy.deepcopy(dict(node))
    pods = copy.deepcopy(list(case.input["pods"]))
    fail = bool(case.input.get("fail"))
    return {"steps": [_step(stored, pods, fail) for _ in range(case.input["pops"])]}


def _holder_is_gone(lock: str, pods: list[dict[str, Any]]) -> bool:
    try:
        owner = parse_lock(lock).owner
    except LockFormatError:
        return False
    present = {(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in pods}
    return owner is not None and (owner.namespace, owner.name) not in present


def _step(node: dict[str, Any], pods: list[dict[str, Any]], fail: bool) -> dict[str, Any]:
    """One attempt. As in the recording, only ``fail`` marks the pod: a pop that gives an error leaves
    everything.
    """
    name = node["metadata"]["name"]
    annotations = node["metadata"].setdefault("annotations", {})
    views = [pod_view(pod) for pod in pods]
    step: dict[str, Any] = {}
    try:
        found = find_pod(name, annotations.get(keys.NODE_LOCK), views, NOW)
    except NoBindingPodError as error:
        if not error.exhausted:
            return {"find": {"error": str(error)}}
        step["error"] = str(error)
        found = next(view for view in views if f"{view.namespace}/{view.name}" == error.exhausted)
    plain = pods[next(position for position, view in enumerate(views) if view is found)]
    step["find"] = {"pod": f"{found.namespace}/{found.name}"}
    if fail:
        plain["metadata"]["annotations"].update(failure("made to fail"))
        _release(annotations, found)
    elif "error" not in step:
        step |= _pop(found, plain, annotations)
    step["annotations"] = {
        key: text for key, text in plain["metadata"]["annotations"].items() if _is_shown(key)
    }
    step["lock"] = annotations.get(keys.NODE_LOCK)
    return step


def _pop(found: Pod, plain: dict[str, Any], node_annotations: dict[str, str]) -> dict[str, Any]:
    try:
        taken = take(found, [next_count(found) or 1])
    except AllocateError as error:
        return {"error": str(error)}
    popped = taken.containers[0]
    plain["metadata"]["annotations"].update(taken.annotations)
    if taken.is_last:
        _release(node_annotations, found)
    devices = [{"uuid": each.uuid, "mem": each.usedmem, "cores": each.usedcores} for each in popped.devices]
    return {"container": popped.container.name, "devices": devices}


def _is_shown(key: str) -> bool:
    """The records show the phase and the NVIDIA allocation."""
    return key in (keys.BIND_PHASE, _NVIDIA.to_allocate, _NVIDIA.allocated)


def _release(annotations: dict[str, str], pod: Pod) -> None:
    """Run the release machine on the node's annotations."""
    machine = Release(LockOwner(pod.namespace, pod.name))
    state, actions = machine.start(NOW)
    while not isinstance(actions[-1], Done):
        action = actions[-1]
        if isinstance(action, PatchNode):
            annotations.pop(action.key, None)
            state, actions = machine.step(state, Patched(), NOW)
        else:
            state, actions = machine.step(state, NodeRead(annotations.get(keys.NODE_LOCK), "1"), NOW)


def _plain(answer: Any) -> Any:
    return {"steps": [_plain_step(step) for step in answer["steps"]]}


def _plain_step(step: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(step)
    if "error" in plain:
        plain["error"] = True
    if "error" in plain.get("find", {}):
        plain["find"] = {"error": True}
    if "annotations" in plain:
        plain["annotations"] = {key: _slots(key, text) for key, text in plain["annotations"].items()}
    return plain


def _slots(key: str, text: str) -> Any:
    if not key.endswith("-devices-to-allocate"):
        return text
    try:
        slots = [
            [(each.uuid, each.usedmem, each.usedcores) for each in slot] for slot in decode_allocation(text)
        ]
    except AllocationError:
        return text
    while slots and not slots[-1]:
        slots.pop()
    return slots
