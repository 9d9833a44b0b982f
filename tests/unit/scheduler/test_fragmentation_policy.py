"""The policy fragmentation-aware: nodes and cards by the growth of capacity that nobody could use."""

import random
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

from hami.protocol import views
from hami.scheduler.core.answers import Placement
from hami.scheduler.core.columns import CardKind
from hami.scheduler.core.hosts import NOTHING, HostAmount, HostBook, HostCharge, need_of
from hami.scheduler.core.mix import RequestKind, RequestMix, VendorMix
from hami.scheduler.core.nodes import Node
from hami.scheduler.core.placement import NodeFit, cards_with
from hami.scheduler.core.pods import shape_of
from hami.scheduler.core.search import Search
from hami.scheduler.core.unusable import Host, States, Tables
from hami.vendors.types import IntArray

Lab = Any
WISH = {
    "hami.io/node-scheduler-policy": "fragmentation-aware",
    "hami.io/gpu-scheduler-policy": "fragmentation-aware",
}
CARD = CardKind("NVIDIA T4", "hami-core", 16000, 100)


@pytest.fixture
def aware(lab: Lab) -> Lab:
    """A cluster whose default policies are fragmentation-aware."""
    return lab.fresh(node_policy="fragmentation-aware", card_policy="fragmentation-aware")


def half(lab: Lab, name: str, gpus: int = 1, **members: Any) -> dict[str, Any]:
    found: dict[str, Any] = lab.pod(name, lab.container(gpus=gpus, mem=4000, cores=50, **members))
    return found


