"""Group ``bind``: the Binder on an API server in memory.

HAMi's patch of the ``bind-`` keys and its Binding are together our one Binding (decisions, row 24).
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from hami.kube.events import EventRecorder, ObjectRef
from hami.protocol import keys
from hami.protocol.allocation import Allocation
from hami.protocol.durations import parse_duration
from hami.protocol.extender import ExtenderBindingArgs
from hami.protocol.views import Pod
from hami.scheduler.core.answers import Reservation
from hami.scheduler.core.reservations import charge_of
from hami.scheduler.core.state import ClusterState
from hami.scheduler.edge.binder import Binder, BinderSettings, PodNote
from hami.scheduler.edge.events import SchedulerEvents
from hami.scheduler.edge.leader import Leadership
from hami.scheduler.edge.node_locks import NodeLocks
from hami.vendors import engine

from .cases import NOW, Case
from .compare import difference
from .fakeapi import FakeApi
from .scheduling import empty_state, feed
from .setup import pod_view, profiles

_LOCKS = (keys.NODE_LOCK, keys.CAMBRICON_LOCK)


class Bind:
    """Group ``bind``."""

    def run(self, case: Case) -> Any:
        """The answer, the writes, the events, and the locks on the node afterwards."""
        return asyncio.run(_bind(case))

    def compare(self, expected: Any, got: Any, case: Case) -> str:
        """Writes in order, GETs left out; a refusal of the API server ends our text in its words."""
        wanted = {
            "error": expected["error"],
            "events": expected["events"],
            "locks_after": expected["locks_after"],
            "writes": expected["writes"] if "writes" in expected else _recorded_writes(expected["actions"]),
        }
        got = _without_precondition(got)
        if "actions" in expected and _failed_before_writing(wanted):
            # HAMi releases a lock without owner after any failed attempt, ours only what it wrote (row 29).
            wanted["writes"] = []
            wanted["locks_after"] = _locks(_node_annotations(case))
        if case.input.get("pod_missing"):
            # HAMi's text comes from its cache, ours from the API server; an event would be on no pod.
            return "" if bool(expected["error"]) == bool(got["error"]) and not got["writes"] else str(got)
        if case.input.get("bind_fails") or case.input.get("patch_fails"):
            return difference(wanted, _in_the_servers_words(got, expected["error"]))
        return difference(wanted, got)


async def _bind(case: Case) -> dict[str, Any]:
    pod = case.input["pod"]
    missing = bool(case.input.get("pod_missing"))
    refusal = "binding refused by test" if case.input.get("bind_fails") else ""
    refusal = "patch refused by test" if case.input.get("patch_fails") else refusal
    pods = [*(case.input.get("pods") or ()), *(() if missing else (pod,))]
    api = FakeApi(case.input["nodes"], pods, refusal)
    recorder = _Recorder(api)
    reservation = None if missing else _reservation(case)
    state = _state_with(case, reservation)
    binder = Binder(
        api,
        state,
        Leadership("scheduler-0", electing=False),
        NodeLocks(api, recorder, clock=lambda: NOW, rng=random.Random(1)),
        SchedulerEvents(recorder),
        BinderSettings(lock_retry_s=_retry_seconds(case)),
        clock=lambda: NOW,
    )
    meta = pod["metadata"]
    if _in_a_group(pod_view(pod)):
        binder.note(meta["uid"], PodNote(group_member=True))
    error = await binder.bind(
        ExtenderBindingArgs(meta["name"], meta["namespace"], meta["uid"], case.input["node"])
    )
    await binder.close()
    return {
        "error": error,
        "events": sorted(recorder.lines),
        "locks_after": _locks(api.annotations(case.input["node"])),
        "writes": _our_writes(api, reservation),
    }


class _Recorder(EventRecorder):
    """Keeps events instead of sending them."""

    def __init__(self, api: FakeApi) -> None:
        super().__init__(api, "scheduler")
        self.lines: list[str] = []

    def record(self, ref: ObjectRef, type_: Any, reason: str, message: str) -> None:
        self.lines.append(f"{type_} {reason} {message}")


def _state_with(case: Case, reservation: Reservation | None) -> ClusterState:
    """A state that holds the reservation made from the recorded annotations, fed with the case's objects."""
    state = empty_state(case)
    if reservation is not None:
        request = state.parse(case.input["pod"])
        assert request is not None
        charge = charge_of(state.profiles, request, reservation)
        state.adopt(dataclasses.replace(state.memory(), open={reservation.uid: (reservation, charge)}))
    feed(state, case)
    return state


