"""MetaX shares of cards (`Metax-SGPU`): QoS policies, online and offline pods, link zones
(vendors/metax.md §6).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from hami.protocol import keys
from hami.protocol.errors import DevicesMalformed
from hami.protocol.timestamps import nanoseconds
from hami.vendors import metax_links
from hami.vendors.discovery import check_number, read_each, register_text
from hami.vendors.fit import MAX_CORES, card_need
from hami.vendors.reasons import APP_CLASS_MISMATCH, CARD_UNHEALTHY, QOS_MISMATCH
from hami.vendors.request import amount_of, annotations_of, child, count_of, integer, invalid, limit_of
from hami.vendors.schema import MetaxConfig
from hami.vendors.types import (
    INT32_MAX,
    AdmissionRejected,
    AnnotateContext,
    BestBonus,
    BonusAsk,
    Card,
    ContainerDevice,
    ContainerRequest,
    DeviceInfo,
    FitContext,
    Holder,
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
from hami.vendors.vector import checks_for, never_exact, standard_needs

SHARE: Final = "Metax-SGPU"
QOS: Final = "metax-tech.com/sgpu-qos-policy"
APP_CLASS: Final = "metax-tech.com/sgpu-app-class"
TOPOLOGY: Final = "metax-tech.com/sgpu-topology-aware"
DEVICES: Final = "metax-tech.com/gpu-devices-allocated"
ONLINE: Final = "online"
OFFLINE: Final = "offline"
POLICIES: Final = ("best-effort", "fixed-share", "burst-share")
_CHECKS: Final = frozenset(
    {"health", "cordon", "type", "id", "slots", "mutex", "quota", "memory", "cores", "exclusive", "exhausted"}
)
_MIB: Final = 1 << 20
_GIB: Final = 1024  # MiB: unit of memory without a suffix
_MAX_GIB: Final = INT32_MAX // _GIB
_MAX_TEXT: Final = 256 * 1024  # characters of a registration that are read
_WEIGHT: Final = 10_000.0
"""Topology and classes come before how full the nodes are (scores up to 30)."""

_BOOLEANS: Final = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}


def profile(config: MetaxConfig) -> VendorProfile:
    """The profile of the shares of section `metax`."""
    own = keys.VENDOR_KEYS[SHARE]
    return VendorProfile(
        SHARE,
        ResourceNames(
            config.resource_vcount_name,
            config.resource_vmemory_name,
            config.resource_vcore_name,
            _GIB,
            bytes_with_suffix=True,
        ),
        Rules(
            Register("json", own.register, keeps_last=False),
            to_allocate=own.to_allocate,
            allocated=own.allocated,
            health="always",
            use_uuid=("metax-tech.com/use-gpuuuid",),
            no_use_uuid=("metax-tech.com/nouse-gpuuuid",),
            lookup="limits_only",
            checks=_CHECKS,
            unhealthy_reason=CARD_UNHEALTHY,
        ),
        checks_for(frozenset({"cordon", "id", "slots", "mutex"})),
        standard_needs,
        never_exact,
        STANDARD,
        hooks=Hooks(
            admit=admit,
            check=check,
            parse=parse,
            discover=discover,
            card_rule=card_rule,
            needs=needs,
            choose=choose,
            extra_annotations=vendor_keys,
            node_bonus=partial(node_bonus, config.topology_aware),
            best_bonus=partial(best_bonus, config.topology_aware),
            admission_use=admission_use,
            advise=advise,
        ),
        placed_annotations=(QOS, APP_CLASS),
        read_annotations=(TOPOLOGY,),
    )


# --- admission and requests -----------------------------------------------------------------------------


def admit(
    container: dict[str, Any], pod: dict[str, Any], p: VendorProfile, _inventory: InventoryView
) -> bool:
    """A container uses the vendor if it limits the count. Its pod gets a policy where it has none."""
    if limit_of(container, p.names.count) is None:
        return False
    annotations = annotations_of(pod)
    if annotations.get(APP_CLASS) != ONLINE and annotations.get(QOS) is None:
        child(child(pod, "metadata"), "annotations")[QOS] = POLICIES[0]
    return True


def check(
    container: Mapping[str, Any], request: ContainerRequest | None, pod: Mapping[str, Any], p: VendorProfile
) -> None:
    """Class and policy of the pod, and amounts that no card can have."""
    if request is None:
        return
    annotations = annotations_of(pod)
    app_class = annotations.get(APP_CLASS)
    if app_class is not None and app_class not in (ONLINE, OFFLINE):
        raise AdmissionRejected(f"{APP_CLASS} must be set one of [{ONLINE}, {OFFLINE}]")
    if app_class is not None and request.nums != 1:
        raise AdmissionRejected("app-class pod must request single device")
    if app_class != ONLINE and annotations.get(QOS, POLICIES[0]) not in POLICIES:
        raise AdmissionRejected(f"{QOS} must be set one of [{', '.join(POLICIES)}]")
    if not 0 <= request.cores <= MAX_CORES:
        who = container.get("name", "")
        raise AdmissionRejected(f"{p.names.cores} of container {who} must be in range [0,{MAX_CORES}]")


def parse(raw: RawRequest, annotations: Mapping[str, str], p: VendorProfile) -> ContainerRequest | None:
    """Count, memory per card in GiB or with a suffix, percent of cores; without memory all of the card, and
    without cores the card for itself.
    """
    if raw.count is None:
        return None
    names = p.names
    nums = count_of(names.count, raw.count, raw.container)
    cores = MAX_CORES if raw.cores is None else _cores_of(raw.cores)
    if not 0 <= cores <= INT32_MAX:
        raise invalid(names.cores, raw.cores, raw.container, f"must be an integer between 0 and {MAX_CORES}")
    memory = 0 if raw.memory is None else mib_of(names.memory, raw.memory, raw.container)
    mode = ONLINE if annotations.get(APP_CLASS) == ONLINE else ""
    return ContainerRequest(nums, p.common_word, memory, 0 if memory else 100, cores, mode)


def _cores_of(text: Any) -> int:
    number = integer(text)
    return -1 if number is None else number


def mib_of(name: str, text: Any, container: str) -> int:
    """MiB of a memory quantity: GiB where its canonical text has no letter, else bytes; 0: not named.

    Raises `AdmissionRejected`: a bare multiple of 1000 is written with a letter by the API server.
    """
    amount, written = amount_of(text)
    if not any(letter.isalpha() for letter in written):
        amount = -1 if integer(written) is None else amount
        if 0 <= amount <= _MAX_GIB:
            return amount * _GIB
    elif amount > 0:
        if amount // _MIB == 0:
            raise AdmissionRejected(
                f"{name} is too small: {written} in container {container} is {amount} bytes; without a "
                "suffix the unit is GiB, but Kubernetes writes multiples of 1000 with one: use Gi"
            )
        if amount // _MIB <= INT32_MAX:
            return amount // _MIB
    raise AdmissionRejected(
        f"{name} is out of range: {str(text)[:40]} in container {container}; give 0 to {_MAX_GIB} (GiB), "
        "or an amount with a suffix"
    )


def admission_use(request: ContainerRequest, _inventory: InventoryView) -> tuple[int, int]:
    """Online containers take no cores."""
    return request.memreq * request.nums, 0 if request.mode == ONLINE else request.cores * request.nums


def advise(container: Mapping[str, Any], request: ContainerRequest, p: VendorProfile) -> Sequence[str]:
    """Memory without cores takes the whole card."""
    names = p.names
    alone = limit_of(container, names.memory) is not None and limit_of(container, names.cores) is None
    if request.mode == ONLINE or not alone:
        return ()
    text = (
        f"container {container.get('name')} names {names.memory} without {names.cores}: it gets all "
        "compute of its card, nobody shares it"
    )
    return (text,)


# --- nodes ----------------------------------------------------------------------------------------------


class _Registered(msgspec.Struct, rename="camel"):
    uuid: str = ""
    model: str = ""
    total_dev_count: int = 0
    total_compute: int = 0
    total_vram: int = msgspec.field(default=0, name="totalVRam")
    numa: int = 0
    healthy: bool = False
    qos_policy: str = ""
    link_zone: int = 0


def discover(node: NodeView, p: VendorProfile) -> Inventory:
    """Cards of the plugin's list; bad ones are left out with a warning."""
    text = register_text(p, node, _MAX_TEXT)
    try:
        entries = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise DevicesMalformed(f"node {node.name}: {error}") from None
    check_number(node, entries, "card")
    return read_each(node, entries, partial(_card, p.common_word), "card")


