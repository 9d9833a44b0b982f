"""Group ``codec``: texts in annotations, inventories, effective use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from hami.protocol import inventory, keys
from hami.protocol.allocation import (
    ContainerDevice,
    Slot,
    decode_allocation,
    decode_container,
    encode_allocation,
)
from hami.protocol.errors import DevicesMalformed, HamiError, TimestampError
from hami.protocol.lock import parse_lock
from hami.protocol.mig import decode_mig_reservations
from hami.protocol.pair_scores import decode_pair_scores
from hami.protocol.timestamps import parse_rfc3339
from hami.scheduler.core.nodes import facts_of
from hami.scheduler.core.policies import parse_weights
from hami.vendors import engine
from hami.vendors.types import Usage, VendorProfile

from .cases import Case
from .compare import difference
from .setup import device_of, device_record, node_view, profile_of, profiles


def run(case: Case) -> Any:
    """Our answer; a typed error becomes the member ``error``."""
    try:
        return {"error": None, **_OPERATIONS[case.input["op"]](case)}
    except HamiError as error:
        return {"error": str(error)}


def compare(expected: Any, got: Any, case: Case) -> str:
    """Error texts are ours; the fact of an error is binding."""
    if "text" in expected and "error" not in expected:
        expected = {"error": None, **expected}
    if (expected.get("error") is None) != (got["error"] is None):
        return f"error is {got['error']!r}, expected {expected.get('error')!r}"
    if got["error"] is not None:
        return ""
    return difference(_plain(expected), _plain(got))


def _plain(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Without spellings that mean the same: time zones, null scores, empty slots at the end."""
    plain = dict(answer)
    if "time" in plain:
        plain["time"] = _moment(plain["time"])
    if "scores" in plain:
        plain["scores"] = {row["uuid"]: row["score"] or {} for row in plain["scores"] or ()}
    if isinstance(plain.get("devices"), dict):
        plain["devices"] = {word: _without_tail(slots) for word, slots in plain["devices"].items()}
    return plain


def _moment(text: str) -> Any:
    try:
        return parse_rfc3339(text)
    except TimestampError:
        return text


def _without_tail(slots: Sequence[Any]) -> list[Any]:
    kept = list(slots)
    while kept and not kept[-1]:
        kept.pop()
    return kept


# --- node registrations -------------------------------------------------------------------------------------


def _node_decode(read: Callable[[str], inventory.Inventory], case: Case) -> dict[str, Any]:
    """HAMi's decoder refuses a text with one bad piece, ours drops the piece and says so (row 47)."""
    found = read(case.input["text"])
    if found.warnings:
        raise DevicesMalformed("; ".join(found.warnings))
    return {"devices": [device_record(device) for device in found.devices]}


def _csv_decode(case: Case) -> dict[str, Any]:
    """A piece without an index has none in the record (0); ours then counts positions (decisions, row 47)."""
    answer = _node_decode(inventory.read_csv, case)
    pieces = [piece for piece in case.input["text"].split(":") if piece]
    for piece, device in zip(pieces, answer["devices"], strict=True):
        if piece.count(",") == 6:
            device["index"] = 0
    return answer


def _json_decode(case: Case) -> dict[str, Any]:
    return _node_decode(inventory.read_json, case)


def _json_encode(case: Case) -> dict[str, Any]:
    return {"text": inventory.encode_json(device_of(device) for device in case.input["devices"])}


def _csv_encode(case: Case) -> dict[str, Any]:
    return {"text": inventory.encode_csv(device_of(device) for device in case.input["devices"])}


def _node_devices(case: Case) -> dict[str, Any]:
    profile = profile_of(case, case.input["vendor"])
    facts = facts_of(node_view(case.input["node"]), frozenset(profile.names.all()))
    return {"devices": [device_record(device) for device in engine.node_devices(profile, facts)]}


