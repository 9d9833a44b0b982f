"""Enflame: DRS slices of one card (`Enflame`), and whole cards (`GCU`) (vendors/enflame.md).

A slice is one of the sizes that the node's plugin registers. A request for slices, memory or cores becomes
the smallest size that serves it only on a node; until then memory of a request is slices (mode direct) or
what the user wrote, GB or MiB (mode by spec, memory percent -1), as HAMi has it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from hami.protocol import keys, quantity
from hami.protocol.errors import DevicesMalformed, QuantityError
from hami.protocol.timestamps import nanoseconds
from hami.vendors.columns import CardColumns, VectorNeeds
from hami.vendors.discovery import check_number, read_each, register_text, registered
from hami.vendors.enflame_profiles import (
    BY_SPEC,
    DIRECT,
    DrsSlice,
    Size,
    SlicesAlgebra,
    choose,
    max_slices,
    more_slices,
    share,
    size_of,
    sizes_of,
)
from hami.vendors.request import child, count_of, integer, invalid, resource_of
from hami.vendors.schema import DeviceConfig
from hami.vendors.types import (
    INT32_MAX,
    MODE_NOT_FIT,
    OUT_OF_SLOTS,
    VENDOR_RULE,
    AdmissionRejected,
    Allocation,
    AnnotateContext,
    CapacityCards,
    Card,
    ContainerDevice,
    ContainerRequest,
    DeviceInfo,
    FitContext,
    Hooks,
    Inventory,
    InventoryView,
    Need,
    NodeRefuses,
    NodeView,
    PodInfo,
    RawRequest,
    Register,
    ResourceNames,
    Rules,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import always_exact, checks_for, never_exact, standard_needs, unused_card_needs

DRS: Final = "Enflame"
WHOLE: Final = "GCU"
CONTAINERS: Final = "assigned-containers"
REQUEST_SIZE: Final = "enflame.com/gcu-request-size"
_MEMORY: Final = "enflame.com/gcu-memory"
_CORES: Final = "enflame.com/gcu-core"
_ASSIGNED: Final = "enflame.com/gcu-assigned"
_DRS_CHECKS: Final = frozenset(
    {"health", "cordon", "type", "id", "slots", "mutex", "quota", "memory", "cores"}
)
_WHOLE_CHECKS: Final = frozenset({"health", "cordon", "type"})
_MAX_TEXT: Final = 256 * 1024  # characters of a registration or of `assigned-containers` that are read
_UNITS: Final = 100  # memory and cores of a whole card, not MiB


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profiles of section `enflame`: whole cards, then slices."""
    config = device_config.enflame
    names = ResourceNames(
        config.drs_name, config.resource_memory_name or _MEMORY, config.resource_core_name or _CORES
    )
    return _cards(config.resource_gcu_name, names.count), _slices(names)


def _slices(names: ResourceNames) -> VendorProfile:
    own = keys.VENDOR_KEYS[DRS]
    rules = Rules(
        Register("vendor", own.register),
        allocated=own.allocated,
        health="always",
        lock="none",
        use_uuid=("enflame.com/use-gpuuuid",),
        no_use_uuid=("enflame.com/nouse-gpuuuid",),
        real_count=False,  # the node counts slices; a request is one device of several
        checks=_DRS_CHECKS,
    )
    return VendorProfile(
        DRS,
        names,
        rules,
        checks_for(_DRS_CHECKS),
        vector_needs,
        never_exact,
        SlicesAlgebra(),
        resolve=resolve,
        hooks=Hooks(
            admit=admit,
            check=check,
            parse=parse,
            discover=discover,
            card_rule=card_rule,
            device_rule=guessed_slices,
            record=record,
            extra_annotations=slice_keys,
            admission_use=admission_use,
            advise=advise,
            in_words=in_words,
        ),
        payload=DrsSlice,
        restore=restore,
        placed_annotations=(CONTAINERS, REQUEST_SIZE),
    )


