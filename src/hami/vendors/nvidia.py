"""NVIDIA cards: time-shared by libvgpu, or in MIG slices (nvidia-scheduling.md)."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from hami.protocol import keys, quantity
from hami.protocol.errors import DevicesAbsent, PairScoreError, QuantityError
from hami.protocol.inventory import decode_csv, decode_json
from hami.protocol.pair_scores import decode_pair_scores
from hami.vendors import mig, topology
from hami.vendors.columns import CardColumns, VectorNeeds
from hami.vendors.fit import MAX_CORES
from hami.vendors.request import (
    any_value,
    append_env,
    default_runtime_class,
    integer,
    invalid,
    limit_of,
    parse_standard,
    request_of,
    resource_of,
    set_limit,
)
from hami.vendors.schema import DeviceConfig, NvidiaConfig
from hami.vendors.selection import select
from hami.vendors.types import (
    NO_PERCENT,
    AdmissionRejected,
    ContainerRequest,
    DeviceInfo,
    Hooks,
    Inventory,
    InventoryView,
    NodeView,
    PodInfo,
    RawRequest,
    Register,
    ResourceNames,
    Rules,
    VendorProfile,
)
from hami.vendors.vector import STANDARD_CHECKS, standard_needs

PERCENTAGE: Final = "percentage"
PRIORITY: Final = "priority"
_KEYS: Final = keys.VENDOR_KEYS[keys.NVIDIA]


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `nvidia`."""
    config = device_config.nvidia
    extra = {PERCENTAGE: config.resource_percentage_name, PRIORITY: config.resource_priority_name}
    names = ResourceNames.of(config, extra={word: name for word, name in extra.items() if name})
    rules = Rules(
        Register("json", _KEYS.register, watched=(keys.NVIDIA_PAIR_SCORES,)),
        to_allocate=_KEYS.to_allocate,
        allocated=_KEYS.allocated,
        handshake=_KEYS.handshake,
        cleanup=_KEYS.handshake,
        health="allocatable",
        lock="hami",
        use_uuid=(keys.NVIDIA_USE_UUID,),
        no_use_uuid=(keys.NVIDIA_NO_USE_UUID,),
        use_type=keys.NVIDIA_USE_TYPE,
        no_use_type=keys.NVIDIA_NO_USE_TYPE,
        mode=keys.NVIDIA_MODE,
        numa_bind=keys.NVIDIA_NUMA_BIND,
        default_cores=config.default_cores,
    )
    profile = VendorProfile(
        keys.NVIDIA,
        names,
        rules,
        STANDARD_CHECKS,
        vector_needs,
        vector_exact,
        mig.MigAlgebra(),
        hooks=Hooks(
            admit=partial(admit, config),
            advise=advise,
            parse=partial(parse, config),
            discover=discover,
            healthy=mig.understood,
            why_closed=mig.why_closed,
            device_rule=mig.device_rule,
            choose=topology.choose,
            choose_when=topology.wanted,
            record=mig.record,
            repeatable=mig.repeatable,
            extra_annotations=mig.reservation_annotations,
            doubts=mig.doubts,
        ),
        payload=mig.MigSlice,
        restore=mig.restore,
        placed_annotations=(keys.MIG_ALLOCATIONS,),
    )
    return (profile,)


# --- admission and requests -----------------------------------------------------------------------------


def admit(
    config: NvidiaConfig,
    container: dict[str, Any],
    pod: dict[str, Any],
    p: VendorProfile,
    _inventory: InventoryView,
) -> bool:
    """Webhook mutation: defaults of count and cores, environment, runtime class."""
    names = p.names
    percentage_name, priority_name = names.extra.get(PERCENTAGE, ""), names.extra.get(PRIORITY, "")
    percentage = resource_of(container, percentage_name)
    percent = None if percentage is None else integer(percentage)
    if percentage is not None and (percent is None or not 0 <= percent <= 100):
        raise invalid(
            percentage_name, percentage, container.get("name"), "must be an integer between 0 and 100"
        )
    priority = limit_of(container, priority_name)
    if priority is not None:
        append_env(container, keys.ENV_TASK_PRIORITY, _priority(priority_name, priority), wins=any_value)
    whole = percent == 100 if percent is not None else resource_of(container, names.memory) is None
    uses = _default_count(config, container, p, whole=whole)
    uses = _default_exclusive(container, p, whole=whole) or uses
    if uses:
        if config.core_policy not in ("", "default"):
            append_env(container, keys.ENV_CORE_POLICY, config.core_policy, wins=any_value)
        default_runtime_class(pod, config.runtime_class_name)
    elif config.overwrite_env:
        hidden = keys.ENV_VISIBLE_NONE
        append_env(container, keys.ENV_VISIBLE_DEVICES, hidden, wins=lambda last: last.get("value") == hidden)
    return uses


