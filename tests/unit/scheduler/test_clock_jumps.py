"""The clock is set back or leaps ahead: nothing is held for ever, nothing that works is dropped."""

from __future__ import annotations

import json
from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from hami.protocol import views
from hami.scheduler.core.answers import Placement
from hami.scheduler.core.state import ClusterState
from hami.vendors.config import decode_config, load_profiles

PROFILES = load_profiles(
    decode_config(
        {
            "nvidia": {
                "resourceCountName": "nvidia.com/gpu",
                "resourceMemoryName": "nvidia.com/gpumem",
                "resourceMemoryPercentageName": "nvidia.com/gpumem-percentage",
                "resourceCoreName": "nvidia.com/gpucores",
                "defaultGPUNum": 1,
            }
        }
    )
)
NOW = 1_787_400_000.0
HOUR = 3600.0


def node(handshake: str) -> views.Node:
    devices = [{"id": "c0", "count": 10, "devmem": 8000, "devcore": 100, "type": "T4", "health": True}]
    annotations = {"hami.io/node-nvidia-register": json.dumps(devices), "hami.io/node-handshake": handshake}
    metadata = {"name": "n1", "annotations": annotations}
    status = {"allocatable": {"nvidia.com/gpu": "10"}}
    return msgspec.convert({"metadata": metadata, "status": status}, views.Node)


def state_with_node(now: float = NOW) -> ClusterState:
    state = ClusterState(PROFILES, reservation_timeout=900)
    state.upsert_node(node("Requesting_2026-08-22 12:00:00"), now)
    return state


def reserve(state: ClusterState, uid: str, now: float) -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1000"}
    pod: dict[str, Any] = {
        "metadata": {"name": uid, "namespace": "default", "uid": uid},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
    }
    request = state.parse(pod)
    assert request is not None
    assert isinstance(state.place(request, state.candidates(["n1"]), now), Placement)


def test_a_reservation_made_before_the_clock_was_set_back_expires_in_its_time() -> None:
    state = state_with_node()
    reserve(state, "p", NOW)
    back = NOW - 24 * HOUR
    assert state.expire(back) == ()
    assert state.next_timer() is not None
    assert state.next_timer() <= back + 900  # type: ignore[operator]
    assert state.expire(back + 899) == ()
    assert [one.uid for one in state.expire(back + 900)] == ["p"]


def test_a_leap_of_the_clock_releases_only_what_nobody_is_binding() -> None:
    state = state_with_node()
    for uid in ("reserved", "binding", "unknown", "bound"):
        reserve(state, uid, NOW)
    for uid in ("binding", "unknown", "bound"):
        state.binding_started(uid)
    state.binding_unknown("unknown")
    state.binding_confirmed("bound")
    assert [one.uid for one in state.expire(NOW + 24 * HOUR)] == ["reserved"]
    assert {one.uid for one in state.reservations()} == {"binding", "unknown", "bound"}
    reserve(state, "reserved", NOW + 24 * HOUR)


@given(
    st.lists(
        st.tuples(st.sampled_from(["tick", "node", "writes"]), st.floats(-48 * HOUR, 48 * HOUR)), max_size=12
    )
)
def test_whatever_the_clock_does_a_node_with_devices_stays_and_takes_pods(
    jumps: list[tuple[str, float]],
) -> None:
    state = state_with_node()
    for what, ahead in jumps:
        now = NOW + ahead
        if what == "tick":
            state.tick(now)
        elif what == "node":
            state.upsert_node(node("Requesting_2026-08-22 12:00:00"), now)
        else:
            for name in state.seen_names():
                state.handshake_writes(name, now)
        assert list(state.node_names()) == ["n1"]
    reserve(state, "p", NOW)
