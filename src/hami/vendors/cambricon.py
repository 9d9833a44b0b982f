"""Cambricon MLU: shares of one card, on nodes whose capacity says what they have (vendors/cambricon.md)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from hami.protocol import keys
from hami.protocol.inventory import Inventory
from hami.vendors.discovery import registered
from hami.vendors.reasons import TYPE_MISMATCH
from hami.vendors.request import WHOLE_CARD, count_of, limit_of, resource_of, set_limit
from hami.vendors.schema import CambriconConfig, DeviceConfig
from hami.vendors.selection import select
from hami.vendors.types import (
    AdmissionRejected,
    AnnotateContext,
    CapacityCards,
    Card,
    ContainerRequest,
    FitContext,
    Hooks,
    InventoryView,
    NodeView,
    PodInfo,
    Register,
    ResourceNames,
    Rules,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, standard_needs

MEMORY_UNIT: Final = 256
"""MiB per unit of memory, unless the config says otherwise."""

PROFILE: Final = "CAMBRICON_DSMLU_PROFILE"
ASSIGNED: Final = ("CAMBRICON_DSMLU_ASSIGNED", "CAMBRICON_DSMLU_ASSIGHED")
"""HAMi 2.10 writes the first, the published plugin looks for the second."""

USE_TYPE: Final = "cambricon.com/use-mlutype"
NO_USE_TYPE: Final = "cambricon.com/nouse-mlutype"
_LABELS: Final = "cambricon.com/"
_MODEL: Final = re.compile(r"mlu\d+", re.IGNORECASE)
_KEYS: Final = keys.VENDOR_KEYS["MLU"]


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `cambricon`."""
    config = device_config.cambricon
    names = ResourceNames.of(config, MEMORY_UNIT)
    cards = CapacityCards("cambricon-mlu", slots=100, cores=100, cores_per_card=100, part_is_a_card=False)
    rules = Rules(
        Register("capacity", cards=cards, labels=_LABELS),
        to_allocate=_KEYS.to_allocate,
        allocated=_KEYS.allocated,
        health="always",
        lock="dsmlu",
        use_uuid=("cambricon.com/use-gpuuuid",),
        no_use_uuid=("cambricon.com/nouse-gpuuuid",),
        default_cores=WHOLE_CARD,
        real_count=False,
        containers="one_regular",
        allow_unsupported=config.allow_unsupported,
    )
    models = replace(rules, use_type=USE_TYPE, no_use_type=NO_USE_TYPE)
    profile = VendorProfile(
        _KEYS.common_word,
        names,
        rules,
        STANDARD_CHECKS,
        standard_needs,
        vector_exact,
        STANDARD,
        hooks=Hooks(
            admit=partial(admit, config),
            discover=discover,
            card_rule=partial(model_rule, models),
            extra_annotations=partial(profile_keys, names.memory_factor),
            advise=advise,
        ),
    )
    return (profile,)


# --- admission ------------------------------------------------------------------------------------------


def admit(
    config: CambriconConfig,
    container: dict[str, Any],
    _pod: dict[str, Any],
    p: VendorProfile,
    _inventory: InventoryView,
) -> bool:
    """The plugin serves one share of one card, and only if memory and cores are both named: adds what is
    missing, denies the rest.
    """
    names = p.names
    count = limit_of(container, names.count)
    if count is None:
        return False
    if config.allow_unsupported or not (names.memory and names.cores):
        return True
    who = str(container.get("name", ""))
    nums = count_of(names.count, count, who)
    memory, cores = resource_of(container, names.memory), resource_of(container, names.cores)
    units = config.whole_card_memory_units
    if memory is None and cores is None:
        if nums > 1 or not units:
            return True
        set_limit(container, names.memory, units)
        set_limit(container, names.cores, WHOLE_CARD)
        return True
    if nums > 1:
        raise AdmissionRejected(
            f"container {who} asks for {nums} {names.count} with {names.memory} or {names.cores}: the device "
            f"plugin gives shares of one card only, write {names.count}: 1"
        )
    if cores is None:
        set_limit(container, names.cores, WHOLE_CARD)
    if memory is None:
        if not units:
            raise AdmissionRejected(
                f"container {who} names {names.cores} without {names.memory}: the device plugin needs both, "
                f"set {names.memory} (units of {names.memory_factor} MiB)"
            )
        set_limit(container, names.memory, units)
    return True


def advise(container: Mapping[str, Any], _request: ContainerRequest, p: VendorProfile) -> Sequence[str]:
    """Whole cards without memory and cores: the node never hears of them."""
    names = p.names
    if not (names.memory and names.cores) or p.rules.allow_unsupported:
        return ()
    if resource_of(container, names.memory) is not None or resource_of(container, names.cores) is not None:
        return ()
    text = (
        f"container {container.get('name')}: {names.count} alone is counted by the scheduler, but the device "
        f"plugin mounts a card only for {names.memory} and {names.cores}"
    )
    return (text,)


# --- node data and fit ----------------------------------------------------------------------------------


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """Cards of the capacity; their type is the model where the core resource or a node label names it."""
    inventory = registered(p, node)
    model = _model_of(p, node)
    if not model:
        return inventory
    devices = tuple(msgspec.structs.replace(one, type=model) for one in inventory.devices)
    return Inventory(devices, inventory.warnings)


def _model_of(p: VendorProfile, node: NodeView) -> str:
    found = _MODEL.search(p.names.cores)
    if found is not None:
        return found[0].upper()
    for key, text in sorted(node.labels.items()):
        if key.startswith(_LABELS) and (found := _MODEL.match(text)) is not None:
            return found[0].upper()
    return ""


def model_rule(models: Rules, ctx: FitContext, card: Card) -> str | None:
    """The type annotations, for cards whose model is known."""
    if card.info.type == _KEYS.common_word:
        return None
    allowed = select(models, ctx.pod.annotations).allows_model(card.info.type, "")
    return None if allowed else TYPE_MISMATCH


def vector_exact(
    _p: VendorProfile, _request: ContainerRequest, pod: PodInfo, _policy: frozenset[str]
) -> bool:
    """Everywhere but for `model_rule`."""
    return USE_TYPE not in pod.annotations and NO_USE_TYPE not in pod.annotations


# --- annotations ----------------------------------------------------------------------------------------


def profile_keys(memory_factor: int, ctx: AnnotateContext) -> dict[str, str]:
    """What the plugin serves: `<index>_<cores>_<memory units>` of the pod's first device."""
    first = next(device for slot in ctx.allocation for device in slot)
    written = dict.fromkeys(ASSIGNED, "false")
    written[PROFILE] = f"{first.index}_{first.usedcores}_{first.usedmem // memory_factor}"
    return written
