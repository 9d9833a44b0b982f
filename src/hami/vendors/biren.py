"""Biren: whole cards, or whole parts of cards that the administrator split (SVI; vendors/biren.md).

The plugin counts parts under resource names of their own. Exactly one of all the names is served by a node;
where it is one of a part, it stands as the mode of the node's cards.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from hami.protocol import keys
from hami.protocol.inventory import Inventory
from hami.vendors.columns import CardColumns, VectorNeeds
from hami.vendors.discovery import registered
from hami.vendors.reasons import TYPE_MISMATCH
from hami.vendors.request import integer, invalid, limit_of
from hami.vendors.schema import DeviceConfig
from hami.vendors.types import (
    INT32_MAX,
    AdmissionRejected,
    Card,
    ContainerRequest,
    FitContext,
    Hooks,
    InventoryView,
    NodeView,
    PodInfo,
    RawRequest,
    ResourceNames,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import always_exact, checks_for, standard_needs
from hami.vendors.whole_devices import CHECKS, rules_of

_KEYS: Final = keys.VENDOR_KEYS["Biren"]


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `biren`."""
    config = device_config.biren
    svi = tuple(name for name in config.svi_names if name and name != config.resource_count_name)
    hooks = Hooks(admit=admit, parse=parse, discover=discover, card_rule=partial(served_rule, frozenset(svi)))
    profile = VendorProfile(
        _KEYS.common_word,
        ResourceNames(config.resource_count_name, also_counted=svi),
        rules_of(_KEYS, "birentech.com"),
        checks_for(CHECKS),
        vector_needs,
        always_exact,
        STANDARD,
        hooks=hooks,
    )
    return (profile,)


def admit(
    container: dict[str, Any], _pod: dict[str, Any], p: VendorProfile, _inventory: InventoryView
) -> bool:
    """Claims a container that limits any of the names."""
    return any(limit_of(container, name) is not None for name in (p.names.count, *p.names.also_counted))


def parse(raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile) -> ContainerRequest | None:
    """A number of whole devices, under one name; 0 asks for nothing."""
    asked = dict(raw.extra)
    if raw.count is not None:
        asked = {p.names.count: raw.count, **asked}
    if len(asked) > 1:
        raise AdmissionRejected(
            f"container {raw.container} asks for {' and '.join(sorted(asked))}: a node serves one of them"
        )
    for name, text in asked.items():
        number = integer(text)
        if number is None or not 0 <= number <= INT32_MAX:
            raise invalid(name, text, raw.container, f"must be an integer between 0 and {INT32_MAX}")
        if number:
            mode = "" if name == p.names.count else name
            return ContainerRequest(number, p.common_word, 0, 100, 0, mode)
    return None


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """The registered devices, with the name under which the node serves them as mode if they are parts."""
    inventory = registered(p, node)
    served = p.names.served(node.allocatable)
    warnings = inventory.warnings
    if len(served) > 1:
        text = f"{' and '.join(served)} are both allocatable, but their plugins overwrite one annotation"
        warnings = (*warnings, text)
    if not served or served[0] == p.names.count:
        return Inventory(inventory.devices, warnings)
    devices = tuple(msgspec.structs.replace(one, mode=served[0]) for one in inventory.devices)
    return Inventory(devices, warnings)


def served_rule(svi: frozenset[str], ctx: FitContext, card: Card) -> str | None:
    """The node must serve its devices under the name that was asked for."""
    return None if _part(svi, card.info.mode) == ctx.request.mode else TYPE_MISMATCH


def vector_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """Standard needs, and `served_rule` on the column of modes."""
    needs = standard_needs(p, request, pod, policy, columns)
    svi = frozenset(p.names.also_counted)
    served = [_part(svi, mode) == request.mode for mode in columns.tables.modes]
    return replace(needs, allowed={**needs.allowed, "mode": np.array(served, dtype=np.bool_)})


def _part(svi: frozenset[str], mode: str) -> str:
    return mode if mode in svi else ""
