"""What is counted for a pod, and what its reservation changes (scheduler.md §4, §6.5)."""

import re
from typing import Any

import pytest

from hami.scheduler.core.answers import PlacementError, ReservationPhase

Lab = Any
DONE = {"terminated": {"exitCode": 0}}
FAILED = {"terminated": {"exitCode": 1}}
ALLOCATED = "hami.io/vgpu-devices-allocated"


def inits_state(*states: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"name": f"i{at}", "state": state} for at, state in enumerate(states)]


def placed_pod(lab: Lab, allocated: str, kinds: str, *states: dict[str, Any], **parts: Any) -> Any:
    """A pod on n1; `kinds` spells its init containers: i ordinary, s sidecar; the other slots are apps."""
    inits = [
        lab.container(f"i{at}", gpus=None, **({"restartPolicy": "Always"} if kind == "s" else {}))
        for at, kind in enumerate(kinds)
    ]
    apps = [lab.container(f"a{at}", gpus=None) for at in range(allocated.count(";") - len(inits))]
    annotations = {"hami.io/vgpu-node": "n1", "hami.io/vgpu-time": "1", ALLOCATED: allocated}
    status = {"initContainerStatuses": inits_state(*states)} if states else {}
    return lab.pod("p", *apps, inits=inits, annotations=annotations, **{"node": "n1", **status, **parts})


@pytest.fixture
def n1(lab: Lab) -> Lab:
    """One node with two cards of 40000 MiB."""
    lab.node("n1", lab.card("a", devmem=40000), lab.card("b", devmem=40000))
    return lab


# --- accounting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kinds", "allocated", "starting", "steady"),
    [
        pytest.param("i", "a,NVIDIA,20000,10:;a,NVIDIA,10000,5:;", (1, 20000, 10), (1, 10000, 5), id="35"),
        pytest.param("", "a,NVIDIA,10000,5:;a,NVIDIA,10000,5:;", (2, 20000, 10), (2, 20000, 10), id="37"),
        pytest.param("s", "a,NVIDIA,4000,0:;a,NVIDIA,4000,0:;", (2, 8000, 0), (2, 8000, 0), id="38"),
        ("is", "a,NVIDIA,20000,0:;a,NVIDIA,2000,0:;a,NVIDIA,10000,0:;", (2, 20000, 0), (2, 12000, 0)),
        ("si", "a,NVIDIA,2000,0:;a,NVIDIA,20000,0:;a,NVIDIA,10000,0:;", (2, 22000, 0), (2, 12000, 0)),
        pytest.param(
            "sisi",
            "a,NVIDIA,1000,1:;a,NVIDIA,20000,2:;a,NVIDIA,500,3:;a,NVIDIA,19900,4:;a,NVIDIA,10,5:;",
            (3, 21400, 9),
            (3, 1510, 9),
            id="70",
        ),
        pytest.param("i", ";a,NVIDIA,100,5:;", (1, 100, 5), (1, 100, 5), id="vendors 12"),
    ],
)
def test_usage_is_the_effective_request_before_and_after_the_inits(
    n1: Lab, kinds: str, allocated: str, starting: object, steady: object
) -> None:
    n1.see(placed_pod(n1, allocated, kinds, *({} for _ in kinds)))
    assert n1.used("n1") == {"a": starting, "b": (0, 0, 0)}
    assert n1.quota_used("default") == starting[1]  # type: ignore[index]
    n1.see(placed_pod(n1, allocated, kinds, *(DONE if kind == "i" else {} for kind in kinds)))
    assert n1.used("n1") == {"a": steady, "b": (0, 0, 0)}
    assert n1.quota_used("default") == steady[1]  # type: ignore[index]


def test_a_failed_init_container_keeps_the_peak(n1: Lab) -> None:
    n1.see(placed_pod(n1, "a,NVIDIA,20000,10:;a,NVIDIA,10000,5:;", "i", FAILED))
    assert n1.used("n1")["a"] == (1, 20000, 10)


def test_a_restarted_sandbox_counts_its_init_containers_again(n1: Lab) -> None:
    allocated = "a,NVIDIA,20000,10:;a,NVIDIA,10000,5:;"
    n1.see(placed_pod(n1, allocated, "i", DONE))
    n1.see(placed_pod(n1, allocated, "i", {"running": {}}))
    assert n1.used("n1")["a"] == (1, 20000, 10)


def test_a_terminating_pod_is_counted_until_it_has_ended_also_after_a_restart(n1: Lab) -> None:
    pod = placed_pod(n1, "a,NVIDIA,100,0:;", "")
    pod["metadata"]["deletionTimestamp"] = "2026-08-22T10:00:00Z"
    n1.see(pod)
    assert n1.used("n1")["a"] == (1, 100, 0)
    n1.see(placed_pod(n1, "a,NVIDIA,100,0:;", "", phase="Failed"))
    assert n1.used("n1")["a"] == (0, 0, 0)


