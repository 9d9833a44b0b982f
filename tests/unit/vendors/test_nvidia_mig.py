"""MIG slices: choice, accounting, annotations (nvidia-scheduling.md §15.3)."""

import json
from datetime import UTC, datetime
from typing import Any

from hami.protocol.allocation import ContainerDevice
from hami.protocol.inventory import MigPlacement, MigProfile
from hami.vendors.engine import annotations, card_healthy, effective, read_allocation
from hami.vendors.mig import MigSlice
from hami.vendors.types import Allocation, AnnotateContext, Card, FitResult, Usage

KEY = "hami.io/vgpu-mig-allocations"


def placed(result: FitResult) -> list[tuple[str, int]]:
    assert result.devices is not None, result.text()
    slices = []
    for device in result.devices:
        assert isinstance(device.payload, MigSlice)
        slices.append((device.payload.profile, device.payload.start))
    return slices


def after(lab: Any, card: Card, result: FitResult) -> Card:
    """The card once the result is booked."""
    algebra = lab.nvidia().algebra
    used = card.used
    for device in result.devices or ():
        if device.uuid == card.info.id:
            used = algebra.add(used, algebra.of(device))
    return Card(card.info, used)


def ask_in_turn(lab: Any, card: Card, *sizes: int) -> tuple[list[tuple[str, int]], Card]:
    found: list[tuple[str, int]] = []
    for size in sizes:
        result = lab.fit([card], lab.request(1, size))
        found += placed(result)
        card = after(lab, card, result)
    return found, card


def test_the_smallest_sufficient_profile_is_recorded(lab: Any) -> None:  # M1
    result = lab.fit([lab.mig_card()], lab.request(1, 9000))
    assert placed(result) == [("2g.10gb", 0)]
    assert result.devices is not None
    assert (result.devices[0].usedmem, result.devices[0].usedcores) == (9856, 29)


def test_small_slices_grow_from_the_end(lab: Any) -> None:  # M2
    assert ask_in_turn(lab, lab.mig_card(), 9000, 4000, 4000)[0][1:] == [("1g.5gb", 6), ("1g.5gb", 5)]


def test_a_mixed_card_is_packed_as_the_plugin_expects(lab: Any) -> None:  # M3
    found, _ = ask_in_turn(lab, lab.mig_card(), 15000, 9000, 4000, 4000)
    assert found == [("3g.20gb", 4), ("2g.10gb", 0), ("1g.5gb", 3), ("1g.5gb", 2)]


def test_a_card_full_of_large_slices_still_takes_a_small_one(lab: Any) -> None:  # M4, M5, M6
    _, card = ask_in_turn(lab, lab.mig_card(), 9000, 9000, 9000)
    assert lab.fit([card], lab.request(1, 9000)).text() == "1/1 CardMigTopologyInfeasible"
    assert placed(lab.fit([card], lab.request(1, 4000))) == [("1g.5gb", 6)]
    assert lab.fit([card], lab.request(1, 0, 25)).text() == "1/1 CardMigTopologyInfeasible"


def test_one_container_gets_several_slices_of_a_card(lab: Any) -> None:  # M7
    assert placed(lab.fit([lab.mig_card()], lab.request(2, 4000))) == [("1g.5gb", 6), ("1g.5gb", 5)]


def test_the_last_free_place_is_given_once(lab: Any) -> None:  # M8
    one_place = MigProfile("1g.5gb", 4864, 15, 1, (MigPlacement(6, 1),))
    result = lab.fit([lab.mig_card(mig_profiles=(one_place,))], lab.request(2, 4000))
    assert result.text() == "1/1 AllocatedCardsInsufficientRequest, 1/1 CardMigTopologyInfeasible"


def test_a_choice_on_another_card_takes_no_place_here(lab: Any) -> None:  # M9
    _, full = ask_in_turn(lab, lab.mig_card("d1"), 9000, 9000, 9000)
    result = lab.fit([lab.mig_card("d0"), full], lab.request(2, 4000))
    assert placed(result) == [("1g.5gb", 6), ("1g.5gb", 6)]


def test_pending_choices_use_up_the_slots_of_the_card(lab: Any) -> None:
    result = lab.fit([lab.mig_card(count=2)], lab.request(3, 4000))
    assert result.text() == "1/1 CardTimeSlicingExhausted, 2/1 AllocatedCardsInsufficientRequest"


def test_a_device_without_reservation_makes_a_mig_card_unhealthy(lab: Any) -> None:  # M13
    profile, card = lab.nvidia(), lab.mig_card()
    pod = lab.info({"hami.io/vgpu-devices-allocated": "d0,NVIDIA,9856,29:;"})
    held = effective(profile, pod.shape, read_allocation(profile, pod), False)
    assert not card_healthy(profile, card.info, held["d0"])
    assert lab.fit([Card(card.info, held["d0"])], lab.request(1, 4000)).text() == "1/1 CardNotHealth"


def test_a_reservation_makes_a_time_shared_card_unhealthy(lab: Any) -> None:
    profile, card = lab.nvidia(), lab.card()
    slice_ = MigSlice("1g.5gb", 6, 1)
    held = profile.algebra.of(ContainerDevice("d0", "NVIDIA", 4864, 15, payload=slice_))
    assert not card_healthy(profile, card.info, held)
    assert card_healthy(profile, card.info, Usage(1, 4864, 15))


def reservation(slot: int, position: int, start: int, uuid: str = "d0") -> dict[str, Any]:
    return {
        "containerIndex": slot,
        "deviceIndex": position,
        "gpuUUID": uuid,
        "profile": "1g.5gb",
        "placement": {"start": start, "size": 1},
    }


