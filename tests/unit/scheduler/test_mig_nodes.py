"""Cards divided by MIG, from registration to reservation (scheduler.md 30, 31; protocol.md 46, 59)."""

from typing import Any

import pytest

Lab = Any

ALLOCATED = "hami.io/vgpu-devices-allocated"
RESERVED = "hami.io/vgpu-mig-allocations"


def mig_card(lab: Lab, card_id: str, places: int, **members: Any) -> dict[str, Any]:
    """A card of 8000 MiB with `places` places for a slice of 2048 MiB."""
    profile = {
        "name": "1g.2gb",
        "memoryMB": 2048,
        "core": 25,
        "sliceCount": 1,
        "placements": [{"start": start, "size": 1} for start in range(places)],
    }
    made: dict[str, Any] = lab.card(card_id, mode="mig", count=7, migProfiles=[profile], **members)
    return made


def reservation(card_id: str, start: int) -> str:
    return (
        f'[{{"containerIndex":0,"deviceIndex":0,"gpuUUID":"{card_id}","profile":"1g.2gb",'
        f'"placement":{{"start":{start},"size":1}}}}]'
    )


def test_more_slices_than_the_card_has_places_for_are_refused(lab: Lab) -> None:
    lab.node("n1", mig_card(lab, "a", 1))
    reason = lab.refused(lab.pod("new", lab.container(gpus=2, mem=1024)))["n1"]
    assert "1/1 CardMigTopologyInfeasible" in reason


def test_one_card_serves_a_container_twice_with_the_memory_of_the_slice(lab: Lab) -> None:
    lab.node("n1", mig_card(lab, "a", 4))
    assert lab.placed(lab.pod("new", lab.container(gpus=2, mem=1024))) == ("n1", [["a", "a"]])
    written = lab.state.reservation("uid-new").annotations
    assert written[ALLOCATED] == "a,NVIDIA,2048,25:a,NVIDIA,2048,25:;"
    assert lab.used("n1") == {"a": (2, 4096, 50)}


@pytest.mark.parametrize("text", [None, "not json"])
def test_a_pod_on_a_mig_card_without_its_reservation_closes_the_card(lab: Lab, text: str | None) -> None:
    lab.node("n1", mig_card(lab, "a", 4))
    annotations = {"hami.io/vgpu-node": "n1", ALLOCATED: "a,NVIDIA,2048,25:;"}
    if text is not None:
        annotations[RESERVED] = text
    outcome = lab.see(lab.pod("old", lab.container(gpus=None), annotations=annotations, node="n1"))
    told = [] if text is None else ["MigReservationUnreadable"]
    assert [notice.reason for notice in outcome.notices] == told
    assert lab.refused(lab.pod("new", lab.container(mem=1024))) == {"n1": "1/1 CardNotHealth"}
    lab.state.delete_pod("uid-old")
    assert lab.placed(lab.pod("new", lab.container(mem=1024)))[0] == "n1"


def test_a_bad_reservation_closes_no_card_that_its_pod_does_not_hold(lab: Lab) -> None:
    lab.node("n1", mig_card(lab, "a", 4), mig_card(lab, "b", 4))
    annotations = {
        "hami.io/vgpu-node": "n1",
        ALLOCATED: "a,NVIDIA,2048,25:;",
        RESERVED: reservation("gone", 1),
    }
    lab.see(lab.pod("old", lab.container(gpus=None), annotations=annotations, node="n1"))
    assert {card.info.id: card.healthy for card in lab.state.node_usage("n1").cards} == {
        "a": False,
        "b": True,
    }


def test_a_reservation_on_a_shared_card_closes_it(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    annotations = {"hami.io/vgpu-node": "n1", ALLOCATED: "a,NVIDIA,2048,25:;", RESERVED: reservation("a", 1)}
    lab.see(lab.pod("old", lab.container(gpus=None), annotations=annotations, node="n1"))
    assert lab.refused(lab.pod("new", lab.container(mem=1024))) == {"n1": "1/1 CardNotHealth"}


def test_a_known_slice_is_not_given_again(lab: Lab) -> None:
    lab.node("n1", mig_card(lab, "a", 2))
    annotations = {"hami.io/vgpu-node": "n1", ALLOCATED: "a,NVIDIA,2048,25:;", RESERVED: reservation("a", 1)}
    lab.see(lab.pod("old", lab.container(gpus=None), annotations=annotations, node="n1"))
    lab.filter(lab.pod("new", lab.container(mem=1024)))
    assert lab.state.reservation("uid-new").annotations[RESERVED] == reservation("a", 0)
    assert "CardMigTopologyInfeasible" in lab.refused(lab.pod("more", lab.container(mem=1024)))["n1"]


def test_a_stale_reservation_bound_to_a_shared_card_leaves_the_card_healthy(lab: Lab) -> None:
    lab.node("n1", lab.card("a"))
    new = lab.pod("new", lab.container(mem=1000), annotations={RESERVED: reservation("a", 0)})
    lab.filter(new)
    bound = lab.bound(new)
    assert bound["metadata"]["annotations"][RESERVED] == "[]"
    lab.see(bound)
    assert [card.healthy for card in lab.state.node_usage("n1").cards] == [True]
    assert lab.placed(lab.pod("more", lab.container(mem=1000)))[0] == "n1"


@pytest.mark.parametrize("mode", ["mig", "hami-core"])
def test_an_id_of_fixed_geometry_is_reported_and_never_mapped_to_a_slice(lab: Lab, mode: str) -> None:
    lab.node("n1", mig_card(lab, "GPU-aa", 4) if mode == "mig" else lab.card("GPU-aa"))
    annotations = {"hami.io/vgpu-node": "n1", ALLOCATED: "GPU-aa[1-2],NVIDIA,2048,25:;"}
    outcome = lab.see(lab.pod("old", lab.container(gpus=None), annotations=annotations, node="n1"))
    assert [(notice.reason, notice.message) for notice in outcome.notices] == [
        ("LegacyMigPod", "legacy MIG pod, drain before upgrade")
    ]
    assert lab.used("n1") == {"GPU-aa": (1, 2048, 25)}
    assert [card.healthy for card in lab.state.node_usage("n1").cards] == [mode == "hami-core"]
