"""The vector side never says no to a node that fits, and gives the exact reasons (cases 65; I2)."""

import json
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from hami.protocol import views
from hami.scheduler.core import search
from hami.scheduler.core.answers import Placement
from hami.scheduler.core.columns import Bank, CodeBook, Codes
from hami.scheduler.core.masks import may_fit, quota_checks
from hami.scheduler.core.nodes import NodeTable, facts_of
from hami.scheduler.core.placement import fit_node
from hami.scheduler.core.reasons import vector_reasons
from hami.scheduler.core.requests import parse_pod
from hami.scheduler.core.state import ClusterState
from hami.scheduler.core.texts import codes, is_unresolvable
from hami.vendors.config import decode_config, load_profiles
from hami.vendors.engine import node_devices
from hami.vendors.selection import policy_words
from hami.vendors.types import ContainerRequest, DeviceInfo, Holder, QuotaView, Usage

PROFILES = {
    profile.common_word: profile
    for profile in load_profiles(
        decode_config(
            {
                "nvidia": {
                    "resourceCountName": "nvidia.com/gpu",
                    "resourceMemoryName": "nvidia.com/gpumem",
                    "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
                    "resourceCoreName": "nvidia.com/gpucores",
                    "defaultGPUNum": 1,
                }
            }
        )
    )
}
RESOURCES = frozenset({"nvidia.com/gpu"})
MIG = [
    {"name": "1g.5gb", "memoryMB": 4864, "core": 15, "sliceCount": 1, "placements": [{"start": 0, "size": 1}]}
]


@st.composite
def cards(draw: st.DrawFn, node: str) -> list[dict[str, Any]]:
    mode = draw(st.sampled_from(["hami-core", "hami-core", "mig", "mps"]))
    return [
        {
            "id": f"{node}-{at}",
            "index": at,
            "count": draw(st.sampled_from([1, 2, 10])),
            "devmem": draw(st.sampled_from([0, 4000, 16000])),
            "devcore": draw(st.sampled_from([0, 100, 150])),
            "type": draw(st.sampled_from(["NVIDIA T4", "NVIDIA A100"])),
            "numa": draw(st.integers(0, 1)),
            "mode": mode,
            "health": draw(st.sampled_from([True, True, True, False])),
            **({"migProfiles": MIG} if mode == "mig" else {}),
        }
        for at in range(draw(st.integers(1, 5)))
    ]


@st.composite
def clusters(draw: st.DrawFn) -> NodeTable:
    table = NodeTable(PROFILES)
    for number in range(draw(st.integers(1, 4))):
        name = f"n{number}"
        annotations = {"hami.io/node-nvidia-register": json.dumps(draw(cards(name)))}
        if draw(st.booleans()):
            annotations["hami.io/device-cordon"] = f"{name}-0"
        allocatable = draw(st.sampled_from([None, None, 1, 4]))
        status = {} if allocatable is None else {"allocatable": {"nvidia.com/gpu": str(allocatable)}}
        obj = {"metadata": {"name": name, "annotations": annotations}, "status": status}
        facts = facts_of(msgspec.convert(obj, views.Node), RESOURCES)

        node = table.register(facts, {"NVIDIA": tuple(node_devices(PROFILES["NVIDIA"], facts))}, 1)
        for at in draw(st.lists(st.integers(0, 4), max_size=5)):
            usage = Usage(
                draw(st.integers(1, 3)),
                draw(st.sampled_from([0, 3000, 9000])),
                draw(st.sampled_from([0, 50, 100])),
            )
            table.add_usage(node, "NVIDIA", {f"{name}-{at}": usage}, Holder("u", "s", "h", {}, usage), 1)
    return table


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    def container(name: str) -> dict[str, Any]:
        limits = {"nvidia.com/gpu": str(draw(st.integers(1, 3)))}
        size = draw(st.sampled_from([None, ("gpumem", 3000), ("gpumem", 0), ("gpumem-percentage", 30)]))
        if size is not None:
            limits[f"nvidia.com/{size[0]}"] = str(size[1])
        cores = draw(st.sampled_from([None, 0, 40, 100]))
        if cores is not None:
            limits["nvidia.com/gpucores"] = str(cores)
        return {"name": name, "resources": {"limits": limits}}

    choices = {
        "nvidia.com/use-gputype": ["T4", ",", "a100"],
        "nvidia.com/nouse-gputype": ["T4"],
        "nvidia.com/use-gpuuuid": ["n0-0,n1-1", ","],
        "nvidia.com/nouse-gpuuuid": ["n0-0,n0-1"],
        "nvidia.com/vgpu-mode": ["hami-core", "mig", "mps,mig"],
        "nvidia.com/numa-bind": ["true"],
        "hami.io/gpu-scheduler-policy": ["binpack", "mutex", "numa,spread", "topology-aware"],
    }
    chosen = draw(st.lists(st.sampled_from(sorted(choices)), max_size=2, unique=True))
    annotations = {key: draw(st.sampled_from(choices[key])) for key in chosen}
    inits = [container("i")] if draw(st.booleans()) else []
    apps = [container(f"a{at}") for at in range(draw(st.integers(1, 3)))]
    metadata = {"name": "p", "namespace": "s", "uid": "u-new", "annotations": annotations}
    return {"metadata": metadata, "spec": {"initContainers": inits, "containers": apps}}


SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@SETTINGS
@given(table=clusters(), pod=pods())
def test_a_node_the_mask_excludes_does_not_fit(table: NodeTable, pod: dict[str, Any]) -> None:
    request = parse_pod(pod, PROFILES, "binpack", "spread")
    assert request is not None
    mask = may_fit(table, PROFILES, request)
    for node in table.registered():
        if fit_node(node, request, {}).allocations is not None:
            assert mask[node.row]


ROOM = st.sampled_from([None, None, -1, 0, 2999, 3000, 6000, 9000, 10**6])


@SETTINGS
@given(table=clusters(), pod=pods(), mem=ROOM, cores=st.sampled_from([None, None, -1, 0, 40, 100, 200]))
def test_vector_reasons_are_the_exact_ones_where_they_claim_it(
    table: NodeTable, pod: dict[str, Any], mem: int | None, cores: int | None
) -> None:
    request = parse_pod(pod, PROFILES, "binpack", "spread")
    assert request is not None
    profile, wanted = PROFILES["NVIDIA"], request.slots[0]["NVIDIA"]
    alone = len(request.slots) == 1
    left = QuotaView(mem, cores)
    checks = quota_checks(profile, wanted, left)
    words = policy_words(request.card_policy)
    if checks is None or not profile.vector_exact(profile, wanted, request.info, words):
        return
    mask = may_fit(table, PROFILES, request, {"NVIDIA": checks})
    texts, known = vector_reasons(table, profile, wanted, request, checks)
    for node in table.registered():
        exact = fit_node(node, request, {"NVIDIA": left})
        if known[node.row]:
            assert texts[node.row] == exact.reason
        if alone and not any(card.info.mode == "mig" for card in node.vendors["NVIDIA"].cards):
            assert known[node.row] != mask[node.row]
            assert bool(mask[node.row]) == (exact.allocations is not None)


def test_quota_goes_by_vectors_unless_it_depends_on_the_cards_taken_before() -> None:
    def by_vectors(nums: int, mem: int, percent: int, left: QuotaView) -> bool:
        wanted = ContainerRequest(nums, "NVIDIA", mem, percent, 10)
        return quota_checks(PROFILES["NVIDIA"], wanted, left) is not None

    assert by_vectors(1, 0, 50, QuotaView(1000, None))
    assert by_vectors(2, 1000, 0, QuotaView(2000, 20))
    assert by_vectors(2, 1000, 0, QuotaView(999, None))
    assert not by_vectors(2, 1000, 0, QuotaView(1999, None))
    assert not by_vectors(2, 0, 50, QuotaView(10**6, None))
    assert not by_vectors(3, 1000, 0, QuotaView(None, 20))


