"""Nodes, pods and quotas that say anything at all: no crash, no use below nothing, and all of it goes away
again."""

import json
from contextlib import suppress
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hami.protocol import views
from hami.scheduler.core.answers import NoFit, PlacementError
from hami.scheduler.core.state import ClusterState

ALLOCATED = "hami.io/vgpu-devices-allocated"
NODES, PODS = ("n0", "n1"), ("p0", "p1", "p2")

numbers = st.sampled_from([0, 1, -1, 100, 8000, 2**31 - 1, -(2**31), 2**31, 2**63, 10**25])
words = st.sampled_from(
    [
        *(
            "",
            "a",
            "GPU-0",
            "n0",
            "mig",
            "hami-core",
            "NVIDIA",
            "%s",
            '\n"',
            "é",
            ",",
            ";",
            ":",
            "null",
            "[]",
            "{}",
        ),
        *("Requesting", "Requesting_2026-08-22 10:00:00", "Requesting_9999-99-99 00:00:00", "Reported_now"),
        "x" * 300,
    ]
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
places = st.lists(st.fixed_dictionaries({"start": numbers, "size": numbers}), max_size=3)
profiles = st.lists(
    st.fixed_dictionaries({"name": words, "memoryMB": numbers, "core": numbers, "placements": places}),
    max_size=2,
)
ids = st.sampled_from(["GPU-0", "GPU-1", "a:b", ""])
odd_card = st.fixed_dictionaries(
    {},
    optional={
        "id": ids | anything,
        "count": numbers | anything,
        "devmem": numbers,
        "devcore": numbers,
        "type": words,
        "mode": words,
        "health": st.booleans() | anything,
        "custominfo": anything,
        "migProfiles": profiles | anything,
    },
)
small = st.integers(0, 3)
good_profiles = st.lists(
    st.fixed_dictionaries(
        {
            "name": st.sampled_from(["1g.5gb", "x"]),
            "memoryMB": st.sampled_from([0, 4000, 2**31 - 1]),
            "core": st.sampled_from([0, 14, 2**31 - 1]),
            "placements": st.lists(st.fixed_dictionaries({"start": small, "size": small}), max_size=3),
        }
    ),
    max_size=2,
)
good_card = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["GPU-0", "GPU-1"]),
        "count": st.sampled_from([0, 1, 10, 2**31 - 1]),
        "devmem": st.sampled_from([0, 8000, 2**31 - 1]),
        "devcore": st.sampled_from([0, 100, 2**31 - 1]),
        "type": words,
        "numa": st.integers(-3, 3),
        "mode": st.sampled_from(["mig", "hami-core", ""]),
        "health": st.just(True),
        "migProfiles": good_profiles,
    }
)
registers = (
    st.lists(good_card, min_size=2, max_size=2).map(json.dumps)
    | st.lists(good_card | odd_card, max_size=3).map(json.dumps)
    | anything.map(json.dumps)
    | words
)
quantities = st.sampled_from(["0", "1", "10", "-5", "1e3", "1Ei", "500m", "garbage", "9" * 40, "1e400"])
node_objects = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {
                "name": st.sampled_from(NODES),
                "annotations": st.fixed_dictionaries(
                    {"hami.io/node-nvidia-register": registers},
                    optional={
                        "hami.io/node-handshake": words,
                        "hami.io/node-nvidia-score": anything.map(json.dumps) | words,
                        "hami.io/device-cordon": words,
                        "hami.io/mutex.lock": words,
                    },
                ),
            }
        ),
        "status": st.fixed_dictionaries(
            {}, optional={"allocatable": st.dictionaries(st.just("nvidia.com/gpu"), quantities, max_size=1)}
        ),
    }
)
amounts = st.sampled_from(["0", "1", "8000", "-1", "-8000", "2147483647", "-2147483648", "2147483648", "x"])
pieces = st.tuples(st.sampled_from(["GPU-0", "GPU-1", "foreign", "", "GPU-0[1-2]"]), words, amounts, amounts)
slots = st.lists(pieces.map(",".join), max_size=3).map(":".join)
allocations = st.lists(slots, max_size=4).map(lambda some: ";".join(some) + ";") | words
reservations = st.lists(
    st.fixed_dictionaries(
        {
            "containerIndex": st.integers(-1, 3),
            "deviceIndex": st.integers(-1, 3),
            "gpuUUID": ids,
            "profile": words,
            "placement": st.fixed_dictionaries({"start": st.integers(0, 3), "size": st.integers(0, 3)}),
        }
    ),
    max_size=3,
).map(json.dumps)
containers = st.builds(
    lambda amounts_of, sidecar: {
        "name": "c",
        "resources": {"limits": {f"nvidia.com/{key}": str(amount) for key, amount in amounts_of.items()}},
        "restartPolicy": "Always" if sidecar else None,
    },
    st.fixed_dictionaries(
        {},
        optional={
            "gpu": st.sampled_from([0, 1, 2, -1, 2**31 - 1]),
            "gpumem": st.sampled_from([0, 10, 8000, -1, 2**31]),
            "gpucores": st.sampled_from([0, 50, 100, 1000]),
            "gpumem-percentage": st.sampled_from([0, 50, 200]),
        },
    ),
    st.booleans(),
)
pod_annotations = st.fixed_dictionaries(
    {},
    optional={
        "hami.io/vgpu-node": st.sampled_from([*NODES, "gone", ""]),
        "hami.io/vgpu-time": words,
        ALLOCATED: allocations,
        "hami.io/vgpu-devices-to-allocate": allocations,
        "hami.io/vgpu-mig-allocations": reservations | words,
        "hami.io/gpu-scheduler-policy": st.sampled_from(
            ["binpack", "numa,mutex", "topology-aware", "x", ","]
        ),
        "hami.io/node-scheduler-policy": st.sampled_from(["spread", "x"]),
        "hami.io/device-scoring-weights": st.sampled_from([f"slot={2**63 - 1},core=1,memory=1", "x"]),
        "nvidia.com/use-gpuuuid": words,
        "nvidia.com/nouse-gputype": words,
        "nvidia.com/numa-bind": words,
        "nvidia.com/vgpu-mode": words,
    },
)
held = st.tuples(st.sampled_from(["GPU-0", "GPU-1"]), st.just("NVIDIA"), amounts, amounts).map(",".join)
holding = st.fixed_dictionaries(
    {
        "hami.io/vgpu-node": st.sampled_from(NODES),
        ALLOCATED: st.lists(held, min_size=1, max_size=3).map(lambda some: ":".join(some) + ";"),
    }
)
pod_objects = st.builds(
    lambda name, apps, inits, annotations, node, phase, space: {
        "metadata": {"name": name, "namespace": space, "uid": f"uid-{name}", "annotations": annotations},
        "spec": {"containers": apps, "initContainers": inits, "nodeName": node},
        "status": {"phase": phase},
    },
    st.sampled_from(PODS),
    st.lists(containers, min_size=1, max_size=3),
    st.lists(containers, max_size=2),
    pod_annotations | holding,
    st.sampled_from([None, *NODES, "gone"]),
    st.sampled_from(["Pending", "Running", "Succeeded", "Odd"]),
    st.sampled_from(["a", "b"]),
)
quota_objects = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({"name": st.just("q"), "namespace": st.sampled_from(["a", "b"])}),
        "spec": st.fixed_dictionaries(
            {
                "hard": st.dictionaries(
                    st.sampled_from(["limits.nvidia.com/gpumem", "limits.nvidia.com/gpucores"]), quantities
                )
            }
        ),
    }
)
steps = st.one_of(
    st.tuples(st.just("node"), node_objects),
    st.tuples(st.just("pod"), pod_objects),
    st.tuples(st.just("filter"), pod_objects),
    st.tuples(st.just("quota"), quota_objects),
    st.tuples(st.just("time"), st.sampled_from([1, 61, 1000])),
)


