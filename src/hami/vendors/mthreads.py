"""Moore Threads: shares of one card in fixed sizes, or whole cards (vendors/mthreads.md).

A pod has one annotation with the indices of its cards, so all its containers get the same ones.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from hami.protocol import keys
from hami.protocol.allocation import ContainerDevice
from hami.protocol.timestamps import nanoseconds
from hami.vendors.reasons import VENDOR_RULE
from hami.vendors.request import (
    align_request,
    child,
    cores_of,
    count_of,
    integer,
    invalid,
    limit_of,
    memory_of,
    request_of,
    resource_of,
    set_limit,
)
from hami.vendors.schema import DeviceConfig, MthreadsConfig
from hami.vendors.types import (
    AdmissionRejected,
    AnnotateContext,
    CapacityCards,
    Card,
    ContainerRequest,
    FitContext,
    Hooks,
    InventoryView,
    Need,
    RawRequest,
    Register,
    ResourceNames,
    Rules,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, always_exact, standard_needs

MEMORY_UNIT: Final = 512
"""MiB per unit of memory, unless the config says otherwise."""

INDICES: Final = "mthreads.com/gpu-index"
PREDICATE_TIME: Final = "mthreads.com/predicate-time"
PREDICATE_NODE: Final = "mthreads.com/predicate-node"
REQUESTED: Final = "mthreads.com/request-gpu-num"
_KEYS: Final = keys.VENDOR_KEYS["Mthreads"]


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `mthreads`."""
    config = device_config.mthreads
    names = ResourceNames.of(config, MEMORY_UNIT)
    units = max(config.core_units, 1)
    rules = Rules(
        Register("capacity", cards=CapacityCards("mthreads", slots=100, cores=units, cores_per_card=units)),
        allocated=_KEYS.allocated,
        health="always",
        lock="none",
        use_uuid=("mthreads.ai/use-gpuuuid", "mthreads.com/use-gpuuuid"),
        no_use_uuid=("mthreads.ai/nouse-gpuuuid", "mthreads.com/nouse-gpuuuid"),
        real_count=False,
        allow_unsupported=config.allow_unsupported,
    )
    profile = VendorProfile(
        _KEYS.common_word,
        names,
        rules,
        STANDARD_CHECKS,
        standard_needs,
        always_exact,
        STANDARD,
        hooks=Hooks(
            admit=partial(admit, config),
            check=partial(check, config),
            parse=partial(parse, units),
            device_rule=same_card_rule,
            extra_annotations=chosen_cards,
            advise=advise,
        ),
    )
    return (profile,)


# --- admission and requests -----------------------------------------------------------------------------


def admit(
    config: MthreadsConfig,
    container: dict[str, Any],
    pod: dict[str, Any],
    p: VendorProfile,
    _inventory: InventoryView,
) -> bool:
    """Whole cards get the amounts that make kubelet call the plugin; a share must have a legal size."""
    names, who = p.names, str(container.get("name", ""))
    count = resource_of(container, names.count)
    if count is None:
        return False
    number = integer(count)
    if number is not None and number <= 0:
        raise AdmissionRejected(f"{names.count} must be greater than 0")
    nums = count_of(names.count, count, who)
    if nums > 1 or limit_of(container, names.memory) is None:
        for name, units in ((names.cores, config.core_units), (names.memory, config.memory_units)):
            if name:
                set_limit(container, name, units * nums)
                align_request(container, name, units * nums)
        if nums > 1:
            child(child(pod, "metadata"), "annotations")[REQUESTED] = str(nums)
        return True
    align_request(container, names.memory, _slice_of(config, container, p))
    _check_cores(container, p, who, config.core_units)
    return True


def check(
    config: MthreadsConfig,
    container: Mapping[str, Any],
    request: ContainerRequest | None,
    _pod: Mapping[str, Any],
    p: VendorProfile,
) -> None:
    """The size of a share."""
    if request is not None and request.nums == 1 and limit_of(container, p.names.memory) is not None:
        _slice_of(config, container, p)


def _slice_of(config: MthreadsConfig, container: Mapping[str, Any], p: VendorProfile) -> int:
    """Units of memory of a share, or of the whole card. Raises `AdmissionRejected`."""
    units = integer(limit_of(container, p.names.memory))
    if units is None or units not in (*config.legal_slices, config.memory_units):
        legal = list(config.legal_slices)
        raise AdmissionRejected(f"sGPU memory request value is invalid, valid values are {legal}")
    return units


def _check_cores(container: dict[str, Any], p: VendorProfile, who: str, units: int) -> None:
    name = p.names.cores
    text = resource_of(container, name)
    if text is None:
        return
    cores = integer(text)
    if cores is None or not 1 <= cores <= units:
        raise invalid(name, text, who, f"must be an integer between 1 and {units}, {units} is a whole card")
    if limit_of(container, name) is not None and request_of(container, name) is not None:
        align_request(container, name, cores)


def parse(
    units: int, raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile
) -> ContainerRequest | None:
    """Amounts are for all cards of the container together; a card has `units` of cores."""
    names, who = p.names, raw.container
    rule = f"must be an integer of at least 0, {units} for each whole card"
    if raw.count is None:
        return None
    nums = count_of(names.count, raw.count, who)
    memory = 0 if raw.memory is None else memory_of(names.memory, raw.memory, names.memory_factor, who)
    cores = 0 if raw.cores is None else cores_of(names.cores, raw.cores, who, rule)
    for name, text, total in ((names.memory, raw.memory, memory), (names.cores, raw.cores, cores)):
        if total % nums:
            raise invalid(name, text, who, f"must be divisible by the {nums} cards it is for")
    percent = 0 if memory else p.rules.omitted_percent
    return ContainerRequest(nums, p.common_word, memory // nums, percent, cores // nums)


def advise(container: Mapping[str, Any], request: ContainerRequest, p: VendorProfile) -> Sequence[str]:
    """A share without cores reserves none."""
    if request.cores or not request.memreq or not p.names.cores:
        return ()
    text = (
        f"container {container.get('name')}: {p.names.memory} without {p.names.cores} reserves no compute, "
        f"set {p.names.cores}"
    )
    return (text,)


# --- fit and annotations --------------------------------------------------------------------------------


def same_card_rule(ctx: FitContext, card: Card, _need: Need, _taken: Sequence[ContainerDevice]) -> str | None:
    """A pod that holds a card gets no other one."""
    other = any(device.uuid != card.info.id for slot in ctx.allocated for device in slot)
    return VENDOR_RULE if other else None


def chosen_cards(ctx: AnnotateContext) -> dict[str, str]:
    """What the plugin gives to the pod."""
    indices = dict.fromkeys(str(device.index) for slot in ctx.allocation for device in slot)
    return {
        INDICES: ",".join(indices),
        PREDICATE_TIME: nanoseconds(ctx.now),
        PREDICATE_NODE: ctx.node.name,
    }
