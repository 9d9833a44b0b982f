"""Which cases our code can be asked: vendors and policies that exist, read from the code itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hami.protocol import keys
from hami.scheduler.edge.webhook import CARD_POLICIES, NODE_POLICIES
from hami.vendors.config import built_words

from .cases import Case

_NO_VENDOR = frozenset({"codec", "inventory", "multi"})
_HAMI_POLICIES = frozenset({"binpack", "spread", "mutex", "topology-aware", "numa"})


def missing(case: Case) -> str:
    """Why a case cannot be asked yet, or ``""``."""
    words = built_words()
    known = {word.lower() for word in words}
    vendor = case.vendor
    if vendor not in _NO_VENDOR and vendor.lower() not in known:
        return f"vendor {vendor} is not built"
    if case.group == "codec":
        return _missing_of_codec(case, known)
    if case.group == "allocate":
        return ""  # our plugin is NVIDIA's; keys of other vendors are only scenery
    for name in _resource_names(case.input):
        owner = _owner(case.device_config, name)
        if owner and not owner & words:
            return f"resource {name} of vendor {'/'.join(sorted(owner))} is not built"
    for key in _annotation_keys(case.input):
        owner_word = _ALLOCATION_KEYS.get(key)
        if owner_word is not None and owner_word not in words:
            return f"vendor {owner_word} is not built"
    unknown = sorted((_policies(case) & _HAMI_POLICIES) - {*CARD_POLICIES, *NODE_POLICIES})
    return f"policy {unknown[0]} is not built" if unknown else ""


def _policies(case: Case) -> set[str]:
    """Policy words that the config or the pod names."""
    annotations = (case.input.get("pod") or {}).get("metadata", {}).get("annotations") or {}
    texts = [
        case.config.get("node_scheduler_policy", ""),
        case.config.get("gpu_scheduler_policy", ""),
        annotations.get(keys.NODE_POLICY, ""),
        annotations.get(keys.CARD_POLICY, ""),
    ]
    return {word.strip() for text in texts for word in text.split(",")}


def _missing_of_codec(case: Case, known: set[str]) -> str:
    operation = case.input["op"]
    asked: set[str] = set()
    if operation == "node-devices":
        asked = {case.input["vendor"]}
    elif operation == "collapse":
        asked = {
            _ALLOCATION_KEYS[key] for key in _annotation_keys(case.input["pod"]) if key in _ALLOCATION_KEYS
        }
    absent = sorted(word for word in asked if word.lower() not in known)
    return f"vendor {', '.join(absent)} is not built" if absent else ""


_ALLOCATION_KEYS: Mapping[str, str] = {
    key: vendor.common_word
    for vendor in keys.VENDOR_KEYS.values()
    for key in (vendor.allocated, vendor.to_allocate)
    if key
}


def _resource_names(value: Any) -> Iterator[str]:
    """Names in every ``limits`` and ``requests`` map below ``value``."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in ("limits", "requests") and isinstance(item, dict):
                yield from item
            else:
                yield from _resource_names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _resource_names(item)


def _annotation_keys(value: Any) -> Iterator[str]:
    """Keys of every ``annotations`` map below ``value``."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "annotations" and isinstance(item, dict):
                yield from item
            else:
                yield from _annotation_keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _annotation_keys(item)


_SECTION_WORDS: Mapping[str, frozenset[str]] = {
    "nvidia": frozenset({"NVIDIA"}),
    "cambricon": frozenset({"MLU"}),
    "hygon": frozenset({"DCU"}),
    "metax": frozenset({"Metax-GPU", "Metax-SGPU"}),
    "enflame": frozenset({"GCU", "Enflame"}),
    "mthreads": frozenset({"Mthreads"}),
    "kunlun": frozenset({"kunlun", "XPU"}),
    "awsneuron": frozenset({"AWSNeuron"}),
    "amd": frozenset({"AMD"}),
    "vastai": frozenset({"Vastai"}),
    "biren": frozenset({"Biren"}),
}


def _owner(config: Mapping[str, Any], resource: str) -> frozenset[str]:
    """Common words of the config section that names ``resource``; empty when none does."""
    for section, content in config.items():
        entries = content if isinstance(content, list) else [content]
        if section == "vnpus" and isinstance(content, dict):
            entries = list(content.get("configs") or ())
        for entry in entries:
            if isinstance(entry, dict) and resource in entry.values():
                return _SECTION_WORDS.get(section) or frozenset({str(entry.get("commonWord", section))})
    return frozenset()
