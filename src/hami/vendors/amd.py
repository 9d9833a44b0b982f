"""AMD Instinct: shares in percent of a card, recorded in compute units (vendors/amd.md)."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from hami.protocol import keys
from hami.vendors.columns import CardColumns, IntArray, VectorNeeds
from hami.vendors.request import WHOLE_CARD, count_of, integer, limit_of, memory_of, set_limit
from hami.vendors.schema import DeviceConfig
from hami.vendors.selection import select
from hami.vendors.types import (
    ALL_CHECKS,
    AdmissionRejected,
    Card,
    ContainerRequest,
    FitContext,
    Hooks,
    InventoryView,
    Need,
    PodInfo,
    RawRequest,
    Register,
    ResourceNames,
    Rules,
    Usage,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import allowed_codes, always_exact, checks_for

_KEYS: Final = keys.VENDOR_KEYS["AMD"]
_CHECKS: Final = ALL_CHECKS - {"exclusive", "exhausted"}


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `amd`."""
    config = device_config.amd
    rules = Rules(
        Register("json", _KEYS.register),
        to_allocate=_KEYS.to_allocate,
        allocated=_KEYS.allocated,
        health="capacity",
        use_uuid=("amd.com/use-gpu-uuid",),
        no_use_uuid=("amd.com/nouse-gpu-uuid",),
        use_type="amd.com/use-gputype",
        no_use_type="amd.com/nouse-gputype",
        lookup="limits_only",
        default_cores=WHOLE_CARD,
        checks=_CHECKS,
        alloc_type="device",
        containers="one",
        allow_unsupported=config.allow_unsupported,
    )
    profile = VendorProfile(
        _KEYS.common_word,
        ResourceNames(config.resource_count_name, config.resource_memory_name, config.resource_core_name),
        rules,
        checks_for(_CHECKS),
        vector_needs,
        always_exact,
        STANDARD,
        hooks=Hooks(
            admit=admit,
            parse=parse,
            needs=needs,
            choose=alike_first,
            choose_when=several_whole_cards,
            quota_use=quota_use,
            in_words=in_words,
        ),
    )
    return (profile,)


# --- admission and requests -----------------------------------------------------------------------------


def admit(
    container: dict[str, Any], _pod: dict[str, Any], p: VendorProfile, _inventory: InventoryView
) -> bool:
    """Limits of memory or cores alone mean one card."""
    names = p.names
    if limit_of(container, names.count) is None:
        if limit_of(container, names.memory) is None and limit_of(container, names.cores) is None:
            return False
        set_limit(container, names.count, 1)
    return True


def parse(raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile) -> ContainerRequest | None:
    """Count, MiB per card (0: the whole card), percent of its compute units."""
    names, who = p.names, raw.container
    if raw.count is None:
        return None
    nums = count_of(names.count, raw.count, who)
    memory = 0 if raw.memory is None else memory_of(names.memory, raw.memory, names.memory_factor, who)
    cores = p.rules.default_cores
    if raw.cores is not None:
        percent = integer(raw.cores)
        if percent is None or not 1 <= percent <= WHOLE_CARD:
            raise AdmissionRejected(f"{names.cores} must be an integer percentage between 1 and 100")
        cores = percent
    return ContainerRequest(nums, p.common_word, memory, 0, cores)


def in_words(request: ContainerRequest) -> str:
    """Cores are asked in percent, and counted in compute units."""
    memory = f"{request.memreq} MiB" if request.memreq else "all memory"
    return f"{request.nums} x {request.type}, each {memory}, {request.cores} % of the compute units"


# --- fit ------------------------------------------------------------------------------------------------


def needs(ctx: FitContext, card: Card) -> Need:
    """MiB and compute units of one card; a card without units serves nobody."""
    request, info = ctx.request, card.info
    mem = request.memreq if request.memreq > 0 else info.devmem
    if request.cores > 0:
        units = min(max(info.devcore * request.cores // 100, 1), max(info.devcore, 1))
    else:
        units = info.devcore if mem >= info.devmem else 0
    return Need(mem, units, info.devcore, card.used.cores)


def vector_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """`needs` on columns."""
    total = columns.cores
    mem: int | IntArray = request.memreq if request.memreq > 0 else columns.mem
    units: IntArray
    if request.cores > 0:
        units = np.minimum(np.maximum(total * request.cores // 100, 1), np.maximum(total, 1))
    else:
        units = np.where(mem >= columns.mem, total, 0)
    return VectorNeeds(
        cards=request.nums,
        slots=request.slots,
        mem=mem,
        cores=units,
        allowed=allowed_codes(select(p.rules, pod.annotations), columns),
        mutex="mutex" in policy,
    )


def several_whole_cards(ctx: FitContext) -> bool:
    """Whether the sizes of the cards decide how much of each a container gets."""
    return ctx.request.nums > 1 and ctx.request.memreq <= 0


def alike_first(ctx: FitContext, eligible: Sequence[Card], _reasons: Mapping[str, int]) -> Sequence[int]:
    """Cards of one size where there are enough: the plugin writes one memory limit for all of a container."""
    sizes: dict[int, list[int]] = {}
    for position, card in enumerate(eligible):
        sizes.setdefault(card.info.devmem, []).append(position)
    enough = (group for group in sizes.values() if len(group) >= ctx.request.nums)
    return next(enough, list(range(len(eligible))))


def quota_use(used: Usage, total_cores: int) -> tuple[int, int]:
    """Quotas count percent, rounded up per card; units of a card nobody knows count as a whole card."""
    if total_cores <= 0:
        return used.mem, WHOLE_CARD if used.cores else 0
    return used.mem, -(-100 * used.cores // total_cores)
