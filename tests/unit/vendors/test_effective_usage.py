"""What a pod holds of its cards, init containers and sidecars included (scheduler.md §6.5)."""

from typing import Any

import pytest

from hami.protocol.allocation import ContainerDevice
from hami.vendors.engine import effective, init_base
from hami.vendors.types import Allocation, PodShape, SlotKind, Usage

INIT, SIDE, APP = SlotKind.INIT, SlotKind.SIDECAR, SlotKind.APP


def device(mem: int, card: str = "c", cores: int = 0) -> ContainerDevice:
    return ContainerDevice(card, "NVIDIA", mem, cores)


def shape(*kinds: SlotKind) -> PodShape:
    return PodShape(kinds, tuple(f"k{n}" for n in range(len(kinds))))


@pytest.mark.parametrize(
    ("kinds", "mem", "starting", "steady"),
    [
        pytest.param((INIT, APP), (20000, 10000), (20000, 1), (10000, 1), id="init then app"),
        pytest.param((APP, APP), (4000, 4000), (8000, 2), (8000, 2), id="two apps"),
        pytest.param((SIDE, APP), (4000, 4000), (8000, 2), (8000, 2), id="sidecar and app"),
        pytest.param(
            (INIT, SIDE, APP), (20000, 2000, 10000), (20000, 2), (12000, 2), id="sidecar after init"
        ),
        pytest.param(
            (SIDE, INIT, APP), (2000, 20000, 10000), (22000, 2), (12000, 2), id="sidecar before init"
        ),
        pytest.param((INIT, INIT, APP), (5000, 7000, 4000), (7000, 1), (4000, 1), id="inits in turn"),
    ],
)
def test_the_kubernetes_formula_holds_per_card(
    lab: Any,
    kinds: tuple[SlotKind, ...],
    mem: tuple[int, ...],
    starting: tuple[int, int],
    steady: tuple[int, int],
) -> None:
    profile = lab.nvidia()
    allocation: Allocation = tuple((device(each),) for each in mem)
    held = {done: effective(profile, shape(*kinds), allocation, done)["c"] for done in (False, True)}
    assert (held[False].mem, held[False].slots) == starting
    assert (held[True].mem, held[True].slots) == steady


def test_cards_and_dimensions_are_taken_apart(lab: Any) -> None:
    allocation: Allocation = (
        (device(9000, "a", 10),),
        (device(100, "a", 50), device(200, "b")),
    )
    held = effective(lab.nvidia(), shape(INIT, APP), allocation, False)
    assert held == {"a": Usage(1, 9000, 50), "b": Usage(1, 200, 0)}


def test_a_card_of_the_init_container_alone_is_free_afterwards(lab: Any) -> None:
    allocation: Allocation = ((device(9000, "a"),), (device(100, "b"),))
    assert effective(lab.nvidia(), shape(INIT, APP), allocation, True) == {"b": Usage(1, 100, 0)}


def test_devices_beyond_the_known_containers_still_count(lab: Any) -> None:
    allocation: Allocation = ((device(1),), (device(2),))
    assert effective(lab.nvidia(), shape(APP), allocation, False) == {"c": Usage(2, 3, 0)}


def test_a_container_is_fitted_beside_what_runs_with_it(lab: Any) -> None:
    profile, pod = lab.nvidia(), shape(SIDE, INIT, SIDE, APP, APP)
    allocation: Allocation = tuple((device(10**n),) for n in range(5))
    beside = [init_base(profile, pod, allocation, slot).get("c", Usage()).mem for slot in range(5)]
    assert beside == [0, 1, 1, 101, 1101]