def test_an_entry_of_an_unknown_card_leaves_the_others_alone(n1: Lab) -> None:
    n1.see(placed_pod(n1, "x,NVIDIA,100,0:b,NVIDIA,7,1:;", ""))
    assert n1.used("n1") == {"a": (0, 0, 0), "b": (1, 7, 1)}
    assert all(one.healthy for one in n1.state.node_usage("n1").cards)


def test_an_unreadable_allocation_is_not_counted_and_noticed(n1: Lab) -> None:
    outcome = n1.see(placed_pod(n1, "a,NVIDIA,many,0:;", ""))
    assert [notice.reason for notice in outcome.notices] == ["AllocationUnreadable"]
    assert n1.used("n1")["a"] == (0, 0, 0)


def test_an_assignment_without_allocation_counts_as_nothing_and_is_noticed(n1: Lab) -> None:
    outcome = n1.see(n1.pod("p", annotations={"hami.io/vgpu-node": "n1"}, node="n1"))
    assert [notice.reason for notice in outcome.notices] == ["AllocationMissing"]


def test_a_pod_bound_elsewhere_than_annotated_counts_where_it_is_bound(n1: Lab) -> None:
    n1.node("n2", n1.card("a"))
    outcome = n1.see(placed_pod(n1, "a,NVIDIA,100,0:;", "", node="n2"))
    assert [notice.reason for notice in outcome.notices] == ["AssignedNodeMismatch"]
    assert (n1.used("n1")["a"], n1.used("n2")["a"]) == ((0, 0, 0), (1, 100, 0))


def test_an_annotated_pod_counts_before_it_is_bound(n1: Lab) -> None:
    n1.see(placed_pod(n1, "a,NVIDIA,100,0:;", "", node=None))
    assert n1.used("n1")["a"] == (1, 100, 0)


def test_usage_of_a_node_that_registers_later_is_not_lost(lab: Lab) -> None:
    lab.see(placed_pod(lab, "a,NVIDIA,100,0:;", ""))
    assert lab.quota_used("default") == 100
    lab.node("n1", lab.card("a"))
    assert lab.used("n1") == {"a": (1, 100, 0)}


def test_a_short_allocation_text_is_taken_for_the_last_containers(n1: Lab) -> None:
    # HAMi leaves out the empty entry of an init container without devices.
    pod = placed_pod(n1, ";a,NVIDIA,100,0:;", "i", DONE)
    pod["metadata"]["annotations"][ALLOCATED] = "a,NVIDIA,100,0:;"
    n1.see(pod)
    assert n1.used("n1")["a"] == (1, 100, 0)


def test_more_entries_than_containers_are_counted(n1: Lab) -> None:
    pod = placed_pod(n1, "a,NVIDIA,100,0:;", "")
    pod["metadata"]["annotations"][ALLOCATED] = "a,NVIDIA,100,0:;b,NVIDIA,200,0:;"
    n1.see(pod)
    assert n1.used("n1") == {"a": (1, 100, 0), "b": (1, 200, 0)}


def test_the_same_event_twice_counts_once(n1: Lab) -> None:
    pod = placed_pod(n1, "a,NVIDIA,100,0:;", "")
    n1.see(pod)
    version = n1.state.version
    n1.see(pod)
    assert n1.used("n1")["a"] == (1, 100, 0)
    assert n1.state.version == version


# --- reservations -------------------------------------------------------------------------------


def test_the_binding_carries_every_annotation_and_the_label(n1: Lab) -> None:
    n1.filter(n1.pod("new", n1.container(mem=100, cores=30)))
    reservation = n1.state.reservation("uid-new")
    text = "b,NVIDIA,100,30:;"
    assert reservation.binding_annotations(n1.now + 1) == {
        "hami.io/vgpu-node": "n1",
        "hami.io/vgpu-time": "1787400000",
        "hami.io/vgpu-devices-to-allocate": text,
        ALLOCATED: text,
        "hami.io/bind-phase": "allocating",
        "hami.io/bind-time": "1787400001",
    }
    assert reservation.labels == {"hami.io/vgpu-node": "n1"}
    assert reservation.locks == (("NVIDIA", "hami"),)


def test_every_container_slot_has_its_entry(n1: Lab) -> None:
    plain = n1.container("i", gpus=None)
    n1.filter(n1.pod("new", n1.container("a", gpus=None), n1.container("b", mem=100), inits=[plain]))
    assert n1.state.reservation("uid-new").annotations[ALLOCATED] == ";;b,NVIDIA,100,0:;"


