"""Groups ``filter`` and ``accounting``: decisions and books of a ClusterState fed with the case's objects."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hami.protocol.allocation import decode_allocation, encode_allocation
from hami.protocol.errors import ProtocolError
from hami.scheduler.core.answers import NodeUsage, NoFit, Placement, PlacementError, PodRequest
from hami.scheduler.core.state import ClusterState
from hami.vendors import engine

from .cases import NOW, Case
from .compare import difference
from .setup import node_view, pod_view, profiles, quota_view
from .vastai_scores import difference_of_scores, without_scores

_ASSIGNED = ("CAMBRICON_DSMLU_ASSIGNED", "CAMBRICON_DSMLU_ASSIGHED")
_OWN_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "MLU": ("CAMBRICON_",),
    "Metax-SGPU": ("metax-tech.com/",),
    "Enflame": ("enflame.com/", "assigned-containers"),
}
"""Keys that a vendor writes besides its allocations."""

_SCORES = re.compile(r"(.* nodes fit\()(.*)(\))")


def new_state(case: Case) -> ClusterState:
    """A state that has seen the case's objects."""
    state = empty_state(case)
    feed(state, case)
    return state


def empty_state(case: Case) -> ClusterState:
    """A state with the case's vendors and policies."""
    return ClusterState(
        profiles(case),
        node_policy=case.config.get("node_scheduler_policy", "binpack"),
        card_policy=case.config.get("gpu_scheduler_policy", "spread"),
    )


def feed(state: ClusterState, case: Case) -> None:
    """Show the case's objects in the order of a start: quotas, pods, nodes."""
    for quota in case.input.get("quotas") or ():
        state.upsert_quota(quota_view(quota))
    for pod in case.input.get("pods") or ():
        state.upsert_pod(pod_view(pod))
    for node in case.input.get("nodes") or ():
        state.upsert_node(node_view(node), NOW)


