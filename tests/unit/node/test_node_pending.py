"""Which pod and container an Allocate call is about (device-plugin.md §15.2, protocol.md §8.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hami.node.errors import AllocateError, NoBindingPodError
from hami.node.plugin.pending import failure, find_pod, lock_is_ahead, next_count, take
from hami.protocol.allocation import ContainerDevice, decode_allocation, encode_allocation
from hami.protocol.views import Pod, decode

NOW = 1_787_300_100.0
LOCK = "2026-08-21T08:14:55Z"
Make = Callable[..., dict[str, Any]]
KEY = "hami.io/vgpu-devices-to-allocate"


def view(pod: dict[str, Any]) -> Pod:
    return decode(msgspec.json.encode(pod), Pod)


def lock_for(name: str, time: str = LOCK) -> str:
    return f"{time},team-a,{name}"


def test_l1_a_good_lock_names_the_pod(make_pod: Make) -> None:
    pods = [view(make_pod("other", "A,NVIDIA,1,1:;", bind_time=1)), view(make_pod("p", "B,NVIDIA,1,1:;"))]
    assert find_pod("n1", lock_for("p"), pods, NOW, [1]).name == "p"


@pytest.mark.parametrize(
    "lock",
    [None, LOCK, "a,b", "garbage", "a,b,c,d", lock_for("gone"), lock_for("p", "2026-08-21T07:00:00Z")],
    ids=["none", "legacy", "two parts", "no time", "four parts", "holder gone", "expired"],
)
def test_l12_l13_l30_without_a_good_lock_the_pods_are_listed(make_pod: Make, lock: str | None) -> None:
    pods = [
        view(make_pod("q", "A,NVIDIA,1,1:;", bind_time=5)),
        view(make_pod("p", "B,NVIDIA,1,1:;", bind_time=9)),
    ]
    assert find_pod("n1", lock, pods, NOW, [1]).name == "q"


@pytest.mark.parametrize(
    "holder",
    [
        {"phase": "Succeeded"},
        {"phase": "Failed"},
        {"bind_phase": "success"},
        {"bind_phase": "failed"},
        {"node": "n2"},
    ],
    ids=str,
)
def test_l30_a_lock_whose_holder_is_done_counts_as_none(make_pod: Make, holder: dict[str, str]) -> None:
    done = make_pod("done", ";", **holder)
    pods = [view(done), view(make_pod("p", "B,NVIDIA,1,1:;"))]
    assert find_pod("n1", lock_for("done"), pods, NOW, [1]).name == "p"


def test_l40_lock_times_of_two_zones_are_one_instant_and_the_future_is_now(make_pod: Make) -> None:
    pods = [view(make_pod("p", "B,NVIDIA,1,1:;", bind_phase="none"))]
    for time in ("2026-08-21T10:14:55+02:00", "2026-08-21T08:14:55Z", "2026-08-21T08:40:00Z"):
        assert find_pod("n1", lock_for("p", time), pods, NOW).name == "p"


def test_l40_a_lock_of_the_future_is_recognised() -> None:
    assert lock_is_ahead("2026-08-21T08:40:00Z,team-a,p", NOW)
    assert not lock_is_ahead("2026-08-21T08:19:00Z,team-a,p", NOW)
    assert not lock_is_ahead("garbage", NOW)
    assert not lock_is_ahead(None, NOW)


def test_l10_the_oldest_bind_time_with_the_matching_count_is_chosen(make_pod: Make) -> None:
    two = "A,NVIDIA,1,1:B,NVIDIA,1,1:;"
    pods = [
        view(make_pod("oldest", two, bind_time=1)),
        view(make_pod("newer", "A,NVIDIA,1,1:;", bind_time=7)),
        view(make_pod("older", "A,NVIDIA,1,1:;", bind_time=5)),
    ]
    assert find_pod("n1", None, pods, NOW, [1]).name == "older"
    assert find_pod("n1", None, pods, NOW, [2]).name == "oldest"


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "Running"},
        {"bind_phase": "failed"},
        {"node": "n2"},
    ],
    ids=str,
)
def test_l11_pods_that_do_not_wait_are_not_found(make_pod: Make, change: dict[str, str]) -> None:
    with pytest.raises(NoBindingPodError, match="no binding pod found on node n1"):
        find_pod("n1", None, [view(make_pod("p", "A,NVIDIA,1,1:;", **change))], NOW, [1])


def test_l31_l32_a_pod_without_the_label_is_found_by_its_annotation(make_pod: Make) -> None:
    node = "n" * 70
    pods = [view(make_pod("p", "A,NVIDIA,1,1:;", node=node))]
    assert find_pod(node, None, pods, NOW, [1]).name == "p"


def test_a_pod_with_nothing_left_is_named_but_not_found(make_pod: Make) -> None:
    with pytest.raises(NoBindingPodError) as caught:
        find_pod("n1", None, [view(make_pod("p", ";"))], NOW, [1])
    assert caught.value.exhausted == "team-a/p"


def test_l9_an_init_container_without_a_gpu_is_skipped(make_pod: Make) -> None:
    taken = take(view(make_pod("p", ";U1,NVIDIA,1000,0:;", init=("setup",))), [1])
    assert taken.containers[0].container.name == "app"
    assert taken.annotations == {KEY: ";;", "hami.io/bind-phase": "success"}


def test_l8_the_phase_changes_only_with_the_last_container(make_pod: Make) -> None:
    pod = make_pod("p", "U1,NVIDIA,1,0:;U1,NVIDIA,2,0:;", init=("setup",))
    first = take(view(pod), [1])
    assert first.containers[0].container.name == "setup"
    assert first.annotations == {KEY: ";U1,NVIDIA,2,0:;"}
    pod["metadata"]["annotations"].update(first.annotations)
    second = take(view(pod), [1])
    assert second.containers[0].container.name == "app"
    assert second.is_last


def test_l7_a_wrong_number_of_ids_is_an_error(make_pod: Make) -> None:
    with pytest.raises(AllocateError, match="device number not matched"):
        take(view(make_pod("p", "A,NVIDIA,1,1:B,NVIDIA,1,1:;")), [1])


def test_more_requests_than_entries_take_nothing(make_pod: Make) -> None:
    with pytest.raises(AllocateError, match="no pending device allocation found"):
        take(view(make_pod("p", "A,NVIDIA,1,1:;", containers=("a", "b"))), [1, 1])


def test_an_entry_beyond_the_containers_is_out_of_range(make_pod: Make) -> None:
    with pytest.raises(AllocateError, match="container index 1 out of range"):
        take(view(make_pod("p", ";A,NVIDIA,1,1:;")), [1])


@pytest.mark.parametrize("text", [None, "A,NVIDIA,1:;", "A,NVIDIA,x,1:;"])
def test_an_unreadable_annotation_is_an_error(make_pod: Make, text: str | None) -> None:
    pod = make_pod("p", "")
    if text is None:
        del pod["metadata"]["annotations"][KEY]
    else:
        pod["metadata"]["annotations"][KEY] = text
    with pytest.raises(AllocateError, match="device request not found"):
        take(view(pod), [1])


@pytest.mark.parametrize(
    "device",
    ["A,NVIDIA,-1,1:", "A,NVIDIA,1,-1:", "A,NVIDIA,1,10001:", "A\nX=1,NVIDIA,1,1:", "A B,NVIDIA,1,1:"],
    ids=["memory", "cores", "many cores", "second line", "blank"],
)
def test_what_no_scheduler_writes_reaches_no_limits_file(make_pod: Make, device: str) -> None:
    with pytest.raises(AllocateError, match="container app names card"):
        take(view(make_pod("p", f"{device};")), [1])


def test_a_card_with_the_places_of_an_instance_is_taken(make_pod: Make) -> None:
    taken = take(view(make_pod("p", "GPU-1[0-1],NVIDIA,1,10000:;")), [1])
    assert taken.containers[0].devices[0].uuid == "GPU-1[0-1]"


def test_l38_the_reason_on_the_pod_has_at_most_256_characters() -> None:
    notes = failure("x" * 400)
    assert notes == {"hami.io/bind-phase": "failed", "hami.io/allocate-error": "x" * 256}


slots = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@given(slots)
def test_taking_container_by_container_consumes_everything_in_order(counts: list[int]) -> None:
    allocation = [
        tuple(ContainerDevice(f"G{slot}-{index}", "NVIDIA", slot, index) for index in range(count))
        for slot, count in enumerate(counts)
    ]
    names = [f"c{index}" for index in range(len(counts))]
    notes = {KEY: encode_allocation(allocation)}
    seen = []
    while True:
        pod = view(
            {
                "metadata": {"name": "p", "namespace": "d", "annotations": notes},
                "spec": {"containers": [{"name": name} for name in names]},
            }
        )
        count = next_count(pod)
        if not count:
            break
        taken = take(pod, [count])
        assert len(decode_allocation(taken.annotations[KEY])) == len(counts)
        seen.append((taken.containers[0].position, taken.containers[0].devices))
        notes.update(taken.annotations)
    assert seen == [(position, slot) for position, slot in enumerate(allocation) if slot]
