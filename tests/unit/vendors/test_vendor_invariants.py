"""Invariants I1-I7 of the vendor interface (README 3.4), over every profile there is.

Cards, usages, pods and requests are generated; fits are compared with the vector side, with themselves and
with what their annotations give back.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st
from vendor_fits import (
    ILUVATAR_POSITIONS,
    NOW,
    PROFILES,
    cases,
    columns_of,
    every_vendor,
    few,
    place_all,
    resolved,
    usages,
)

from hami.protocol import keys as wire
from hami.protocol.inventory import DeviceInfo
from hami.vendors import engine
from hami.vendors.types import (
    AnnotateContext,
    Card,
    FitResult,
    Holder,
    PodInfo,
    QuotaView,
    ScoreContext,
    Usage,
    VendorProfile,
)


@every_vendor
@few
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
@settings(max_examples=80)
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
@settings(max_examples=80)
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


@every_vendor
@few
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
@few
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
@few
@given(data=st.data())
def test_i4_a_pod_rebuilt_from_its_annotations_holds_the_same(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p, slots=3))
    placed = place_all(p, case)
    if placed is None:
        return
    allocation, _ = placed
    keys = engine.annotations(
        p, AnnotateContext(case.pod, allocation, case.node, NOW, (case.request,) * len(allocation))
    )
    pod = PodInfo("u", "ns", "p", {**case.pod.annotations, **keys}, case.pod.shape)
    again = engine.read_allocation(p, pod)
    assert [[d.payload for d in slot] for slot in again] == [[d.payload for d in slot] for slot in allocation]
    for finished in (False, True):
        assert engine.effective(p, pod.shape, again, finished) == engine.effective(
            p, pod.shape, allocation, finished
        )


@every_vendor
@few
@given(data=st.data())
def test_a_cordoned_card_is_refused(p: VendorProfile, data: st.DataObject) -> None:
    """README §5, 35."""
    case = data.draw(cases(p))
    case.node.annotations = {**case.node.annotations, "hami.io/device-cordon": ""}
    free = engine.fit(p, case.context())
    if free.devices is None:
        return
    ids = {device.uuid for device in free.devices}
    case.node.annotations = {**case.node.annotations, "hami.io/device-cordon": " ,".join(sorted(ids))}
    after = engine.fit(p, case.context())
    if after.devices is None:
        assert "CardCordoned" in after.text()
    else:
        assert not ids & {device.uuid for device in after.devices}


@every_vendor
@few
@given(data=st.data())
def test_i5_resolving_twice_changes_nothing_more(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p))
    request = resolved(p, case)
    if request is not None:
        assert request.nums >= 1
        assert p.resolve(request, case.node, [card.info for card in case.cards]) == request


@every_vendor
@few
@given(data=st.data())
def test_i6_other_annotations_of_a_cards_holders_do_not_matter(p: VendorProfile, data: st.DataObject) -> None:
    case = data.draw(cases(p))
    plain = engine.fit(p, case.context())
    for text in ("", "x"):
        other = Holder("v", "ns", "q", {f"{p.common_word}.example/other": text}, Usage())
        held = [Card(card.info, card.used, (other,)) for card in case.cards]
        assert engine.fit(p, case.context(cards=held)) == plain


@every_vendor
@few
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
    context = AnnotateContext(case.pod, (result.devices, ()), case.node, NOW, (case.request, None))
    documented = {p.rules.allocated, p.rules.to_allocate, *p.placed_annotations, *wire.VENDOR_EXTRA_KEYS}
    documented.add(wire.ascend_extra_key(p.common_word))
    written = engine.annotations(p, context)
    assert {key for key in written if not key.startswith(ILUVATAR_POSITIONS)} <= documented


RESOURCES = sorted({name for p in PROFILES for name in p.names.all()})
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "1", "x", "Always"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from([*RESOURCES, "limits", "requests", "name", "value", "annotations", "containers"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@every_vendor
@few
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
@few
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
        if request is None:  # a vendor whose plugin lives with a count of 0
            assert "0" in {*limits.values(), *requests.values()}
        else:
            assert request.nums > 0