def _card(word: str, entry: msgspec.Raw, index: int) -> DeviceInfo:
    """The card of an entry. Raises `ValueError`."""
    found = msgspec.json.decode(entry, type=_Registered)
    amounts = (found.total_dev_count, found.total_vram, found.total_compute)
    if abs(found.numa) > INT32_MAX or abs(found.link_zone) > INT32_MAX:
        raise ValueError("numa or linkZone is too large")
    if not found.uuid or _SEPARATORS.intersection(found.uuid):
        raise ValueError(f"uuid {found.uuid[:60]!r} must not be empty nor hold , : or ;")
    if not all(0 <= amount <= INT32_MAX for amount in amounts):
        raise ValueError("a total is negative or too large")
    custom = {
        "Model": found.model,
        "QosPolicy": found.qos_policy,
        metax_links.ZONE: found.link_zone,
    }
    return DeviceInfo(
        found.uuid, index, *amounts, word, found.numa, health=found.healthy, vendor=word, custom=custom
    )


_SEPARATORS: Final = frozenset(",:;")


# --- fit ------------------------------------------------------------------------------------------------


def needs(ctx: FitContext, card: Card) -> Need:
    """Memory, and cores as asked; online containers take none and do not mind who has them."""
    mem = card_need(ctx.request, card.info, card.used).mem
    if ctx.request.mode == ONLINE:
        return Need(mem, 0, 0, 0)
    return Need(mem, ctx.request.cores, card.info.devcore, card.used.cores)