def _reservation(case: Case) -> Reservation:
    pod = case.input["pod"]
    info = engine.pod_info(pod)
    asked = {
        profile.common_word: profile
        for profile in profiles(case)
        if any(
            engine.container_request(profile, container, pod) is not None
            for container in engine.containers_of(pod)
        )
    }
    allocations: dict[str, Allocation] = {
        word: engine.read_allocation(profile, info) for word, profile in asked.items()
    }
    return Reservation(
        uid=info.uid,
        namespace=info.namespace,
        name=info.name,
        node=case.input["node"],
        allocations=allocations,
        annotations=dict(info.annotations),
        labels={},
        locks=tuple(
            (word, profile.rules.lock)
            for word, profile in sorted(asked.items())
            if profile.rules.lock != "none"
        ),
        reserved_at=NOW,
    )


def _retry_seconds(case: Case) -> float:
    timeout = case.config.get("node_lock_retry_timeout") or 0
    return parse_duration(timeout) if isinstance(timeout, str) else float(timeout)


def _in_a_group(pod: Pod) -> bool:
    group = pod.spec.scheduling_group
    return bool(pod.labels.get(keys.POD_GROUP_LABEL) or (group is not None and group.pod_group_name))


def _recorded_writes(actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Node patches, and the Binding with the keys of the pod patch before it."""
    writes: list[dict[str, Any]] = []
    bind_keys: dict[str, str] = {}
    for action in actions:
        if action["verb"] == "patch" and action["resource"] == "pods":
            bind_keys = action["patch"]["metadata"]["annotations"]
        elif action["verb"] == "patch":
            writes.append({"node": action["name"], "patch": action["patch"]})
        elif action["verb"] == "create":
            meta, target = action["object"]["metadata"], action["object"]["target"]
            writes.append(
                {
                    "pod": meta["name"],
                    "uid": meta["uid"],
                    "node": target["name"],
                    "kind": target["kind"],
                    "annotations": bind_keys,
                }
            )
    return writes


def _without_precondition(got: Mapping[str, Any]) -> dict[str, Any]:
    """Our answer without the ``resourceVersion`` of patches of Cambricon's lock, which HAMi writes blindly
    (vendors/cambricon.md §7, **Ours**)."""
    writes = []
    for write in got["writes"]:
        metadata = write.get("patch", {}).get("metadata", {})
        if keys.CAMBRICON_LOCK in metadata.get("annotations", {}) and metadata.get("resourceVersion"):
            kept = {key: value for key, value in metadata.items() if key != "resourceVersion"}
            write = {**write, "patch": {"metadata": kept}}
        writes.append(write)
    return {**got, "writes": writes}


def _our_writes(api: FakeApi, reserved: Reservation | None) -> list[dict[str, Any]]:
    writes: list[dict[str, Any]] = []
    decided = reserved.annotations if reserved is not None else {}
    for action in api.actions:
        body = action["body"]
        if action["verb"] == "patch":
            writes.append({"node": action["name"], "patch": body})
            continue
        meta, target = body["metadata"], body["target"]
        annotations = {
            key: text
            for key, text in meta["annotations"].items()
            if key not in decided or key.startswith("hami.io/bind-")
        }
        writes.append(
            {
                "pod": meta["name"],
                "uid": meta["uid"],
                "node": target["name"],
                "kind": target["kind"],
                "annotations": annotations,
            }
        )
    return writes


def _failed_before_writing(wanted: Mapping[str, Any]) -> bool:
    set_lock = any(
        any(value is not None for value in write["patch"]["metadata"]["annotations"].values())
        for write in wanted["writes"]
        if "patch" in write
    )
    return bool(wanted["error"]) and not set_lock and not any("pod" in write for write in wanted["writes"])


def _node_annotations(case: Case) -> Mapping[str, str]:
    for node in case.input["nodes"]:
        if node["metadata"]["name"] == case.input["node"]:
            found: Mapping[str, str] = node["metadata"].get("annotations") or {}
            return found
    return {}


def _locks(annotations: Mapping[str, str]) -> dict[str, str]:
    return {key: annotations[key] for key in _LOCKS if key in annotations}


def _in_the_servers_words(got: Any, text: str) -> Any:
    """``got`` with our texts cut to ``text`` where they end in it."""
    events = [
        line[: -len(line.split(" ", 2)[2])] + text if line.endswith(text) else line for line in got["events"]
    ]
    return {**got, "error": text if got["error"].endswith(text) else got["error"], "events": events}
