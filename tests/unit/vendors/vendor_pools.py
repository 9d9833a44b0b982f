"""What the recorded cases know of every vendor: nodes, and containers with what their pods say."""

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.quantity import value
from hami.vendors import engine
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.types import AdmissionRejected, DeviceInfo, VendorProfile

_CASES = Path(__file__).parents[2] / "conformance" / "cases"
CONFIG_TEXT = (_CASES / "device-config-default.json").read_text()
"""The device config that HAMi's chart renders."""


@dataclass(frozen=True)
class RecordedNode:
    """A node as the engine sees it, and its devices of the pool's vendor."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    capacity: Mapping[str, int]
    allocatable: Mapping[str, int]
    devices: tuple[DeviceInfo, ...] = ()


@dataclass
class Pool:
    """Nodes with devices of one vendor, and containers (with their pods' annotations) that ask for some."""

    nodes: list[RecordedNode] = field(default_factory=list)
    asks: list[tuple[dict[str, Any], Mapping[str, str]]] = field(default_factory=list)


def every_profile() -> tuple[VendorProfile, ...]:
    """The profiles of the device config that HAMi's chart renders."""
    return load_profiles(decode_config(json.loads(CONFIG_TEXT)), enable_ascend=True, enable_iluvatar=True)


def pools(profiles: Sequence[VendorProfile]) -> dict[str, Pool]:
    """By common word, of the recorded filter cases that start from the unchanged config."""
    found = {profile.common_word: Pool() for profile in profiles}
    for case in json.loads(gzip.decompress((_CASES / "filter.json.gz").read_bytes())):
        if (case.get("config") or {}).get("set"):
            continue
        pod = case["input"]["pod"]
        for profile in profiles:
            pool = found[profile.common_word]
            if len(pool.nodes) < 60:
                pool.nodes += [node for plain in case["input"]["nodes"] if (node := _node(profile, plain))]
            if len(pool.asks) < 60:
                pool.asks += _asks(profile, pod)
    return found


def _node(profile: VendorProfile, plain: Mapping[str, Any]) -> RecordedNode | None:
    meta, status = plain["metadata"], plain.get("status") or {}
    facts = RecordedNode(
        meta["name"],
        meta.get("labels") or {},
        meta.get("annotations") or {},
        {name: value(text) for name, text in (status.get("capacity") or {}).items()},
        {name: value(text) for name, text in (status.get("allocatable") or {}).items()},
    )
    try:
        devices = tuple(engine.node_devices(profile, facts))
    except (DevicesAbsent, DevicesMalformed):
        return None
    return replace(facts, devices=devices)


def _asks(profile: VendorProfile, pod: Mapping[str, Any]) -> list[tuple[dict[str, Any], Mapping[str, str]]]:
    annotations = (pod["metadata"].get("annotations")) or {}
    asks = []
    for container in engine.containers_of(pod):
        try:
            if engine.container_request(profile, container, pod) is not None:
                asks.append((container, annotations))
        except AdmissionRejected:
            continue
    return asks
