"""Vendors that the device config describes by data alone (section `profiles`, docs/adding-a-vendor.md)."""

from typing import Literal, cast

from hami.vendors.schema import DeviceConfig, ProfileConfig
from hami.vendors.types import CapacityCards, Register, ResourceNames, Rules, VendorProfile
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, always_exact, standard_needs


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """One profile per item of section `profiles`."""
    return tuple(_profile(one) for one in device_config.profiles)


def _profile(config: ProfileConfig) -> VendorProfile:
    word = config.common_word
    rules = Rules(
        _register(config),
        to_allocate=config.to_allocate_annotation or f"hami.io/{word}-devices-to-allocate",
        allocated=config.allocated_annotation or f"hami.io/{word}-devices-allocated",
        handshake=config.handshake_annotation or None,
        cleanup=config.handshake_annotation or None,
        health=_health(config),
        lock="hami" if config.node_lock else "none",
        use_uuid=(config.use_uuid_annotation or f"hami.io/use-{word}-uuid",),
        no_use_uuid=(config.no_use_uuid_annotation or f"hami.io/no-use-{word}-uuid",),
        use_type=config.use_type_annotation,
        no_use_type=config.no_use_type_annotation,
        default_cores=config.default_cores,
        real_count=config.counted_by_kubelet,
    )
    names = ResourceNames.of(config)
    return VendorProfile(word, names, rules, STANDARD_CHECKS, standard_needs, always_exact, STANDARD)


def _register(config: ProfileConfig) -> Register:
    if config.register_format == "capacity":
        cards = config.cards
        return Register(
            "capacity", cards=CapacityCards(config.common_word, cards.slots, cards.cores, cards.memory)
        )
    kind = cast(Literal["json", "csv"], config.register_format)
    return Register(kind, config.register_annotation or f"hami.io/node-{config.common_word}-register")


def _health(config: ProfileConfig) -> Literal["handshake", "capacity", "always"]:
    """A plugin without a handshake lives while kubelet has some of its resource to give."""
    if config.handshake_annotation:
        return "handshake"
    return "capacity" if config.counted_by_kubelet else "always"
