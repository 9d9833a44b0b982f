"""Registration, fake devices, preferred allocation and alignment (device-plugin.md §15.1, §15.3)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from node_cards import U1, U2

from hami.node.config import Settings
from hami.node.plugin.inventory import Card, fake_devices, offered_cards, physical_uuid, registered_devices
from hami.node.plugin.preferred import Choice, align, preferred_for_containers, preferred_ids
from hami.protocol.allocation import ContainerDevice, Slot
from hami.protocol.inventory import encode_json

MIB = 1 << 20
C1 = Card(0, U1, "NVIDIA A100-SXM4-40GB", 40960 * MIB)
C2 = Card(1, U2, "Tesla T4", 15360 * MIB, numa=1)


def test_d1_every_card_is_offered_once_per_slot_in_order() -> None:
    offered = fake_devices((C1, C2), Settings(split_count=3))
    assert [device.id for device in offered] == [f"{uuid}-{slot}" for uuid in (U1, U2) for slot in range(3)]
    assert all(device.healthy and device.numa is None for device in offered)


def test_d2_topology_is_sent_only_when_enabled() -> None:
    offered = fake_devices((C2,), Settings(split_count=1, numa_topology=True))
    assert offered[0].numa == 1


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        (Settings(excluded_indexes=frozenset({0})), [U2]),
        (Settings(excluded_uuids=frozenset({U1}), excluded_indexes=frozenset({1})), []),
        (Settings(), [U1, U2]),
    ],
)
def test_d3_d4_filtered_cards_are_neither_offered_nor_registered(settings: Settings, left: list[str]) -> None:
    assert [card.uuid for card in offered_cards((C2, C1), settings)] == left


@pytest.mark.parametrize("device_id", [f"{U1}-10", U1, f"{U1}::3"])
def test_d5_ids_map_back_to_the_card(device_id: str) -> None:
    assert physical_uuid(device_id) == U1


def test_r1_scaling_of_memory_and_cores() -> None:
    card = Card(0, U1, "NVIDIA A", 24564 * MIB)
    devices, _ = registered_devices((card,), Settings(memory_scaling=1.5, core_scaling=1.2))
    assert (devices[0].devmem, devices[0].devcore) == (36846, 120)
    assert registered_devices((card,), Settings(core_scaling=1.15))[0][0].devcore == 115


def test_r2_r3_the_registration_text() -> None:
    devices, _ = registered_devices((C1, C2), Settings())
    assert encode_json(devices) == (
        f'[{{"id":"{U1}","count":10,"devmem":40960,"devcore":100,"type":"NVIDIA A100-SXM4-40GB",'
        f'"mode":"hami-core","health":true}},'
        f'{{"id":"{U2}","index":1,"count":10,"devmem":15360,"devcore":100,"type":"NVIDIA-Tesla T4","numa":1,'
        f'"mode":"hami-core","health":true}}]'
    )


def test_r4_r5_unknown_memory_is_configured_or_the_card_is_left_out() -> None:
    card = Card(0, U1, "NVIDIA GH200", None)
    devices, left_out = registered_devices((card,), Settings(preconfigured_memory_mib=131072))
    assert devices[0].devmem == 131072
    assert left_out == ()
    devices, left_out = registered_devices((card,), Settings())
    assert devices == ()
    assert "preConfiguredDeviceMemory" in left_out[0]


def test_d10_preferred_ids_follow_the_scheduler() -> None:
    choice = Choice((f"{U1}-0", f"{U1}-1", f"{U2}-0"), (), 2)
    assert set(preferred_ids(choice, [U2, U1])) == {f"{U2}-0", f"{U1}-0"}


def test_d11_must_include_ids_are_accounted() -> None:
    choice = Choice((f"{U1}-0", f"{U1}-1", f"{U2}-0"), (f"{U1}-1",), 2)
    assert set(preferred_ids(choice, [U1, U2])) == {f"{U1}-1", f"{U2}-0"}


@pytest.mark.parametrize(
    ("choice", "cards"),
    [
        (Choice((f"{U2}-0",), (), 2), [U2]),
        (Choice((f"{U1}-0",), (), 1), [U2]),
        (Choice((f"{U2}-0",), (f"{U1}-0",), 1), [U2]),
        (Choice((), (), 0), []),
    ],
    ids=["too few devices", "card not available", "foreign must-include", "nothing asked"],
)
def test_d12_without_an_exact_choice_there_is_no_answer(choice: Choice, cards: list[str]) -> None:
    assert preferred_ids(choice, cards) == ()


def test_positions_stay_aligned_after_a_skipped_container() -> None:
    entries = [(ContainerDevice(U2, "NVIDIA", 1, 1),), (ContainerDevice(U1, "NVIDIA", 1, 1),)]
    choices = [Choice((f"{U1}-0",), (), 1), Choice((f"{U1}-0",), (), 1)]
    assert preferred_for_containers(choices, entries) == ((), (f"{U1}-0",))
    assert preferred_for_containers(choices[:1], entries) == ()


def test_l24_limits_travel_with_their_card() -> None:
    slot: Slot = (ContainerDevice(U1, "NVIDIA", 3000, 1), ContainerDevice(U2, "NVIDIA", 4000, 2))
    aligned = align(slot, [f"{U2}-0", f"{U1}-0"])
    assert [(device.uuid, device.usedmem) for device in aligned] == [(U2, 4000), (U1, 3000)]


cards = st.sampled_from([f"GPU-{n}1111111-2222-3333-4444-555555555555" for n in range(4)])


@given(st.lists(st.tuples(cards, cards), min_size=1, max_size=8))
def test_alignment_keeps_every_limit_and_takes_kubelets_cards(pairs: list[tuple[str, str]]) -> None:
    slot = tuple(ContainerDevice(uuid, "NVIDIA", index, index) for index, (uuid, _) in enumerate(pairs))
    ids = [f"{uuid}-{index}" for index, (_, uuid) in enumerate(pairs)]
    aligned = align(slot, ids)
    assert [device.uuid for device in aligned] == [physical_uuid(device_id) for device_id in ids]
    assert sorted(device.usedmem for device in aligned) == list(range(len(pairs)))
