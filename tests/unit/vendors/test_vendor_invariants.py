"""Invariants I1-I7 of the vendor interface (README 3.4), over every profile there is.

Cards, usages, pods and requests are generated; fits are compared with the vector side, with themselves and
with what their annotations give back.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hami.protocol.allocation import ContainerDevice
from hami.protocol.inventory import DeviceInfo, MigPlacement, MigProfile
from hami.vendors import engine
from hami.vendors.columns import BoolArray, IntArray
from hami.vendors.config import BUILTIN, load_profiles
from hami.vendors.types import (
    Allocation,
    AnnotateContext,
    Card,
    ContainerRequest,
    FitContext,
    FitResult,
    Holder,
    NodeRefuses,
    PodInfo,
    PodShape,
    QuotaView,
    ScoreContext,
    SlotKind,
    Usage,
    VendorProfile,
)

PROFILES = load_profiles(BUILTIN, enable_ascend=True, enable_iluvatar=True)
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
TEXTS = st.sampled_from(
    ["", ",", "d0", "d1, d2", "A10", "A100,T4", "=T4", "hami-core", "mig,mps", "true", "1", " "]
)


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


@st.composite
def cases(draw: st.DrawFn, p: VendorProfile, mig: bool = True, slots: int = 1) -> Case:
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
    return card if more is None else Card(card.info, p.algebra.add(card.used, more))


@every_vendor
@given(data=st.data())
def test_i1_equal_questions_have_equal_answers(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p))
    assert engine.fit(p, case.context()) == engine.fit(p, case.context())
    placed = place_all(p, case)
    if placed is not None:
        policies: tuple[Literal["binpack", "spread"], ...] = ("binpack", "spread")
        for policy in policies:
            score = ScoreContext(case.node, placed[0], case.cards, policy)
            assert engine.node_bonus(p, score) == engine.node_bonus(p, score)


@every_vendor
@settings(max_examples=300)
@given(data=st.data())
def test_i2_a_false_mask_means_no_fit(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p))
    request = resolved(p, case)
    if not case.cards or request is None:
        return
    columns = columns_of(p, case.cards, case.node)
    needs = engine.vector_needs(p, request, case.pod, case.policy, columns)
    result = engine.fit(p, case.context())
    if not engine.node_mask(p, columns, needs, 1)[0]:
        assert result.devices is None
    elif result.devices is None:
        assert result.reasons


@every_vendor
@settings(max_examples=300)
@given(data=st.data())
def test_i2_vector_reasons_equal_the_exact_ones(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p))
    case.quota = QuotaView()
    if not case.cards or case.request.nums > len(case.cards):
        return
    if not engine.vector_exact(p, case.request, case.pod, case.policy):
        return
    columns = columns_of(p, case.cards, case.node)
    needs = engine.vector_needs(p, case.request, case.pod, case.policy, columns)
    if needs.inexact is not None and needs.inexact.any():
        return
    result = engine.fit(p, case.context())
    fits = bool(engine.node_mask(p, columns, needs, 1)[0])
    assert fits == (result.devices is not None)
    if not fits:
        counts = engine.card_reasons(p, engine.first_failures(p, columns, needs))
        assert FitResult(None, counts, len(case.cards)).text() == result.text()


DEVICES = st.builds(
    ContainerDevice, st.just("d0"), st.just("x"), st.integers(0, 2**31 - 1), st.integers(0, 100)
)


@st.composite
def usages(draw: st.DrawFn, p: VendorProfile) -> Usage:
    """Uses of one card as pods hold them: sums of devices, maxima of such sums."""
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


@every_vendor
@given(data=st.data())
def test_i3_the_algebra_adds_removes_and_combines(p: VendorProfile, data: st.DataObject) -> None:
    a, b, c = (data.draw(usages(p)) for _ in range(3))
    algebra = p.algebra
    assert algebra.add(a, b) == algebra.add(b, a)
    assert algebra.add(algebra.add(a, b), c) == algebra.add(a, algebra.add(b, c))
    assert algebra.add(a, algebra.zero) == a
    assert algebra.remove(algebra.add(a, b), b) == a
    assert algebra.combine(a, b) == algebra.combine(b, a)
    assert algebra.combine(algebra.combine(a, b), c) == algebra.combine(a, algebra.combine(b, c))
    assert algebra.combine(a, a) == a
    both = algebra.combine(a, b)
    assert all(
        (both.slots >= each.slots, both.mem >= each.mem, both.cores >= each.cores) == (True, True, True)
        for each in (a, b)
    )


@every_vendor
@given(data=st.data())
def test_i3_any_order_of_coming_and_going_ends_where_it_began(p: VendorProfile, data: st.DataObject) -> None:
    uses = [data.draw(usages(p)) for _ in range(data.draw(st.integers(0, 5)))]
    start = data.draw(usages(p))
    total = start
    for use in uses:
        total = p.algebra.add(total, use)
    for use in data.draw(st.permutations(uses)):
        total = p.algebra.remove(total, use)
    assert total == start


@every_vendor
@given(data=st.data())
def test_i4_a_pod_rebuilt_from_its_annotations_holds_the_same(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p, slots=3))
    placed = place_all(p, case)
    if placed is None:
        return
    allocation, _ = placed
    keys = engine.annotations(
        p, AnnotateContext(case.pod, allocation, case.node, datetime(2026, 8, 22, tzinfo=UTC))
    )
    pod = PodInfo("u", "ns", "p", {**case.pod.annotations, **keys}, case.pod.shape)
    again = engine.read_allocation(p, pod)
    assert [[d.payload for d in slot] for slot in again] == [[d.payload for d in slot] for slot in allocation]
    for finished in (False, True):
        assert engine.effective(p, pod.shape, again, finished) == engine.effective(
            p, pod.shape, allocation, finished
        )


@every_vendor
def test_a_cordoned_card_is_refused(p: VendorProfile) -> None:
    """README §5, 35."""
    names = ("id1", "id2")
    infos = [
        DeviceInfo(id=name, count=10, devmem=40960, devcore=100, health=True, vendor=p.common_word)
        for name in names
    ]
    request = ContainerRequest(1, p.common_word, 100, 101, 0)
    pod = PodInfo("u", "ns", "p", {}, PodShape((SlotKind.APP,), ("a",)))
    for cordon, text in ((" id1 ,, id2 ", "2/2 CardCordoned"), ("", "")):
        node = Node({"hami.io/device-cordon": cordon})
        context = FitContext([Card(info, Usage()) for info in infos], request, pod, node)
        assert engine.fit(p, context).text() == text


@every_vendor
@given(data=st.data())
def test_i5_resolving_twice_changes_nothing_more(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p))
    request = resolved(p, case)
    if request is not None:
        assert request.nums >= 1
        assert p.resolve(request, case.node, [card.info for card in case.cards]) == request


@every_vendor
@given(data=st.data())
def test_i6_other_annotations_of_a_cards_holders_do_not_matter(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p))
    plain = engine.fit(p, case.context())
    for text in ("", "x"):
        other = Holder("v", "ns", "q", {f"{p.common_word}.example/other": text}, Usage())
        held = [Card(card.info, card.used, (other,)) for card in case.cards]
        assert engine.fit(p, case.context(cards=held)) == plain


@every_vendor
@given(data=st.data())
def test_i7_devices_are_distinct_and_reasons_never_empty(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p, slots=2))
    result = engine.fit(p, case.context())
    if result.devices is None:
        assert result.reasons
        assert result.text()
        assert "InternalError" not in result.reasons, result.detail
        return
    assert len(result.devices) == case.request.nums
    repeatable = {c.info.id for c in case.cards if p.hooks.repeatable and p.hooks.repeatable(c.info)}
    once = [d.uuid for d in result.devices if d.uuid not in repeatable]
    assert len(once) == len(set(once))
    assert all(d.payload is None or isinstance(d.payload, p.payload or type(None)) for d in result.devices)
    context = AnnotateContext(case.pod, (result.devices, ()), case.node, NOW)
    documented = {p.rules.allocated, p.rules.to_allocate, *p.placed_annotations}
    assert set(engine.annotations(p, context)) <= documented


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "1", "x", "Always"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                [*PROFILES[0].names.all(), "limits", "requests", "name", "value", "annotations", "containers"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@every_vendor
@given(data=st.data())
def test_hostile_pods_get_an_answer_or_a_denial(p: VendorProfile, data: st.DataObject) -> None:
    container = {key: data.draw(JSON) for key in ("name", "resources", "env")}
    pod = {"metadata": data.draw(JSON), "spec": data.draw(JSON | st.just({"containers": [container]}))}
    info = engine.pod_info(pod)
    assert len(info.shape.kinds) == len(engine.containers_of(pod))
    for given_container in (container, *engine.containers_of(pod)):
        with contextlib.suppress(engine.AdmissionRejected):
            engine.mutate_admission(p, given_container, pod, NoInventory())
            engine.container_request(p, given_container, pod)


class NoInventory:
    def kinds(self, common_word: str) -> Sequence[DeviceInfo]:
        return ()


QUANTITIES = st.sampled_from(["0", "1", "2", "100", "1k", "4Gi", "16.0", "1500m", "-1", "2147483648", "x"])


@every_vendor
@given(data=st.data())
def test_i7_admission_is_idempotent_and_agrees_with_the_filter(p: VendorProfile, data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(p.names.all()), unique=True))
    limits = {name: data.draw(QUANTITIES) for name in names if data.draw(st.booleans())}
    requests = {name: data.draw(QUANTITIES) for name in names if name not in limits}
    container: dict[str, Any] = {"name": "c", "resources": {"limits": limits, "requests": requests}}
    pod: dict[str, Any] = {"metadata": {}, "spec": {"containers": [container]}}

    def admit() -> tuple[bool, str]:
        try:
            return engine.mutate_admission(p, container, pod, NoInventory()), repr(pod)
        except engine.AdmissionRejected:
            return False, "rejected"

    first = admit()
    assert admit() == first
    if first[0]:
        request = engine.container_request(p, container, pod)
        assert request is not None
        assert request.nums > 0