def card_rule(ctx: FitContext, card: Card) -> str | None:
    """Classes and QoS policies that go together on one card."""
    if card.used.slots <= 0:
        return None
    own = ctx.pod.annotations.get(APP_CLASS, "")
    classes = _classes(card.holders)
    online, offline = ONLINE in classes, OFFLINE in classes
    if own == ONLINE:
        fits = online or offline
    elif own == OFFLINE:
        fits = offline and not online
    else:
        fits = not (online or offline)
    if not fits:
        return APP_CLASS_MISMATCH
    if own == ONLINE or ctx.request.cores == MAX_CORES:
        return None
    policy = policy_of(card)
    return QOS_MISMATCH if policy not in ("", ctx.pod.annotations.get(QOS, "")) else None


def _classes(holders: Sequence[Holder]) -> list[str]:
    return [holder.annotations.get(APP_CLASS, "") for holder in holders]


def policy_of(card: Card) -> str:
    """The policy of the shares on a card, "" for none: that of its holders, else what the node reports."""
    if not card.holders:
        return str(card.info.custom.get("QosPolicy", ""))
    sharing = (
        holder.annotations.get(QOS, "")
        for holder in card.holders
        if holder.annotations.get(APP_CLASS) != ONLINE and holder.usage.cores < MAX_CORES
    )
    return next(filter(None, sharing), "")


