"""Huawei Ascend NPUs: vNPU templates cut by the driver, or soft slices of whole cards (ascend.md).

One profile per configured chip. Memory is MiB per card; in hard mode (the default) a request is rounded up
to a template of the chip or to the whole card, in soft mode it is taken as it is and cores are percent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import msgspec

from hami.protocol import keys
from hami.vendors import ascend_choice
from hami.vendors.ascend_units import TemplateUnits, UnitsAlgebra
from hami.vendors.columns import CardColumns, VectorNeeds
from hami.vendors.discovery import registered
from hami.vendors.fit import MAX_CORES, card_need
from hami.vendors.request import (
    any_value,
    append_env,
    child,
    count_of,
    default_runtime_class,
    integer,
    limit_of,
    memory_of,
    parse_standard,
    resource_of,
    set_limit,
)
from hami.vendors.schema import AscendChip, AscendConfig, AscendTemplate, DeviceConfig
from hami.vendors.types import (
    INSUFFICIENT_CORES,
    MODE_NOT_FIT,
    VENDOR_RULE,
    AdmissionRejected,
    Allocation,
    AnnotateContext,
    Card,
    ContainerDevice,
    ContainerRequest,
    DeviceInfo,
    FitContext,
    FitResult,
    Hooks,
    Inventory,
    InventoryView,
    Need,
    NodeView,
    PodInfo,
    RawRequest,
    Register,
    ResourceNames,
    Rules,
    Usage,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, standard_needs

MODE_KEY: Final = "huawei.com/vnpu-mode"
SOFT: Final = "hami-core"
NODE_MODE_KEY: Final = "hami-vnpu-core"
TIME_KEY: Final = "predicate-time"
PAIRED_WORD: Final = "Ascend910C"
_MAX_RUNTIME_TEXT: Final = 64 * 1024  # characters of `huawei.com/<cw>` that are read


@dataclass(frozen=True, slots=True)
class Chip:
    """One chip with what the whole section says about all of them; templates ascend by memory."""

    config: AscendChip
    section: AscendConfig
    counts: tuple[str, ...]  # count resources of all chips

    @property
    def word(self) -> str:
        return self.config.common_word

    @property
    def paired(self) -> bool:
        """Whether requests are for whole modules of two dies."""
        return self.word == PAIRED_WORD and self.config.super_pod

    def rounded(self, mem: int) -> int | None:
        """What a hard-mode request of `mem` MiB gets: a template's memory, the whole card's, or None."""
        template = self.template(mem)
        if template is not None:
            return template.memory
        return self.config.memory_allocatable if mem <= self.config.memory_capacity else None

    def template(self, mem: int) -> AscendTemplate | None:
        """The smallest template of at least `mem` MiB."""
        return next((one for one in self.config.templates if mem <= one.memory), None)


@dataclass(frozen=True, slots=True)
class FullRequest:
    """Part of a soft-mode request whose memory is shared by all its cards: the MiB of the container."""

    memory: int


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """One profile per chip of section `vnpus`."""
    section = device_config.vnpus
    counts = tuple(config.resource_count_name for config in section.chips if config.resource_count_name)
    return tuple(
        _profile(Chip(replace(config, templates=_ascending(config.templates)), section, counts))
        for config in section.chips
    )


def _ascending(templates: Sequence[AscendTemplate]) -> tuple[AscendTemplate, ...]:
    return tuple(sorted(templates, key=lambda one: one.memory))


def _profile(chip: Chip) -> VendorProfile:
    config, word = chip.config, chip.word
    own = keys.ascend_keys(word)
    counts_units = chip.section.check_template_units
    networked = word.startswith(ascend_choice.NETWORKED)
    return VendorProfile(
        word,
        ResourceNames.of(config),
        Rules(
            Register("json", own.register),
            to_allocate=own.to_allocate,
            allocated=own.allocated,
            handshake=own.handshake,
            cleanup=own.handshake,
            lock_covers="container",
            use_uuid=(f"hami.io/use-{word}-uuid",),
            no_use_uuid=(f"hami.io/no-use-{word}-uuid",),
        ),
        STANDARD_CHECKS,
        partial(vector_needs, chip),
        partial(vector_exact, chip),
        UnitsAlgebra() if counts_units else STANDARD,
        hooks=Hooks(
            admit=partial(admit, chip),
            check=partial(check, chip),
            parse=partial(parse, chip),
            discover=partial(discover, chip),
            prefit=partial(prefit, chip),
            needs=partial(needs, chip),
            device_rule=partial(device_rule, chip),
            choose=partial(ascend_choice.choose, chip.paired),
            choose_when=partial(ascend_choice.wanted, word),
            record=partial(record, chip) if counts_units else None,
            extra_annotations=partial(runtime_annotations, chip),
            node_bonus=ascend_choice.network_bonus if networked else None,
            best_bonus=ascend_choice.best_network_bonus if networked else None,
            shown_cores=shown_cores,
        ),
        payload=TemplateUnits if counts_units else None,
        restore=partial(restore, chip) if counts_units else _unchanged,
        placed_annotations=(keys.ascend_extra_key(word),) if counts_units else (),
        read_annotations=(MODE_KEY, NODE_MODE_KEY),
    )


def _unchanged(_pod: PodInfo, allocation: Allocation) -> Allocation:
    return allocation


# --- admission ------------------------------------------------------------------------------------------


def admit(
    chip: Chip, container: dict[str, Any], pod: dict[str, Any], p: VendorProfile, _inventory: InventoryView
) -> bool:
    """Webhook mutation (ascend.md §4): whole modules, memory of a template, runtime class, environment."""
    config, names = chip.config, p.names
    wanted = limit_of(container, names.count)
    if wanted is None:
        if config.overwrite_env and not any(limit_of(container, name) is not None for name in chip.counts):
            append_env(container, keys.ENV_ASCEND_VISIBLE_DEVICES, "", wins=any_value)
        return False
    name = str(container.get("name", ""))
    nums = count_of(names.count, wanted, name)
    _check_count(chip, nums)
    soft = is_soft(pod.get("metadata"))
    memory = _served_memory(chip, container, p, nums, soft=soft)
    if chip.paired and nums == 1:
        _set_count(container, names.count)
    if names.memory:
        _set_memory(chip, container, p, memory, soft=soft)
    default_runtime_class(pod, config.runtime_class_name)
    return True


def check(
    chip: Chip,
    container: Mapping[str, Any],
    request: ContainerRequest | None,
    _pod: Mapping[str, Any],
    p: VendorProfile,
) -> None:
    """What the node plugin cannot give, whether or not the webhook has seen the pod."""
    if request is not None:
        _served_memory(chip, container, p, request.nums, soft=request.mode == SOFT)


def _served_memory(
    chip: Chip, container: Mapping[str, Any], p: VendorProfile, nums: int, *, soft: bool
) -> int | None:
    """MiB that the container will have on a card; None when it names none. Raises `AdmissionRejected` for
    cores and memory that the node plugin cannot give.
    """
    names = p.names
    if not soft and _positive(resource_of(container, names.cores)):
        raise AdmissionRejected(f"{names.cores} is only supported in {SOFT} (soft split) mode")
    memory = _admitted_memory(chip, container, p, soft=soft)
    if soft or memory is None or memory == chip.config.memory_allocatable:
        return memory
    if chip.paired and nums == 1:
        raise AdmissionRejected(
            f"{names.memory} in container {container.get('name', '')}: a part of a card needs superPod: "
            f"false, {names.count} stands for modules of two dies"
        )
    if nums > 1:
        raise AdmissionRejected("vNPU not supported for multiple devices")
    return memory


def is_soft(metadata: Any) -> bool:
    """Whether a pod's metadata asks for soft mode."""
    annotations = metadata.get("annotations") if isinstance(metadata, Mapping) else None
    return isinstance(annotations, Mapping) and annotations.get(MODE_KEY) == SOFT


