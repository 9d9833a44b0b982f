"""Generated fits of every vendor: cards, usages, pods and requests, made up for NVIDIA, else recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from vendor_pools import every_profile, pools

from hami.protocol import keys as wire
from hami.protocol.allocation import ContainerDevice
from hami.protocol.inventory import DeviceInfo, MigPlacement, MigProfile
from hami.vendors import engine
from hami.vendors.columns import BoolArray, IntArray
from hami.vendors.selection import steering_keys
from hami.vendors.types import (
    Allocation,
    AnnotateContext,
    Card,
    ContainerRequest,
    FitContext,
    Holder,
    NodeRefuses,
    PodInfo,
    PodShape,
    QuotaView,
    SlotKind,
    Usage,
    VendorProfile,
)

LEAST_ASKS = 12
"""Recorded requests that make a vendor worth drawing from; other chips of its family have the same code."""

ILUVATAR_POSITIONS = "iluvatar.ai/predicate-gpu-idx-"  # one key per container

POOLS = pools(every_profile())
PROFILES = [p for p in every_profile() if len(POOLS[p.common_word].asks) >= LEAST_ASKS]
few = settings(max_examples=30)  # each vendor draws for itself: together some hundreds
every_vendor = pytest.mark.parametrize("p", PROFILES, ids=lambda p: p.common_word)

NOW = datetime(2026, 8, 22, tzinfo=UTC)
MIG = (
    MigProfile("1g.5gb", 4864, 15, 1, tuple(MigPlacement(start, 1) for start in range(7))),
    MigProfile("2g.10gb", 9856, 29, 2, tuple(MigPlacement(start, 2) for start in (0, 2, 4))),
)


@dataclass
class Tables:
    types: Sequence[str]
    modes: Sequence[str]
    ids: Sequence[str]
    id_codes: Mapping[str, int]


@dataclass
class Columns:
    node: IntArray
    slots: IntArray
    used: IntArray
    mem: IntArray
    usedmem: IntArray
    cores: IntArray
    usedcores: IntArray
    healthy: BoolArray
    cordoned: BoolArray
    type: IntArray
    mode: IntArray
    id: IntArray
    tables: Tables

    @property
    def slots_left(self) -> IntArray:
        return self.slots - self.used

    @property
    def mem_left(self) -> IntArray:
        return self.mem - self.usedmem

    @property
    def cores_left(self) -> IntArray:
        return self.cores - self.usedcores


@dataclass
class Node:
    annotations: Mapping[str, str]
    name: str = "n1"
    labels: Mapping[str, str] = None  # type: ignore[assignment]
    capacity: Mapping[str, int] = None  # type: ignore[assignment]
    allocatable: Mapping[str, int] = None  # type: ignore[assignment]


def columns_of(p: VendorProfile, cards: Sequence[Card], node: Node) -> Columns:
    """The cards of one node (number 0) as columns."""
    types = sorted({c.info.type for c in cards})
    modes = sorted({c.info.mode for c in cards})
    ids = [c.info.id for c in cards]
    cordoned = engine.cordoned_ids(node.annotations)

    def ints(values: Sequence[int]) -> IntArray:
        return np.array(values, dtype=np.int64)

    return Columns(
        ints([0] * len(cards)),
        ints([c.info.count for c in cards]),
        ints([c.used.slots for c in cards]),
        ints([c.info.devmem for c in cards]),
        ints([c.used.mem for c in cards]),
        ints([c.info.devcore for c in cards]),
        ints([c.used.cores for c in cards]),
        np.array([engine.card_healthy(p, c.info, c.used) for c in cards], dtype=np.bool_),
        np.array([c.info.id in cordoned for c in cards], dtype=np.bool_),
        ints([types.index(c.info.type) for c in cards]),
        ints([modes.index(c.info.mode) for c in cards]),
        ints(range(len(cards))),
        Tables(types, modes, ids, {name: n for n, name in enumerate(ids)}),
    )


@st.composite
def some_cards(draw: st.DrawFn, p: VendorProfile, mig: bool) -> list[Card]:
    cards = []
    for n in range(draw(st.integers(0, 5))):
        mode = draw(st.sampled_from(["hami-core", "hami-core", "", "mps", *(["mig"] if mig else [])]))
        info = DeviceInfo(
            id=f"d{n}",
            index=n,
            count=draw(st.sampled_from([0, 1, 2, 10])),
            devmem=draw(st.sampled_from([0, 3, 9999, 40960])),
            devcore=draw(st.sampled_from([0, 100, 100, 150])),
            type=draw(st.sampled_from(["NVIDIA A100", "NVIDIA A10", "T4"])),
            numa=draw(st.integers(0, 1)),
            health=draw(st.sampled_from([True, True, True, False])),
            mode=mode,
            vendor=p.common_word,
            mig_profiles=MIG if mode == "mig" else (),
        )
        used = Usage()
        if mode != "mig":
            used = Usage(
                draw(st.integers(0, max(info.count, 1))),
                draw(st.integers(0, info.devmem)),
                draw(st.sampled_from([0, info.devcore // 2, info.devcore])),
            )
        cards.append(Card(info, used))
    return cards


REQUESTS = st.tuples(
    st.integers(1, 4),
    st.sampled_from([0, 0, 1, 4000, 9000, 40960]),
    st.sampled_from([0, 1, 33, 100, 101]),
    st.sampled_from([0, 0, 1, 50, 75, 100, 250]),
)
POLICIES = st.sets(st.sampled_from(["binpack", "mutex", "topology-aware", "spread"])).map(frozenset)
TEXT_CHOICES = ["", ",", "d0", "d1, d2", "A10", "A100,T4", "=T4", "hami-core", "mig,mps", "true", "1", " "]
TEXTS = st.sampled_from(TEXT_CHOICES)


@st.composite
def user_annotations(draw: st.DrawFn, p: VendorProfile) -> dict[str, str]:
    rules = p.rules
    keys = [
        *rules.use_uuid,
        *rules.no_use_uuid,
        rules.use_type,
        rules.no_use_type,
        rules.mode,
        rules.numa_bind,
    ]
    chosen = draw(st.lists(st.sampled_from([k for k in keys if k]), max_size=2, unique=True))
    return {key: draw(TEXTS) for key in chosen}


@dataclass
class Case:
    cards: list[Card]
    request: ContainerRequest
    pod: PodInfo
    node: Node
    policy: frozenset[str]
    quota: QuotaView

    def context(self, allocated: Allocation = (), cards: list[Card] | None = None) -> FitContext:
        return FitContext(
            self.cards if cards is None else cards,
            self.request,
            self.pod,
            self.node,
            allocated,
            self.policy,
            self.quota,
        )


def cases(p: VendorProfile, mig: bool = True, slots: int = 1) -> st.SearchStrategy[Case]:
    """NVIDIA's cards and requests are made up, those of the other vendors recorded and then changed."""
    return made_up(p, mig, slots) if p.common_word == wire.NVIDIA else recorded(p, slots)