def test_the_word_of_the_vendor_is_written_not_the_model_of_the_card(lab: Lab) -> None:
    lab.node("n1", lab.card("G0", type="NVIDIA A30"), lab.card("G1", type="NVIDIA A30"))
    inits = [lab.container("i0", gpus=None), lab.container("i1", mem=1000, cores=10)]
    wish = {"nvidia.com/use-gpuuuid": "G0"}
    lab.filter(lab.pod("new", lab.container(mem=500, cores=5), inits=inits, annotations=wish))
    text = ";G0,NVIDIA,1000,10:;G0,NVIDIA,500,5:;"
    assert lab.state.reservation("uid-new").annotations[ALLOCATED] == text


def test_a_device_of_an_init_container_alone_needs_the_lock(n1: Lab) -> None:
    n1.filter(n1.pod("new", n1.container("app", gpus=None), inits=[n1.container("i", mem=100)]))
    assert n1.state.reservation("uid-new").locks == (("NVIDIA", "hami"),)


def test_a_long_node_name_is_cut_in_the_label_only(lab: Lab) -> None:
    name = "n" * 58 + ".example.com"
    assert len(name) == 70
    lab.node(name, lab.card("a"))
    lab.filter(lab.pod("new"))
    reservation = lab.state.reservation("uid-new")
    label = reservation.labels["hami.io/vgpu-node"]
    assert reservation.annotations["hami.io/vgpu-node"] == name
    assert re.fullmatch("n{54}-[0-9a-f]{8}", label)
    other = lab.fresh()
    other.node(name[:-1] + "z", other.card("a"))
    other.filter(other.pod("new"))
    assert other.state.reservation("uid-new").labels["hami.io/vgpu-node"] != label


def test_stale_mig_reservations_are_overwritten(n1: Lab) -> None:
    n1.filter(n1.pod("new", annotations={"hami.io/vgpu-mig-allocations": '[{"containerIndex":0}]'}))
    assert n1.state.reservation("uid-new").annotations["hami.io/vgpu-mig-allocations"] == "[]"


def test_the_same_pod_filtered_twice_counts_once(n1: Lab) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    n1.filter(new)
    assert sum(slots for slots, _, _ in n1.used("n1").values()) == 1
    assert n1.quota_used("default") == 100


def test_a_second_filter_moves_the_reservation(n1: Lab) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    n1.node("n2", n1.card("c"))
    assert n1.filter(new, "n2").node == "n2"
    assert n1.used("n1") == {"a": (0, 0, 0), "b": (0, 0, 0)}
    assert n1.used("n2") == {"c": (1, 100, 0)}
    assert n1.quota_used("default") == 100


def test_a_second_filter_that_finds_nothing_releases_the_first(n1: Lab) -> None:
    n1.filter(n1.pod("new", n1.container(mem=100)))
    n1.refused(n1.pod("new", n1.container(mem=50000)))
    assert n1.used("n1") == {"a": (0, 0, 0), "b": (0, 0, 0)}
    assert n1.state.reservation("uid-new") is None


def test_a_late_event_with_an_older_assignment_changes_nothing(n1: Lab) -> None:
    n1.node("n2", n1.card("c"))
    new = n1.pod("p", n1.container(mem=100))
    n1.filter(new, "n1")
    stale = placed_pod(n1, "c,NVIDIA,999,0:;", "", node=None)
    stale["metadata"]["annotations"]["hami.io/vgpu-node"] = "n2"
    n1.see(stale)
    assert (n1.used("n1")["b"], n1.used("n2")["c"]) == ((1, 100, 0), (0, 0, 0))


def test_a_label_change_of_a_reserved_pod_changes_nothing(n1: Lab) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    new["metadata"]["labels"] = {"team": "x"}
    n1.see(new)
    assert n1.used("n1")["b"] == (1, 100, 0)


@pytest.mark.parametrize("how", ["deleted", "Succeeded", "Failed"])
def test_the_end_of_the_pod_releases_its_reservation(n1: Lab, how: str) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    outcome = n1.state.delete_pod("uid-new") if how == "deleted" else n1.see(n1.pod("new", phase=how))
    assert outcome.closed
    assert n1.used("n1")["b"] == (0, 0, 0)
    assert n1.quota_used("default") == 0


@pytest.mark.parametrize("answer_first", [True, False])
def test_the_watch_closes_a_bound_reservation_in_either_order(n1: Lab, answer_first: bool) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    bound = n1.bound(new)
    n1.state.binding_started("uid-new")
    if answer_first:
        n1.state.binding_confirmed("uid-new")
    outcome = n1.see(bound)
    if not answer_first:
        n1.state.binding_confirmed("uid-new")
    assert outcome.closed
    assert not outcome.missing_labels
    assert n1.state.reservation("uid-new") is None
    assert n1.used("n1")["b"] == (1, 100, 0)