# --- columns ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 40)), max_size=30), st.randoms(use_true_random=False)
)
def test_a_bank_counts_per_node_what_its_rows_hold(changes: list[tuple[int, int]], random: Any) -> None:
    width = 8 if random.random() < 0.5 else 64
    bank = Bank(width, CodeBook())
    rows: dict[int, tuple[DeviceInfo, ...]] = {}
    for node, cards_ in changes:
        if node in rows:
            at = list(bank.node_rows).index(node)
            bank.remove(at, rows.pop(node))
        else:
            infos = tuple(
                DeviceInfo(f"{node}-{at}", count=at, health=at % 2 == 0) for at in range(min(cards_, width))
            )
            bank.add(node, infos, frozenset({f"{node}-1"}))
            rows[node] = infos
    healthy = dict(
        zip(bank.node_rows.tolist(), bank.per_node(bank.healthy & bank.real).tolist(), strict=True)
    )
    assert healthy == {node: (len(infos) + 1) // 2 for node, infos in rows.items()}
    ids = [bank.tables.ids[code] for code in bank.id[bank.real].tolist()]
    assert sorted(ids) == sorted(info.id for infos in rows.values() for info in infos)
    assert np.count_nonzero(bank.cordoned) == sum(len(infos) > 1 for infos in rows.values())


def test_codes_of_texts_that_are_gone_are_used_again() -> None:
    codes = Codes("")
    assert [codes.take("a"), codes.take("b"), codes.take("a")] == [0, 1, 0]
    codes.drop("a")
    assert codes.codes == {"a": 0, "b": 1}
    codes.drop("a")
    assert codes.take("c") == 0
    assert codes.values == ["c", "b"]


def test_a_node_that_keeps_making_up_models_and_modes_leaves_nothing_behind(lab: Any) -> None:
    for at in range(50):
        lab.node("n1", lab.card(f"c{at}", type=f"t{at}", mode=f"m{at}"))
    tables = lab.state._world.table.columns["NVIDIA"].tables
    assert max(len(tables.types), len(tables.modes), len(tables.ids)) <= 2


# --- texts --------------------------------------------------------------------------------------


def test_only_selection_mismatches_are_beyond_preemption() -> None:
    assert is_unresolvable("node unregistered")
    assert is_unresolvable("NodeInsufficientDevice")
    assert is_unresolvable("1/3 CardUuidMismatch, 2/3 CardTypeMismatch")
    assert not is_unresolvable("1/3 CardNotHealth, 2/3 CardTypeMismatch")
    assert not is_unresolvable("2/2 CardTimeSlicingExhausted")
    assert not is_unresolvable("some text from a vendor")


def test_plain_texts_have_no_codes() -> None:
    assert codes("1/3 CardNotHealth, 2/3 CardTypeMismatch") == ("CardNotHealth", "CardTypeMismatch")
    assert codes("node unregistered") == ()
    assert codes("nvidia.com/gpumem, 1/2 of it") == ()


# --- the choice ---------------------------------------------------------------------------------


@SETTINGS
@given(data=st.data(), policy=st.sampled_from(["binpack", "spread"]), limited=st.booleans())
def test_few_and_many_candidates_give_the_same_node_and_cards(
    data: st.DataObject, policy: str, limited: bool
) -> None:
    """Judging every candidate, and going down from the best, choose alike (D22)."""
    pod = data.draw(pods())
    nodes = [data.draw(node_views(f"n{at}")) for at in range(data.draw(st.integers(1, 5)))]
    holders = [data.draw(holding_pods(f"n{at}")) for at in range(len(nodes))]
    answers: list[tuple[object, object]] = []
    for all_fitted in (64, 0):
        state = ClusterState(tuple(PROFILES.values()), node_policy=policy)
        for node, holder in zip(nodes, holders, strict=True):
            state.upsert_node(node, 0.0)
            state.upsert_pod(holder)
        if limited:
            state.upsert_quota(QUOTA)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(search, "ALL_FITTED", all_fitted)
            request = state.parse(pod)
            assert request is not None
            answer = state.place(request, state.candidates([node.name for node in nodes]), 0.0)
        if isinstance(answer, Placement):
            answers.append((answer.node, answer.reservation.annotations))
        else:
            answers.append(({**answer.failed, **answer.unresolvable}, {}))
    assert answers[0] == answers[1]


QUOTA = msgspec.convert(
    {"metadata": {"namespace": "s", "name": "q"}, "spec": {"hard": {"limits.nvidia.com/gpumem": "9000"}}},
    views.ResourceQuota,
)


@st.composite
def node_views(draw: st.DrawFn, name: str) -> views.Node:
    annotations = {"hami.io/node-nvidia-register": json.dumps(draw(cards(name)))}
    annotations["hami.io/node-handshake"] = "Reported_now"
    status = {"allocatable": {"nvidia.com/gpu": draw(st.sampled_from(["4", "30"]))}}
    return msgspec.convert(
        {"metadata": {"name": name, "annotations": annotations}, "status": status}, views.Node
    )


@st.composite
def holding_pods(draw: st.DrawFn, node: str) -> views.Pod:
    devices = [
        f"{node}-{draw(st.integers(0, 4))},NVIDIA,{draw(st.sampled_from([0, 3000, 9000]))},{cores}:"
        for cores in draw(st.lists(st.sampled_from([0, 50, 100]), max_size=4))
    ]
    annotations = {
        "hami.io/vgpu-node": node,
        "hami.io/vgpu-devices-allocated": "".join(devices) + ";",
    }
    metadata = {"name": f"h-{node}", "namespace": "s", "uid": f"h-{node}", "annotations": annotations}
    spec = {"nodeName": node, "containers": [{"name": "c"}]}
    return msgspec.convert({"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}, views.Pod)