def _check_count(chip: Chip, nums: int) -> None:
    odd = chip.word == PAIRED_WORD and nums > 1 and nums % 2
    if odd and (chip.paired or not chip.section.allow_unsupported):
        raise AdmissionRejected(f"{chip.word} device request must be 1 or 2*n, got {nums}")


def _positive(quantity_text: Any) -> bool:
    number = integer(quantity_text) if quantity_text is not None else 0
    return number is None or number > 0


def _admitted_memory(chip: Chip, container: Mapping[str, Any], p: VendorProfile, *, soft: bool) -> int | None:
    """MiB the container will have on a card; None when it names none."""
    names = p.names
    given = limit_of(container, names.memory)
    if given is None:
        return None
    memory = memory_of(names.memory, given, names.memory_factor, str(container.get("name", "")))
    if soft:
        return memory
    rounded = chip.rounded(memory)
    if rounded is None:
        raise AdmissionRejected(f"{names.memory} {integer(given)} is invalid")
    return rounded


def _set_count(container: dict[str, Any], name: str) -> None:
    set_limit(container, name, 2)
    requests = container["resources"].get("requests")
    if isinstance(requests, dict) and name in requests:
        requests[name] = "2"


def _set_memory(
    chip: Chip, container: dict[str, Any], p: VendorProfile, memory: int | None, *, soft: bool
) -> None:
    """Write the memory to limits and requests, in the user's unit."""
    name, factor = p.names.memory, p.names.memory_factor
    if memory is None:
        memory = chip.config.memory_allocatable
        soft = False
    written = memory // factor if soft else max(1, memory // factor)
    set_limit(container, name, written)
    child(container["resources"], "requests")[name] = str(written)


