"""AWS Neuron: whole devices, or single cores of one device (vendors/awsneuron.md).

Cores are bit masks everywhere: bit b of a device's cores, used cores and recorded cores is its core b. How
many cores a device has depends on the node, so a request stays "n devices" or "n cores" until it meets one.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

import numpy as np

from hami.protocol import keys
from hami.protocol.allocation import ContainerDevice
from hami.protocol.errors import DevicesAbsent, DevicesMalformed
from hami.protocol.inventory import MAX_DEVICES, Inventory
from hami.protocol.timestamps import nanoseconds
from hami.vendors.columns import BoolArray, CardColumns, IntArray, VectorCheck, VectorNeeds
from hami.vendors.neuron_cores import NeuronAlgebra, lowest_free
from hami.vendors.reasons import CORDONED, ID_MISMATCH, INSUFFICIENT_CORES, NUMA_NOT_FIT, QUOTA_NOT_FIT
from hami.vendors.request import containers_of, integer, resource_of
from hami.vendors.schema import DeviceConfig
from hami.vendors.selection import select
from hami.vendors.types import (
    INT32_MAX,
    AdmissionRejected,
    AnnotateContext,
    Card,
    ContainerRequest,
    DeviceInfo,
    FitContext,
    Hooks,
    InventoryView,
    Need,
    NodeRefuses,
    NodeView,
    PodInfo,
    RawRequest,
    Refused,
    Register,
    ResourceNames,
    Rules,
    Usage,
    VendorProfile,
)
from hami.vendors.vector import allowed_codes, checks_for

DEVICES: Final = "devices"
CORES: Final = "cores"
WHOLE_ONLY: Final = "whole-device"
"""Mode of the devices of a node that reports no cores."""

NODE_TYPE: Final = "AWSNodeType"
IDS: Final = "AWS_NEURON_IDS"
ALLOC_TIME: Final = "NEURON_ALLOC_TIME"
ALLOCATED: Final = "NEURON_ALLOCATED"
RESOURCE_TYPE: Final = "NEURON_RESOURCE_TYPE"
PREDICATE_NODE: Final = "aws.amazon.com/predicate-node"
USUAL_CORES: Final = 2
"""Cores of a device as long as no node is known."""

MAX_CORES_ASKED: Final = 2**32 - 2
_MAX_CORES: Final = 31  # a mask is an int32
_ALIGNED: Final = (4, 8, 16)
_KEYS: Final = keys.VENDOR_KEYS["AWSNeuron"]
_CHECKS: Final = frozenset({"health", "cordon", "type", "id", "slots", "mutex", "quota", "cores"})


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profile of section `awsneuron`."""
    config = device_config.awsneuron
    names = ResourceNames(config.resource_count_name, cores=config.resource_core_name)
    rules = Rules(
        Register("capacity", labels=keys.INSTANCE_TYPE_LABEL),
        allocated=_KEYS.allocated,
        health="always",
        lock="none",
        use_uuid=("aws.amazon.com/use-neuron-uuid",),
        no_use_uuid=("aws.amazon.com/nouse-neuron-uuid",),
        real_count=False,  # kubelet counts devices, slots are cores
        checks=_CHECKS,
        shows_memory=False,
    )
    hooks = Hooks(
        admit=admit,
        check=check,
        parse=parse,
        discover=discover,
        needs=needs,
        choose=choose,
        record=record,
        charge=charge,
        extra_annotations=partial(neuron_keys, names),
        quota_use=quota_use,
        shown_cores=shown_cores,
        in_words=in_words,
        admission_use=admission_use,
    )
    profile = VendorProfile(
        _KEYS.common_word,
        names,
        rules,
        (*checks_for(_CHECKS - {"cores"}), VectorCheck(INSUFFICIENT_CORES, enough_free_cores)),
        vector_needs,
        vector_exact,
        NeuronAlgebra(),
        resolve=resolve,
        hooks=hooks,
    )
    return (profile,)


# --- admission and requests -----------------------------------------------------------------------------


