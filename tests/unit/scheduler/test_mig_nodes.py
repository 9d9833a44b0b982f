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


@pytest.mark.parametrize("wrong", [{"name": ""}, {"placements": [{"start": 0, "size": 0}]}])
def test_a_slice_that_no_annotation_could_name_is_never_chosen(lab: Lab, wrong: dict[str, Any]) -> None:
    profile = {"name": "1g.2gb", "memoryMB": 2048, "placements": [{"start": 0, "size": 1}]} | wrong
    lab.node("n1", lab.card("a", mode="mig", count=7, migProfiles=[profile]))
    reason = lab.refused(lab.pod("new", lab.container(mem=1024)))["n1"]
    assert reason == "1/1 CardMigTopologyInfeasible"


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
    assert [notice.reason for notice in outcome.notices] == [*told, "CardClosed"]
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
    told = {notice.reason: notice.message for notice in outcome.notices}
    assert told["LegacyMigPod"] == "legacy MIG pod, drain before upgrade"
    assert told.keys() == {"LegacyMigPod"} | ({"CardClosed"} if mode == "mig" else set())
    assert lab.used("n1") == {"GPU-aa": (1, 2048, 25)}
    assert [card.healthy for card in lab.state.node_usage("n1").cards] == [mode == "hami-core"]


def closed(outcome: Any) -> list[tuple[str, str, str]]:
    """Kind, object and text of the notices about closed cards."""
    return [(one.kind, one.name, one.message) for one in outcome.notices if one.reason == "CardClosed"]


@pytest.mark.parametrize(
    ("mode", "reserved", "why"),
    [
        ("mig", None, f"the card is divided by MIG and {RESERVED} of the pod names no slice of it"),
        (
            "hami-core",
            reservation("a", 1),
            f"{RESERVED} of the pod names slices of it, but the card is not divided by MIG",
        ),
    ],
)
def test_the_node_is_told_which_pod_closes_a_card_and_why(
    lab: Lab, mode: str, reserved: str | None, why: str
) -> None:
    annotations = {"hami.io/vgpu-node": "n1", ALLOCATED: "a,NVIDIA,2048,25:;"}
    if reserved is not None:
        annotations[RESERVED] = reserved
    old = lab.pod("old", lab.container(gpus=None), annotations=annotations, node="n1")
    expected = [("Node", "n1", f"card a takes no new pods until pod default/old ends: {why}")]
    assert closed(lab.see(old)) == []  # its node is not known yet
    cards = [mig_card(lab, "a", 4) if mode == "mig" else lab.card("a"), lab.card("b")]
    assert closed(lab.node("n1", *cards)) == expected
    assert closed(lab.see(old)) == expected
    lab.state.delete_pod("uid-old")
    assert closed(lab.node("n1", *cards, lab.card("c"))) == []


def test_a_card_in_proper_use_and_a_sick_one_are_no_news(lab: Lab) -> None:
    lab.node("n1", mig_card(lab, "a", 4), mig_card(lab, "sick", 4, health=False))
    for name, card_id, reserved in (("p", "a", reservation("a", 1)), ("q", "sick", "[]")):
        annotations = {
            "hami.io/vgpu-node": "n1",
            ALLOCATED: f"{card_id},NVIDIA,2048,25:;",
            RESERVED: reserved,
        }
        assert (
            closed(lab.see(lab.pod(name, lab.container(gpus=None), annotations=annotations, node="n1"))) == []
        )