def choose(ctx: FitContext, eligible: Sequence[Card], _reasons: Mapping[str, int]) -> Sequence[int] | Refused:
    """Online pods keep away from each other, cards that containers get for themselves are linked."""
    positions = range(len(eligible))
    own = ctx.pod.annotations.get(APP_CLASS)
    if len(eligible) <= ctx.request.nums:
        return positions
    if own == ONLINE:
        return sorted(positions, key=lambda at: _crowd(eligible[at]))
    if own is None and ctx.request.cores == MAX_CORES:
        zones = [metax_links.zone_of(card.info.custom) for card in eligible]
        return metax_links.pick(zones, ctx.request.nums)
    return positions


def _crowd(card: Card) -> tuple[bool, int, int]:
    """Order of cards for an online pod, best first."""
    classes = _classes(card.holders)
    online, offline = classes.count(ONLINE), classes.count(OFFLINE)
    return offline > 0 and not online, online, offline


def node_bonus(topology_by_default: bool, ctx: ScoreContext) -> NodeBonus:
    """Few neighbours for online pods; links, where topology is in force, for cards given whole."""
    before = {card.info.id: card for card in ctx.before}
    given = [device for slot in ctx.allocation for device in slot]
    if ctx.pod.annotations.get(APP_CLASS) == ONLINE:
        return NodeBonus(float(sum(_quiet(before[device.uuid]) for device in given)), _WEIGHT)
    whole = {device.uuid for device in given if device.usedcores == MAX_CORES}
    if not whole or not _wants_links(ctx.pod, topology_by_default):
        return NodeBonus(0.0)
    free = (metax_links.zone_of(card.info.custom) for card in ctx.before if card.used.slots == 0)
    taken = (metax_links.zone_of(before[card].info.custom) for card in sorted(whole))
    return NodeBonus(float(metax_links.score(free, taken)), _WEIGHT)


def _wants_links(pod: PodInfo, by_default: bool) -> bool:
    return _BOOLEANS.get(pod.annotations.get(TOPOLOGY, ""), by_default)


def best_bonus(topology_by_default: bool, ask: BonusAsk) -> BestBonus:
    """The quietest card for each that an online pod asks for; else the best of all zones for whole cards."""
    if ask.pod.annotations.get(APP_CLASS) == ONLINE:
        count = sum(ask.counts)
        return lambda _node, cards: NodeBonus(float(count * max(map(_quiet, cards), default=0)), _WEIGHT)
    whole = [one.nums for one in ask.requests if one is not None and one.cores == MAX_CORES]
    if not whole or not _wants_links(ask.pod, topology_by_default):
        return lambda _node, _cards: NodeBonus(0.0)
    least, most = max(whole), sum(whole)

    def of_node(_node: NodeView, cards: Sequence[Card]) -> NodeBonus:
        free, others = list[int](), list[int]()
        for card in cards:
            zone = metax_links.zone_of(card.info.custom)
            if card.used.slots == 0:
                free.append(zone)
            elif card.info.devcore != MAX_CORES:  # given whole beside others (fit check 11)
                others.append(zone)
        best = metax_links.best_score(tuple(sorted(free)), tuple(sorted(others)), least, most)
        return NodeBonus(float(best), _WEIGHT)

    return of_node


def _quiet(card: Card) -> int:
    offline_only, online, offline = _crowd(card)
    return -100 * offline if offline_only else -20 * online - 2 * offline


# --- annotations ----------------------------------------------------------------------------------------


def vendor_keys(ctx: AnnotateContext) -> dict[str, str]:
    """What the vendor's plugin reads: per container its cards with compute and memory, both left out when
    0.
    """
    containers = [[_shown(device) for device in slot] for slot in ctx.allocation]
    return {
        DEVICES: msgspec.json.encode(containers).decode(),
        "metax-tech.com/predicate-time": nanoseconds(ctx.now),
    }


def _shown(device: ContainerDevice) -> dict[str, Any]:
    amounts = {"compute": device.usedcores, "vRam": device.usedmem}
    return {"uuid": device.uuid, **{key: amount for key, amount in amounts.items() if amount}}
