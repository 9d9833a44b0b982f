"""Texts that users and broken plugins can write cost a bounded time and never more than they hold."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from hami.protocol import keys
from hami.protocol.allocation import MAX_PIECES, decode_allocation
from hami.protocol.errors import AllocationError, DevicesMalformed
from hami.protocol.inventory import MAX_MIG_PARTS, decode_json
from hami.vendors import mig
from hami.vendors.annotate import read_allocation
from hami.vendors.engine import container_request, effective, pod_info
from hami.vendors.selection import steering_keys
from hami.vendors.topology import choose
from hami.vendors.types import FitContext, PodInfo, PodShape, SlotKind, Usage
from hami.vendors.usage import Held


class CountingReads(dict[str, str]):
    """Counts whole walks over the mapping."""

    walks = 0

    def __iter__(self) -> Iterator[str]:
        self.walks += 1
        return super().__iter__()

    def values(self) -> Any:
        self.walks += 1
        return super().values()

    def items(self) -> Any:
        self.walks += 1
        return super().items()


def test_a_container_is_parsed_without_walking_over_all_annotations(lab: Any) -> None:
    pod = lab.pod({"gpu": 1})
    annotations = CountingReads({f"a{n}": "" for n in range(100)})
    pod["metadata"]["annotations"] = annotations
    assert container_request(lab.nvidia(), pod["spec"]["containers"][0], pod) is not None
    assert annotations.walks == 0


def test_annotations_that_are_no_text_do_not_exist() -> None:
    info = pod_info({"metadata": {"annotations": {"a": "x", "b": 1, "c": None}}, "spec": {}})
    assert info.annotations == {"a": "x"}


@pytest.mark.parametrize("text", [";" * (MAX_PIECES + 1), "a,b,1,1:" * (MAX_PIECES + 1) + ";"])
def test_an_allocation_of_too_many_pieces_is_refused(text: str) -> None:
    with pytest.raises(AllocationError, match=str(MAX_PIECES)):
        decode_allocation(text)


def test_the_most_pieces_are_read() -> None:
    assert len(decode_allocation(";" * MAX_PIECES)) == MAX_PIECES


@pytest.mark.parametrize("member", ["migProfiles", "placements"])
def test_a_card_with_too_many_mig_profiles_or_placements_is_dropped(member: str) -> None:
    places = [{"start": n, "size": 1} for n in range(MAX_MIG_PARTS + (member == "placements"))]
    profiles = [{"name": "p", "placements": places}] * (MAX_MIG_PARTS + (member == "migProfiles"))
    with pytest.raises(DevicesMalformed, match="no usable device"):
        decode_json(json.dumps([{"id": "a", "count": 1, "migProfiles": profiles}]), "NVIDIA")


@pytest.mark.parametrize("member", ["memoryMB", "core", "sliceCount"])
def test_a_card_with_a_negative_mig_profile_is_dropped(member: str) -> None:
    profile = {"name": "p", member: -1, "placements": [{"start": 0, "size": 1}]}
    with pytest.raises(DevicesMalformed, match="no usable device"):
        decode_json(json.dumps([{"id": "a", "count": 1, "migProfiles": [profile]}]), "NVIDIA")


def test_reservations_keep_their_order_whatever_their_number(lab: Any) -> None:
    def reservation(slot: int, position: int, card: str, start: int) -> dict[str, Any]:
        return {
            "containerIndex": slot,
            "deviceIndex": position,
            "gpuUUID": card,
            "profile": "p",
            "placement": {"start": start, "size": 1},
        }

    written = [
        reservation(7, 0, "a", 1),
        reservation(0, 1, "a", 2),
        reservation(8, 0, "b", 3),
        reservation(9, 0, "x", 4),
        reservation(0, 5, "x", 5),
    ]
    annotations = {
        "hami.io/vgpu-devices-allocated": "a,NVIDIA,1,1:a,NVIDIA,1,1:;b,NVIDIA,1,1:;",
        keys.MIG_ALLOCATIONS: json.dumps(written),
    }
    shape = PodShape((SlotKind.APP, SlotKind.APP), ("c0", "c1"))
    found = read_allocation(lab.nvidia(), PodInfo("u", "ns", "p", annotations, shape))

    def starts(slot: int) -> list[tuple[str, int]]:
        parts = [(each.uuid, each.payload) for each in found[slot]]
        assert all(isinstance(part, mig.MigSlice) for _, part in parts)
        return [(uuid, part.start) for uuid, part in parts if isinstance(part, mig.MigSlice)]

    assert starts(0) == [("a", 1), ("a", 2), ("x", 5)]
    assert starts(1) == [("b", 3), ("x", 4)]


def test_the_use_of_a_pod_can_be_asked_slot_by_slot(lab: Any) -> None:
    profile = lab.nvidia()
    kinds = (SlotKind.SIDECAR, SlotKind.INIT, SlotKind.INIT, SlotKind.APP, SlotKind.APP)
    shape = PodShape(kinds, tuple("abcde"))
    texts = ("x,N,1,1:;", "x,N,9,2:y,N,3,1:;", "y,N,4,1:;", ";", "x,N,2,2:;")
    allocation = decode_allocation("".join(texts))
    for finished in (False, True):
        held = Held(profile, shape, finished)
        for upto, slot in enumerate(allocation, 1):
            expected: Mapping[str, Usage] = effective(profile, shape, allocation[:upto], finished)
            assert held.total_with(slot) == expected
            held.append(slot)
            assert held.total() == expected


def test_a_card_with_a_made_up_slot_count_is_chosen_as_often_as_it_has_places(lab: Any) -> None:
    card = lab.mig_card("a", count=2**31 - 1)
    info = pod_info(lab.pod())
    request = lab.request(nums=2**31 - 1)
    context = FitContext([card], request, info, lab.node(), (), frozenset({"topology-aware"}))
    places = sum(len(profile.placements) for profile in lab.mig_profiles)
    assert len(choose(context, [card], {})) == 1 + places


def test_the_steering_annotations_of_a_vendor_are_those_its_cards_are_chosen_by(lab: Any) -> None:
    assert set(steering_keys(lab.nvidia().rules)) == {
        keys.NVIDIA_USE_UUID,
        keys.NVIDIA_NO_USE_UUID,
        keys.NVIDIA_USE_TYPE,
        keys.NVIDIA_NO_USE_TYPE,
        keys.NVIDIA_MODE,
        keys.NVIDIA_NUMA_BIND,
    }