def test_the_event_of_our_own_binding_changes_no_version(n1: Lab) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    bound = n1.bound(new)
    version = n1.state.version
    n1.see(bound)
    assert n1.state.version == version


def test_a_label_the_api_server_dropped_is_to_be_patched(n1: Lab) -> None:
    new = n1.pod("new")
    n1.filter(new)
    bound = n1.bound(new)
    bound["metadata"]["labels"] = {}
    assert n1.see(bound).missing_labels == {"hami.io/vgpu-node": "n1"}


def test_a_pod_bound_elsewhere_by_somebody_releases_the_reservation(n1: Lab) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    n1.see({**new, "spec": {**new["spec"], "nodeName": "n9"}})
    assert n1.state.reservation("uid-new") is None
    assert n1.used("n1")["b"] == (0, 0, 0)


def test_a_refused_binding_releases(n1: Lab) -> None:
    n1.filter(n1.pod("new", n1.container(mem=100)))
    n1.state.binding_started("uid-new")
    n1.state.binding_refused("uid-new")
    assert n1.used("n1")["b"] == (0, 0, 0)
    assert n1.quota_used("default") == 0


def test_an_unbound_reservation_expires_and_says_so(n1: Lab) -> None:
    n1.filter(n1.pod("new", n1.container(mem=100)))
    assert n1.state.next_timer() == n1.now + 900
    assert n1.state.expire(n1.now + 899) == ()
    assert [one.uid for one in n1.state.expire(n1.now + 900)] == ["uid-new"]
    assert n1.used("n1")["b"] == (0, 0, 0)


@pytest.mark.parametrize("step", ["started", "unknown", "confirmed"])
def test_a_reservation_whose_binding_may_have_landed_is_held(n1: Lab, step: str) -> None:
    new = n1.pod("new", n1.container(mem=100))
    n1.filter(new)
    n1.state.binding_started("uid-new")
    if step != "started":
        getattr(n1.state, f"binding_{step}")("uid-new")
    assert n1.state.expire(n1.now + 10_000) == ()
    assert n1.state.drop_reservations() == ()
    assert n1.state.delete_node("n1") == ()
    with pytest.raises(PlacementError, match="not settled"):
        n1.filter(new, "n1")
    assert n1.quota_used("default") == 100


def test_an_unsent_binding_expires_again(n1: Lab) -> None:
    n1.filter(n1.pod("new"))
    n1.state.binding_started("uid-new")
    n1.state.binding_unsent("uid-new")
    assert n1.state.reservation("uid-new").phase is ReservationPhase.RESERVED
    assert len(n1.state.expire(n1.now + 900)) == 1


def test_lost_leadership_drops_what_was_not_sent(n1: Lab) -> None:
    n1.filter(n1.pod("kept"))
    n1.filter(n1.pod("gone"))
    n1.state.binding_started("uid-kept")
    assert [one.name for one in n1.state.drop_reservations()] == ["gone"]
    assert [one.name for one in n1.state.reservations()] == ["kept"]


def test_a_deleted_node_releases_its_reservations(n1: Lab) -> None:
    n1.filter(n1.pod("new", n1.container(mem=100)))
    assert [one.uid for one in n1.state.delete_node("n1")] == ["uid-new"]
    assert n1.quota_used("default") == 0


def test_a_filter_voids_the_old_assignment_of_an_unbound_pod(n1: Lab) -> None:
    old = placed_pod(n1, "a,NVIDIA,40000,0:;", "", node=None)
    n1.see(old)
    new = n1.pod("p", n1.container(mem=40000, gpus=2))
    assert n1.placed(new)[0] == "n1"  # its own stale use of card a is not in the way
    n1.state.release("uid-p")
    n1.see(old)  # the same old decision again
    assert n1.used("n1")["a"] == (0, 0, 0)


def test_a_bound_pod_is_not_placed_again(n1: Lab) -> None:
    n1.see(placed_pod(n1, "a,NVIDIA,100,0:;", ""))
    with pytest.raises(PlacementError, match="already bound to node n1"):
        n1.filter(n1.pod("p"))


def test_freed_capacity_is_announced(n1: Lab) -> None:
    n1.filter(n1.pod("new"))
    before = n1.state.freed
    n1.filter(n1.pod("other"))
    assert n1.state.freed == before
    n1.state.release("uid-new")
    assert n1.state.freed > before


def test_a_trial_fit_reserves_nothing(n1: Lab) -> None:
    version = n1.state.version
    assert n1.state.fits_now(n1.request(n1.pod("new", n1.container(mem=40000))))
    assert not n1.state.fits_now(n1.request(n1.pod("new", n1.container(mem=40001))))
    assert n1.state.version == version
