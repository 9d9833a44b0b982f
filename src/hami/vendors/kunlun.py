"""Kunlunxin cards: whole ones (`kunlun`) and slices of a quarter, a half or a whole card (`XPU`) (kunlun.md).

Both modes follow one topology; memory is MiB, cores are percent of a card and follow from the memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hami.protocol import keys
from hami.protocol.errors import DevicesMalformed
from hami.vendors import kunlun_topology
from hami.vendors.discovery import registered
from hami.vendors.kunlun_slices import SliceAlgebra, sizes
from hami.vendors.request import amount_of, child, count_of, invalid, limit_of, set_limit
from hami.vendors.schema import DeviceConfig, KunlunConfig
from hami.vendors.types import (
    CORDONED,
    EXCLUSIVE,
    ID_MISMATCH,
    INT32_MAX,
    MODE_NOT_FIT,
    NOT_HEALTHY,
    NUMA_NOT_FIT,
    QUOTA_NOT_FIT,
    VENDOR_RULE,
    AdmissionRejected,
    AnnotateContext,
    BestBonus,
    BonusAsk,
    CapacityCards,
    Card,
    ContainerDevice,
    ContainerRequest,
    FitContext,
    Hooks,
    Inventory,
    InventoryView,
    Need,
    NodeBonus,
    NodeView,
    PodInfo,
    RawRequest,
    Refused,
    Register,
    ResourceNames,
    Rules,
    ScoreContext,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import checks_for, never_exact, standard_needs, unused_card_needs

WHOLE: Final = "kunlun"
SHARE: Final = "XPU"
IDX_KEY: Final = "BAIDU_COM_DEVICE_IDX"
CARD_MIB: Final = 98304
SLICES: Final = (24576, 49152, CARD_MIB)
"""Sizes of slices, ascending."""

_BONUS: Final = 1000.0
_BYTES_FROM: Final = 1 << 20  # amounts with a unit from here on are bytes
_IDS: Final = ("hami.io/use-xpu-uuid", "baidu.com/use-gpuuuid")
_NO_IDS: Final = ("hami.io/no-use-xpu-uuid", "baidu.com/nouse-gpuuuid")
_WHOLE_CHECKS: Final = frozenset({"health", "cordon", "id"})
_SHARE_CHECKS: Final = frozenset({"health", "cordon", "id", "quota", "memory"})
_HANDLES: Final = {SLICES[0]: 4, SLICES[1]: 2}
"""Virtual functions that opening a card for slices of a size takes; none for a whole card."""


def build(device_config: DeviceConfig) -> tuple[VendorProfile, ...]:
    """The profiles of section `kunlun`: whole cards, then slices."""
    return _whole(device_config.kunlun), _share(device_config.kunlun)


def _whole(config: KunlunConfig) -> VendorProfile:
    strict = config.strict_counts is not False
    return VendorProfile(
        WHOLE,
        ResourceNames(config.resource_count_name),
        Rules(
            Register("capacity", cards=CapacityCards("kunlun", 100, 100, CARD_MIB, numa_halves=True)),
            allocated=keys.VENDOR_KEYS[WHOLE].allocated,
            health="always",
            lock="none",
            use_uuid=_IDS,
            no_use_uuid=_NO_IDS,
            checks=_WHOLE_CHECKS,
            unused_only=True,
        ),
        checks_for(_WHOLE_CHECKS | {"mutex"}),
        unused_card_needs,
        never_exact,
        STANDARD,
        hooks=Hooks(
            admit=partial(admit, strict),
            discover=discover,
            card_rule=partial(busy_in_other_mode, SHARE),
            needs=whole_card,
            choose=choose_whole,
            extra_annotations=partial(indexes, config.multi_container_idx == "concat"),
            doubts=doubts,
            node_bonus=bonus,
            best_bonus=best_bonus,
        ),
        beside=(SHARE,),
    )


def _share(config: KunlunConfig) -> VendorProfile:
    own = keys.VENDOR_KEYS[SHARE]
    strict = config.strict_counts is True
    return VendorProfile(
        SHARE,
        ResourceNames(config.resource_vcount_name, config.resource_vmemory_name),
        Rules(
            Register("json", own.register),
            to_allocate=own.to_allocate,
            allocated=own.allocated,
            handshake=own.handshake,
            cleanup=own.handshake,
            use_uuid=_IDS,
            no_use_uuid=_NO_IDS,
            checks=_SHARE_CHECKS,
        ),
        checks_for(_SHARE_CHECKS),
        standard_needs,
        never_exact,
        SliceAlgebra(),
        hooks=Hooks(
            admit=partial(admit_share, strict),
            parse=parse_share,
            discover=discover_share,
            card_rule=partial(busy_in_other_mode, WHOLE),
            device_rule=one_size,
            choose=partial(choose_share, Budget(config.max_vfs), strict),
        ),
        beside=(WHOLE,),
    )


# --- admission and requests -----------------------------------------------------------------------------


def admit(
    strict: bool, container: dict[str, Any], _pod: dict[str, Any], p: VendorProfile, _inventory: InventoryView
) -> bool:
    """A container uses the vendor if it limits the count; counts that no server can serve are denied."""
    wanted = limit_of(container, p.names.count)
    if wanted is None:
        return False
    name = str(container.get("name", ""))
    count = count_of(p.names.count, wanted, name)
    if strict and count not in kunlun_topology.SHAPES:
        shapes = list(kunlun_topology.SHAPES)
        raise AdmissionRejected(f"{p.names.count} must be one of {shapes}, container {name} asks for {count}")
    return True


def admit_share(
    strict: bool, container: dict[str, Any], pod: dict[str, Any], p: VendorProfile, inventory: InventoryView
) -> bool:
    """As `admit`; memory becomes that of a slice, in limits and requests."""
    if not admit(strict, container, pod, p, inventory):
        return False
    given = limit_of(container, p.names.memory)
    if given is not None:
        memory = slice_of(mib_of(p.names.memory, given, str(container.get("name", ""))))
        set_limit(container, p.names.memory, memory)
        child(container["resources"], "requests")[p.names.memory] = str(memory)
    return True


def mib_of(name: str, text: Any, container: str) -> int:
    """MiB of a memory quantity: its value, or what it says in bytes where it has a unit and is large.

    Raises `AdmissionRejected`.
    """
    amount, written = amount_of(text)
    if amount >= _BYTES_FROM and not written.isdigit():
        amount = -(-amount // _BYTES_FROM)
    if not 0 <= amount <= INT32_MAX:
        raise invalid(name, text, container, f"the unit is MiB, must be between 0 and {INT32_MAX}")
    return amount


def slice_of(mib: int) -> int:
    """The smallest slice of at least `mib`; the whole card for more."""
    return next((size for size in SLICES if mib <= size), CARD_MIB)


def parse_share(
    raw: RawRequest, _annotations: Mapping[str, str], p: VendorProfile
) -> ContainerRequest | None:
    """Count of slices, one per card, and their size."""
    if raw.count is None:
        return None
    nums = count_of(p.names.count, raw.count, raw.container)
    memory = CARD_MIB
    if raw.memory is not None:
        memory = slice_of(mib_of(p.names.memory, raw.memory, raw.container))
    percent = 100 if raw.memory is None else 0
    return ContainerRequest(nums, SHARE, memory, percent, memory * 100 // CARD_MIB)


# --- nodes ----------------------------------------------------------------------------------------------


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """The node's cards, with a warning about those that no topology knows."""
    inventory = registered(p, node)
    beyond = sum(card.index >= kunlun_topology.CARDS for card in inventory.devices)
    if not beyond:
        return inventory
    text = f"{beyond} cards have an index above {kunlun_topology.CARDS - 1}: this topology is not supported"
    return Inventory(inventory.devices, (*inventory.warnings, f"{text}, they are never chosen"))