def _cards(name: str, drs_name: str) -> VendorProfile:
    own = keys.VENDOR_KEYS[WHOLE]
    rules = Rules(
        Register("capacity", cards=CapacityCards(WHOLE, slots=1, cores=_UNITS, mem=_UNITS)),
        to_allocate=own.to_allocate,
        allocated=own.allocated,
        health="capacity",
        lock="none",
        real_count=False,  # one task a card: kubelet's count says nothing more
        checks=_WHOLE_CHECKS,
        unused_only=True,
        shows_memory=False,
    )
    return VendorProfile(
        WHOLE,
        ResourceNames(name),
        rules,
        checks_for(_WHOLE_CHECKS | {"mutex"}),
        unused_card_needs,
        always_exact,
        STANDARD,
        hooks=Hooks(parse=parse_whole, discover=partial(discover_whole, drs_name)),
    )


# --- slices: admission and requests ---------------------------------------------------------------------


def admit(
    container: dict[str, Any], _pod: dict[str, Any], p: VendorProfile, _inventory: InventoryView
) -> bool:
    """A container uses the vendor if it names slices, memory or cores; what one of limits and requests
    lacks is copied from the other.
    """
    names = p.names
    by_count = resource_of(container, names.count) is not None
    asked = (names.count,) if by_count else (names.memory, names.cores)
    for name in asked:
        _copy(container, name)
    return any(resource_of(container, name) is not None for name in asked)


def check(
    container: Mapping[str, Any],
    _request: ContainerRequest | None,
    _pod: Mapping[str, Any],
    p: VendorProfile,
) -> None:
    """Deny also what `parse` takes for no request: such a pod would run without being counted."""
    names, who = p.names, str(container.get("name", ""))
    count = resource_of(container, names.count)
    if count is not None:
        if _value(count) <= 0:
            raise AdmissionRejected(f"{names.count} must be greater than 0")
        count_of(names.count, count, who)
        return
    memory, cores = resource_of(container, names.memory), resource_of(container, names.cores)
    if memory is not None and _value(memory) <= 0:
        raise AdmissionRejected(f"{names.memory} must be greater than 0")
    if memory is not None and _value(memory) > INT32_MAX:
        raise invalid(names.memory, memory, who, f"the unit is MiB, at most {INT32_MAX}")
    if cores is not None and not 0 < _value(cores) <= 100:
        raise AdmissionRejected(f"{names.cores} must be in range (0,100]")


def _value(text: Any) -> int:
    """The amount of a quantity, rounded up; 0 for what is none."""
    try:
        return quantity.value(text)
    except QuantityError:
        return 0


def _copy(container: dict[str, Any], name: str) -> None:
    amount = resource_of(container, name)
    if amount is None:
        return
    resources = child(container, "resources")
    for side in ("limits", "requests"):
        if child(resources, side).get(name) is None:
            child(resources, side)[name] = amount


def parse(raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile) -> ContainerRequest | None:
    """Slices, else memory and cores; amounts beyond an int32 are no request."""
    if raw.count is not None:
        slices = integer(raw.count)
        if slices is None or not 0 < slices <= INT32_MAX:
            return None
        return ContainerRequest(1, p.common_word, slices, 0, 0, DIRECT)
    memory = 0 if raw.memory is None else _value(raw.memory)
    cores = 0 if raw.cores is None else _value(raw.cores)
    if not (0 <= memory <= INT32_MAX and 0 <= cores <= INT32_MAX) or not (memory or cores):
        return None
    return ContainerRequest(1, p.common_word, memory, -1, cores, BY_SPEC)


def in_words(request: ContainerRequest) -> str:
    """What is asked before a node says what that is."""
    if request.mode == DIRECT:
        return f"1 x {DRS} of {request.memreq} slices"
    memory = [f"{request.memreq} of memory (MiB, GB where small)"] if request.memreq else []
    cores = [f"{request.cores} % of the cores"] if request.cores else []
    return f"1 x {DRS} of at least {' and '.join((*memory, *cores))}"


def advise(_container: Mapping[str, Any], request: ContainerRequest, p: VendorProfile) -> Sequence[str]:
    """Small amounts of memory are read as GB."""
    if request.mode == DIRECT or not 0 < request.memreq < 1024:
        return ()
    text = (
        f"{p.names.memory}: {request.memreq} is read as GB on cards whose largest size has at least half of "
        "that, as MiB on others: write MiB"
    )
    return (text,)