def admit(
    container: dict[str, Any], _pod: dict[str, Any], p: VendorProfile, inventory: InventoryView
) -> bool:
    """Nothing is changed; cores that no registered device can be split into are denied."""
    kind = _kind(container, p)
    if kind is None:
        return False
    number = None if kind == DEVICES else integer(resource_of(container, p.names.cores))
    if number is None or not 0 < number <= MAX_CORES_ASKED:
        return True  # parse says what is wrong
    sizes = _geometries(inventory)
    if not any(_splits(number, size) for size in sizes):
        raise AdmissionRejected(f"{p.names.cores} must be 1 or a multiple of {max(sizes)}, got {number}")
    if not any(_splits(number, size) and number // size <= INT32_MAX for size in sizes):
        raise AdmissionRejected(
            f"{p.names.cores} needs {number // max(sizes)} devices, which exceeds the maximum of {INT32_MAX}"
        )
    return True


def check(
    container: Mapping[str, Any], _request: ContainerRequest | None, pod: Mapping[str, Any], p: VendorProfile
) -> None:
    """One list of ids is written for the pod: of devices, or of cores."""
    kind = _kind(container, p)
    if kind is not None and any(_kind(other, p) not in (None, kind) for other in containers_of(pod)):
        raise AdmissionRejected(f"cannot mix {p.names.count} and {p.names.cores} in one pod")


def _kind(container: Mapping[str, Any], p: VendorProfile) -> Literal["devices", "cores"] | None:
    """What the container asks for; the number of cores beside a number of devices is ignored."""
    if resource_of(container, p.names.count) is not None:
        return DEVICES
    return CORES if resource_of(container, p.names.cores) is not None else None


def _geometries(inventory: InventoryView) -> list[int]:
    """Cores per device of everything registered."""
    kinds = inventory.kinds(_KEYS.common_word)
    return [info.devcore.bit_count() for info in kinds if info.mode != WHOLE_ONLY] or [USUAL_CORES]


def _splits(number: int, size: int) -> bool:
    return number <= size or number % size == 0


def parse(raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile) -> ContainerRequest | None:
    """`detail` is the number of cores asked; `nums` and `cores` are for devices of the usual size until the
    request meets a node.
    """
    names = p.names
    if raw.count is not None:
        number = _number(names.count, raw.count, INT32_MAX)
        return ContainerRequest(number, p.common_word, 0, 0, 0, DEVICES)
    if raw.cores is None:
        return None
    number = _number(names.cores, raw.cores, MAX_CORES_ASKED)
    nums, cores = (number // USUAL_CORES, USUAL_CORES) if number % USUAL_CORES == 0 else (1, number)
    return ContainerRequest(nums, p.common_word, 0, 0, cores, CORES, detail=number)


def _number(name: str, text: str, top: int) -> int:
    number = integer(text)
    if number is None:
        raise AdmissionRejected(f"{name} must be an integer")
    if number <= 0:
        raise AdmissionRejected(f"{name} must be greater than 0")
    if number > top:
        raise AdmissionRejected(f"{name} must not exceed {top}")
    return number


def resolve(request: ContainerRequest, _node: NodeView, devices: Sequence[DeviceInfo]) -> ContainerRequest:
    """Devices and cores per device on a node whose devices have `size` cores. Raises `NodeRefuses`."""
    size = devices[0].devcore.bit_count() if devices else USUAL_CORES
    if request.mode == DEVICES:
        return _sized(request, request.nums, size)
    if request.mode != CORES:
        return request
    number = _cores_asked(request)
    if not _splits(number, size) or (devices and devices[0].mode == WHOLE_ONLY):
        raise NodeRefuses(INSUFFICIENT_CORES, len(devices))
    return _sized(request, 1, number) if number <= size else _sized(request, number // size, size)


def _sized(request: ContainerRequest, nums: int, cores: int) -> ContainerRequest:
    return ContainerRequest(nums, request.type, 0, 0, cores, request.mode, request.slots, request.detail)


def _cores_asked(request: ContainerRequest) -> int:
    return request.detail if isinstance(request.detail, int) else request.nums * request.cores


# --- node data ------------------------------------------------------------------------------------------


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """As many devices as the node has capacity of, with its cores split evenly between them."""
    number, cores = node.capacity.get(p.names.count, 0), node.capacity.get(p.names.cores, 0)
    if number <= 0:
        raise DevicesAbsent(f"node {node.name} has no capacity of {p.names.count}")
    size = cores // number
    if number > MAX_DEVICES or size > _MAX_CORES:
        raise DevicesMalformed(f"node {node.name}: {number} devices with {cores} cores together")
    custom = {NODE_TYPE: node.labels.get(keys.INSTANCE_TYPE_LABEL, "")}
    devices = tuple(
        DeviceInfo(
            id=f"{node.name}-{p.common_word}-{index}",
            index=index,
            count=max(size, 1),
            devcore=(1 << max(size, 1)) - 1,
            type=p.common_word,
            health=True,
            mode="" if size else WHOLE_ONLY,
            vendor=p.common_word,
            custom=custom,
        )
        for index in range(number)
    )
    return Inventory(devices)


# --- fit ------------------------------------------------------------------------------------------------


def needs(ctx: FitContext, card: Card) -> Need:
    """Numbers of cores: asked, of the device, and in use."""
    total = card.info.devcore
    return Need(0, ctx.request.cores, total.bit_count(), (total & card.used.cores).bit_count())


def choose(ctx: FitContext, eligible: Sequence[Card], reasons: Mapping[str, int]) -> Sequence[int] | Refused:
    """One device: the fullest that still has room, then the highest index, which keeps the low aligned blocks
    free. Several: the first free block of neighbours that the instance type allows.
    """
    nums = ctx.request.nums
    if nums == 1:
        return sorted(range(len(eligible)), key=lambda at: (_free(eligible[at]), -eligible[at].info.index))
    unused = {card.info.index: at for at, card in enumerate(eligible) if card.used.slots <= 0}
    for start in _starts(ctx, nums):
        block = range(start, start + nums)
        if all(index in unused for index in block):
            return [unused[index] for index in block]
    total = len(ctx.candidates)
    cordoned = {CORDONED: reasons[CORDONED]} if CORDONED in reasons else {}
    for code in (QUOTA_NOT_FIT, ID_MISMATCH):
        if code in reasons:
            return Refused({**cordoned, code: reasons[code]}, total)
    return Refused({**cordoned, NUMA_NOT_FIT: 1}, total)


def _free(card: Card) -> int:
    return (card.info.devcore & ~card.used.cores).bit_count()


def _starts(ctx: FitContext, nums: int) -> Iterable[int]:
    """First indices of the blocks of `nums` devices: anywhere on Inf, aligned elsewhere."""
    end = max(card.info.index for card in ctx.candidates) + 1
    node_type = str(ctx.candidates[0].info.custom.get(NODE_TYPE, ""))
    if "inf" in node_type or "Inf" in node_type:
        return range(end - nums + 1)
    return range(0, end - nums + 1, nums) if nums in _ALIGNED else ()


def record(ctx: FitContext, card: Card, need: Need, _taken: Sequence[ContainerDevice]) -> ContainerDevice:
    """The lowest free cores of the device."""
    info = card.info
    mask = lowest_free(info.devcore, card.used.cores, need.cores)
    return ContainerDevice(info.id, ctx.request.type, 0, mask, info.index, info.custom)


def charge(ctx: FitContext, card: Card, need: Need) -> ContainerDevice:
    """What a quota counts for the device: the cores it would give."""
    return record(ctx, card, need, ())


def quota_use(used: Usage, _total_cores: int) -> tuple[int, int]:
    """Quotas count cores."""
    return used.mem, used.cores.bit_count()


def shown_cores(info: DeviceInfo, used: Usage) -> tuple[int, int]:
    """Numbers of cores instead of masks."""
    return used.cores.bit_count(), info.devcore.bit_count()


def in_words(request: ContainerRequest) -> str:
    """Devices, or cores of them."""
    if request.mode == CORES:
        return f"{_cores_asked(request)} cores of {request.type}"
    return f"{request.nums} x {request.type}"


def admission_use(request: ContainerRequest, inventory: InventoryView) -> tuple[int, int]:
    """Cores asked, or those of the smallest devices there are."""
    if request.mode == CORES:
        return 0, _cores_asked(request)
    return 0, request.nums * min(_geometries(inventory))


# --- vector side ----------------------------------------------------------------------------------------


def vector_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """Cores asked per device, by the size of each; for a number of cores a device counts as its size."""
    allowed = allowed_codes(select(p.rules, pod.annotations), columns)
    cards, cores, capacity, inexact = request.nums, np.full(len(columns.node), request.cores), None, None
    size: IntArray = np.bitwise_count(columns.cores).astype(np.int64)
    if request.mode == DEVICES:
        cores = size
    elif request.mode == CORES:
        number = cards = _cores_asked(request)
        inexact = np.array([mode == WHOLE_ONLY for mode in columns.tables.modes], dtype=np.bool_)[
            columns.mode
        ]
        splits = (number <= size) | (number % np.maximum(size, 1) == 0)
        cores = np.where(splits & ~inexact, np.minimum(size, number), size + 1)
        capacity = size
    return VectorNeeds(
        cards,
        request.slots,
        0,
        cores,
        allowed,
        mutex="mutex" in policy,
        capacity=capacity,
        inexact=inexact,
    )


def enough_free_cores(columns: CardColumns, needed: VectorNeeds) -> BoolArray:
    """Whether a device has the cores left."""
    free = np.bitwise_count(columns.cores & ~columns.usedcores)
    result: BoolArray = np.greater_equal(free, needed.cores)
    return result


def vector_exact(
    _p: VendorProfile, request: ContainerRequest, _pod: PodInfo, _policy: frozenset[str]
) -> bool:
    """One device, or one core: the rest depends on blocks, or on the size of the node's devices."""
    return request.nums == 1 and (request.mode == DEVICES or _cores_asked(request) == 1)


# --- annotations ----------------------------------------------------------------------------------------


def neuron_keys(names: ResourceNames, ctx: AnnotateContext) -> dict[str, str]:
    """What AWS's plugin reads: the devices or cores of the pod, containers in order."""
    capacity = ctx.node.capacity
    size = capacity.get(names.cores, 0) // max(capacity.get(names.count, 0), 1)
    ids: list[int] = []
    of_cores = False
    for position, slot in enumerate(ctx.allocation):
        request = ctx.requests[position] if position < len(ctx.requests) else None
        if slot and request is not None and request.mode == CORES:
            of_cores = True
            ids += [size * one.index + core for one in slot for core in _set_bits(one.usedcores)]
        else:
            ids += [one.index for one in slot]
    written = {
        IDS: ",".join(map(str, ids)),
        ALLOC_TIME: nanoseconds(ctx.now),
        ALLOCATED: "false",
        PREDICATE_NODE: ctx.node.name,
    }
    return {**written, RESOURCE_TYPE: names.cores} if of_cores else written


def _set_bits(mask: int) -> Iterable[int]:
    return (core for core in range(mask.bit_length()) if mask >> core & 1)