def uses(state: ClusterState) -> list[tuple[int, int, int]]:
    return [(c.used.slots, c.used.mem, c.used.cores) for node in state.usage() for c in node.cards]


def take(lab: Any, kind: str, given_: Any) -> None:
    state: ClusterState = lab.state
    if kind == "node":
        state.upsert_node(msgspec.convert(given_, views.Node), lab.now)
    elif kind == "pod":
        state.upsert_pod(msgspec.convert(given_, views.Pod))
    elif kind == "quota":
        state.upsert_quota(msgspec.convert(given_, views.ResourceQuota))
    elif kind == "time":
        lab.now += given_
        state.tick(lab.now)
        state.expire(lab.now)
    else:
        with suppress(PlacementError):
            request = state.parse(given_)
            answer = (
                None if request is None else state.place(request, state.candidates([*NODES, "gone"]), lab.now)
            )
            if isinstance(answer, NoFit):
                assert "InternalError" not in str({**answer.failed, **answer.unresolvable})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=2, max_size=12))
def test_whatever_objects_say_the_books_stay_sane(lab: Any, happened: list[tuple[str, Any]]) -> None:
    lab = lab.fresh()
    for kind, given_ in happened:
        take(lab, kind, given_)
        assert all(amount >= 0 for use in uses(lab.state) for amount in use)
    for name in PODS:
        lab.state.delete_pod(f"uid-{name}")
    assert set(uses(lab.state)) <= {(0, 0, 0)}
    assert not any(quota.used for quota in lab.state.quota_usage())
