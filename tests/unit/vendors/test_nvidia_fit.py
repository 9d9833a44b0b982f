"""The fit of NVIDIA requests (nvidia-scheduling.md §15.2, F1-F28). Cards stand in ascending preference."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from hami.protocol.allocation import ContainerDevice
from hami.vendors import fit as fit_module
from hami.vendors.engine import annotations, refuse_all
from hami.vendors.types import AnnotateContext, FitResult, QuotaView


def ids(result: FitResult) -> list[str]:
    assert result.devices is not None, result.text()
    assert result.text() == ""
    return [device.uuid for device in result.devices]


def test_the_most_preferred_card_is_tried_first(lab: Any) -> None:  # F1
    assert ids(lab.fit([lab.card("d0"), lab.card("d1")], lab.request(1, 4000, cores=20))) == ["d1"]


@pytest.mark.parametrize(
    ("card", "request_", "reason"),
    [
        pytest.param({"usedmem": 39000, "used": 1}, (1, 4000), "CardInsufficientMemory", id="F2"),
        pytest.param({"usedcores": 90, "used": 1}, (1, 0, 101, 20), "CardInsufficientCore", id="F3"),
        pytest.param({"used": 10}, (1, 4000), "CardTimeSlicingExhausted", id="F4"),
        pytest.param({"used": 1}, (1, 4000, 101, 100), "ExclusiveDeviceAllocateConflict", id="F5"),
        pytest.param({"used": 1, "usedcores": 100}, (1, 4000), "CardComputeUnitsExhausted", id="F6"),
        pytest.param({"health": False}, (1, 4000), "CardNotHealth", id="sick"),
    ],
)
def test_a_card_that_cannot_serve_is_counted_with_its_reason(
    lab: Any, card: dict[str, Any], request_: tuple[int, ...], reason: str
) -> None:
    result = lab.fit([lab.card(**card)], lab.request(*request_))
    assert result.devices is None
    assert result.text() == f"1/1 {reason}"


def test_a_whole_card_request_may_share_a_card_with_scaled_cores(lab: Any) -> None:  # F7
    card = lab.card(used=1, devcore=150)
    assert ids(lab.fit([card], lab.request(1, 4000, cores=100))) == ["d0"]


def test_a_card_without_cores_takes_requests_without_cores(lab: Any) -> None:
    assert ids(lab.fit([lab.card(used=1, devcore=0)], lab.request(1, 4000))) == ["d0"]
    assert lab.fit([lab.card(devcore=0)], lab.request(1, 4000, cores=1)).text() == "1/1 CardInsufficientCore"


def test_cores_over_100_mean_a_whole_card(lab: Any) -> None:  # F8
    result = lab.fit([lab.card()], lab.request(1, 4000, cores=250))
    assert result.devices is not None
    assert result.devices[0].usedcores == 100


@pytest.mark.parametrize(
    ("total", "percent", "mem"),
    [
        pytest.param(40961, 30, 12288, id="F9"),
        (2147483647, 99, 2126008810),
        (3, 33, 0),
        (8000, 100, 8000),
    ],
)
def test_a_percentage_of_the_cards_memory_is_truncated(lab: Any, total: int, percent: int, mem: int) -> None:
    result = lab.fit([lab.card(devmem=total)], lab.request(1, 0, percent))
    assert result.devices is not None
    assert result.devices[0].usedmem == mem


def test_memory_wins_over_a_percentage_given_beside_it(lab: Any) -> None:  # A12
    result = lab.fit([lab.card()], lab.request(1, 500, 60))
    assert result.devices is not None
    assert result.devices[0].usedmem == 500


def test_cards_that_would_have_done_are_counted_when_too_few(lab: Any) -> None:  # F10, F27
    cards = [lab.card("d0"), lab.card("d1", health=False), lab.card("d2")]
    result = lab.fit(cards, lab.request(3, 4000))
    assert result.text() == "1/3 CardNotHealth, 2/3 AllocatedCardsInsufficientRequest"


def test_three_reasons_are_sorted_as_text(lab: Any) -> None:  # F27
    cards = [
        lab.card("d0", health=False),
        lab.card("d1"),
        lab.card("d2", used=1, usedmem=40000),
        lab.card("d3", used=1, usedmem=40000),
    ]
    assert lab.fit(cards, lab.request(2, 4000)).text() == (
        "1/4 AllocatedCardsInsufficientRequest, 1/4 CardNotHealth, 2/4 CardInsufficientMemory"
    )


def test_more_cards_than_the_node_has_is_a_reason_of_the_node(lab: Any) -> None:  # F11
    assert lab.fit([lab.card("d0"), lab.card("d1")], lab.request(3)).text() == "NodeInsufficientDevice"


def test_no_candidates_are_a_reason_too(lab: Any) -> None:
    result = lab.fit([], lab.request(1))
    assert result.devices is None
    assert result.text() == "NodeInsufficientDevice"


@pytest.mark.parametrize(
    ("annotations_", "fits"),
    [
        pytest.param({"nvidia.com/use-gputype": "H100, a100"}, True, id="F12"),
        pytest.param({"nvidia.com/nouse-gputype": "A100"}, False, id="F13"),
        pytest.param({"nvidia.com/use-gputype": "  "}, True, id="F14"),
        pytest.param({"nvidia.com/use-gputype": ","}, False, id="F15"),
        pytest.param({"nvidia.com/nouse-gputype": ","}, True, id="no-use of nothing"),
        pytest.param({"nvidia.com/vgpu-mode": "mig"}, False, id="F16"),
        pytest.param({"nvidia.com/vgpu-mode": "mig, hami-core"}, True, id="one of two modes"),
        pytest.param({"nvidia.com/vgpu-mode": "my-hami-core"}, False, id="modes are whole words"),
        pytest.param({"nvidia.com/vgpu-mode": ""}, True, id="blank mode"),
        pytest.param({"nvidia.com/use-gputype": "a100, H100"}, True, id="47"),
        pytest.param({"nvidia.com/nouse-gputype": "A10,"}, False, id="48"),
        pytest.param({"nvidia.com/vgpu-mode": "mig"}, False, id="51"),
        pytest.param({"nvidia.com/use-gputype": "=NVIDIA A100-SXM4-40GB"}, True, id="whole type"),
        pytest.param({"nvidia.com/use-gputype": "=NVIDIA A100"}, False, id="not the whole type"),
        pytest.param(
            {"nvidia.com/use-gputype": "A100", "nvidia.com/nouse-gputype": "SXM4"}, False, id="both lists"
        ),
    ],
)
def test_models_and_modes_are_selected_by_annotation(
    lab: Any, annotations_: Mapping[str, str], fits: bool
) -> None:
    result = lab.fit([lab.card()], lab.request(1, 4000), annotations_)
    assert result.text() == ("" if fits else "1/1 CardTypeMismatch")


def test_a_card_without_a_mode_serves_any_mode(lab: Any) -> None:
    assert ids(lab.fit([lab.card(mode="")], lab.request(), {"nvidia.com/vgpu-mode": "mps"})) == ["d0"]


def test_a_card_is_chosen_by_its_uuid(lab: Any) -> None:  # F17
    cards = [lab.card("d1"), lab.card("d0")]
    wanted = {"nvidia.com/use-gpuuuid": "d7, d1"}
    assert ids(lab.fit(cards, lab.request(1, 4000), wanted)) == ["d1"]
    assert lab.fit(cards, lab.request(2, 4000), wanted).text() == (
        "1/2 AllocatedCardsInsufficientRequest, 1/2 CardUuidMismatch"
    )


@pytest.mark.parametrize(
    "annotations_",
    [
        pytest.param({"nvidia.com/nouse-gpuuuid": "d1"}, id="F18"),
        {"nvidia.com/use-gpuuuid": ","},
        {"nvidia.com/use-gpuuuid": "D1"},
        {"nvidia.com/use-gpuuuid": "d1", "nvidia.com/nouse-gpuuuid": "d1"},
    ],
)
def test_a_card_is_excluded_by_its_uuid(lab: Any, annotations_: Mapping[str, str]) -> None:
    assert lab.fit([lab.card("d1")], lab.request(1, 4000), annotations_).text() == "1/1 CardUuidMismatch"


@pytest.mark.parametrize(
    "text", [pytest.param(" G0 ,G1", id="49"), pytest.param("  ", id="50"), pytest.param("", id="empty")]
)
def test_a_list_that_names_the_card_or_nothing_allows_it(lab: Any, text: str) -> None:
    assert ids(lab.fit([lab.card("G0")], lab.request(1, 4000), {"nvidia.com/use-gpuuuid": text})) == ["G0"]


def test_cordoned_cards_take_no_new_pods(lab: Any) -> None:  # F19, F20
    cards = [lab.card("d0"), lab.card("d1")]
    one = lab.node(annotations={"hami.io/device-cordon": "d1, ,"})
    assert ids(lab.fit(cards, lab.request(1, 4000), node=one)) == ["d0"]
    both = lab.node(annotations={"hami.io/device-cordon": "d0,d1"})
    assert lab.fit(cards, lab.request(1, 4000), node=both).text() == "2/2 CardCordoned"


BIND = {"nvidia.com/numa-bind": "true"}


class TestNumaBinding:
    def test_all_cards_come_from_one_numa_node(self, lab: Any) -> None:  # F21
        cards = [lab.card("c", numa=1), lab.card("b", numa=1), lab.card("a", numa=0)]
        assert ids(lab.fit(cards, lab.request(2, 4000), BIND)) == ["b", "c"]

    def test_what_was_collected_on_other_numa_nodes_is_reported(self, lab: Any) -> None:  # F22
        cards = [lab.card("b", numa=1), lab.card("a", numa=0)]
        result = lab.fit(cards, lab.request(2, 4000), BIND)
        assert result.text() == "1/2 AllocatedCardsInsufficientRequest, 1/2 NumaNotFit"

    def test_anything_but_a_boolean_does_not_bind(self, lab: Any) -> None:  # F23
        cards = [lab.card("b", numa=1), lab.card("a", numa=0)]
        assert ids(lab.fit(cards, lab.request(2, 4000), {"nvidia.com/numa-bind": "yes"})) == ["a", "b"]

    def test_cards_of_one_numa_node_need_not_be_adjacent(self, lab: Any) -> None:
        cards = [lab.card("c", numa=1), lab.card("b", numa=0), lab.card("a", numa=1)]
        assert ids(lab.fit(cards, lab.request(2, 4000), BIND)) == ["a", "c"]

    def test_a_rejected_card_of_another_numa_node_keeps_the_progress(self, lab: Any) -> None:
        full = lab.card("b", numa=0, used=10)
        cards = [lab.card("c", numa=1), full, lab.card("a", numa=1)]
        assert ids(lab.fit(cards, lab.request(2, 4000), BIND)) == ["a", "c"]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("mutex", id="F24"),
        pytest.param("binpack,mutex", id="F25"),
        pytest.param("binpack, mutex", id="vendors 34"),
    ],
)
def test_mutex_takes_unused_cards_only(lab: Any, policy: str) -> None:
    cards = [lab.card("d1"), lab.card("d0", used=1)]
    assert ids(lab.fit(cards, lab.request(1, 4000), policy=policy)) == ["d1"]
    assert lab.fit(cards, lab.request(2, 4000), policy=policy).text() == (
        "1/2 AllocatedCardsInsufficientRequest, 1/2 ExclusiveDeviceAllocateConflict"
    )


class TestQuota:
    def test_a_card_that_would_exceed_the_quota_is_refused(self, lab: Any) -> None:  # F26
        left = QuotaView(mem_left=1000)
        assert lab.fit([lab.card()], lab.request(1, 2000), quota=left).text() == "1/1 ResourceQuotaNotFit"
        assert ids(lab.fit([lab.card()], lab.request(1, 1000), quota=left)) == ["d0"]

    def test_the_resolved_percentage_counts(self, lab: Any) -> None:
        cards = [lab.card("small", devmem=1000), lab.card("large", devmem=8000)]
        result = lab.fit(cards, lab.request(1, 0, 50), quota=QuotaView(mem_left=500))
        assert ids(result) == ["small"]

    def test_earlier_cards_of_the_container_count(self, lab: Any) -> None:
        result = lab.fit(
            [lab.card("d0"), lab.card("d1")], lab.request(2, 600), quota=QuotaView(mem_left=1000)
        )
        assert result.text() == "1/2 AllocatedCardsInsufficientRequest, 1/2 ResourceQuotaNotFit"

    def test_an_init_container_and_an_app_container_count_once(self, lab: Any) -> None:
        held = ((ContainerDevice("d0", "NVIDIA", 900, 0),),)
        left = QuotaView(mem_left=1000)
        after_init = lab.info(slots=2, inits=1)
        assert ids(lab.fit([lab.card()], lab.request(1, 800), quota=left, allocated=held, pod=after_init))
        after_app = lab.info(slots=2)
        refused = lab.fit([lab.card()], lab.request(1, 800), quota=left, allocated=held, pod=after_app)
        assert refused.text() == "1/1 ResourceQuotaNotFit"

    def test_cores_have_a_limit_of_their_own(self, lab: Any) -> None:
        left = QuotaView(cores_left=10)
        assert lab.fit([lab.card()], lab.request(1, 1, cores=20), quota=left).devices is None
        assert lab.fit([lab.card()], lab.request(1, 1, cores=10), quota=left).devices is not None


def test_every_container_has_a_place_in_the_annotation(lab: Any) -> None:  # F28
    profile = lab.nvidia()
    allocation = ((), (ContainerDevice("d0", "NVIDIA", 4000, 20),))
    context = AnnotateContext(lab.info(slots=3), allocation, lab.node(), datetime.now(UTC))
    text = ";d0,NVIDIA,4000,20:;;"
    assert annotations(profile, context) == {
        "hami.io/vgpu-devices-to-allocate": text,
        "hami.io/vgpu-devices-allocated": text,
    }
    two = AnnotateContext(lab.info(slots=2), allocation, lab.node(), datetime.now(UTC))
    assert set(annotations(profile, two).values()) == {";d0,NVIDIA,4000,20:;"}


def test_nothing_is_written_for_a_pod_without_devices(lab: Any) -> None:
    context = AnnotateContext(lab.info(slots=2), ((), ()), lab.node(), datetime.now(UTC))
    assert annotations(lab.nvidia(), context) == {}


def test_a_full_node_refuses_with_every_card() -> None:  # F30
    assert refuse_all("CardTimeSlicingExhausted", 2).text() == "2/2 CardTimeSlicingExhausted"


def test_a_fault_inside_rejects_the_node_and_is_told(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("odd")

    monkeypatch.setattr(fit_module, "card_need", broken)
    result = lab.fit([lab.card()], lab.request(1))
    assert result.devices is None
    assert result.text() == "InternalError"
    assert result.detail == "KeyError: 'odd'"


def test_the_chosen_device_carries_the_cards_index_and_extras(lab: Any) -> None:
    result = lab.fit([lab.card("d0", index=3, custom={"x": 1})], lab.request(1, 5))
    assert result.devices == (ContainerDevice("d0", "NVIDIA", 5, 0, 3, {"x": 1}),)
