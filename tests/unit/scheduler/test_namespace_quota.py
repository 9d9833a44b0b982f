"""Quota on memory and cores (scheduler.md §9, acceptance cases 43 to 48)."""

from typing import Any

import msgspec
import pytest

from hami.protocol import views

Lab = Any


@pytest.fixture
def four(lab: Lab) -> Lab:
    """One node with four cards of 8000 MiB."""
    lab.node("n1", *(lab.card(f"c{at}") for at in range(4)))
    return lab


def admitted(lab: Lab, pod: Any) -> bool:
    return bool(lab.state.quota_allows(lab.request(pod)))


def test_a_pod_that_uses_the_quota_exactly_is_scheduled(four: Lab) -> None:
    four.quota("q", gpumem=4000, gpucores=200)
    new = four.pod("new", four.container(gpus=2, mem=2000, cores=100), namespace="q")
    assert admitted(four, new)
    assert four.placed(new)[0] == "n1"


def test_more_than_the_quota_is_denied_at_admission(four: Lab) -> None:
    four.quota("q", gpumem=4000)
    assert not admitted(four, four.pod("new", four.container(gpus=2, mem=3000), namespace="q"))


def test_a_whole_card_is_admitted_and_judged_by_the_card_chosen(four: Lab) -> None:
    four.quota("q", gpumem=1500)
    new = four.pod("new", namespace="q")
    assert admitted(four, new)
    assert four.refused(new) == {"n1": "4/4 ResourceQuotaNotFit"}


def test_an_explicit_zero_blocks(four: Lab) -> None:
    four.quota("q", gpumem=0)
    assert not admitted(four, four.pod("new", four.container(mem=500), namespace="q"))


def test_cards_beyond_the_quota_are_counted_apart(four: Lab) -> None:
    four.quota("q", gpumem=1500)
    new = four.pod("new", four.container(gpus=2, mem=1000), namespace="q")
    assert four.refused(new) == {"n1": "1/4 AllocatedCardsInsufficientRequest, 3/4 ResourceQuotaNotFit"}


def test_rewriting_a_quota_never_opens_it(four: Lab) -> None:
    four.quota("q", gpumem=1000)
    four.holder("h", "n1", "c0,NVIDIA,1000,0:;", namespace="q")
    new = four.pod("new", four.container(mem=1), namespace="q")
    for limit in (900, 1000, 900):
        four.quota("q", gpumem=limit)
        assert not admitted(four, new)
        assert four.refused(new) == {"n1": "4/4 ResourceQuotaNotFit"}


def test_a_quota_in_arrears_admits_no_request_at_all(four: Lab) -> None:
    four.holder("h", "n1", "c0,NVIDIA,2000,0:;", namespace="q")
    four.quota("q", gpumem=1000)
    percent = four.pod("new", four.container(percent=10, cores=10), namespace="q")
    assert not admitted(four, percent)
    assert four.state.quota_shortage(four.request(percent)) == (
        "nvidia.com/gpumem: 0 asked, 0 left of the quota limits.nvidia.com/gpumem in namespace q"
    )
    four.quota("q", gpumem=2000)
    assert admitted(four, percent)


def test_a_request_of_no_known_amount_is_left_to_the_fit(four: Lab) -> None:
    four.holder("h", "n1", "c0,NVIDIA,2000,0:;", namespace="q")
    four.quota("q", gpumem=1000)
    new = four.pod("new", four.container(percent=10, cores=0), namespace="q")
    assert admitted(four, new)
    assert four.refused(new) == {"n1": "4/4 ResourceQuotaNotFit"}


def test_init_containers_count_with_their_maximum(four: Lab) -> None:
    four.quota("q", gpumem=2000)
    four.holder("h", "n1", "c0,NVIDIA,1000,0:;", namespace="q")
    inits = [four.container("i0", mem=800), four.container("i1", mem=800)]
    assert admitted(four, four.pod("new", four.container(mem=500), inits=inits, namespace="q"))


def test_sidecars_count_with_their_sum(four: Lab) -> None:
    four.quota("q", gpumem=1000)
    inits = [four.sidecar("s", mem=600)]
    assert not admitted(four, four.pod("new", four.container(mem=500), inits=inits, namespace="q"))