def _pair_scores(case: Case) -> dict[str, Any]:
    scores = decode_pair_scores(case.input["text"])
    return {"scores": [{"uuid": uuid, "score": row} for uuid, row in scores.items()]}


# --- allocations --------------------------------------------------------------------------------------------


def _container_decode(case: Case) -> dict[str, Any]:
    return {"devices": _slot_record(decode_container(case.input["text"]))}


def _pod_decode(case: Case) -> dict[str, Any]:
    annotations = case.input["annotations"]
    found = {
        word: [_slot_record(slot) for slot in decode_allocation(annotations[vendor.allocated])]
        for word, vendor in _all_vendor_keys(case).items()
        if vendor.allocated in annotations
    }
    return {"devices": found}


def _pod_encode(case: Case) -> dict[str, Any]:
    slots = [
        [ContainerDevice(each["uuid"], each["type"], each["mem"], each["cores"]) for each in slot]
        for slot in case.input["slots"]
    ]
    return {"text": encode_allocation(slots)}


def _slot_record(slot: Slot) -> list[dict[str, Any]]:
    return [
        {"uuid": each.uuid, "type": each.type, "mem": each.usedmem, "cores": each.usedcores} for each in slot
    ]


def _all_vendor_keys(case: Case) -> dict[str, keys.VendorKeys]:
    config = case.device_config
    ascend = [chip["commonWord"] for chip in (config.get("vnpus") or {}).get("configs") or ()]
    iluvatar = [chip["commonWord"] for chip in config.get("iluvatars") or ()]
    return {
        **keys.VENDOR_KEYS,
        **{word: keys.ascend_keys(word) for word in ascend},
        **{word: keys.iluvatar_keys(word) for word in iluvatar},
    }


def _collapse(case: Case) -> dict[str, Any]:
    pod = case.input["pod"]
    info = engine.pod_info(pod)
    answer: dict[str, dict[str, Any]] = {"app_only": {}, "effective": {}}
    for profile in profiles(case):
        if profile.rules.allocated not in info.annotations:
            continue
        allocation = engine.read_allocation(profile, info)
        for member, finished in (("effective", False), ("app_only", True)):
            used = engine.effective(profile, engine.shape_of(pod), allocation, finished)
            answer[member][profile.common_word] = [_usage_record(profile, used)]
    return answer


def _usage_record(profile: VendorProfile, used: Mapping[str, Usage]) -> list[dict[str, Any]]:
    return [
        {
            "uuid": uuid,
            "type": profile.common_word,
            "mem": usage.mem,
            "cores": usage.cores,
            "slots": usage.slots,
        }
        for uuid, usage in sorted(used.items())
    ]


# --- the rest -----------------------------------------------------------------------------------------------


def _mig(case: Case) -> dict[str, Any]:
    return {"allocations": msgspec.to_builtins(decode_mig_reservations(case.input["text"]))}


def _lock(case: Case) -> dict[str, Any]:
    text = case.input["text"]
    value = parse_lock(text)
    owner = value.owner
    return {
        "namespace": owner.namespace if owner else "",
        "name": owner.name if owner else "",
        "time": text.split(",")[0],
    }


def _weights(case: Case) -> dict[str, Any]:
    weights = parse_weights({keys.SCORING_WEIGHTS: case.input["text"]})
    return {"slot": weights.slot, "core": weights.core, "memory": weights.memory}


_OPERATIONS: Mapping[str, Callable[[Case], dict[str, Any]]] = {
    "node-decode-csv": _csv_decode,
    "node-decode-json": _json_decode,
    "node-encode-csv": _csv_encode,
    "node-encode-json": _json_encode,
    "node-devices": _node_devices,
    "pair-scores-decode": _pair_scores,
    "container-decode": _container_decode,
    "pod-decode": _pod_decode,
    "pod-encode": _pod_encode,
    "mig-decode": _mig,
    "lock-parse": _lock,
    "weights": _weights,
    "collapse": _collapse,
}