def discover_share(node: NodeView, p: VendorProfile) -> Inventory:
    """As `discover`, without cards whose id cannot be written into an allocation."""
    inventory = discover(node, p)
    good = tuple(card for card in inventory.devices if not _FORBIDDEN.intersection(card.id))
    if len(good) == len(inventory.devices):
        return inventory
    bad = [card.id for card in inventory.devices if _FORBIDDEN.intersection(card.id)]
    warnings = (*inventory.warnings, *(f"card {text!r}: an id must not hold , : or ;" for text in bad))
    if not good:
        raise DevicesMalformed(f"node {node.name}: {'; '.join(warnings)}")
    return Inventory(good, warnings)


_FORBIDDEN: Final = frozenset(",:;")


# --- fit ------------------------------------------------------------------------------------------------


def whole_card(_ctx: FitContext, card: Card) -> Need:
    """All of the card."""
    info = card.info
    return Need(info.devmem, info.devcore, info.devcore, card.used.cores)


def busy_in_other_mode(other: str, ctx: FitContext, card: Card) -> str | None:
    """A card in use in the other mode is the same silicon."""
    for there in ctx.beside.get(other, ()):
        if there.info.index == card.info.index and there.used.slots > 0:
            return VENDOR_RULE
    return None


def one_size(ctx: FitContext, card: Card, need: Need, _taken: Sequence[ContainerDevice]) -> str | None:
    """All slices of a card have one size; under `mutex` only an unused card will do."""
    if any(size != need.mem for size in sizes(card.used)):
        return VENDOR_RULE
    return EXCLUSIVE if card.used.slots > 0 and "mutex" in ctx.policy else None


def choose_whole(
    ctx: FitContext, eligible: Sequence[Card], reasons: Mapping[str, int]
) -> Sequence[int] | Refused:
    """Linked cards."""
    places = _places(eligible)
    chosen = kunlun_topology.select(places.keys(), ctx.request.nums)
    return [places[index] for index in chosen] or _refusal(ctx, reasons)


