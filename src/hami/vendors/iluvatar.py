"""Iluvatar CoreX: one vendor per configured chip (vendors/iluvatar.md)."""

from typing import Any, Final

from hami.protocol import keys
from hami.protocol.timestamps import nanoseconds
from hami.vendors.request import (
    WHOLE_CARD,
    align_request,
    any_value,
    append_env,
    count_of,
    limit_of,
    set_limit,
)
from hami.vendors.schema import DeviceConfig, IluvatarConfig
from hami.vendors.types import (
    AnnotateContext,
    CapacityCards,
    Hooks,
    InventoryView,
    Register,
    ResourceNames,
    Rules,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, always_exact, standard_needs

MEMORY_UNIT: Final = 256
"""MiB per vMem."""


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """One profile per item of section `iluvatars`."""
    return tuple(_build_chip(chip) for chip in device_config.iluvatars)


def _build_chip(config: IluvatarConfig) -> VendorProfile:
    word = config.common_word
    chip = keys.iluvatar_keys(word)
    names = ResourceNames.of(config, MEMORY_UNIT)
    rules = Rules(
        _register(config, chip.register),
        to_allocate=chip.to_allocate,
        allocated=chip.allocated,
        handshake=chip.handshake,
        use_uuid=(f"hami.io/use-{word}-uuid",),
        no_use_uuid=(f"hami.io/no-use-{word}-uuid",),
        default_cores=config.default_cores,
        slices_one_card=True,
        allow_unsupported=config.allow_unsupported,
    )
    hooks = Hooks(admit=admit, extra_annotations=None if config.discovery == "annotation" else legacy_keys)
    return VendorProfile(
        word, names, rules, STANDARD_CHECKS, standard_needs, always_exact, STANDARD, hooks=hooks
    )


def _register(config: IluvatarConfig, key: str) -> Register:
    """Some releases of the plugin write no annotation; the node's vCore and vMem then say what there is."""
    if config.discovery == "annotation":
        return Register("csv", key)
    cards = CapacityCards("iluvatar", slots=100, cores=100, cores_per_card=100, part_is_a_card=False)
    return (
        Register("capacity", cards=cards) if config.discovery == "capacity" else Register("csv", key, cards)
    )


def admit(
    container: dict[str, Any], _pod: dict[str, Any], p: VendorProfile, _inventory: InventoryView
) -> bool:
    """Whole cards where several are asked, and the name that the vendor's runtime reads."""
    names = p.names
    count = limit_of(container, names.count)
    if count is None:
        return False
    name = str(container.get("name") or "")
    nums = count_of(names.count, count, name)
    if nums > 1 and names.cores:
        set_limit(container, names.cores, nums * WHOLE_CARD)
        align_request(container, names.cores, nums * WHOLE_CARD)
    if name:
        append_env(container, keys.ENV_ILUVATAR_CONTAINER_NAME, name, wins=any_value)
    return True


def legacy_keys(ctx: AnnotateContext) -> dict[str, str]:
    """What plugins that write no register annotation look for (of earlier HAMi releases, experimental)."""
    devices = [device for slot in ctx.allocation for device in slot]
    register = keys.iluvatar_keys(devices[0].type).register
    if register in ctx.node.annotations:
        return {}
    written = {
        keys.ILUVATAR_ASSIGNED: "false",
        keys.ILUVATAR_PREDICATE_TIME: nanoseconds(ctx.now),
    }
    for position, slot in enumerate(ctx.allocation):
        if slot:
            indices = ",".join(str(device.index) for device in slot)
            written[f"{keys.ILUVATAR_INDEX_PREFIX}{position}"] = indices
    return written