def admission_use(request: ContainerRequest, inventory: InventoryView) -> tuple[int, int]:
    """MiB and cores of the smallest size of any registered card that serves the request; the least they can
    be as long as no card is known.
    """
    cards = [info.custom for info in inventory.kinds(DRS)]
    uses = []
    for card in cards:
        sizes = sizes_of([card])
        whole = max_slices([card], sizes)
        found = choose(request, sizes, whole)
        if found is not None:
            uses.append((found.gb * 1024, share(found.slices, whole)))
    if uses:
        return min(uses)
    return (0, 0) if request.mode == DIRECT else (request.memreq, request.cores)


# --- slices: nodes --------------------------------------------------------------------------------------


class _Device(msgspec.Struct):
    index: Any = ""
    minor: Any = ""
    capacity: Any = None


class _Registration(msgspec.Struct):
    devices: list[msgspec.Raw] = []
    profiles: dict[str, Any] = {}


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """Cards of the plugin's annotation; one that says no number of slices is left out with a warning."""
    text = register_text(p, node, _MAX_TEXT)
    try:
        found = msgspec.json.decode(text, type=_Registration)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DevicesMalformed(f"node {node.name}: {error}") from None
    check_number(node, found.devices, "device")
    profiles = {name: _word(number) for name, number in found.profiles.items()}
    sizes = [size_of(name) for name in profiles]
    whole = max((size.slices for size in sizes), default=0)
    if whole <= 0:
        raise DevicesMalformed(f"node {node.name}: no valid drs profiles")
    memory = (max(size.gb for size in sizes) or whole) * 1024
    if memory > INT32_MAX:
        raise DevicesMalformed(f"node {node.name}: cards of {memory} MiB")

    def read(entry: msgspec.Raw, position: int) -> DeviceInfo:
        one = msgspec.json.decode(entry, type=_Device)
        index = _index(one.index, position)
        shown = _word(one.index) or str(index)
        minor = _word(one.minor).strip() or shown
        return DeviceInfo(
            f"{node.name}-enflame-drs-{index}",
            index,
            _capacity(one.capacity),
            memory,
            100,
            p.common_word,
            health=True,
            vendor=p.common_word,
            custom={"minor": minor, "index": shown, "profiles": profiles, "maxSlice": whole},
        )

    return read_each(node, found.devices, read, "device")


def _word(value: Any) -> str:
    """Text, or the text of a whole number; "" for anything else."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else ""


def _capacity(value: Any) -> int:
    """Slices of a card: a number, or the text of one. Raises `ValueError` for anything else."""
    slices = 0
    if isinstance(value, str):
        slices = min(integer(value.strip()) or 0, INT32_MAX)
    elif isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= INT32_MAX:
        slices = int(value)
    if slices <= 0:
        raise ValueError(f"capacity {str(value)[:40]!r}")
    return slices


def _index(value: Any, position: int) -> int:
    number = integer(_word(value).strip())
    return number if number is not None and 0 <= number <= INT32_MAX else position


def resolve(request: ContainerRequest, _node: NodeView, devices: Sequence[DeviceInfo]) -> ContainerRequest:
    """The request in the size that the node's cards serve it with."""
    cards = [info.custom for info in devices]
    sizes = sizes_of(cards)
    whole = max_slices(cards, sizes)
    found = choose(request, sizes, whole)
    if found is None:
        raise NodeRefuses(MODE_NOT_FIT, 1)
    return replace(
        request,
        memreq=found.gb * 1024,
        mem_percent=0,
        cores=share(found.slices, whole),
        slots=found.slices,
        detail=found,
    )


# --- slices: fit ----------------------------------------------------------------------------------------


def card_rule(ctx: FitContext, card: Card) -> str | None:
    """All containers of a pod share one card; a card must have the size."""
    held = next((device for slot in ctx.allocated for device in slot), None)
    if held is not None and held.uuid != card.info.id:
        return VENDOR_RULE
    size = ctx.request.detail
    known = isinstance(size, Size) and size.name in card.info.custom.get("profiles", ())
    return None if known else MODE_NOT_FIT


def guessed_slices(ctx: FitContext, card: Card, _need: Need, _taken: Sequence[ContainerDevice]) -> str | None:
    """Slices of placed pods that lost the annotation which counts them."""
    used = card.used
    left = card.info.count - used.slots - more_slices(card.info.custom, used)
    return OUT_OF_SLOTS if left < ctx.request.slots else None