def advise(container: Mapping[str, Any], request: ContainerRequest, p: VendorProfile) -> list[str]:
    """A container that asks for more than a whole card gets a whole card."""
    if request.cores <= MAX_CORES:
        return []
    what = f"{p.names.cores} {request.cores} in container {container.get('name')}"
    return [f"{what} acts as {MAX_CORES}, one whole card; ask for more cards with {p.names.count}"]


def _default_count(config: NvidiaConfig, container: dict[str, Any], p: VendorProfile, *, whole: bool) -> bool:
    names = p.names
    if limit_of(container, names.count) is not None:
        return True
    sizes = [limit_of(container, name) for name in (names.memory, names.extra.get(PERCENTAGE, ""))]
    cores = limit_of(container, names.cores)
    ours = integer(cores) == 100 and sizes == [None, None] and request_of(container, names.cores) is None
    if ours and whole and request_of(container, names.count) is not None:
        return True  # a count among the requests, with our own exclusive default: nothing more to do
    if config.default_count <= 0 or (cores is None and sizes == [None, None]):
        return False
    set_limit(container, names.count, config.default_count)
    return True


def _default_exclusive(container: dict[str, Any], p: VendorProfile, *, whole: bool) -> bool:
    """A container that asks for whole cards and says nothing about cores gets them for itself."""
    names = p.names
    if resource_of(container, names.count) is None or not names.cores:
        return False
    if resource_of(container, names.cores) is not None:
        return False
    if whole:
        set_limit(container, names.cores, 100)
    return whole


def _priority(name: str, text: Any) -> str:
    try:
        return str(quantity.value(text))
    except QuantityError as error:
        raise AdmissionRejected(f"invalid {name} value {str(text)[:40]}: {error}") from error


def parse(
    config: NvidiaConfig, raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile
) -> ContainerRequest | None:
    """Count, MiB per card or percent of it, percent of cores; memory wins where both are given."""
    request = parse_standard(p, raw)
    if request is None:
        return None
    wanted = raw.extra.get(PERCENTAGE)
    number = None if wanted is None else integer(wanted)
    if number is not None and number > 0:
        return replace(request, mem_percent=min(number, 100))
    if request.memreq:
        return replace(request, mem_percent=NO_PERCENT)
    if config.default_memory:
        return replace(request, memreq=config.default_memory, mem_percent=NO_PERCENT)
    return request


# --- node data ------------------------------------------------------------------------------------------


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """Cards of the register annotation (JSON, or the older comma form) with their pair scores."""
    text = node.annotations.get(p.rules.register.key)
    if text is None:
        raise DevicesAbsent(f"node {node.name} has no annotation {p.rules.register.key}")
    read = decode_csv if _is_legacy(text) else decode_json
    inventory = read(text, p.common_word)
    score_text = node.annotations.get(keys.NVIDIA_PAIR_SCORES, "")
    if not score_text:
        return inventory
    try:
        scores = decode_pair_scores(score_text)
    except PairScoreError as error:
        warning = f"{keys.NVIDIA_PAIR_SCORES} is unusable, cards have no scores: {error}"
        return Inventory(inventory.devices, (*inventory.warnings, warning))
    devices = tuple(_with_scores(device, scores.get(device.id)) for device in inventory.devices)
    return Inventory(devices, inventory.warnings)


def _is_legacy(text: str) -> bool:
    """Not JSON of any kind, and with the separators of the older form."""
    head = text.lstrip()[:1]
    return head not in ("[", "{", '"', "") and ":" in text


def _with_scores(device: DeviceInfo, scores: Mapping[str, int] | None) -> DeviceInfo:
    if scores is None:
        return device
    return msgspec.structs.replace(device, custom={**device.custom, topology.SCORES: scores})


# --- vector side ----------------------------------------------------------------------------------------


def vector_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """Standard needs; one MIG card may serve as many devices as it has free slots."""
    needs = standard_needs(p, request, pod, policy, columns)
    is_mig = np.array([mode == mig.MIG_MODE for mode in columns.tables.modes], dtype=np.bool_)
    if not is_mig.any() or not select(p.rules, pod.annotations).allows_mode(mig.MIG_MODE):
        return needs
    cards = is_mig[columns.mode]
    free = np.maximum(columns.slots_left, 0)
    return VectorNeeds(
        needs.cards,
        needs.slots,
        needs.mem,
        needs.cores,
        needs.allowed,
        needs.mutex,
        capacity=np.where(cards, free, 1),
        inexact=cards,
    )


def vector_exact(p: VendorProfile, request: ContainerRequest, pod: PodInfo, _policy: frozenset[str]) -> bool:
    """Everywhere but for several cards of one NUMA node."""
    return request.nums == 1 or not select(p.rules, pod.annotations).numa_bound