@st.composite
def recorded(draw: st.DrawFn, p: VendorProfile, slots: int) -> Case:
    pool = POOLS[p.common_word]
    plain = draw(st.sampled_from(pool.nodes))
    first, number = draw(st.integers(0, len(plain.devices))), draw(st.integers(0, len(plain.devices)))
    chosen = (*plain.devices[first:], *plain.devices[:first])[:: draw(st.sampled_from([1, -1]))][:number]
    ill = draw(st.sampled_from(["", chosen[0].id if chosen else ""]))
    cards = [
        Card(msgspec.structs.replace(info, health=info.health and info.id != ill), p.algebra.zero)
        for info in chosen
    ]
    cordon = draw(st.sampled_from(["", plain.devices[0].id]))
    node = Node(
        {**plain.annotations, "hami.io/device-cordon": cordon},
        plain.name,
        plain.labels,
        plain.capacity,
        plain.allocatable,
    )
    for other in range(draw(st.integers(0, 4))):
        container, annotations = draw(st.sampled_from(pool.asks))
        pod = PodInfo(f"v{other}", "ns", f"q{other}", annotations, one_app())
        cards = with_pod(p, cards, pod, asked(p, container, annotations), node)
    container, annotations = draw(st.sampled_from(pool.asks))
    others = draw(st.lists(st.sampled_from(list(SlotKind)), min_size=slots - 1, max_size=slots - 1))
    kinds = tuple(sorted([*others, SlotKind.APP], key=lambda kind: kind is SlotKind.APP))
    steered = {
        key: draw(st.sampled_from([*TEXT_CHOICES, *(info.id for info in chosen)]))
        for key in draw(st.lists(st.sampled_from(steering(p)), max_size=1))
    }
    try:
        request = p.resolve(asked(p, container, annotations), node, [card.info for card in cards])
    except NodeRefuses:
        cards, request = [], asked(p, container, annotations)  # the engine does not fit such a request
    return Case(
        cards,
        request,
        PodInfo("u", "ns", "p", {**annotations, **steered}, PodShape(kinds, tuple("abcdef"[:slots]))),
        node,
        draw(POLICIES),
        QuotaView(draw(st.sampled_from([None, None, 9000])), draw(st.sampled_from([None, None, 60]))),
    )


def one_app() -> PodShape:
    return PodShape((SlotKind.APP,), ("a",))


def steering(p: VendorProfile) -> list[str]:
    """Annotations that steer a placement; one that nobody reads where the vendor has none."""
    return [*steering_keys(p.rules), "example.com/nothing"]


def asked(p: VendorProfile, container: dict[str, Any], annotations: Mapping[str, str]) -> ContainerRequest:
    request = engine.container_request(p, container, {"metadata": {"annotations": dict(annotations)}})
    assert request is not None
    return request