def record(ctx: FitContext, card: Card, need: Need, _taken: Sequence[ContainerDevice]) -> ContainerDevice:
    """Memory and cores of the size; the size itself as payload."""
    info, size = card.info, ctx.request.detail
    assert isinstance(size, Size)
    custom = info.custom
    held = DrsSlice(size.name, custom["profiles"][size.name], size.slices, custom["minor"], custom["index"])
    return ContainerDevice(info.id, ctx.request.type, need.mem, need.cores, info.index, custom, held)


def vector_needs(
    p: VendorProfile, request: ContainerRequest, pod: PodInfo, policy: frozenset[str], columns: CardColumns
) -> VectorNeeds:
    """Free slices, where the request names them: sizes depend on the node."""
    least = replace(request, memreq=1, mem_percent=0, cores=0)
    if request.mode == DIRECT:
        least = replace(least, slots=request.memreq)
    return standard_needs(p, least, pod, policy, columns)


# --- slices: annotations --------------------------------------------------------------------------------


def slice_keys(ctx: AnnotateContext) -> dict[str, str]:
    """What the plugin reads; card and size of the first container that has a slice."""
    containers: dict[str, Any] = {}
    first: DrsSlice | None = None
    for position, slot in enumerate(ctx.allocation):
        for device in slot:
            held = device.payload
            assert isinstance(held, DrsSlice)
            first = first or held
            names = ctx.pod.shape.names
            name = names[position] if position < len(names) and names[position] else f"container-{position}"
            entry = {"allocated": False, "request": held.slices}
            shown = {"profileID": held.id, "profileName": held.name}
            containers[name] = {**entry, **{key: text for key, text in shown.items() if text}}
    assert first is not None
    index = str(next(device.index for slot in ctx.allocation for device in slot))
    return {
        _ASSIGNED: "false",
        "enflame.com/gcu-assigned-time": nanoseconds(ctx.now),
        "enflame.com/gcu-assigned-index": index,
        "enflame.com/gcu-assigned-id": index,
        "enflame.com/gcu-assigned-minor": first.minor,
        REQUEST_SIZE: str(first.slices),
        CONTAINERS: msgspec.json.encode(dict(sorted(containers.items()))).decode(),
    }


def restore(pod: PodInfo, allocation: Allocation) -> Allocation:
    """Slices of a placed pod: of its container; else, until a card says what its recorded memory is, of the
    pod where one container has a slice, else 1.
    """
    containers = _containers(pod.annotations.get(CONTAINERS, ""))
    single = sum(1 for slot in allocation if slot) == 1
    size = integer(pod.annotations.get(REQUEST_SIZE, "")) if single else None
    names = pod.shape.names
    slices = size if size is not None and 0 < size <= INT32_MAX else 1
    restored = []
    for position, slot in enumerate(allocation):
        name = names[position] if position < len(names) else f"container-{position}"
        held = containers.get(name)
        restored.append(
            tuple(
                msgspec.structs.replace(
                    device, payload=held or DrsSlice("", "", slices, guessed_mib=device.usedmem)
                )
                for device in slot
            )
        )
    return tuple(restored)


def _containers(text: str) -> dict[str, DrsSlice]:
    """Slices by container of an annotation that a plugin may have written anew."""
    if not text or len(text) > _MAX_TEXT:
        return {}
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    slices = {}
    for name, entry in found.items() if isinstance(found, dict) else ():
        size = entry.get("request") if isinstance(entry, dict) else None
        if isinstance(size, int) and not isinstance(size, bool) and 0 < size <= INT32_MAX:
            shown = _word(entry.get("profileName", "")), _word(entry.get("profileID", ""))
            slices[name] = DrsSlice(*shown, size)
    return slices


# --- whole cards ----------------------------------------------------------------------------------------


def parse_whole(
    raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile
) -> ContainerRequest | None:
    """A number of whole cards."""
    if raw.count is None:
        return None
    nums = count_of(p.names.count, raw.count, raw.container)
    return ContainerRequest(nums, p.common_word, _UNITS, 100, _UNITS)


def discover_whole(drs_name: str, node: NodeView, p: VendorProfile) -> Inventory:
    """Cards of the node's capacity."""
    inventory = registered(p, node)
    if not node.capacity.get(drs_name, 0):
        return inventory
    warning = f"{node.name} reports both {p.names.count} and {drs_name}: cards may be given away twice"
    return Inventory(inventory.devices, (*inventory.warnings, warning))
