"""Which MIG instances there must be, and whose they are: the rules, without a driver."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mig_world import MODEL, NOTE, PLACES, PROFILES, mig_pod, reservation, slot
from node_cards import U1, U2

from hami.node.config import MigAllowed
from hami.node.errors import AllocateError, SliceBusyError
from hami.node.mig.caps import instance_nodes, parse_minors
from hami.node.mig.driver import GpuProfile
from hami.node.mig.journal import decode_journal, encode_journal
from hami.node.mig.plan import (
    Journalled,
    Managed,
    PodSlices,
    Record,
    Seen,
    SliceKey,
    Survey,
    adopt,
    survey,
    unwanted,
    usable,
    wanted_slices,
    with_identity,
)
from hami.node.mig.profiles import NUMBERS, offer, profile_of, word_of
from hami.protocol.inventory import MigPlacement
from hami.protocol.mig import decode_mig_reservations
from hami.protocol.views import Pod, decode

Make = Callable[..., dict[str, Any]]
A100 = (MigAllowed(("A30",), ("1g.6gb",)), MigAllowed(("A100-SXM4-40GB",), ("1g.5gb", "3g.20gb", "7g.40gb")))


def view(pod: dict[str, Any]) -> Pod:
    return decode(msgspec.json.encode(pod), Pod)


def places(profile: GpuProfile) -> tuple[MigPlacement, ...]:
    return tuple(MigPlacement(*place) for place in PLACES[profile.number])


def key(start: int = 0, word: str = "1g", size: int = 1, gpu: str = U1) -> SliceKey:
    return SliceKey(gpu, word, start, size)


# --- what a card offers ---


def test_a_card_offers_the_allowed_profiles_that_its_driver_knows() -> None:
    found = offer(MODEL, A100, PROFILES, places)
    assert [item.name for item in found.profiles] == ["1g.5gb", "3g.20gb", "7g.40gb"]
    first = found.profiles[0]
    assert (first.memory_mib, first.core, first.slice_count) == (4864, 15, 1)
    assert [place.start for place in first.placements] == list(range(7))
    assert [item.core for item in found.profiles] == [15, 43, 100], "percent of 98 SMs, rounded up"
    assert found.count == 7
    assert found.why == ""


def test_the_first_entry_whose_model_is_part_of_the_name_decides() -> None:
    entries = (MigAllowed(("A100",), ("2g.10gb",)), *A100)
    assert [item.name for item in offer(MODEL, entries, PROFILES, places).profiles] == ["2g.10gb"]


def test_r10_a_model_that_no_entry_matches_offers_nothing_and_is_named() -> None:
    found = offer("NVIDIA L4", A100, PROFILES, places)
    assert (found.profiles, found.count) == ((), 0)
    assert "'NVIDIA L4'" in found.why


def test_profiles_that_the_driver_does_not_know_are_skipped() -> None:
    entries = (MigAllowed(("A100",), ("8g.40gb", "2g.10gb")),)
    assert [item.name for item in offer(MODEL, entries, PROFILES, places).profiles] == ["2g.10gb"]
    only = (MigAllowed(("A100",), ("8g.40gb",)),)
    assert "8g.40gb" in offer(MODEL, only, PROFILES, places).why


def test_two_labels_of_one_profile_are_offered_once() -> None:
    entries = (MigAllowed(("A100",), ("1g.5gb", "1g.10gb")),)
    assert [item.name for item in offer(MODEL, entries, PROFILES, places).profiles] == ["1g.5gb"]


def test_a_profile_with_a_suffix_is_never_selected_by_a_label() -> None:
    assert {word_of(item) for item in PROFILES} == {"1g", "2g", "3g", "4g", "7g", "1g.5gb+me"}
    for word in NUMBERS:
        found = profile_of(word, PROFILES)
        assert found is None or "+" not in found.name


# --- pods ---


def test_pods_that_have_ended_use_nothing(make_pod: Make) -> None:
    pods = [
        view(mig_pod(make_pod, "runs", reservation(U1, "1g.5gb", 6, 1), phase="Running")),
        view(mig_pod(make_pod, "done", reservation(U2, "1g.5gb", 6, 1), phase="Succeeded")),
        view(mig_pod(make_pod, "failed", reservation(U2, "1g.5gb", 5, 1), phase="Failed")),
    ]
    found = survey(pods, {U1, U2})
    assert [pod.name for pod in found.pods] == ["team-a/runs"]
    assert found.cards == {U1}
    assert found.problem == ""


def test_a_pod_that_is_being_deleted_counts_until_its_containers_have_ended(make_pod: Make) -> None:
    pod = mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1), phase="Running")
    pod["metadata"]["deletionTimestamp"] = "2026-08-21T10:00:00Z"
    assert survey([view(pod)], {U1}).uids == {"uid-p"}
    pod["status"]["containerStatuses"] = [{"name": "app", "state": {"running": {"startedAt": None}}}]
    assert survey([view(pod)], {U1}).uids == {"uid-p"}
    pod["status"]["containerStatuses"] = [{"name": "app", "state": {"terminated": {"exitCode": 0}}}]
    assert survey([view(pod)], {U1}).uids == frozenset()


def test_a_card_of_a_pod_without_reservation_is_in_use(make_pod: Make) -> None:
    pod = make_pod("p", f"{U1},NVIDIA,3000,30:;", phase="Running")
    assert survey([view(pod)], {U1}).cards == {U1}, "a pod of mode hami-core that still runs there"


@pytest.mark.parametrize("text", ["{", '[{"containerIndex":0}]', "[1]"])
def test_an_annotation_that_cannot_be_read_stops_every_destruction(make_pod: Make, text: str) -> None:
    pod = make_pod("bad", f"{U1},NVIDIA,1,1:;", phase="Running")
    pod["metadata"]["annotations"][NOTE] = text
    found = survey([view(pod)], {U1})
    assert "team-a/bad" in found.problem
    assert unwanted([Managed(key(), 1, 0, "MIG-1")], found) == ()


def test_a_reservation_on_an_unknown_card_stops_every_destruction(make_pod: Make) -> None:
    found = survey([view(mig_pod(make_pod, "p", reservation(U2, "1g.5gb", 6, 1)))], {U1})
    assert U2 in found.problem
    assert unwanted([Managed(key(), 1, 0, "MIG-1")], found) == ()


@given(
    st.dictionaries(st.integers(0, 6), st.frozensets(st.sampled_from("abcdef"), max_size=3), max_size=7),
    st.frozensets(st.sampled_from("abcdef")),
    st.frozensets(st.sampled_from("abcdef")),
)
def test_only_instances_without_a_living_owner_are_unwanted(
    owners: dict[int, frozenset[str]], live: frozenset[str], ending: frozenset[str]
) -> None:
    managed = [Managed(key(start), start, 0, f"MIG-{start}", who) for start, who in owners.items()]
    pods = tuple(PodSlices(uid, uid, (), frozenset()) for uid in live)
    gone = unwanted(managed, Survey(pods, ending))
    assert {each.key.start for each in gone} == {
        start for start, who in owners.items() if not who & (live | ending)
    }


# --- what a container may have ---


def test_the_reservations_of_a_container_in_device_order(make_pod: Make) -> None:
    pod = mig_pod(
        make_pod,
        "p",
        reservation(U1, "1g.5gb", 5, 1, container=1, device=1),
        reservation(U1, "1g.5gb", 6, 1, container=1, device=0),
        reservation(U2, "2g.10gb", 0, 2, container=0),
        init=["prepare"],
    )
    found = wanted_slices(view(pod), 1, slot(U1, U1))
    assert [item.placement.start for item in found] == [6, 5]


def test_g3_fewer_reservations_than_devices_is_an_error(make_pod: Make) -> None:
    pod = mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1))
    with pytest.raises(AllocateError, match=r"resolve allocated NVIDIA devices.*2 devices and 1 MIG"):
        wanted_slices(view(pod), 0, slot(U1, U1))


def test_g4_a_reservation_on_another_card_than_the_entry_is_an_error(make_pod: Make) -> None:
    pod = mig_pod(make_pod, "p", reservation(U1, "1g.5gb", 6, 1))
    with pytest.raises(AllocateError, match=f"resolve allocated NVIDIA devices.*{U2}.*{U1}"):
        wanted_slices(view(pod), 0, slot(U2))


def test_reservations_of_one_container_that_overlap_are_an_error(make_pod: Make) -> None:
    pod = mig_pod(make_pod, "p", reservation(U1, "2g.10gb", 4, 2), reservation(U1, "1g.5gb", 5, 1, device=1))
    with pytest.raises(AllocateError, match="overlap"):
        wanted_slices(view(pod), 0, slot(U1, U1))


def test_an_instance_is_used_again_only_by_the_pod_it_was_made_for() -> None:
    there = Managed(key(6), 7, 0, "MIG-1", frozenset({"mine"}))
    assert usable(key(6), "mine", [there]) == there
    assert usable(key(5), "mine", [there]) is None
    with pytest.raises(SliceBusyError, match="another pod"):
        usable(key(6), "next", [there])
    with pytest.raises(SliceBusyError, match="another pod"):
        usable(key(4, "3g", 4), "mine", [there])
    with pytest.raises(SliceBusyError, match="unfinished"):
        usable(key(6), "mine", [Managed(key(6), 7, owners=frozenset({"mine"}))])


def test_ids_are_written_to_the_reservations_that_were_realised_and_to_no_other() -> None:
    text = json.dumps([reservation(U1, "1g.5gb", 6, 1), reservation(U1, "2g.10gb", 0, 2, container=1)])
    made = {(0, 0): Managed(key(6), 7, 0, "MIG-1", frozenset({"p"}))}
    first, second = decode_mig_reservations(with_identity(text, made))
    assert (first.mig_uuid, first.gpu_instance_id, first.compute_instance_id) == ("MIG-1", 7, 0)
    assert not second.realised


def test_ids_are_not_written_to_reservations_that_changed_meanwhile() -> None:
    made = {(0, 0): Managed(key(6), 7, 0, "MIG-1")}
    with pytest.raises(AllocateError, match="changed meanwhile"):
        with_identity(json.dumps([reservation(U1, "1g.5gb", 5, 1)]), made)
    with pytest.raises(AllocateError, match="changed meanwhile"):
        with_identity(json.dumps([reservation(U1, "1g.5gb", 6, 1)]), {})
    with pytest.raises(AllocateError):
        with_identity("{", made)


# --- adoption ---


def seen(start: int, number: int, uuid: str, *more: str) -> Seen:
    devices = dict(enumerate((uuid, *more)))
    return Seen(key(start), number, tuple(devices), devices)


def pods_with(*ids: tuple[str, int, tuple[str, int, int]]) -> Survey:
    """Pods by UID, start and ids of a realised 1g reservation on U1."""
    return Survey(
        tuple(
            PodSlices(
                uid,
                f"team-a/{uid}",
                decode_mig_reservations(json.dumps([reservation(U1, "1g.5gb", start, 1, ids=found)])),
                frozenset({U1}),
            )
            for uid, start, found in ids
        )
    )


def test_an_instance_is_adopted_by_the_reservation_that_names_all_of_it() -> None:
    pods = pods_with(("p", 6, ("MIG-1", 7, 0)))
    found = adopt(U1, [seen(6, 7, "MIG-1"), seen(5, 8, "MIG-2")], pods, [], {"MIG-1": {"p"}})
    assert found.managed == (Managed(key(6), 7, 0, "MIG-1", frozenset({"p"})),)
    assert [each.gpu_instance for each in found.foreign] == [8]
    assert found.problems == ()


@pytest.mark.parametrize(
    "ids",
    [("MIG-other", 7, 0), ("MIG-1", 8, 0), ("MIG-1", 7, 1)],
    ids=["another UUID", "another GPU instance", "another compute instance"],
)
def test_an_instance_that_differs_from_the_reservation_is_not_adopted(ids: tuple[str, int, int]) -> None:
    owners = {uuid: {"p"} for uuid in ("MIG-1", "MIG-other")}
    found = adopt(U1, [seen(6, 7, "MIG-1")], pods_with(("p", 6, ids)), [], owners)
    assert found.managed == ()
    assert [each.gpu_instance for each in found.foreign] == [7]
    assert "team-a/p" in found.problems[0]


def test_an_instance_is_not_adopted_by_a_reservation_of_a_pod_that_was_not_given_it() -> None:
    pods = pods_with(("p", 6, ("MIG-1", 7, 0)))
    nobody: dict[str, set[str]] = {}
    for owners in (nobody, {"MIG-1": {"other"}}, {"MIG-2": {"p"}}):
        found = adopt(U1, [seen(6, 7, "MIG-1")], pods, [], owners)
        assert (found.managed, len(found.foreign), found.problems) == ((), 1, ())


def test_one_lost_instance_does_not_keep_others_from_being_adopted() -> None:
    pods = pods_with(("lost", 4, ("MIG-9", 9, 0)), ("p", 6, ("MIG-1", 7, 0)))
    found = adopt(U1, [seen(6, 7, "MIG-1")], pods, [], {"MIG-1": {"p"}})
    assert [each.gpu_instance for each in found.managed] == [7]
    assert len(found.problems) == 1


def test_what_was_about_to_be_made_is_found_again_with_and_without_its_compute_instance() -> None:
    intent = Record(key(6), frozenset({"p"}))
    whole = adopt(U1, [seen(6, 7, "MIG-1")], Survey(()), [intent])
    assert whole.managed == (Managed(key(6), 7, 0, "MIG-1", frozenset({"p"})),)
    half = adopt(U1, [Seen(key(6), 7, (), {})], Survey(()), [intent])
    assert half.managed == (Managed(key(6), 7, None, "", frozenset({"p"})),)
    assert not half.managed[0].is_finished


def test_a_record_does_not_claim_an_instance_that_somebody_made_in_its_place() -> None:
    record = Record(key(6), frozenset({"p"}), 7, "MIG-1")
    assert adopt(U1, [seen(6, 7, "MIG-1")], Survey(()), [record]).managed
    assert not adopt(U1, [seen(6, 7, "MIG-new")], Survey(()), [record]).managed
    assert not adopt(U1, [seen(6, 8, "MIG-1")], Survey(()), [record]).managed
    assert not adopt(U1, [seen(5, 7, "MIG-1")], Survey(()), [record]).managed
    assert not adopt(U1, [seen(6, 7, "MIG-1", "MIG-2")], Survey(()), [record]).managed, "divided further"


# --- journal and device nodes ---

records = st.builds(
    Record,
    st.builds(
        SliceKey, st.text(max_size=8), st.sampled_from(sorted(NUMBERS)), st.integers(0, 7), st.integers(1, 8)
    ),
    st.frozensets(st.text(max_size=8), max_size=3),
    st.none() | st.integers(0, 2**32 - 1),
    st.text(max_size=8),
)


@given(
    st.lists(records, max_size=8, unique_by=lambda record: record.key),
    st.frozensets(st.text(max_size=8), max_size=3),
    st.text(min_size=1, max_size=8),
)
def test_the_journal_comes_back_whole_in_the_same_boot(
    written: list[Record], cards: frozenset[str], boot: str
) -> None:
    known = Journalled(tuple(written), cards)
    content = encode_journal(boot, known)
    found = decode_journal(content, boot)
    assert (set(found.records), found.cards) == (set(written), cards)
    assert decode_journal(content, boot + "x") == Journalled()
    assert decode_journal(encode_journal("", known), "") == Journalled(), "no boot is known"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version":2,"boot":"b","instances":[]}', b"\xff"])
def test_another_journal_is_an_error(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_journal(content, "b")


@given(st.binary(max_size=200))
def test_no_journal_makes_the_reader_crash(content: bytes) -> None:
    try:
        decode_journal(content, "b")
    except ValueError:
        pass


def test_capability_minors_are_read_and_other_lines_skipped() -> None:
    text = "config 1\nmonitor 2\ngpu0/gi7/access 66\ngpu0/gi7/ci0/access 67\ngpu1/gi7/access x\nrubbish\n"
    minors = parse_minors(text)
    assert minors == {(0, 7, -1): 66, (0, 7, 0): 67}
    assert instance_nodes(0, 7, 0, minors) == (
        "/dev/nvidia0",
        "/dev/nvidia-caps/nvidia-cap66",
        "/dev/nvidia-caps/nvidia-cap67",
    )
    assert instance_nodes(1, 7, 0, minors) == ("/dev/nvidia1",)
