"""MetaX: the acceptance cases of vendors/metax.md §8."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vendor_desk import NOW, Desk, pod

from hami.protocol.allocation import ContainerDevice
from hami.protocol.errors import ProtocolError
from hami.scheduler.core.answers import Placement
from hami.vendors import metax_links
from hami.vendors.engine import node_bonus, node_devices, read_inventory
from hami.vendors.types import ContainerRequest, PodInfo, PodShape, ScoreContext, SlotKind

Lab = Any
GPU = "metax-tech.com/gpu"
SGPU, MEMORY, CORES = "metax-tech.com/sgpu", "metax-tech.com/vmemory", "metax-tech.com/vcore"
REGISTER = "metax-tech.com/node-gpu-devices"
QOS, APP_CLASS = "metax-tech.com/sgpu-qos-policy", "metax-tech.com/sgpu-app-class"
LOSSES, SCORES = "metax-tech.com/gpu.topology.losses", "metax-tech.com/gpu.topology.scores"
BEST = {QOS: "best-effort"}
SPREAD, BINPACK = {"hami.io/node-scheduler-policy": "spread"}, {"hami.io/node-scheduler-policy": "binpack"}


# --- whole cards ------------------------------------------------------------------------------------------


@pytest.fixture
def whole(lab: Lab) -> Desk:
    return Desk(lab.vendor("Metax-GPU"))


def gpus(number: Any) -> dict[str, Any]:
    return {GPU: number}


def test_case_1_the_cards_of_the_capacity(whole: Desk) -> None:
    whole.node("east", capacity={GPU: 3})
    found = whole.cards("east")
    assert [one.id for one in found] == ["east-metax-0", "east-metax-1", "east-metax-2"]
    assert {(one.count, one.devmem, one.devcore, one.type) for one in found} == {(1, 65536, 100, "Metax-GPU")}


@pytest.mark.parametrize("capacity", [{}, {GPU: 0}])
def test_case_2_without_capacity_the_cards_are_gone(whole: Desk, capacity: dict[str, int]) -> None:
    whole.node("east", capacity={GPU: 3})
    whole.node("east", capacity=capacity)
    assert whole.cards("east") == []


def test_case_3_the_last_card_is_taken_first(whole: Desk) -> None:
    whole.node("east", capacity={GPU: 2})
    written = whole.written(pod(gpus(1)))
    assert written["hami.io/metax-gpu-devices-allocated"] == "east-metax-1,Metax-GPU,65536,100:;"
    assert written["hami.io/metax-gpu-devices-to-allocate"] == "east-metax-1,Metax-GPU,65536,100:;"


def test_case_4_a_card_has_one_slot(whole: Desk) -> None:
    whole.node("east", capacity={GPU: 1})
    whole.hold("a", "east", "east-metax-0,Metax-GPU,65536,100:;")
    assert whole.refused(pod(gpus(1)), "east") == "1/1 CardTimeSlicingExhausted"


def test_case_5_containers_take_their_own_cards(whole: Desk) -> None:
    whole.node("east", capacity={GPU: 2})
    text = "east-metax-1,Metax-GPU,65536,100:;east-metax-0,Metax-GPU,65536,100:;"
    assert whole.allocated(pod(gpus(1), gpus(1))) == text


def bonus(
    lab: Lab, table: Mapping[str, str], cards: int, policy: Any, kinds: tuple[SlotKind, ...] = (SlotKind.APP,)
) -> float:
    """What the adapter adds for a pod with so many cards per container."""
    device = ContainerDevice("c", "Metax-GPU", 65536, 100)
    slots = tuple((device,) * cards for _ in kinds)
    info = PodInfo("u", "ns", "p", {}, PodShape(kinds, tuple(f"c{at}" for at in range(len(kinds)))))
    context = ScoreContext(lab.node(annotations=table), slots, (), policy, info)
    return node_bonus(lab.vendor("Metax-GPU"), context)


def test_case_6_the_loss_of_the_number_of_cards_counts(lab: Lab) -> None:
    assert bonus(lab, {LOSSES: '{"1":100,"3":250}'}, 3, "binpack") == 1750
    assert bonus(lab, {LOSSES: '{"1":100,"3":250}'}, 2, "binpack") == 0
    assert bonus(lab, {LOSSES: '{"1":100}'}, 1, "spread") == 0


@pytest.mark.parametrize(
    "text", ['{"2":"high"}', "[]", "no", '{"2":1.5}', '{"x":1}', "null", '{"2":' + "1" * 99]
)
def test_case_7_a_table_nobody_can_read_counts_nothing_and_is_told(lab: Lab, text: str) -> None:
    assert bonus(lab, {SCORES: text}, 2, "spread") == 0
    node = lab.node(annotations={SCORES: text}, capacity={GPU: 2})
    (warning,) = read_inventory(lab.vendor("Metax-GPU"), node).warnings
    assert SCORES in warning


def test_cards_at_a_time_decide_not_those_of_all_containers(lab: Lab) -> None:
    kinds = (SlotKind.INIT, SlotKind.APP, SlotKind.APP)
    assert bonus(lab, {LOSSES: '{"4":10}'}, 2, "binpack", kinds) == 1990
    kinds = (SlotKind.SIDECAR, SlotKind.INIT, SlotKind.APP)
    assert bonus(lab, {LOSSES: '{"4":10}'}, 2, "binpack", kinds) == 1990


@pytest.mark.parametrize(("policy", "node"), [(BINPACK, "west"), (SPREAD, "east")])
def test_case_28_the_table_ranks_the_nodes(whole: Desk, policy: dict[str, str], node: str) -> None:
    tables = {"east": ('{"2":90}', '{"2":110}'), "west": ('{"2":20}', '{"2":60}')}
    for name, (losses, scores) in tables.items():
        whole.node(name, capacity={GPU: 4}, annotations={LOSSES: losses, SCORES: scores})
    assert whole.written(pod(gpus(2), annotations=policy))["hami.io/vgpu-node"] == node


def test_a_node_policy_of_another_name_looks_into_no_table(whole: Desk) -> None:
    whole.node("east", capacity={GPU: 2})
    whole.node("west", capacity={GPU: 4}, annotations={LOSSES: '{"1":20}', SCORES: '{"1":60}'})
    other = {"hami.io/node-scheduler-policy": "fastest"}
    assert whole.written(pod(gpus(1), annotations=other))["hami.io/vgpu-node"] == "east"
    assert whole.written(pod(gpus(1), annotations=BINPACK))["hami.io/vgpu-node"] == "west"


# --- shares: admission ------------------------------------------------------------------------------------


class Shares(Desk):
    """Nodes with cards in sGPU mode."""

    def cards_of(self, name: str, *cards: Mapping[str, Any]) -> None:
        """A node with these cards, each 16 shares, 64 GiB, healthy."""
        base = {"totalDevCount": 16, "totalCompute": 100, "totalVRam": 65536, "healthy": True}
        self.registered(name, *({**base, **card} for card in cards))

    def holder(self, name: str, card: str, cores: int = 40, **annotations: str) -> None:
        """A running pod with a share of a card of n1."""
        written = {"qos": QOS, "app_class": APP_CLASS}
        own = {written[key]: text for key, text in annotations.items()}
        self.hold(name, "n1", f"{card},Metax-SGPU,1024,{cores}:;", annotations=own)


@pytest.fixture
def desk(lab: Lab) -> Shares:
    return Shares(lab.vendor("Metax-SGPU"))


@pytest.fixture
def one(desk: Shares) -> Shares:
    """Node n1 with card G."""
    desk.cards_of("n1", {"uuid": "G"})
    return desk


@pytest.mark.parametrize("text", ["", "{", "null", "[null]", '[{"uuid":""}]'])
def test_shares_of_a_list_that_nobody_can_read_are_dropped_with_an_event(one: Shares, text: str) -> None:
    """README R4: other vendors keep the last good devices."""
    outcome = one.node("n1", annotations={"metax-tech.com/node-gpu-devices": text})
    assert "n1" not in one.state.node_names()
    (notice,) = outcome.notices
    assert notice.reason == "RegistrationUnreadable"
    assert notice.message.endswith("the node has no such devices until it is mended")


@pytest.mark.parametrize("number", [10**400, -(10**400), 2**31])
def test_a_table_with_a_number_beyond_an_int32_is_no_table(whole: Desk, number: int) -> None:
    whole.node("east", capacity={GPU: 4}, annotations={LOSSES: json.dumps({"2": number})})
    whole.node("west", capacity={GPU: 4}, annotations={LOSSES: json.dumps({"2": 90})})
    answer = whole.place(pod(gpus(2)))
    assert isinstance(answer, Placement)
    assert answer.node == "west"


def sgpu(number: Any = 1, **amounts: Any) -> dict[str, Any]:
    names = {"memory": MEMORY, "cores": CORES}
    return {SGPU: number, **{names[key]: amount for key, amount in amounts.items()}}


@pytest.mark.parametrize(
    ("limit", "gib", "fits"),
    [
        ("4Gi", 4, True),
        ("4Gi", 5, False),
        ("1536Mi", 1, True),
        ("1536Mi", 2, False),
        (4, 4, True),
        (4, 5, False),
    ],
)
def test_a_quota_is_gib_or_bytes_with_a_suffix(one: Shares, limit: Any, gib: int, fits: bool) -> None:
    one.quota({MEMORY: limit})
    asked = pod(sgpu(memory=gib, cores=10), annotations={"metax-tech.com/sgpu-qos-policy": "best-effort"})
    if fits:
        assert one.allocated(asked) == f"G,Metax-SGPU,{gib * 1024},10:;"
    else:
        assert one.refused(asked) == "1/1 ResourceQuotaNotFit"


def test_case_8_a_policy_is_set_where_there_is_none(one: Shares) -> None:
    assert one.admitted(pod(sgpu()))["metadata"]["annotations"] == BEST


@pytest.mark.parametrize(
    ("limits", "annotations", "text"),
    [
        pytest.param(
            sgpu(),
            {QOS: "Burst-share"},
            f"{QOS} must be set one of [best-effort, fixed-share, burst-share]",
            id="9",
        ),
        pytest.param(sgpu(2), {APP_CLASS: "online"}, "app-class pod must request single device", id="10"),
        pytest.param(
            sgpu(), {APP_CLASS: "oNLine"}, f"{APP_CLASS} must be set one of [online, offline]", id="class"
        ),
        pytest.param(
            sgpu(memory="2k"),
            {},
            f"{MEMORY} is too small: 2k in container app0 is 2000 bytes; without a suffix the unit is "
            "GiB, but Kubernetes writes multiples of 1000 with one: use Gi",
            id="16",
        ),
        pytest.param(
            sgpu(memory=2097152),
            {},
            f"{MEMORY} is out of range: 2097152 in container app0; give 0 to 2097151 (GiB), or an "
            "amount with a suffix",
            id="17",
        ),
        pytest.param(sgpu(cores=120), {}, f"{CORES} of container app0 must be in range [0,100]", id="cores"),
    ],
)
def test_what_cannot_be_served_is_denied_with_the_reason(
    one: Shares, limits: dict[str, Any], annotations: dict[str, str], text: str
) -> None:
    assert one.denied(pod(limits, annotations=annotations)) == text


def test_case_11_online_pods_need_no_policy(one: Shares) -> None:
    annotations = {APP_CLASS: "online", QOS: "whatever"}
    assert one.admitted(pod(sgpu(), annotations=annotations))["metadata"]["annotations"] == annotations


@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        pytest.param(sgpu(cores=30, memory=3), (1, 3072, 0, 30), id="12"),
        pytest.param(sgpu(2), (2, 0, 100, 100), id="13"),
        pytest.param(sgpu(memory="1536Mi"), (1, 1536, 0, 100), id="14"),
        pytest.param(sgpu(memory="4G"), (1, 3814, 0, 100), id="15"),
        pytest.param(sgpu(memory=0), (1, 0, 100, 100), id="no memory"),
        pytest.param(sgpu(memory="2097151"), (1, 2147482624, 0, 100), id="most"),
    ],
)
def test_requests_are_read_in_gib_or_bytes(one: Shares, limits: dict[str, Any], numbers: Any) -> None:
    assert one.numbers(pod(limits)) == numbers


def test_memory_without_cores_gets_a_warning(one: Shares) -> None:
    assert "gets all compute" in one.review(pod(sgpu(memory=4))).warnings[0]
    assert list(one.review(pod(sgpu(memory=4, cores=10))).warnings) == []


# --- shares: fit ------------------------------------------------------------------------------------------


def test_case_18_shares_of_a_card_have_one_policy(one: Shares) -> None:
    one.holder("a", "G", qos="burst-share")
    assert one.refused(pod(sgpu(cores=40), annotations=BEST)) == "1/1 CardQosPolicyMismatch"
    assert one.allocated(pod(sgpu(cores=40, memory=1), annotations={QOS: "burst-share"})) != ""


def test_case_19_an_idle_card_takes_any_policy(desk: Shares) -> None:
    desk.cards_of("n1", {"uuid": "G", "qosPolicy": "burst-share"})
    assert desk.allocated(pod(sgpu(cores=40), annotations=BEST)) == "G,Metax-SGPU,65536,40:;"


@pytest.mark.parametrize(
    ("holders", "own", "fits"),
    [
        pytest.param(("",), "online", False, id="20"),
        pytest.param(("offline",), "online", True, id="online beside offline"),
        pytest.param(("online", "offline"), "online", True, id="online beside both"),
        pytest.param(("",), "offline", False, id="offline beside normal"),
        pytest.param(("offline",), "offline", True, id="offline beside offline"),
        pytest.param(("online",), "offline", False, id="offline beside online"),
        pytest.param(("",), "", True, id="normal beside normal"),
        pytest.param(("offline",), "", False, id="normal beside offline"),
        pytest.param(("online",), "", False, id="normal beside online"),
    ],
)
def test_classes_that_share_a_card(one: Shares, holders: tuple[str, ...], own: str, fits: bool) -> None:
    for number, word in enumerate(holders):
        classes = {"app_class": word} if word else {}
        one.holder(f"h{number}", "G", cores=10, qos="best-effort", **classes)
    annotations = {**BEST, **({APP_CLASS: own} if own else {})}
    asking = pod(sgpu(cores=10, memory=1), annotations=annotations)
    if fits:
        assert one.allocated(asking).startswith("G,Metax-SGPU,1024,")
    else:
        assert one.refused(asking) == "1/1 CardAppClassMismatch"


def test_case_21_an_unhealthy_card(desk: Shares) -> None:
    desk.cards_of("n1", {"uuid": "G", "healthy": False})
    assert desk.refused(pod(sgpu())) == "1/1 CardUnhealthy"


def test_case_22_more_cores_than_a_card_has(lab: Lab) -> None:
    card = lab.card("G", count=16, devmem=65536, type="Metax-SGPU", vendor="Metax-SGPU", mode="")
    request = ContainerRequest(1, "Metax-SGPU", 1024, 0, 120)
    assert lab.fit([card], request, profile=lab.vendor("Metax-SGPU")).text() == "1/1 CardInsufficientCore"


def test_case_23_too_few_cards_fit(desk: Shares) -> None:
    desk.cards_of("n1", {"uuid": "G"}, {"uuid": "H", "healthy": False})
    reason = "1/2 AllocatedCardsInsufficientRequest, 1/2 CardUnhealthy"
    assert desk.refused(pod(sgpu(2))) == reason


def test_case_24_the_vendors_key_has_a_list_per_container(one: Shares) -> None:
    written = one.written(pod(sgpu(cores=30, memory=8), inits=[{}], annotations=BEST))
    assert written["metax-tech.com/gpu-devices-allocated"] == '[[],[{"uuid":"G","compute":30,"vRam":8192}]]'
    assert written["hami.io/metax-sgpu-devices-allocated"] == ";G,Metax-SGPU,8192,30:;"
    assert written["hami.io/metax-sgpu-devices-to-allocate"] == ";G,Metax-SGPU,8192,30:;"
    assert written["metax-tech.com/predicate-time"] == f"{int(NOW)}000000000"


def test_case_25_online_pods_take_no_cores(one: Shares) -> None:
    written = one.written(pod(sgpu(memory="6144Mi"), annotations={APP_CLASS: "online"}))
    assert written["metax-tech.com/gpu-devices-allocated"] == '[[{"uuid":"G","vRam":6144}]]'
    assert written["hami.io/metax-sgpu-devices-allocated"] == "G,Metax-SGPU,6144,0:;"


@pytest.mark.parametrize("text", [pytest.param("[]", id="26"), pytest.param(None, id="none")])
def test_without_a_list_the_vendor_leaves_the_node(one: Shares, text: str | None) -> None:
    one.node("n1", annotations={} if text is None else {REGISTER: text})
    assert one.cards("n1") == []


def test_case_27_the_policy_is_that_of_the_holders_after_a_restart(one: Shares) -> None:
    one.holder("a", "G", cores=40, qos="burst-share")
    assert one.refused(pod(sgpu(cores=40), annotations=BEST)) == "1/1 CardQosPolicyMismatch"
    one.state.delete_pod("uid-a")
    assert one.allocated(pod(sgpu(cores=40), annotations=BEST)) != ""


def test_a_card_given_whole_has_no_policy(desk: Shares) -> None:
    desk.cards_of("n1", {"uuid": "G"})
    desk.hold("a", "n1", "G,Metax-SGPU,1024,100:;", annotations={QOS: "burst-share"})
    assert desk.refused(pod(sgpu(cores=40, memory=1), annotations=BEST)) == "1/1 CardInsufficientCore"


def test_the_pod_itself_is_a_holder_for_its_next_container(one: Shares) -> None:
    asking = pod(sgpu(memory=1), sgpu(memory=1), annotations={APP_CLASS: "online"})
    assert one.allocated(asking) == "G,Metax-SGPU,1024,0:;G,Metax-SGPU,1024,0:;"


def test_an_online_pod_keeps_away_from_others(desk: Shares) -> None:
    desk.cards_of("n1", {"uuid": "A"}, {"uuid": "B"}, {"uuid": "C"})
    desk.holder("off", "A", app_class="offline", qos="best-effort")
    desk.holder("on", "B", cores=0, app_class="online")
    desk.holder("x", "C", app_class="offline", qos="best-effort")
    desk.holder("y", "C", cores=0, app_class="online")
    asking = pod(sgpu(memory=1), annotations={APP_CLASS: "online"})
    assert desk.allocated(asking).startswith("B,"), "no offline pod beside it"


@pytest.mark.parametrize(
    ("zones", "count", "chosen"),
    [
        ((1, 1, 2), 1, [2]),
        ((1, 1, 2, 2, 2), 2, [0, 1]),
        ((1, 1, 2, 2, 2), 4, [0, 1, 2, 3]),
        ((0, 0, 1, 1, 1), 4, [2, 3, 4, 0]),
        ((3, 4), 1, [0]),
    ],
)
def test_linked_cards_are_picked_together(zones: tuple[int, ...], count: int, chosen: list[int]) -> None:
    assert metax_links.pick(zones, count) == chosen


@pytest.mark.parametrize(
    ("free", "given", "score"),
    [
        ((1, 1, 1, 1), (1,), -30),
        ((1, 1, 1, 1), (1, 1), 60),
        ((1, 1, 1, 1, 2, 2), (2, 2), 100),
        ((1, 1, 2, 2), (1, 2), -20),
        ((1,) * 4 + (2,) * 4, (1,) * 4 + (2,) * 4, 1200),
        ((0, 0), (0, 0), 0),
    ],
)
def test_the_score_of_links(free: tuple[int, ...], given: tuple[int, ...], score: int) -> None:
    assert metax_links.score(free, given) == score


def test_topology_ranks_nodes_for_cards_given_whole(desk: Shares) -> None:
    desk.cards_of("split", {"uuid": "a", "linkZone": 1}, {"uuid": "b", "linkZone": 2})
    desk.cards_of("linked", {"uuid": "c", "linkZone": 1}, {"uuid": "d", "linkZone": 1})
    aware = {"metax-tech.com/sgpu-topology-aware": "true", **BEST}
    for policy in (SPREAD, BINPACK):
        obj = pod(sgpu(2), annotations={**aware, **policy})
        assert desk.written(obj)["hami.io/vgpu-node"] == "linked"
        desk.state.release("uid-p")


def test_the_quota_is_in_gib_and_counts_no_cores_of_online_pods(one: Shares) -> None:
    one.quota({MEMORY: 8, CORES: 10})
    assert one.review(pod(sgpu(memory=8, cores=10), annotations=BEST)).allowed
    assert one.denied(pod(sgpu(memory=9, cores=10), annotations=BEST)) == "exceeding resource quota"
    assert one.review(pod(sgpu(memory=8), annotations={APP_CLASS: "online"})).allowed
    assert one.refused(pod(sgpu(cores=10), annotations=BEST)) == "1/1 ResourceQuotaNotFit"


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "uuid": st.sampled_from(["A", "B", "", "x,y", 5]),
                "totalDevCount": st.integers(-1, 20) | st.none(),
                "totalVRam": st.integers() | st.text(max_size=2),
                "healthy": st.booleans(),
                "linkZone": st.integers(),
                "numa": st.integers(-1, 3),
            },
        )
        | st.integers(),
        max_size=4,
    ).map(json.dumps)
    | st.text(max_size=20)
)
def test_no_registration_breaks_the_reader(lab: Lab, text: str) -> None:
    try:
        found = node_devices(lab.vendor("Metax-SGPU"), lab.node(annotations={REGISTER: text}))
    except ProtocolError:
        return
    assert {one.id for one in found} <= {"A", "B"}
    assert len({one.id for one in found}) == len(found) > 0