def filter_answer(state: ClusterState, pod: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The extender's answer in the form of the records: result, patch (of the Binding to come), events."""
    try:
        request = state.parse(pod)
        if request is None:
            return {"result": {"nodeNames": list(names), "failedNodes": None, "error": ""}, "events": []}
        answer = state.place(request, state.candidates(names), NOW)
    except PlacementError as error:
        return {"result": {"error": str(error)}, "events": [f"Warning FilteringFailed {error}"]}
    if isinstance(answer, Placement):
        return _placed(answer)
    return _refused(answer)


def _placed(answer: Placement) -> dict[str, Any]:
    reservation = answer.reservation
    return {
        "result": {"nodeNames": [answer.node], "failedNodes": None, "error": ""},
        "patch": {"annotations": dict(reservation.annotations), "labels": dict(reservation.labels)},
        "events": [f"Normal FilteringSucceed {_sorted_scores(answer.message)}"],
    }


def _refused(answer: NoFit) -> dict[str, Any]:
    failed = {**answer.failed, **answer.unresolvable}
    events = sorted(f"Warning FilteringFailed {message}" for message in answer.messages())
    return {"result": {"nodeNames": None, "failedNodes": failed, "error": ""}, "events": events}


def _sorted_scores(message: str) -> str:
    match = _SCORES.fullmatch(message)
    if match is None:
        return message
    return match[1] + ",".join(sorted(match[2].split(","))) + match[3]


class Filter:
    """Group ``filter``."""

    def run(self, case: Case) -> Any:
        """The answer to the extender call."""
        state = new_state(case)
        if case.input.get("dry_run"):
            return _dry_run(state, case)
        names = case.input.get("node_names")
        if names is None:
            names = [node["metadata"]["name"] for node in case.input["nodes"]]
        return filter_answer(state, case.input["pod"], names)

    def compare(self, expected: Any, got: Any, case: Case) -> str:
        """As recorded; where a decision changes the form of the answer, what it leaves is compared."""
        if case.input.get("dry_run"):
            return _compare_dry_run(expected, got)
        if case.input.get("patch_fails"):
            # Our /filter writes nothing, so nothing can fail: the decision is the recorded one (row 24).
            return difference(expected.get("patch"), got.get("patch"), "patch")
        wanted = _without_idle_vendors(_padded(expected, case), case)
        wanted = _with_both_spellings(wanted, case)
        found = difference(wanted, got)
        if found and case.vendor == "Vastai":
            found = difference(without_scores(wanted), without_scores(got))
            return found or difference_of_scores(wanted, got, case, new_state(case))
        return found


def _with_both_spellings(expected: Any, case: Case) -> Any:
    """The record with Cambricon's second key, which HAMi left out (vendors/cambricon.md §6, **Ours**)."""
    annotations = (expected.get("patch") or {}).get("annotations") or {}
    if _ASSIGNED[0] not in annotations or not any("ASSIG*" in reason for reason in case.ours):
        return expected
    both = {**annotations, _ASSIGNED[1]: annotations[_ASSIGNED[0]]}
    return {**expected, "patch": {**expected["patch"], "annotations": both}}


def _without_idle_vendors(expected: Any, case: Case) -> Any:
    """The record without the keys of vendors that the pod got no device of (README R6, **Ours**)."""
    annotations = (expected.get("patch") or {}).get("annotations")
    if not annotations or not any("vendor keys only" in reason for reason in case.ours):
        return expected
    idle: set[str] = set()
    for word, vendor in _keys_by_word(case).items():
        texts = [annotations[key] for key in vendor if key in annotations]
        if texts and not any(any(decode_allocation(text)) for text in texts):
            own = _OWN_PREFIXES.get(word, ())
            idle |= {*vendor, *(key for key in annotations if own and key.startswith(own))}
    kept = {key: text for key, text in annotations.items() if key not in idle}
    return {**expected, "patch": {**expected["patch"], "annotations": kept}}


def _dry_run(state: ClusterState, case: Case) -> dict[str, Any]:
    nodes = case.input["nodes"]
    try:
        request = state.parse(case.input["pod"])
    except PlacementError as error:
        return {"result": {"error": str(error)}, "events": []}
    if request is None:
        names = [node["metadata"]["name"] for node in nodes]
        return {"result": {"nodeNames": None, "failedNodes": None, "error": "", "nodes": names}, "events": []}
    simulation = state.simulate(request, [node_view(node) for node in nodes])
    while (answer := simulation.advance(64)) is None:
        pass
    result = {"nodeNames": None, "failedNodes": dict(answer.failed), "error": "", "nodes": list(answer.fits)}
    return {"result": result, "events": []}


def _compare_dry_run(expected: Any, got: Any) -> str:
    """HAMi names only the best node, ours every fitting one (scheduler.md §2.3): the best is among them."""
    wanted, result = dict(expected["result"]), dict(got["result"])
    best, fitting = wanted.pop("nodes", None) or [], result.pop("nodes", None) or []
    if not set(best) <= set(fitting):
        return f"fitting nodes are {fitting}, expected {best} among them"
    return difference({**expected, "result": wanted}, {**got, "result": result})


def _padded(expected: Any, case: Case) -> Any:
    """The record with one segment per container slot in every allocation text (protocol.md §8, **Ours**).

    HAMi leaves out the empty segments of vendors whose card model is not the vendor key; the devices that it
    writes belong to the containers that ask for the vendor, in order.
    """
    annotations = (expected.get("patch") or {}).get("annotations")
    if not annotations or not any("one segment per container slot" in reason for reason in case.ours):
        return expected
    request = new_state(case).parse(case.input["pod"])
    if request is None:
        return expected
    fixed = {
        key: _with_all_slots(text, request, word)
        for word, vendor in _keys_by_word(case).items()
        for key in vendor
        if (text := annotations.get(key)) is not None
    }
    return {**expected, "patch": {**expected["patch"], "annotations": {**annotations, **fixed}}}


def _keys_by_word(case: Case) -> dict[str, tuple[str, ...]]:
    return {
        profile.common_word: tuple(key for key in (profile.rules.allocated, profile.rules.to_allocate) if key)
        for profile in profiles(case)
    }


def _with_all_slots(text: str, request: PodRequest, word: str) -> str:
    try:
        written = [slot for slot in decode_allocation(text) if slot]
    except ProtocolError:
        return text
    asking = [position for position, slot in enumerate(request.slots) if word in slot]
    if len(written) != len(asking):
        return text
    by_position = dict(zip(asking, written, strict=True))
    return encode_allocation([by_position.get(position, ()) for position in range(len(request.slots))])


class Accounting:
    """Group ``accounting``."""

    def run(self, case: Case) -> Any:
        """Use of cards and quotas after every step of the sequence."""
        state = new_state(case)
        nodes = {node["metadata"]["name"]: node for node in case.input.get("nodes") or ()}
        steps = []
        for step in case.input["sequence"]:
            answer = self._perform(state, step, nodes)
            steps.append({"op": step["op"], **answer, "usage": _usage(state, nodes)})
        return {"steps": steps}

    def compare(self, expected: Any, got: Any, case: Case) -> str:
        """As recorded, but for the mark whether a slice is realised."""
        return difference(_without_ready(expected), _without_ready(got))

    def _perform(self, state: ClusterState, step: Mapping[str, Any], nodes: dict[str, Any]) -> dict[str, Any]:
        match step["op"]:
            case "add" | "update":
                state.upsert_pod(pod_view(step["pod"]))
            case "delete" | "tombstone":
                state.delete_pod(step["pod"]["metadata"]["uid"])
            case "filter":
                answer = filter_answer(state, step["pod"], step.get("node_names") or list(nodes))
                patch = {"patch": answer["patch"]} if "patch" in answer else {}
                return {"filter": {**answer["result"], **patch}}
            case "register":
                for node in nodes.values():
                    state.upsert_node(node_view(node), NOW)
            case "node-update":
                nodes[step["node"]["metadata"]["name"]] = step["node"]
                state.upsert_node(node_view(step["node"]), NOW)
            case "node-delete":
                name = _name_of(step.get("node", step.get("name")))
                nodes.pop(name, None)
                state.delete_node(name)
            case "quota-add":
                state.upsert_quota(quota_view(step["quota"]))
            case "quota-delete":
                quota = step["quota"]
                meta = quota.get("metadata", quota) if isinstance(quota, dict) else {**step, "name": quota}
                state.delete_quota(meta["namespace"], meta["name"])
            case other:
                raise ValueError(f"unknown step {other!r}")
        return {}


def _name_of(node: Any) -> str:
    return str(node["metadata"]["name"]) if isinstance(node, dict) else str(node)


def _usage(state: ClusterState, nodes: Mapping[str, Any]) -> dict[str, Any]:
    registered = {usage.name: usage for usage in state.usage()}
    quota: dict[str, dict[str, Any]] = {}
    for entry in state.quota_usage():
        record: dict[str, Any] = {"used": entry.used}
        if entry.limit is not None:
            record["limit"] = entry.limit
        if entry.used or entry.limit is not None:
            quota.setdefault(entry.namespace, {})[entry.resource] = record
    return {
        "nodes": {name: _cards(state, usage) for name, usage in registered.items()},
        "failed": {name: "node unregistered" for name in nodes if name not in registered},
        "quota": quota,
    }


def _cards(state: ClusterState, node: NodeUsage) -> list[dict[str, Any]]:
    cards = []
    for card in node.cards:
        profile = state.profiles[card.vendor]
        record: dict[str, Any] = {
            "id": card.info.id,
            "used": card.used.slots,
            "usedmem": card.used.mem,
            "usedcores": card.used.cores,
            "health": engine.card_healthy(profile, card.info, card.used),
        }
        slices = getattr(card.used.payload, "slices", ())
        if slices:
            record["mig"] = [
                {"profile": one.profile, "start": one.start, "size": one.size}
                for one, count in slices
                for _ in range(count)
            ]
        cards.append(record)
    return cards


def _without_ready(answer: Any) -> Any:
    """Slices in one order and without the mark ``ready``: our scheduler does not need to know it."""
    if isinstance(answer, list):
        return [_without_ready(item) for item in answer]
    if not isinstance(answer, dict):
        return answer
    plain = {key: _without_ready(item) for key, item in answer.items()}
    if "mig" in plain:
        slices = [{key: value for key, value in one.items() if key != "ready"} for one in plain["mig"]]
        plain["mig"] = sorted(slices, key=lambda one: (one["start"], one["profile"]))
    return plain
