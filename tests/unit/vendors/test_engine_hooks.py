"""The engine with profiles other than NVIDIA's: plain data, and each hook (README 3.5)."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from hami.protocol.allocation import ContainerDevice
from hami.protocol.errors import DevicesAbsent
from hami.vendors.engine import (
    AdmissionRejected,
    annotations,
    card_healthy,
    container_request,
    fit,
    mutate_admission,
    node_bonus,
    node_devices,
    quota_use,
    register_source,
)
from hami.vendors.types import (
    ALL_CHECKS,
    AnnotateContext,
    Card,
    ContainerRequest,
    DeviceInfo,
    FitContext,
    FitResult,
    Hooks,
    Inventory,
    Need,
    NodeBonus,
    NodeView,
    QuotaView,
    RawRequest,
    Refused,
    Register,
    ResourceNames,
    Rules,
    ScoreContext,
    Usage,
    VendorProfile,
)
from hami.vendors.usage import STANDARD
from hami.vendors.vector import STANDARD_CHECKS, always_exact, standard_needs

NAMES = ResourceNames("x.io/card", "x.io/memory", "x.io/cores", 2)
RULES = Rules(
    Register("csv", "x.io/register"),
    to_allocate="x.io/to-allocate",
    allocated="x.io/allocated",
    use_uuid=("x.io/use",),
    default_cores=100,
)


def vendor(hooks: Hooks | None = None, names: ResourceNames = NAMES, **rules: Any) -> VendorProfile:
    return VendorProfile(
        "X",
        names,
        dataclasses.replace(RULES, **rules),
        STANDARD_CHECKS,
        standard_needs,
        always_exact,
        STANDARD,
        hooks=hooks or Hooks(),
    )


def card(name: str = "c0", **values: Any) -> Card:
    used = Usage(values.pop("used", 0), values.pop("usedmem", 0), values.pop("usedcores", 0))
    defaults: dict[str, Any] = {"count": 4, "devmem": 1000, "devcore": 100, "type": "X-1", "health": True}
    return Card(DeviceInfo(id=name, **(defaults | values)), used)


def ask(
    lab: Any, p: VendorProfile, cards: Sequence[Card], nums: int = 1, mem: int = 10, cores: int = 0
) -> FitResult:
    request = ContainerRequest(nums, "X", mem, 0 if mem else 100, cores)
    return fit(p, FitContext(cards, request, lab.info(), lab.node()))


def container(**quantities: str) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {f"x.io/{name}": text for name, text in quantities.items()}}}


class TestRequests:
    def test_count_memory_times_factor_and_cores(self) -> None:
        request = container_request(vendor(), container(card="2", memory="300", cores="20"), {})
        assert request == ContainerRequest(2, "X", 600, 0, 20)

    def test_omitted_sizes_take_the_profiles_defaults(self) -> None:
        assert container_request(vendor(), container(card="1"), {}) == ContainerRequest(1, "X", 0, 100, 100)

    def test_no_count_is_no_request(self) -> None:
        assert container_request(vendor(), container(memory="5"), {}) is None
        assert container_request(vendor(), {"name": "c"}, {}) is None

    def test_limits_only_never_reads_requests(self) -> None:
        given = {"name": "c", "resources": {"requests": {"x.io/card": "1"}}}
        assert container_request(vendor(), given, {}) is not None
        assert container_request(vendor(lookup="limits_only"), given, {}) is None

    def test_the_standard_admission_looks_at_limits_and_validates(self, lab: Any) -> None:
        assert mutate_admission(vendor(), container(card="1"), {}, lab.no_inventory)
        only_requests = {"name": "c", "resources": {"requests": {"x.io/card": "1"}}}
        assert not mutate_admission(vendor(), only_requests, {}, lab.no_inventory)
        with pytest.raises(AdmissionRejected, match=r"x\.io/memory"):
            mutate_admission(vendor(), container(card="1", memory="16Gi"), {}, lab.no_inventory)

    def test_a_parse_hook_sees_requests_without_a_count(self) -> None:
        def parse(raw: RawRequest, found: Mapping[str, str], p: VendorProfile) -> ContainerRequest | None:
            assert (raw.count, raw.memory, raw.cores, raw.container) == (None, "7", None, "c")
            assert found == {"a": "b"}
            return ContainerRequest(1, p.common_word, 7, 0, 0, mode="spec")

        pod = {"metadata": {"annotations": {"a": "b"}}}
        request = container_request(vendor(Hooks(parse=parse)), container(memory="7"), pod)
        assert request is not None
        assert request.mode == "spec"

    def test_an_admit_hook_replaces_the_standard_rule(self, lab: Any) -> None:
        def admit(given: dict[str, Any], pod: dict[str, Any], p: VendorProfile, _inventory: Any) -> bool:
            given["resources"]["limits"][p.names.memory] = "5"
            return True

        given = container(card="1")
        assert mutate_admission(vendor(Hooks(admit=admit)), given, {}, lab.no_inventory)
        assert given["resources"]["limits"]["x.io/memory"] == "5"


class TestNodeData:
    def test_csv_devices_with_fixed_cores(self, lab: Any) -> None:
        p = vendor(register=Register("csv", "x.io/register", devcore=16))
        node = lab.node(annotations={"x.io/register": "a,4,10,100,T,1,true:b,4,10,100,T,1,false:"})
        first, second = node_devices(p, node)
        assert (first.id, first.index, first.devcore, first.vendor) == ("a", 0, 16, "X")
        assert (second.index, second.health) == (1, False)
        with pytest.raises(DevicesAbsent):
            node_devices(p, lab.node())

    def test_devices_from_capacity_change_with_it(self, lab: Any) -> None:
        def discover(node: NodeView, p: VendorProfile) -> Inventory:
            return Inventory(
                tuple(DeviceInfo(f"{node.name}-{n}") for n in range(node.capacity[p.names.count]))
            )

        p = vendor(Hooks(discover=discover), register=Register("capacity"))
        assert [d.id for d in node_devices(p, lab.node(capacity={"x.io/card": 2}))] == ["n1-0", "n1-1"]
        assert register_source(p, lab.node()) is None
        sources = [register_source(p, lab.node(capacity={"x.io/card": n})) for n in (1, 2)]
        assert sources[0] != sources[1]


class TestFit:
    def test_checks_that_a_vendor_does_not_do_are_left_out(self, lab: Any) -> None:
        p = vendor(checks=ALL_CHECKS - {"memory", "cores", "slots", "exclusive", "exhausted", "quota"})
        assert ask(lab, p, [card(used=9, usedmem=1000, usedcores=100)]).devices is not None
        assert ask(lab, vendor(), [card(used=9)]).devices is None

    def test_an_exclusive_vendor_takes_unused_cards(self, lab: Any) -> None:
        p = vendor(unused_only=True)
        result = ask(lab, p, [card(used=1)])
        assert result.text() == "1/1 ExclusiveDeviceAllocateConflict"

    def test_what_is_recorded_follows_the_rules(self, lab: Any) -> None:
        result = ask(lab, vendor(alloc_type="device", record_mem=0), [card(index=2)])
        assert result.devices == (ContainerDevice("c0", "X-1", 0, 0, 2),)

    def test_a_vendor_names_its_own_reason_for_a_sick_card(self, lab: Any) -> None:
        p = vendor(unhealthy_reason="CardUnhealthy")
        assert ask(lab, p, [card(health=False)]).text() == "1/1 CardUnhealthy"

    def test_a_request_of_another_vendor_matches_no_card(self, lab: Any) -> None:
        request = ContainerRequest(1, "Y", 1, 0, 0)
        result = fit(vendor(), FitContext([card()], request, lab.info(), lab.node()))
        assert result.text() == "1/1 CardTypeMismatch"

    def test_a_request_may_take_several_slots(self, lab: Any) -> None:
        request = ContainerRequest(1, "X", 1, 0, 0, slots=3)
        for used, reason in ((1, ""), (2, "1/1 CardTimeSlicingExhausted")):
            result = fit(vendor(), FitContext([card(used=used)], request, lab.info(), lab.node()))
            assert result.text() == reason

    def test_prefit_refuses_the_node(self, lab: Any) -> None:
        def prefit(ctx: FitContext) -> FitResult | None:
            return FitResult(None, {"ModeNotFit": 1}, len(ctx.candidates))

        assert ask(lab, vendor(Hooks(prefit=prefit)), [card("a"), card("b")]).text() == "1/2 ModeNotFit"

    def test_card_rule_comes_before_the_id_check_and_device_rule_last(self, lab: Any) -> None:
        def early(_ctx: FitContext, _card: Card) -> str | None:
            return "CardQosPolicyMismatch"

        def late(_ctx: FitContext, _card: Card, need: Need, _taken: Sequence[ContainerDevice]) -> str | None:
            return "CardNotFoundCustomFilterRule" if need.mem > 5 else None

        use_other = lab.info({"x.io/use": "other"})
        request = ContainerRequest(1, "X", 10, 0, 0)
        first = fit(vendor(Hooks(card_rule=early)), FitContext([card()], request, use_other, lab.node()))
        assert first.text() == "1/1 CardQosPolicyMismatch"
        p = vendor(Hooks(device_rule=late))
        assert ask(lab, p, [card()], mem=10).text() == "1/1 CardNotFoundCustomFilterRule"
        assert ask(lab, p, [card()], mem=5).devices is not None
        assert ask(lab, p, [card(usedmem=999)], mem=10).text() == "1/1 CardInsufficientMemory"

    def test_needs_put_their_own_numbers_into_the_checks(self, lab: Any) -> None:
        def needs(ctx: FitContext, one: Card) -> Need:
            units = max(one.info.devcore * ctx.request.cores // 100, 1)
            return Need(ctx.request.memreq, units, one.info.devcore, one.used.cores)

        p = vendor(Hooks(needs=needs))
        result = ask(lab, p, [card(devcore=304, usedcores=100)], cores=25)
        assert result.devices is not None
        assert result.devices[0].usedcores == 76
        assert ask(lab, p, [card(devcore=304, usedcores=300)], cores=25).text() == "1/1 CardInsufficientCore"

    def test_choose_picks_among_all_eligible_cards(self, lab: Any) -> None:
        def choose(_ctx: FitContext, eligible: Sequence[Card], _r: Mapping[str, int]) -> Sequence[int]:
            return range(len(eligible) - 1, -1, -1)

        result = ask(lab, vendor(Hooks(choose=choose)), [card("a"), card("b", used=4), card("c")])
        assert result.devices is not None
        assert result.devices[0].uuid == "a"
        short = ask(lab, vendor(Hooks(choose=choose)), [card("a"), card("b", used=4)], nums=2)
        assert short.text() == "1/2 AllocatedCardsInsufficientRequest, 1/2 CardTimeSlicingExhausted"

    def test_choose_refuses_with_its_own_reasons_and_denominator(self, lab: Any) -> None:
        def choose(ctx: FitContext, _e: Sequence[Card], reasons: Mapping[str, int]) -> Refused:
            assert reasons == {"CardNotHealth": 1}
            return Refused({"AllocatedCardsInsufficientRequest": 2}, ctx.request.nums)

        result = ask(lab, vendor(Hooks(choose=choose)), [card("a"), card("b", health=False)], nums=2)
        assert result.text() == "2/2 AllocatedCardsInsufficientRequest"

    def test_record_writes_down_what_the_vendor_wants(self, lab: Any) -> None:
        def record(_ctx: FitContext, one: Card, need: Need, _t: Sequence[ContainerDevice]) -> ContainerDevice:
            return ContainerDevice(one.info.id, "X", need.mem * 2, 3, payload="slice")

        result = ask(lab, vendor(Hooks(record=record)), [card()])
        assert result.devices == (ContainerDevice("c0", "X", 20, 3, payload="slice"),)

    def test_health_may_depend_on_use(self) -> None:
        p = vendor(Hooks(healthy=lambda _info, used: used.slots < 2))
        assert card_healthy(p, card().info, Usage(1))
        assert not card_healthy(p, card().info, Usage(2))

    def test_quota_is_charged_in_the_vendors_units(self, lab: Any) -> None:
        p = vendor(Hooks(quota_use=lambda used, total: (used.mem, 100 * used.cores // total)))
        assert quota_use(p, {"c0": Usage(1, 5, 76)}, {"c0": 304}) == (5, 25)
        request = ContainerRequest(1, "X", 10, 0, 76)
        for left, fits in ((24, False), (25, True)):
            context = FitContext(
                [card(devcore=304)], request, lab.info(), lab.node(), quota=QuotaView(cores_left=left)
            )
            assert (fit(p, context).devices is not None) is fits


class TestOutputs:
    def test_extra_annotations_join_the_two_keys(self, lab: Any) -> None:
        def extra(ctx: AnnotateContext) -> dict[str, str]:
            return {"x.io/time": str(int(ctx.now.timestamp()))}

        now = datetime(2026, 8, 22, tzinfo=UTC)
        device = ContainerDevice("c0", "X", 1, 2)
        context = AnnotateContext(lab.info(), ((device,),), lab.node(), now)
        assert annotations(vendor(Hooks(extra_annotations=extra)), context) == {
            "x.io/allocated": "c0,X,1,2:;",
            "x.io/to-allocate": "c0,X,1,2:;",
            "x.io/time": "1787356800",
        }
        assert annotations(vendor(to_allocate=None), context) == {"x.io/allocated": "c0,X,1,2:;"}

    @pytest.mark.parametrize(
        ("bonus", "binpack", "spread"),
        [
            (NodeBonus(7.5), 7.5, -7.5),
            (NodeBonus(2.0, weight=10_000), 20_000.0, -20_000.0),
            (NodeBonus(3.0, higher_is_better=False), 3.0, 3.0),
        ],
    )
    def test_a_bonus_turns_its_sign_under_spread(
        self, lab: Any, bonus: NodeBonus, binpack: float, spread: float
    ) -> None:
        p = vendor(Hooks(node_bonus=lambda _ctx: bonus))
        assert node_bonus(p, ScoreContext(lab.node(), (), [], "binpack")) == binpack
        assert node_bonus(p, ScoreContext(lab.node(), (), [], "spread")) == spread

    def test_a_vendor_without_topology_adds_nothing(self, lab: Any) -> None:
        assert node_bonus(vendor(), ScoreContext(lab.node(), (), [], "spread")) == 0.0
