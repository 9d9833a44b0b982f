"""`bench/filter.py --vendor`: what a decision costs with the cards of every vendor.

Nodes and containers are those of the recorded cases (tests/conformance/cases): of each vendor the node with
most cards and the containers that fit on it, alone on as many equal nodes as asked. Warm: the same request
again and again, each placement changes one node. Cold: every pod differs, so nothing is remembered.
"""

import gc
import gzip
import itertools
import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hami.protocol import views
from hami.protocol.errors import HamiError
from hami.scheduler.core.answers import Placement
from hami.scheduler.core.nodes import NodeFacts, facts_of
from hami.scheduler.core.state import ClusterState, Mask
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.engine import containers_of, node_devices
from hami.vendors.types import DeviceInfo, VendorProfile

_CASES = Path(__file__).resolve().parents[2] / "tests" / "conformance" / "cases"
_NOW = 1_787_400_000.0
_ASKS = 3  # containers per vendor
_COLD = 20
_LOOKED_AT = 6


def measure_vendors(words: str, nodes: int, count: int) -> dict[str, float]:
    """Milliseconds per vendor, and the two figures over all of them. `words`: `all` or a comma list."""
    document = json.loads((_CASES / "device-config-default.json").read_text())
    profiles = load_profiles(decode_config(document), enable_ascend=True, enable_iluvatar=True)
    wanted = {profile.common_word for profile in profiles} if words == "all" else set(words.split(","))
    cases = json.loads(gzip.decompress((_CASES / "filter.json.gz").read_bytes()))
    cases = [case for case in cases if not (case.get("config") or {}).get("set")]
    figures: dict[str, float] = {}
    for profile in profiles:
        word = profile.common_word
        if word in wanted or word == "NVIDIA":
            measured = _measure(profile, cases, nodes, count)
            if measured is None:  # a further chip of a vendor, of which nothing is recorded
                print(f"{word}: no recorded node and container that fit together, left out")
                continue
            figures[f"warm_p99_ms_{word}"], figures[f"cold_max_ms_{word}"] = measured
    slowest = max(figure for name, figure in figures.items() if name.startswith("warm_"))
    figures["vendor_warm_ratio_max"] = round(slowest / figures["warm_p99_ms_NVIDIA"], 2)
    figures["vendor_cold_ms_max"] = max(value for name, value in figures.items() if name.startswith("cold_"))
    return figures


def _measure(profile: VendorProfile, cases: list[Any], nodes: int, count: int) -> tuple[float, float] | None:
    node = _largest_node(profile, cases)
    if node is None:
        return None
    facts, devices = node
    warm: list[float] = []
    cold: list[float] = []
    for container, annotations in itertools.islice(_asks(profile, cases, facts, devices), _ASKS):
        state, mask = _cluster(profile, facts, devices, nodes)
        numbers = itertools.count()
        for _ in range(_COLD):
            pod = _pod(container, {**annotations, "bench/pod": str(next(numbers))}, next(numbers))
            cold.append(_place(state, mask, pod))
        took = [_place(state, mask, _pod(container, annotations, next(numbers))) for _ in range(count)]
        warm += took[1:]
        gc.unfreeze()
    if not warm:
        return None
    warm.sort()
    return round(warm[int(0.99 * (len(warm) - 1))], 3), round(max(cold), 3)


def _largest_node(
    profile: VendorProfile, cases: list[Any]
) -> tuple[NodeFacts, tuple[DeviceInfo, ...]] | None:
    best: tuple[NodeFacts, tuple[DeviceInfo, ...]] | None = None
    for plain in itertools.chain.from_iterable(case["input"]["nodes"] for case in cases):
        facts = facts_of(msgspec.convert(plain, views.Node), frozenset(profile.names.all()))
        try:
            devices = tuple(node_devices(profile, facts))
        except HamiError:
            continue
        if best is None or len(devices) > len(best[1]):
            best = facts, devices
    return best


def _asks(
    profile: VendorProfile, cases: list[Any], facts: NodeFacts, devices: tuple[DeviceInfo, ...]
) -> Iterable[tuple[dict[str, Any], Mapping[str, str]]]:
    """Containers that fit on an empty node."""
    state, mask = _cluster(profile, facts, devices, 1)
    found: dict[str, tuple[dict[str, Any], Mapping[str, str]]] = {}
    names = set(profile.names.all())
    for case in cases:
        pod = case["input"]["pod"]
        if len(found) >= _LOOKED_AT:
            break
        annotations = pod["metadata"].get("annotations") or {}
        for container in containers_of(pod):
            if names.isdisjoint((container.get("resources") or {}).get("limits") or {}):
                continue
            key = json.dumps([container.get("resources"), annotations], sort_keys=True)
            if key not in found and _fits(state, mask, _pod(container, annotations, 0)):
                found[key] = container, annotations
    plain: dict[str, Any] = {"name": "main", "resources": {"limits": {profile.names.count: "1"}}}
    if not found and _fits(state, mask, _pod(plain, {}, 0)):
        found[""] = plain, {}
    return [found[key] for key in sorted(found, reverse=True)]


def _fits(state: ClusterState, mask: Mask, pod: dict[str, Any]) -> bool:
    try:
        request = state.parse(pod)
        if request is None or request.invalid:
            return False
        fits = isinstance(state.place(request, mask, _NOW), Placement)
    except HamiError:
        return False
    state.release(pod["metadata"]["uid"])
    return fits


def _cluster(
    profile: VendorProfile, facts: NodeFacts, devices: tuple[DeviceInfo, ...], nodes: int
) -> tuple[ClusterState, Mask]:
    """Equal nodes; put into the table as they are, whatever the recorded handshakes say."""
    state = ClusterState((profile,))
    names = [f"node-{number:05d}" for number in range(nodes)]
    for name in names:
        one = NodeFacts(name, facts.labels, facts.annotations, facts.capacity, facts.allocatable)
        state._world.set_node(one, {profile.common_word: devices})
    gc.collect()
    gc.freeze()
    return state, state.candidates(names)


def _pod(container: dict[str, Any], annotations: Mapping[str, str], number: int) -> dict[str, Any]:
    name = f"pod-{number}"
    return {
        "metadata": {"name": name, "namespace": "default", "uid": name, "annotations": dict(annotations)},
        "spec": {"containers": [container]},
    }


def _place(state: ClusterState, mask: Mask, pod: dict[str, Any]) -> float:
    """Milliseconds."""
    request = state.parse(pod)
    assert request is not None
    started = time.perf_counter()
    answer = state.place(request, mask, _NOW)
    spent = (time.perf_counter() - started) * 1e3
    assert isinstance(answer, Placement), answer
    return spent
