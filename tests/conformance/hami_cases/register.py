"""Group ``register``: what successive looks at node objects leave in the books and write to the nodes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from hami.protocol import keys
from hami.scheduler.core.answers import NodeOutcome
from hami.scheduler.core.state import ClusterState

from .cases import NOW, Case
from .compare import difference
from .setup import device_record, node_view, profiles

_PASS_SECONDS = 15.0
_KEEP = "@keep@"


class Register:
    """Group ``register``."""

    def run(self, case: Case) -> Any:
        """Per pass: cards by node and vendor, and the patches of nodes."""
        state = ClusterState(profiles(case))
        stored: dict[str, dict[str, str]] = {}
        passes = []
        for number, nodes in enumerate(case.input["passes"]):
            now = NOW + number * _PASS_SECONDS
            present = {node["metadata"]["name"] for node in nodes}
            for name in sorted(stored.keys() - present):
                state.delete_node(name)
                del stored[name]
            patches = []
            for plain in nodes:
                node = _with_kept(plain, stored)
                name = node["metadata"]["name"]
                stored[name] = dict(node["metadata"].get("annotations") or {})
                patches += _perform(state.upsert_node(node_view(node), now), stored)
            patches += _perform(state.tick(now), stored)
            passes.append({"cached": _cached(state), "node_patches": patches})
        return {"passes": passes}

    def compare(self, expected: Any, got: Any, case: Case) -> str:
        """As recorded, without the handshakes that HAMi writes for vendors a node does not have (row 15)."""
        wanted = []
        for recorded, nodes in zip(expected["passes"], case.input["passes"], strict=True):
            kept = [patch for patch in recorded["node_patches"] if _is_due(patch, nodes)]
            wanted.append({"cached": recorded["cached"], "node_patches": kept})
        return difference({"passes": wanted}, got)


def _with_kept(plain: Mapping[str, Any], stored: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The node, ``@keep@`` replaced by the annotations of that prefix as the last pass left them."""
    node: dict[str, Any] = copy.deepcopy(dict(plain))
    annotations = node["metadata"].get("annotations") or {}
    prefix = annotations.pop(_KEEP, None)
    if prefix is not None:
        before = stored.get(node["metadata"]["name"], {})
        annotations.update({key: text for key, text in before.items() if key.startswith(prefix)})
    return node


def _perform(outcome: NodeOutcome, stored: Mapping[str, dict[str, str]]) -> list[dict[str, Any]]:
    patches = []
    for name, changes in outcome.patches:
        for key, text in changes.items():
            if text is None:
                stored[name].pop(key, None)
            else:
                stored[name][key] = text
        patches.append({"node": name, "patch": {"metadata": {"annotations": dict(changes)}}})
    return patches


def _cached(state: ClusterState) -> dict[str, Any]:
    cached: dict[str, Any] = {}
    for node in state.usage():
        by_vendor = cached.setdefault(node.name, {})
        for card in node.cards:
            by_vendor.setdefault(card.vendor, []).append(device_record(card.info))
    return cached


def _is_due(patch: Mapping[str, Any], nodes: list[dict[str, Any]]) -> bool:
    annotations = next(
        (
            node["metadata"].get("annotations") or {}
            for node in nodes
            if node["metadata"]["name"] == patch["node"]
        ),
        {},
    )
    registers = {
        vendor.handshake: vendor.register for vendor in keys.VENDOR_KEYS.values() if vendor.handshake
    }
    changed = patch["patch"]["metadata"]["annotations"]
    return any(key not in registers and not _of_a_chip(key) for key in changed) or any(
        _register_of(key, registers) in annotations for key in changed
    )


def _of_a_chip(key: str) -> bool:
    return key.startswith("hami.io/node-handshake-")


def _register_of(handshake: str, registers: Mapping[str, str]) -> str:
    """The register annotation that a handshake belongs to; the keys of a chip carry its word."""
    if handshake in registers:
        return registers[handshake]
    word = handshake.removeprefix("hami.io/node-handshake-")
    ascend = keys.ascend_keys(word).register
    return ascend if word.startswith("Ascend") else keys.iluvatar_keys(word).register