def with_pod(
    p: VendorProfile, cards: list[Card], pod: PodInfo, request: ContainerRequest, node: Node
) -> list[Card]:
    """The cards after one more pod, or as they are when it does not fit."""
    try:
        request = p.resolve(request, node, [card.info for card in cards])
    except NodeRefuses:
        return cards
    devices = engine.fit(p, FitContext(cards, request, pod, node)).devices
    if devices is None:
        return cards
    context = AnnotateContext(pod, (devices,), node, NOW, (request,))
    told = PodInfo(pod.uid, pod.namespace, pod.name, engine.annotations(p, context), pod.shape)
    seen = engine.placed_annotations(p, told)
    held = engine.effective(p, pod.shape, (devices,), inits_finished=True)
    return [
        Card(
            card.info,
            p.algebra.add(card.used, held[card.info.id]),
            (*card.holders, Holder(pod.uid, pod.namespace, pod.name, seen, held[card.info.id])),
        )
        if card.info.id in held
        else card
        for card in cards
    ]


@st.composite
def made_up(draw: st.DrawFn, p: VendorProfile, mig: bool, slots: int) -> Case:
    nums, mem, percent, cores = draw(REQUESTS)
    others = [draw(st.sampled_from(list(SlotKind))) for _ in range(slots - 1)]
    kinds = tuple(sorted([*others, SlotKind.APP], key=lambda kind: kind is SlotKind.APP))
    return Case(
        draw(some_cards(p, mig)),
        ContainerRequest(nums, p.common_word, mem, percent, cores),
        PodInfo("u", "ns", "p", draw(user_annotations(p)), PodShape(kinds, tuple("abcdef"[:slots]))),
        Node({"hami.io/device-cordon": draw(st.sampled_from(["", "d0", "d1,d3"]))}),
        draw(POLICIES),
        QuotaView(draw(st.sampled_from([None, None, 100, 9000])), draw(st.sampled_from([None, None, 60]))),
    )


def resolved(p: VendorProfile, case: Case) -> ContainerRequest | None:
    try:
        return p.resolve(case.request, case.node, [card.info for card in case.cards])
    except NodeRefuses:
        return None


def place_all(p: VendorProfile, case: Case) -> tuple[Allocation, list[Card]] | None:
    """Every container of the pod asks the same; the cards with the pod's steady use, or None."""
    allocated: Allocation = ()
    for slot, _ in enumerate(case.pod.shape.kinds):
        beside = engine.init_base(p, case.pod.shape, allocated, slot)
        cards = [with_use(p, card, beside) for card in case.cards]
        result = engine.fit(p, case.context(allocated, cards))
        if result.devices is None:
            return None
        allocated = (*allocated, result.devices)
    held = engine.effective(p, case.pod.shape, allocated, False)
    return allocated, [with_use(p, card, held) for card in case.cards]


def with_use(p: VendorProfile, card: Card, extra: Mapping[str, Usage]) -> Card:
    more = extra.get(card.info.id)
    return card if more is None else Card(card.info, p.algebra.add(card.used, more), card.holders)


DEVICES = st.builds(
    ContainerDevice, st.just("d0"), st.just("x"), st.integers(0, 2**31 - 1), st.integers(0, 100)
)


def usages(p: VendorProfile) -> st.SearchStrategy[Usage]:
    """Uses of one card as pods hold them: sums of devices, maxima of such sums."""
    return made_up_usages(p) if p.common_word == wire.NVIDIA else recorded_usages(p)


@st.composite
def recorded_usages(draw: st.DrawFn, p: VendorProfile) -> Usage:
    use = p.algebra.zero
    for _ in range(draw(st.integers(1, 2))):
        total = p.algebra.zero
        for device in draw(st.lists(DEVICES, max_size=2)):
            total = p.algebra.add(total, p.algebra.of(device))
        case = draw(recorded(p, 1))
        for device in (engine.fit(p, case.context()).devices or ())[:1]:
            total = p.algebra.add(total, p.algebra.of(device))
        use = p.algebra.combine(use, total)
    return use


@st.composite
def made_up_usages(draw: st.DrawFn, p: VendorProfile) -> Usage:
    card = Card(
        DeviceInfo("d0", count=99, devmem=40960, devcore=100, health=True, mode="mig", mig_profiles=MIG)
    )
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        total = p.algebra.zero
        for device in draw(st.lists(DEVICES, max_size=3)):
            total = p.algebra.add(total, p.algebra.of(device))
        if draw(st.booleans()):
            request = ContainerRequest(
                draw(st.integers(1, 3)), p.common_word, draw(st.sampled_from([1, 9000])), 101, 0
            )
            pod = PodInfo("u", "ns", "p", {}, PodShape((SlotKind.APP,), ("a",)))
            result = engine.fit(p, FitContext([card], request, pod, Node({})))
            for device in result.devices or ():
                total = p.algebra.add(total, p.algebra.of(device))
        parts.append(total)
    use = parts[0]
    for part in parts[1:]:
        use = p.algebra.combine(use, part)
    return use