@dataclass(frozen=True, slots=True)
class Budget:
    """Virtual functions of a server: opening an idle card for slices takes some of them."""

    most: int  # 0: no limit

    def idle_cards(self, cards: Sequence[Card], size: int) -> int:
        """How many idle cards of a server may be opened for slices of `size`."""
        cost = _HANDLES.get(size, 0)
        if not self.most or not cost:
            return len(cards)
        taken = sum(max((_HANDLES.get(one, 0) for one in sizes(card.used)), default=0) for card in cards)
        return max(self.most - taken, 0) // cost


def choose_share(
    budget: Budget, strict: bool, ctx: FitContext, eligible: Sequence[Card], reasons: Mapping[str, int]
) -> Sequence[int] | Refused:
    """Linked cards, as far as there are handles; counts without a shape by groups, unless `strict`."""
    request, places = ctx.request, _places(eligible)
    idle = {index for index, place in places.items() if not eligible[place].used.slots}
    shaped = strict or request.nums in kunlun_topology.SHAPES
    most = budget.idle_cards(ctx.candidates, request.memreq)
    opened = places.keys() - idle
    chosen = kunlun_topology.select_within(opened, idle, most, request.nums, shaped=shaped)
    if chosen:
        return [places[index] for index in chosen]
    if "mutex" in ctx.policy and reasons.get(EXCLUSIVE):
        return _refused(ctx, reasons, EXCLUSIVE)
    short = kunlun_topology.select_within(opened, idle, len(idle), request.nums, shaped=shaped)
    return _refusal(ctx, reasons, without_handles=len(idle) - most if short else 0)


def _places(eligible: Sequence[Card]) -> dict[int, int]:
    """Index of a card of the topology -> its position; the first one where two say the same."""
    places: dict[int, int] = {}
    for position, card in enumerate(eligible):
        if 0 <= card.info.index < kunlun_topology.CARDS:
            places.setdefault(card.info.index, position)
    return places


def _refusal(ctx: FitContext, reasons: Mapping[str, int], without_handles: int = 0) -> Refused:
    """Cards that the pod excludes explain a refusal, else a spent quota, else the topology."""
    for code in (ID_MISMATCH, QUOTA_NOT_FIT):
        if reasons.get(code):
            return _refused(ctx, reasons, code)
    more = {MODE_NOT_FIT: without_handles} if without_handles else {}
    return _refused(ctx, {**reasons, **more, NUMA_NOT_FIT: 1}, NUMA_NOT_FIT)


def _refused(ctx: FitContext, reasons: Mapping[str, int], code: str) -> Refused:
    shown = (NOT_HEALTHY, CORDONED, MODE_NOT_FIT, code)
    return Refused({each: reasons[each] for each in shown if reasons.get(each)}, len(ctx.candidates))


# --- after the fit --------------------------------------------------------------------------------------


def bonus(ctx: ScoreContext) -> NodeBonus:
    """More for servers that the pod leaves less fragmented; 0 to 3000."""
    before = {card.info.index for card in ctx.before if card.used.slots > 0}
    given = {device.index for slot in ctx.allocation for device in slot}
    change = kunlun_topology.fragmentation(before | given) - kunlun_topology.fragmentation(before)
    return NodeBonus(_BONUS * (2 - min(max(change, -1), 2)))


def best_bonus(ask: BonusAsk) -> BestBonus:
    """The largest bonus that any cards not in use can give."""
    counts = ask.counts
    changes = kunlun_topology.least_changes(counts[0]).tolist() if len(counts) == 1 else None

    def of_node(_node: NodeView, cards: Sequence[Card]) -> NodeBonus:
        if changes is None:
            return NodeBonus(_BONUS * 3)
        used = 0
        for card in cards:
            if card.used.slots > 0 and 0 <= card.info.index < kunlun_topology.CARDS:
                used |= 1 << card.info.index
        return NodeBonus(_BONUS * (2 - min(max(changes[used], -1), 2)))

    return of_node


def indexes(concatenated: bool, ctx: AnnotateContext) -> dict[str, str]:
    """Indexes of the pod's cards for the vendor's plugin: of all containers in order, or of the last one."""
    slots = [slot for slot in ctx.allocation if slot]
    shown = slots if concatenated else slots[-1:]
    return {IDX_KEY: ",".join(str(device.index) for slot in shown for device in slot)}


def doubts(pod: PodInfo, p: VendorProfile) -> list[tuple[str, str]]:
    """Several containers with cards: the plugin finds one list of indexes for all of them."""
    held = [part for part in pod.annotations.get(p.rules.allocated, "").split(";") if "," in part]
    if len(held) < 2:
        return []
    text = f"{len(held)} containers have whole cards, but {IDX_KEY} is one list for all of them"
    return [("SeveralXpuContainers", text)]