def test_containers_of_one_pod_add_up_at_fit(four: Lab) -> None:
    four.quota("q", gpumem=1000)
    two = [four.container("a", mem=600), four.container("b", mem=600)]
    assert four.refused(four.pod("new", *two, namespace="q")) == {"n1": "4/4 ResourceQuotaNotFit"}


def test_several_objects_on_one_resource_the_minimum_counts(four: Lab) -> None:
    four.quota("q", "wide", gpumem=9000)
    four.quota("q", "tight", gpumem=100)
    new = four.pod("new", four.container(mem=500), namespace="q")
    assert not admitted(four, new)
    four.state.delete_quota("q", "tight")
    assert admitted(four, new)
    four.state.delete_quota("q", "wide")
    assert [one for one in four.state.quota_usage() if one.limit is not None] == []


def test_a_key_that_leaves_the_object_limits_no_more(four: Lab) -> None:
    four.quota("q", gpumem=100)
    four.quota("q", gpucores=100)
    assert four.placed(four.pod("new", four.container(mem=500), namespace="q"))[0] == "n1"


@pytest.mark.parametrize("limit", ["1500m", "much", "0.5"])
def test_limits_that_are_no_integers_are_ignored(four: Lab, limit: str) -> None:
    four.quota("q", gpumem=limit)
    assert four.placed(four.pod("new", four.container(mem=500), namespace="q"))[0] == "n1"


@pytest.mark.parametrize(
    "key",
    [
        "nvidia.com/gpumem",
        "requests.nvidia.com/gpumem",
        "limits.nvidia.com/gpu",
        "limits.nvidia.com/gpumem-percentage",
        "limits.cpu",
    ],
)
def test_only_limits_on_memory_and_cores_are_ours(four: Lab, key: str) -> None:
    obj = {"metadata": {"name": "quota", "namespace": "q"}, "spec": {"hard": {key: "1"}}}
    four.state.upsert_quota(msgspec.convert(obj, views.ResourceQuota))
    new = four.pod("new", four.container(mem=500), namespace="q")
    assert admitted(four, new)
    assert four.placed(new)[0] == "n1"
    assert [one for one in four.state.quota_usage() if one.limit is not None] == []


def test_a_limit_may_be_written_with_a_suffix(four: Lab) -> None:
    four.quota("q", gpumem="1k")
    assert four.placed(four.pod("new", four.container(mem=1000), namespace="q"))[0] == "n1"
    assert not admitted(four, four.pod("more", four.container(mem=1), namespace="q"))


def test_the_memory_factor_scales_the_limit(lab: Lab) -> None:
    lab = type(lab)(type(lab.state)(lab.profiles(memoryFactor=2)))
    lab.node("n1", lab.card("a"))
    lab.quota("q", gpumem=1000)
    lab.holder("h", "n1", "a,NVIDIA,600,0:;", namespace="q")
    assert admitted(lab, lab.pod("ok", lab.container(mem=600), namespace="q"))  # 600 + 1200 <= 2000
    assert not admitted(lab, lab.pod("no", lab.container(mem=800), namespace="q"))


def test_other_namespaces_are_not_limited(four: Lab) -> None:
    four.quota("q", gpumem=0)
    assert four.placed(four.pod("new", four.container(mem=500), namespace="r"))[0] == "n1"


def test_a_raised_quota_announces_capacity(four: Lab) -> None:
    four.quota("q", gpumem=100)
    before = four.state.freed
    four.quota("q", gpumem=1000)
    assert four.state.freed > before


def test_a_refusal_is_not_remembered_for_another_quota(four: Lab) -> None:
    four.quota("tight", gpumem=100)
    reasons = {"n1": "4/4 ResourceQuotaNotFit"}
    assert four.refused(four.pod("a", four.container(mem=500), namespace="tight")) == reasons
    assert four.placed(four.pod("b", four.container(mem=500), namespace="free"))[0] == "n1"
    assert four.refused(four.pod("c", four.container(mem=500), namespace="tight")) == reasons
