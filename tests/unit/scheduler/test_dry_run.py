"""Dry runs on the nodes of the request (scheduler.md §2.3; cases 59, 60)."""

import json
from typing import Any

import msgspec

from hami.protocol import views

Lab = Any


def node(name: str, *cards: dict[str, Any]) -> views.Node:
    annotations = {"hami.io/node-nvidia-register": json.dumps(cards)} if cards else {}
    return msgspec.convert({"metadata": {"name": name, "annotations": annotations}}, views.Node)


def simulated(lab: Lab, pod: Any, *nodes: views.Node) -> Any:
    simulation = lab.state.simulate(lab.request(pod), nodes)
    while (answer := simulation.advance(1)) is None:
        pass
    return answer


def test_every_fitting_node_is_returned_in_the_order_of_the_request(lab: Lab) -> None:
    answer = simulated(lab, lab.pod("new"), node("b", lab.card("x")), node("a", lab.card("y")))
    assert (answer.fits, answer.failed) == (("b", "a"), {})


def test_a_node_without_devices_is_unregistered_and_nothing_is_remembered(lab: Lab) -> None:
    before = lab.state.fingerprint(), lab.state.version
    answer = simulated(lab, lab.pod("new"), node("bare"))
    assert (answer.fits, answer.failed) == ((), {"bare": "node unregistered"})
    assert (lab.state.fingerprint(), lab.state.version) == before


def test_reasons_are_those_of_the_fit(lab: Lab) -> None:
    answer = simulated(lab, lab.pod("new", lab.container(mem=16384)), node("n", lab.card("x", devmem=8192)))
    assert answer.failed == {"n": "1/1 CardInsufficientMemory"}


def test_running_pods_do_not_count_but_the_live_quota_does(lab: Lab) -> None:
    lab.node("n", lab.card("x"))
    lab.holder("h", "n", "x,NVIDIA,8000,100:;", namespace="q")
    new = lab.pod("new", lab.container(mem=8000), namespace="q")
    assert simulated(lab, new, node("n", lab.card("x"))).fits == ("n",)
    lab.quota("q", gpumem=9000)
    assert simulated(lab, new, node("n", lab.card("x"))).failed == {"n": "1/1 ResourceQuotaNotFit"}


def test_no_nodes_no_answer_but_an_empty_one(lab: Lab) -> None:
    answer = simulated(lab, lab.pod("new"))
    assert (answer.fits, answer.failed) == ((), {})


def test_a_step_is_one_container_on_one_node_and_the_answer_stays(lab: Lab) -> None:
    pod = lab.pod("new", *(lab.container(mem=100) for _ in range(5)))
    simulation = lab.state.simulate(lab.request(pod), [node("a", lab.card("x")), node("b", lab.card("y"))])
    steps = 0
    while (answer := simulation.advance(1)) is None:
        steps += 1
    assert steps >= 10
    assert simulation.advance(1) is answer
    assert answer.fits == ("a", "b")


def test_a_node_of_more_cards_than_there_are_is_not_judged(lab: Lab) -> None:
    cards = [lab.card(f"x{number}") for number in range(513)]
    answer = simulated(lab, lab.pod("new"), node("n", *cards), node("m", *cards[:512]))
    assert answer.failed == {"n": "513 cards, dry runs are made for at most 512 on a node"}
    assert answer.fits == ("m",)
