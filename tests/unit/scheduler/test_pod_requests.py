"""From pod objects to requests, hostile ones included (scheduler.md §6.2)."""

from typing import Any

import pytest

from hami.protocol.errors import ObjectError
from hami.scheduler.core.answers import Placement, PlacementError
from hami.scheduler.core.hosts import effective_amount
from hami.scheduler.core.requests import slots_needed
from hami.vendors.types import PodShape, SlotKind

Lab = Any
INIT, SIDECAR, APP = SlotKind.INIT, SlotKind.SIDECAR, SlotKind.APP


def test_slots_are_init_containers_first_and_only_requests_appear(lab: Lab) -> None:
    pod = lab.pod("new", lab.container("a"), inits=[lab.container("i", gpus=None)])
    request = lab.request(pod)
    assert [list(slot) for slot in request.slots] == [[], ["NVIDIA"]]
    assert request.vendors == ("NVIDIA",)


def test_bookkeeping_annotations_make_no_other_request(lab: Lab) -> None:
    plain = lab.request(lab.pod("a"))
    touched = lab.request(lab.pod("b", annotations={"hami.io/requeue": "1", "hami.io/vgpu-node": "n1"}))
    chosen = lab.request(lab.pod("c", annotations={"nvidia.com/use-gputype": "T4"}))
    assert plain.signature == touched.signature
    assert plain.signature != chosen.signature


@pytest.mark.parametrize(
    "pod",
    [
        {"metadata": 7},
        {"metadata": {"annotations": {"a": 1}}},
        {"spec": {"containers": "many"}},
        {"spec": {"containers": [7]}},
        {"spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": ["1"]}}}]}},
        {"spec": {"initContainers": {"name": "c"}}},
    ],
)
def test_what_is_no_pod_is_an_object_error(lab: Lab, pod: dict[str, Any]) -> None:
    with pytest.raises(ObjectError):
        lab.state.parse(pod)


@pytest.mark.parametrize("pod", [{}, {"spec": None}, {"metadata": None, "spec": {"containers": None}}])
def test_an_empty_pod_wants_nothing_or_is_an_object_error(lab: Lab, pod: dict[str, Any]) -> None:
    try:
        assert lab.state.parse(pod) is None
    except ObjectError:
        assert None in pod.values()


@pytest.mark.parametrize("amount", ["-1", "1.5", "1e99", "zero", "", "9999999999"])
def test_amounts_nobody_can_serve_fail_every_node(lab: Lab, amount: str) -> None:
    lab.node("n1", lab.card("a"))
    pod = lab.pod("new", lab.container(mem=amount))
    assert amount[:3] in lab.refused(pod)["n1"]


@pytest.mark.parametrize(
    ("kinds", "amounts", "expected"),
    [
        ((APP, APP), (3, 4), 7),
        ((INIT, APP), (9, 4), 9),
        ((SIDECAR, INIT, APP), (2, 9, 4), 11),
        ((INIT, SIDECAR, APP), (9, 2, 4), 9),
        ((INIT, SIDECAR, APP), (1, 2, 4), 6),
        ((), (), 0),
    ],
)
def test_the_effective_amount_is_that_of_kubernetes(kinds: Any, amounts: Any, expected: int) -> None:
    assert effective_amount(PodShape(kinds, ("",) * len(kinds)), amounts) == expected


def test_slots_needed_follow_the_same_formula(lab: Lab) -> None:
    inits = [lab.sidecar("s", gpus=1), lab.container("i", gpus=4)]
    request = lab.request(lab.pod("new", lab.container("a", gpus=2), inits=inits))
    assert slots_needed(request, "NVIDIA") == 5


@pytest.mark.parametrize("raw", [b"", b"{}", b"[1]", b'["a",', b'"n1"', b'["\xff"]'])
def test_a_list_of_names_that_is_none_is_an_object_error(lab: Lab, raw: bytes) -> None:
    with pytest.raises(ObjectError):
        lab.state.candidates_json(raw)


def test_abandoned_searches_do_not_pile_up(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    mask = lab.state.candidates(["n1"])
    searches = [lab.state.search(lab.request(lab.pod(f"p{at}")), mask, lab.now) for at in range(300)]
    with pytest.raises(PlacementError, match="not finished"):
        searches[0].advance(1)
    assert isinstance(searches[-1].advance(1), Placement)


def test_an_answer_stays_the_same_when_it_is_asked_for_again(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    search = lab.state.search(lab.request(lab.pod("p")), lab.state.candidates(["n1"]), lab.now)
    assert search.advance(1) is search.advance(1)