def parse(
    chip: Chip, raw: RawRequest, annotations: Mapping[str, str], p: VendorProfile
) -> ContainerRequest | None:
    """Count, MiB per card (not rounded yet: the fit does that), percent of cores."""
    request = parse_standard(p, raw)
    if request is None or annotations.get(MODE_KEY) != SOFT:
        return request
    nums, memory = request.nums, request.memreq
    if not (memory and nums > 1 and chip.section.memory_scope == "total"):
        return replace(request, mode=SOFT)
    return replace(request, memreq=-(-memory // nums), mode=SOFT, detail=FullRequest(memory))


# --- nodes ----------------------------------------------------------------------------------------------


def discover(chip: Chip, node: NodeView, p: VendorProfile) -> Inventory:
    """The registered cards; a warning for each that our configuration would not produce."""
    inventory = registered(p, node)
    config = chip.config
    smallest = config.templates[0].memory if config.templates else 0
    slots = config.memory_allocatable // smallest if smallest else 1
    odd = [
        f"card {card.id} of {node.name} has {card.devmem} MiB and {card.count} slots, the device config of "
        f"{chip.word} says {config.memory_allocatable} MiB and {slots}: are both configs the same?"
        for card in inventory.devices
        if (card.devmem, card.count) != (config.memory_allocatable, slots)
    ]
    return Inventory(inventory.devices, (*inventory.warnings, *odd)) if odd else inventory


def is_soft_node(chip: Chip, node: NodeView) -> bool:
    """Whether the node serves soft mode: it says so, else the configuration does."""
    said = node.annotations.get(NODE_MODE_KEY)
    return chip.section.soft_mode if said is None else said == "true"


# --- fit ------------------------------------------------------------------------------------------------


def prefit(chip: Chip, ctx: FitContext) -> FitResult | None:
    """A node serves one mode."""
    request = ctx.request
    if request.mode == SOFT:
        refused = not is_soft_node(chip, ctx.node)
    else:
        refused = chip.section.strict_mode and _is_partial(chip, request) and is_soft_node(chip, ctx.node)
    return FitResult(None, {MODE_NOT_FIT: 1}, len(ctx.candidates)) if refused else None


def _is_partial(chip: Chip, request: ContainerRequest) -> bool:
    return request.memreq > 0 and chip.template(request.memreq) is not None


def needs(chip: Chip, ctx: FitContext, card: Card) -> Need:
    """Hard mode: the template's memory. Soft mode: a card has 100 cores whatever is registered."""
    need = card_need(_charged(chip, ctx.request), card.info, card.used)
    return need._replace(total_cores=MAX_CORES) if ctx.request.mode == SOFT else need


def _charged(chip: Chip, request: ContainerRequest) -> ContainerRequest:
    """The request with the memory it takes on a card."""
    if request.mode == SOFT or request.memreq <= 0:
        return request
    return replace(request, memreq=chip.rounded(request.memreq) or request.memreq)


def device_rule(
    chip: Chip, ctx: FitContext, card: Card, need: Need, _taken: Sequence[ContainerDevice]
) -> str | None:
    """One size per card within a pod, as the plugin keeps one entry per card; units of templates."""
    for slot in ctx.allocated:
        for device in slot:
            same = device.uuid != card.info.id or (device.usedmem, device.usedcores) == (need.mem, need.cores)
            if not same:
                return VENDOR_RULE
    if chip.section.check_template_units:
        return _units_rule(chip, ctx.request, card, need)
    return None


def _units_rule(chip: Chip, request: ContainerRequest, card: Card, need: Need) -> str | None:
    wanted, used = units_of(chip, request.mode, need.mem), card.used.payload
    if wanted is None:
        return None
    held = used if isinstance(used, TemplateUnits) else TemplateUnits(0, 0)
    config = chip.config
    over = (config.ai_core and held.ai_core + wanted.ai_core > config.ai_core) or (
        config.ai_cpu and held.ai_cpu + wanted.ai_cpu > config.ai_cpu
    )
    return INSUFFICIENT_CORES if over else None


def units_of(chip: Chip, mode: str, mem: int) -> TemplateUnits | None:
    """AI cores and AI CPUs of the template that `mem` MiB get in hard mode; None without a template."""
    template = chip.template(mem) if mode != SOFT else None
    return None if template is None else TemplateUnits(template.ai_core, template.ai_cpu)


def record(
    chip: Chip, ctx: FitContext, card: Card, need: Need, _taken: Sequence[ContainerDevice]
) -> ContainerDevice:
    """What is written down, with the units of the template."""
    info, request = card.info, ctx.request
    units = units_of(chip, request.mode, need.mem)
    return ContainerDevice(info.id, request.type, need.mem, need.cores, info.index, info.custom, units)


def shown_cores(info: DeviceInfo, used: Usage) -> tuple[int, int]:
    """Percent in soft mode; templates of hard mode have AI cores of their own, which nobody counts here."""
    soft = info.devcore == MAX_CORES or used.cores > 0
    return (used.cores, MAX_CORES) if soft else (0, 0)


# --- annotations ----------------------------------------------------------------------------------------


class _RuntimeDevice(msgspec.Struct, omit_defaults=True):
    """One device as the node plugin reads it."""

    uuid: str = msgspec.field(default="", name="UUID")
    temp: str = ""
    memory: int = 0
    core: int = 0


def runtime_annotations(chip: Chip, ctx: AnnotateContext) -> dict[str, str]:
    """What the plugin needs besides the allocation: templates and limits of each device, and the time."""
    soft = ctx.pod.annotations.get(MODE_KEY) == SOFT
    devices = [
        _runtime_device(chip, device, request, soft=soft)
        for slot, request in zip(ctx.allocation, _padded(ctx), strict=True)
        for device in slot
    ]
    return {
        keys.ascend_extra_key(chip.word): msgspec.json.encode(devices).decode(),
        TIME_KEY: str(int(ctx.now.timestamp())),
    }


def _padded(ctx: AnnotateContext) -> tuple[ContainerRequest | None, ...]:
    missing = len(ctx.allocation) - len(ctx.requests)
    return (*ctx.requests[: len(ctx.allocation)], *(None,) * missing)


def _runtime_device(
    chip: Chip, device: ContainerDevice, request: ContainerRequest | None, *, soft: bool
) -> _RuntimeDevice:
    memory, template = device.usedmem, None
    if not soft:
        template = chip.template(memory)
    elif request is not None and isinstance(request.detail, FullRequest):
        memory = request.detail.memory
    return _RuntimeDevice(device.uuid, template.name if template else "", memory, device.usedcores)


def restore(chip: Chip, pod: PodInfo, allocation: Allocation) -> Allocation:
    """The allocation with the units of the templates that the pod's runtime entry names, in its order."""
    text = pod.annotations.get(keys.ascend_extra_key(chip.word), "")
    units = {one.name: TemplateUnits(one.ai_core, one.ai_cpu) for one in chip.config.templates}
    named = {(one.uuid, one.memory): units[one.temp] for one in _runtime_devices(text) if one.temp in units}
    return tuple(
        tuple(
            msgspec.structs.replace(device, payload=named.get((device.uuid, device.usedmem)))
            for device in slot
        )
        for slot in allocation
    )


def _runtime_devices(text: str) -> list[_RuntimeDevice]:
    if len(text) > _MAX_RUNTIME_TEXT:
        return []
    try:
        return msgspec.json.decode(text, type=list[_RuntimeDevice])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return []


# --- vector side ----------------------------------------------------------------------------------------


def vector_needs(
    chip: Chip,
    p: VendorProfile,
    request: ContainerRequest,
    pod: PodInfo,
    policy: frozenset[str],
    columns: CardColumns,
) -> VectorNeeds:
    """Standard needs of the rounded request; soft mode counts 100 cores per card."""
    found = standard_needs(p, _charged(chip, request), pod, policy, columns)
    return replace(found, total_cores=MAX_CORES) if request.mode == SOFT else found


def vector_exact(
    chip: Chip, _p: VendorProfile, request: ContainerRequest, _pod: PodInfo, _policy: frozenset[str]
) -> bool:
    """Where neither the node's mode, nor units, nor modules of two dies have a say."""
    section = chip.section
    if request.mode == SOFT or section.check_template_units:
        return False
    if section.strict_mode and _is_partial(chip, request):
        return False
    return request.nums == 1 or chip.word != PAIRED_WORD