def whole(lab: Lab, name: str, gpus: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = lab.pod(name, lab.container(gpus=gpus, percent=100, cores=100))
    return found


# --- what it chooses --------------------------------------------------------------------------------------


def test_a_half_goes_beside_a_half_and_leaves_the_whole_cards_whole(aware: Lab) -> None:
    aware.node("n1", aware.card("a"), aware.card("b"))
    aware.node("n2", aware.card("c"), aware.card("d"))
    aware.holder("h", "n2", "d,NVIDIA,4000,50:;")
    aware.filter(whole(aware, "seen"))
    aware.state.release("uid-seen")
    assert aware.placed(half(aware, "new")) == ("n2", [["d"]])


def test_a_rest_that_serves_the_mix_is_preferred_to_one_that_serves_nobody(aware: Lab) -> None:
    """40 % fit beside 30 % or beside 60 %: after the first 30 % are left for the pods of 30 %."""
    aware.node("n1", aware.card("a", devmem=10000), aware.card("b", devmem=10000))
    for number in range(20):
        aware.filter(aware.pod(f"seen-{number}", aware.container(mem=3000, cores=30)))
        aware.state.release(f"uid-seen-{number}")
    aware.holder("h1", "n1", "a,NVIDIA,3000,30:;")
    aware.holder("h2", "n1", "b,NVIDIA,5000,50:;")
    new = aware.pod("new", aware.container(mem=4000, cores=40))
    assert aware.placed(new) == ("n1", [["a"]])


def test_nodes_with_room_for_many_cards_at_once_are_kept_for_such_pods(aware: Lab) -> None:
    aware.node("n1", *(aware.card(f"a{at}") for at in range(4)))
    aware.node("n2", *(aware.card(f"b{at}") for at in range(4)))
    aware.holder("h", "n2", "b0,NVIDIA,8000,100:;")
    for number in range(5):
        aware.filter(whole(aware, f"seen-{number}", gpus=4))
        aware.state.release(f"uid-seen-{number}")
    node, _ = aware.placed(whole(aware, "new"))
    assert node == "n2"
    assert aware.placed(whole(aware, "large", gpus=4))[0] == "n1"


def test_cards_that_lose_their_cpu_count_as_unusable(aware: Lab) -> None:
    """Both nodes are alike but for CPU: what the pod leaves no CPU for is lost."""
    for name, cpu in (("n1", "8"), ("n2", "32")):
        node_with_host(aware, name, cpu)
    for number in range(10):
        seen = whole(aware, f"seen-{number}")
        seen["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "6", "memory": "1Gi"}
        aware.filter(seen)
        aware.state.release(f"uid-seen-{number}")
    new = whole(aware, "new")
    new["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "6", "memory": "1Gi"}
    assert aware.placed(new)[0] == "n2"


def test_pods_without_cards_take_cpu_and_give_it_back(aware: Lab) -> None:
    node_with_host(aware, "n1", "16")
    node_with_host(aware, "n2", "16")
    busy = aware.pod("busy", aware.container(gpus=None), node="n1")
    busy["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "15"}}
    aware.see(busy)
    new = whole(aware, "new")
    new["spec"]["containers"][0]["resources"]["requests"] = {"cpu": "4"}
    assert aware.placed(new)[0] == "n2"
    aware.state.delete_pod("uid-busy")
    aware.state.delete_pod("uid-new")
    assert aware.placed(new)[0] == "n1"


def node_with_host(lab: Lab, name: str, cpu: str) -> None:
    lab.node(name, lab.card(f"{name}-a"), lab.card(f"{name}-b"))
    node = {
        "metadata": {"name": name, "annotations": dict(lab.state.node(name).annotations)},
        "status": {"allocatable": {"cpu": cpu, "memory": "64Gi"}},
    }
    lab.state.upsert_node(msgspec.convert(node, views.Node), lab.now)


def test_the_annotations_alone_choose_the_policy(lab: Lab) -> None:
    lab.node("n1", lab.card("a"), lab.card("b"))
    lab.holder("h", "n1", "b,NVIDIA,4000,50:;")
    lab.filter(whole(lab, "seen"))
    lab.state.release("uid-seen")
    new = half(lab, "new")
    new["metadata"]["annotations"] = WISH
    assert lab.placed(new) == ("n1", [["b"]])


def test_other_card_policies_keep_their_cards_and_the_best_node_is_found(lab: Lab) -> None:
    lab = lab.fresh(node_policy="fragmentation-aware", card_policy="spread")
    lab.node("n1", lab.card("a"), lab.card("b"))
    lab.node("n2", lab.card("c"))
    lab.holder("h1", "n1", "b,NVIDIA,4000,50:;")
    lab.holder("h2", "n2", "c,NVIDIA,4000,50:;")
    lab.filter(whole(lab, "seen"))
    lab.state.release("uid-seen")
    assert lab.placed(half(lab, "new")) == ("n2", [["c"]])


def partly_taken(lab: Lab, nodes: int) -> None:
    """So many nodes of four cards; other pods hold parts of some."""
    rng = random.Random(nodes)
    for number in range(nodes):
        name = f"n{number:03d}"
        cards = [lab.card(f"{name}-{at}", devmem=rng.choice([8000, 16000])) for at in range(4)]
        lab.node(name, *cards)
        held = "".join(
            f"{name}-{at},NVIDIA,{rng.choice([1000, 2000, 4000])},{rng.choice([10, 25, 50])}:"
            for at in range(4)
            if rng.random() < 0.6
        )
        lab.holder(f"h{number}", name, f"{held};")


@pytest.mark.parametrize("nodes", [3, 90])
@pytest.mark.parametrize("cards", ["spread", "binpack"])
def test_the_growth_by_the_cards_of_a_fit_is_that_of_the_node_with_the_pod(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, cards: str, nodes: int
) -> None:
    """What the vectors say of the cards that another policy chose, and the node's own sum."""
    lab = lab.fresh(node_policy="fragmentation-aware", card_policy=cards)
    partly_taken(lab, nodes)
    estimated = Search._estimated_growth
    seen: list[tuple[float, float]] = []

    def both(search: Search, node: Node, fit: NodeFit) -> float | None:
        growth = estimated(search, node, fit)
        if growth is not None:
            assert fit.allocations is not None
            after = cards_with(node, search._request, fit.allocations)
            seen.append((growth, search._world.fragmentation.node_growth(node, search._request, after)))
        return growth

    monkeypatch.setattr(Search, "_estimated_growth", both)
    for number, (gpus, mem, cores) in enumerate([(1, 2000, 25), (2, 4000, 50), (4, 1000, 10), (1, 500, 5)]):
        lab.filter(lab.pod(f"new-{number}", lab.container(gpus=gpus, mem=mem, cores=cores)))
    assert len(seen) >= 4
    assert [growth for growth, _ in seen] == pytest.approx([own for _, own in seen], abs=1e-9)


@pytest.mark.parametrize("nodes", [3, 90])
def test_the_vectors_and_the_exact_fit_give_a_node_the_same_score(lab: Lab, nodes: int) -> None:
    """Whether all nodes were fitted or the vectors ordered them."""
    lab = lab.fresh(node_policy="fragmentation-aware", card_policy="fragmentation-aware")
    partly_taken(lab, nodes)
    sizes = [(1, 2000, 25), (2, 4000, 50), (1, 8000, 100), (4, 1000, 10)]
    for number, (gpus, mem, cores) in enumerate(sizes * 3):
        new = lab.pod(f"new-{number}", lab.container(gpus=gpus, mem=mem, cores=cores))
        if number % 3 == 2:  # a second container: nothing but the exact fit knows it
            new["spec"]["containers"].append(lab.container("second", gpus=None))
        answer = lab.filter(new)
        if not isinstance(answer, Placement):
            assert nodes == 3
            continue
        assert answer.scores[-1][0] == answer.node
        shown = dict(answer.scores)
        lab.state.release(f"uid-new-{number}")
        alone = lab.filter(new, answer.node)
        assert isinstance(alone, Placement)
        assert dict(alone.scores)[answer.node] == pytest.approx(shown[answer.node], abs=1e-4)


def test_the_cards_that_one_quota_allows_are_not_those_of_another(aware: Lab) -> None:
    """Half of the large card is more than the namespace may use; others, who may, have asked before."""
    for number in range(70):
        name = f"n{number:02d}"
        aware.node(name, aware.card(f"{name}-large", devmem=16000), aware.card(f"{name}-small"))
    aware.holder("h1", "n10", "n10-large,NVIDIA,8000,50:;")
    aware.quota("tight", gpumem=5000)
    aware.filter(whole(aware, "seen"))
    aware.state.release("uid-seen")
    for namespace in ("default", "tight", "default"):
        new = aware.pod("new", aware.container(percent=50, cores=50), namespace=namespace)
        answer = aware.filter(new)
        assert isinstance(answer, Placement)
        aware.state.release("uid-new")
        alone = aware.filter(new, answer.node)
        assert isinstance(alone, Placement)
        aware.state.release("uid-new")
        assert dict(alone.scores)[answer.node] == pytest.approx(dict(answer.scores)[answer.node], abs=1e-4)


def test_a_node_is_looked_at_again_once_it_has_changed(aware: Lab) -> None:
    """More nodes than are fitted exactly: what is remembered of a node holds for its version only."""
    for number in range(70):
        aware.node(f"n{number:02d}", aware.card(f"c{number:02d}"))
    aware.holder("h", "n40", "c40,NVIDIA,4000,50:;")
    aware.filter(whole(aware, "seen"))
    aware.state.release("uid-seen")
    assert aware.placed(half(aware, "one"))[0] == "n40"
    assert aware.placed(half(aware, "two"))[0] != "n40"
    aware.state.delete_pod("uid-one")
    assert aware.placed(half(aware, "three"))[0] in ("n40", aware.state.reservation("uid-two").node)


# --- the mix ----------------------------------------------------------------------------------------------


def test_a_pod_counts_once_however_often_it_comes() -> None:
    mix = RequestMix()
    for uid in ("a", "a", "a", "b"):
        mix.note_placed(uid, {"NVIDIA": ((device(4000),),)}, NOTHING)
    mix.note_placed("c", {"NVIDIA": ((device(8000),), ())}, NOTHING)
    shares = {kind.memreq: share for kind, share in mix.of("NVIDIA").shares().items()}
    assert shares == {4000: pytest.approx(2 / 3, abs=1e-3), 8000: pytest.approx(1 / 3, abs=1e-3)}


def device(mem: int) -> Any:
    from hami.protocol.allocation import ContainerDevice

    return ContainerDevice("card", "NVIDIA", mem, 50)


def test_old_requests_fade() -> None:
    mix = VendorMix()
    mix.add(kind(mem=1000))
    for _ in range(7000):
        mix.add(kind(mem=2000))
    assert mix.shares()[kind(mem=1000)] < 1 / 9000


def test_the_kinds_that_are_kept_are_bounded() -> None:
    mix = VendorMix()
    for number in range(2000):
        mix.add(kind(mem=number))
        mix.add(kind(mem=7))
    shares = mix.shares()
    assert len(shares) <= 512
    assert shares[kind(mem=7)] == max(shares.values())
    assert sum(shares.values()) == pytest.approx(1)


def test_running_pods_are_the_mix_of_a_restarted_scheduler(lab: Lab) -> None:
    lab.node("n1", lab.card("a"), lab.card("b"))
    lab.holder("h", "n1", "a,NVIDIA,3000,30:b,NVIDIA,3000,30:;")
    (found,) = lab.state._world.fragmentation.mix.of("NVIDIA").shares()
    assert (found.nums, found.memreq, found.cores) == (2, 3000, 30)


def kind(nums: int = 1, mem: int = 0, cores: int = 0, host: HostAmount = NOTHING) -> RequestKind:
    return RequestKind(nums, mem, 0 if mem else 100, cores, host)


# --- the arithmetic ---------------------------------------------------------------------------------------


def unusable_by_hand(
    shares: dict[RequestKind, float], cards: list[tuple[int, int]], host: HostAmount
) -> float:
    """The definition, one kind of request after the other. Cards: free MiB and free percent of `CARD`."""
    total = 0.0
    for one, share in shares.items():
        mem = one.memreq or CARD.devmem * one.mem_percent // 100
        free = [(left / CARD.devmem + cores / 100) / 2 for left, cores in cards]
        serves = [
            left >= mem and cores >= one.cores and cores > 0 and (one.cores < 100 or left == CARD.devmem)
            for left, cores in cards
        ]
        room = host.cpu >= one.host.cpu and host.mem >= one.host.mem
        if not room or sum(serves) < one.nums:
            total += share * sum(free)
        else:
            total += share * sum(f for f, ok in zip(free, serves, strict=True) if not ok)
    return total


def unusable(shares: dict[RequestKind, float], cards: Iterable[tuple[int, int]], host: HostAmount) -> float:
    rows = np.array([(left, cores, left < CARD.devmem) for left, cores in cards])
    states = States(
        kind=np.zeros(len(rows), np.int64),
        devmem=np.full(len(rows), CARD.devmem),
        free_mem=rows[:, 0],
        free_cores=rows[:, 1],
        free_slots=np.full(len(rows), 9),
        used_slots=rows[:, 2],
        alive=np.ones(len(rows), np.bool_),
    )
    tables = Tables(shares, [CARD])
    at = Host(np.array([host.cpu]), np.array([host.mem]))
    codes = np.arange(len(rows))[None, :]
    return float(tables.before(tables.look(states), codes, at).unusable[0])


@pytest.mark.parametrize("seed", range(30))
def test_the_tables_give_what_the_definition_gives(seed: int) -> None:
    rng = random.Random(seed)
    eighth = CARD.devmem // 8

    def some_kind() -> RequestKind:
        part = rng.choice([1, 2, 4, 8])
        host = HostAmount(rng.choice([0, 1000, 4000, 8000]), rng.choice([0, 1024, 4096]))
        return RequestKind(rng.choice([1, 1, 1, 2, 4]), part * eighth, 0, part * 100 // 8, host)

    kinds = list({some_kind() for _ in range(6)})
    if len({one.memreq for one in kinds if one.nums > 1}) > 3:  # more groups than are looked at
        kinds = [one._replace(nums=1) for one in kinds]
    weights = {one: rng.random() for one in kinds}
    shares = {one: weight / sum(weights.values()) for one, weight in weights.items()}
    cards = []
    for _ in range(4):
        taken = rng.choice([0, 0, 1, 2, 4, 8])
        cards.append(((8 - taken) * eighth, 100 - taken * 100 // 8))
    host = HostAmount(rng.choice([0, 2000, 9000]), rng.choice([512, 2048, 8192]))
    assert unusable(shares, cards, host) == pytest.approx(unusable_by_hand(shares, cards, host), abs=0.01)


def test_a_mix_of_hundreds_of_kinds_on_many_kinds_of_cards_fits_into_the_tables() -> None:
    rng = random.Random(3)
    kinds = {
        RequestKind(1, rng.randrange(1, 16000), 0, rng.randrange(100), HostAmount(rng.randrange(64000), 1024))
        for _ in range(400)
    }
    cards = [CardKind(f"model {at}", "hami-core", 1000 * (1 + at), 100) for at in range(100)]
    tables = Tables(dict.fromkeys(kinds, 1 / len(kinds)), [*cards, None])

    def every(value: int) -> IntArray:
        return np.full(100, value, np.int64)

    states = States(
        np.arange(100), every(8000), every(8000), every(100), every(10), every(0), np.ones(100, np.bool_)
    )
    found = tables.before(
        tables.look(states), np.arange(100)[:, None], Host(np.full(100, 64000), np.full(100, 64000))
    ).unusable
    assert np.all((found >= 0) & (found <= 8.1))


# --- CPU and memory ---------------------------------------------------------------------------------------


def test_the_effective_request_of_cpu_and_memory_is_that_of_kubernetes() -> None:
    pod = {
        "metadata": {"name": "p"},
        "spec": {
            "initContainers": [
                {"name": "i", "resources": {"requests": {"cpu": "3", "memory": "1Gi"}}},
                {"name": "s", "restartPolicy": "Always", "resources": {"requests": {"cpu": "100m"}}},
            ],
            "containers": [
                {"name": "a", "resources": {"requests": {"cpu": "1500m", "memory": "1000Mi"}}},
                {"name": "b", "resources": {"limits": {"cpu": "0.5", "memory": "1Mi"}}},
                {"name": "c", "resources": {"requests": {"cpu": "much"}}},
            ],
        },
    }
    view = msgspec.convert(pod, views.Pod)
    assert need_of(view, shape_of(view)) == (3000, 1024)


def test_what_pods_hold_of_a_node_is_given_back_exactly() -> None:
    book = HostBook()
    assert book.set("a", HostCharge("n1", HostAmount(1000, 10))) == ("n1",)
    assert book.set("b", HostCharge("n1", HostAmount(500, 5))) == ("n1",)
    assert book.set("a", HostCharge("n1", HostAmount(1000, 10))) == ()
    assert book.set("a", HostCharge("n2", HostAmount(1000, 10))) == ("n1", "n2")
    assert (book.used("n1"), book.used("n2")) == ((500, 5), (1000, 10))
    book.set("a", None)
    book.set("b", None)
    assert (book.used("n1"), book.used("n2")) == (NOTHING, NOTHING)