def restored(lab: Any, devices: str, *reservations: dict[str, Any], slots: int = 1) -> Allocation:
    info = lab.info(
        {"hami.io/vgpu-devices-allocated": devices, KEY: json.dumps(list(reservations))}, slots=slots
    )
    allocation: Allocation = read_allocation(lab.nvidia(), info)
    return allocation


def test_reservations_without_any_device_occupy_their_place_and_nothing_else(lab: Any) -> None:
    profile, card = lab.nvidia(), lab.mig_card()
    allocation = restored(lab, ";", reservation(0, 0, 6))
    held = effective(profile, lab.info().shape, allocation, False)["d0"]
    assert (held.slots, held.mem, held.cores) == (0, 0, 0)
    assert placed(lab.fit([Card(card.info, held)], lab.request(1, 4000))) == [("1g.5gb", 5)]


def test_reservations_beyond_the_device_list_stay_occupied(lab: Any) -> None:  # M14
    profile = lab.nvidia()
    allocation = restored(lab, "d0,NVIDIA,4864,15:;", reservation(0, 0, 6), reservation(0, 1, 5))
    held = effective(profile, lab.info().shape, allocation, False)
    card = Card(lab.mig_card().info, held["d0"])
    assert card_healthy(profile, card.info, card.used)
    assert placed(lab.fit([card], lab.request(1, 4000))) == [("1g.5gb", 4)]


def test_a_reservation_of_a_wrongly_counted_container_is_found_by_its_card(lab: Any) -> None:
    allocation = restored(lab, "d0,NVIDIA,4864,15:;;", reservation(1, 0, 6), slots=2)
    assert allocation[0][0].payload == MigSlice("1g.5gb", 6, 1)


def test_each_device_takes_the_reservation_with_its_own_indexes(lab: Any) -> None:
    both = (reservation(1, 0, 5), reservation(0, 0, 6))
    allocation = restored(lab, "d0,NVIDIA,4864,15:;d0,NVIDIA,4864,15:;", *both, slots=2)
    assert [slot[0].payload for slot in allocation] == [
        MigSlice("1g.5gb", 6, 1),
        MigSlice("1g.5gb", 5, 1),
    ]


def test_an_undecodable_or_foreign_reservation_gives_no_slice(lab: Any) -> None:
    bad = reservation(0, 0, 6) | {"migUUID": "MIG-x"}  # M10: partial identity
    assert restored(lab, "d0,NVIDIA,4864,15:;", bad)[0][0].payload is None
    other = reservation(0, 0, 6, uuid="d9")
    assert restored(lab, "d0,NVIDIA,4864,15:;", other)[0][0].payload is None


def test_an_id_of_fixed_geometry_counts_on_its_card_without_a_slice(lab: Any) -> None:  # M18
    (slot,) = restored(lab, "GPU-aa[1-2],NVIDIA,4864,15:;")
    assert slot == (ContainerDevice("GPU-aa", "NVIDIA", 4864, 15),)


def written(lab: Any, info: Any, allocation: Allocation) -> dict[str, str]:
    found: dict[str, str] = annotations(
        lab.nvidia(), AnnotateContext(info, allocation, lab.node(), datetime.now(UTC))
    )
    return found


def test_slices_are_written_as_reservations(lab: Any) -> None:
    device = ContainerDevice("d0", "NVIDIA", 4864, 15, payload=MigSlice("1g.5gb", 6, 1))
    keys = written(lab, lab.info(slots=2), ((), (device,)))
    assert keys["hami.io/vgpu-devices-allocated"] == ";d0,NVIDIA,4864,15:;"
    assert json.loads(keys[KEY]) == [reservation(1, 0, 6)]


def test_a_stale_reservation_is_overwritten(lab: Any) -> None:  # M15
    stale = lab.info({KEY: json.dumps([reservation(0, 0, 6)])})
    device = ContainerDevice("d0", "NVIDIA", 4000, 20)
    assert written(lab, stale, ((device,),))[KEY] == "[]"
    assert KEY not in written(lab, lab.info(), ((device,),))


def test_more_instances_than_cards_is_no_refusal_on_a_mig_node(lab: Any) -> None:
    assert len(placed(lab.fit([lab.mig_card()], lab.request(7, 4000)))) == 7
    hami_core_only = {"nvidia.com/vgpu-mode": "hami-core"}
    assert lab.fit([lab.mig_card()], lab.request(7, 4000), hami_core_only).text() == "NodeInsufficientDevice"


class TestSlicesOfOnePodAtDifferentTimes:
    """Kubelet makes all of a pod's slices at once, so an init container's slice is not free for the app."""

    def held(self, start: int, size: int, profile: str) -> Allocation:
        return ((ContainerDevice("d0", "NVIDIA", 1, 1, payload=MigSlice(profile, start, size)),),)

    def test_an_equal_slice_is_shared(self, lab: Any) -> None:
        pod = lab.info(slots=2, inits=1)
        result = lab.fit([lab.mig_card()], lab.request(1, 4000), pod=pod, allocated=self.held(6, 1, "1g.5gb"))
        assert placed(result) == [("1g.5gb", 6)]

    def test_an_overlapping_other_slice_is_avoided(self, lab: Any) -> None:
        pod = lab.info(slots=2, inits=1)
        result = lab.fit(
            [lab.mig_card()], lab.request(1, 4000), pod=pod, allocated=self.held(4, 4, "3g.20gb")
        )
        assert placed(result) == [("1g.5gb", 3)]
