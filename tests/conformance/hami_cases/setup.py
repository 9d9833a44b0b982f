"""What the groups share: profiles of a case's config, object views, card records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from hami.protocol.inventory import DeviceInfo
from hami.protocol.views import Node, Pod, ResourceQuota, decode
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.types import VendorProfile

from .cases import Case


def profiles(case: Case) -> tuple[VendorProfile, ...]:
    """The vendor profiles of the case's device config."""
    config = decode_config(case.device_config)
    return load_profiles(config, enable_ascend=True, enable_iluvatar=True)


def profile_of(case: Case, word: str) -> VendorProfile:
    """The profile of one vendor. Raises ``LookupError``."""
    for profile in profiles(case):
        if profile.common_word == word:
            return profile
    raise LookupError(f"no profile for {word}")


def pod_view(pod: Mapping[str, Any]) -> Pod:
    return decode(json.dumps(pod), Pod)


def node_view(node: Mapping[str, Any]) -> Node:
    return decode(json.dumps(node), Node)


def quota_view(quota: Mapping[str, Any]) -> ResourceQuota:
    return decode(json.dumps(quota), ResourceQuota)


def device_of(record: Mapping[str, Any]) -> DeviceInfo:
    """A card from its record."""
    renamed = {"custominfo": "custom", "migProfiles": "mig_profiles"}
    return msgspec.convert({renamed.get(key, key): value for key, value in record.items()}, DeviceInfo)


def device_record(device: DeviceInfo) -> dict[str, Any]:
    """A card as the records write it: optional members only when set."""
    record = {
        name: getattr(device, name)
        for name in ("id", "index", "count", "devmem", "devcore", "type", "numa", "mode", "health")
    }
    if device.vendor:
        record["vendor"] = device.vendor
    custom = dict(device.custom)
    if "pairScores" in custom:
        record["pairScores"] = custom.pop("pairScores")
    if custom:
        record["custominfo"] = custom
    if device.mig_profiles:
        record["migProfiles"] = msgspec.to_builtins(device.mig_profiles)
    return record
