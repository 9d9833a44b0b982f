"""What the dashboard makes of objects and of what monitors say (webui.md §6, §7)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from dashboard_harness import NOW, World, api, card, container, node, pod, quota
from hypothesis import given
from hypothesis import strategies as st

from hami.dashboard.shapes import Source
from hami.dashboard.view import Memory, build_view

GOLDEN = Path(__file__).parent / "golden"
MIB = 1 << 20
ASCEND = """vnpus:
- chipName: 910B
  commonWord: Ascend910B4
  resourceName: huawei.com/Ascend910B4
  resourceMemoryName: huawei.com/Ascend910B4-memory
  memoryAllocatable: 32768
  memoryCapacity: 32768
  aiCore: 20
  aiCPU: 7
  templates:
  - {name: vir05_1c_8g, memory: 8192, aiCore: 5, aiCPU: 1}
"""


def two_nodes() -> World:
    """Two nodes, four cards, three pods, of which one waits; only the first node's monitor answers."""
    world = World()
    world.put(
        node("a", card("a-0"), card("a-1", 1)),
        node("b", card("b-0"), card("b-1", 1, health=False)),
        pod("one", "a", "a-0,NVIDIA,2000,30:;"),
        pod("two", "b", "b-0,NVIDIA,4000,50:;", namespace="team"),
        pod("three"),
    )
    world.measured("a", monitor("a-0", "default", "one", used=500 * MIB, host=700 * MIB))
    return world


def monitor(device: str, namespace: str, name: str, *, used: float, host: float, **more: float) -> str:
    """What a monitor exports of one container and its card."""
    who = f'namespace="{namespace}",pod="{name}",container="main"'
    lines = [
        f'hami_host_gpu_memory_used_bytes{{device_uuid="{device}"}} {host}',
        f'hami_host_gpu_memory_total_bytes{{device_uuid="{device}"}} {more.get("total", 8000 * MIB)}',
        f'hami_host_gpu_utilization_ratio{{device_uuid="{device}"}} 40',
        f'hami_host_gpu_temperature_celsius{{device_uuid="{device}"}} 51',
        f'hami_vgpu_memory_used_bytes{{{who},device_uuid="{device}"}} {used}',
        f'hami_vgpu_hook_active{{{who},device_uuid="{device}"}} 1',
        f'hami_container_last_kernel_elapsed_seconds{{{who},device_uuid="{device}"}} {more.get("idle", 5)}',
        f"hami_vgpu_blocked{{{who}}} {more.get('blocked', 0)}",
    ]
    return "\n".join(lines) + "\n"


def the_device(world: World, uuid: str) -> Any:
    return api(world, f"devices/{uuid}")


def test_all_pages_are_filled_without_prometheus_and_dcgm() -> None:
    world = two_nodes()
    world.store.put_quota(quota("default", gpumem=20000))
    summary = api(world, "summary")
    assert summary["nodes"] == {"total": 2, "ready": 2, "schedulable": 2, "gpuNodes": 2}
    assert (summary["devices"]["total"], summary["devices"]["healthy"]) == (4, 3)
    assert summary["memoryMiB"] == {"total": 32000, "allocated": 6000, "used": 700.0}
    assert summary["workloads"]["running"] == 2
    assert summary["workloads"]["pending"] == 1
    for page, count in (("nodes", 2), ("devices", 4), ("workloads", 3), ("pending", 1), ("quotas", 1)):
        assert api(world, page)["total"] == count, page
    world.history.note(NOW, {("cluster", "memoryAllocatedMiB"): 6000})
    points = api(world, f"history?metric=memoryAllocatedMiB&from={NOW - 3600:.0f}&to={NOW:.0f}")["points"]
    assert points == [[NOW, 6000.0]], "history begins with the process"


def test_the_answers_are_as_recorded() -> None:
    world = two_nodes()
    found = {
        path: api(world, path)
        for path in ("summary", "nodes/a", "devices/a-0", "workloads/default/one", "pending")
    }
    text = json.dumps(found, indent=1, sort_keys=True) + "\n"
    if os.environ.get("HAMI_GOLDEN") == "write":
        (GOLDEN / "answers.json").write_text(text, "utf-8")
    assert text == (GOLDEN / "answers.json").read_text("utf-8"), "HAMI_GOLDEN=write records anew"


def test_a_node_of_another_vendor_is_found_by_its_registration_alone() -> None:
    world = World(ASCEND)
    cards = json.dumps([card("npu-0", devmem=32768, devcore=20, type="Ascend910B4", mode="")])
    only = node("n")
    only["metadata"]["annotations"] = {
        "hami.io/node-register-Ascend910B4": cards,
        "hami.io/node-handshake-Ascend910B4": "Reported_now",
    }
    world.put(only)
    assert [one["name"] for one in api(world, "nodes")["items"]] == ["n"]
    assert [one["vendor"] for one in api(world, "devices")["items"]] == ["Ascend910B4"]


def test_devices_are_attached_to_the_right_containers_when_there_are_init_containers() -> None:
    world = World()
    held = "c-0,NVIDIA,2000,0:;;c-1,NVIDIA,4000,0:;"
    containers = [container("none"), container("uses", gpu=1, gpumem=4000)]
    inits = [container("first", gpu=1, gpumem=2000)]
    world.put(node("n", card("c-0"), card("c-1", 1)), pod("p", "n", held, containers=containers, inits=inits))
    found = api(world, "workloads/default/p")["containers"]
    assert [
        (one["name"], one["init"], [(it["uuid"], it["memoryMiB"]) for it in one["devices"]]) for one in found
    ] == [("first", True, [("c-0", 2000)]), ("none", False, []), ("uses", False, [("c-1", 4000)])]


def test_a_pod_with_devices_of_two_vendors_shows_both() -> None:
    world = World("nvidia:\n  resourceCountName: nvidia.com/gpu\n" + ASCEND)
    both = node("n", card("gpu-0"))
    npus = [card("npu-0", devmem=32768, devcore=20, type="Ascend910B4", mode="")]
    both["metadata"]["annotations"]["hami.io/node-register-Ascend910B4"] = json.dumps(npus)
    held = {"hami.io/Ascend910B4-devices-allocated": "npu-0,Ascend910B4,8192,5:;"}
    world.put(both, pod("p", "n", "gpu-0,NVIDIA,2000,0:;", annotations=held))
    found = api(world, "workloads/default/p")
    assert [one["uuid"] for one in found["containers"][0]["devices"]] == ["gpu-0", "npu-0"]
    assert found["vendors"] == ["Ascend910B4", "NVIDIA"]


def test_an_ended_pod_is_listed_as_completed_until_it_is_deleted_and_holds_nothing() -> None:
    world = World()
    ended = pod("p", "n", "c-0,NVIDIA,2000,30:;", phase="Succeeded")
    world.put(node("n", card("c-0")), ended)
    (found,) = api(world, "workloads?status=completed")["items"]
    assert (found["pod"], found["memoryMiB"]) == ("p", 0)
    assert api(world, "summary")["memoryMiB"]["allocated"] == 0
    world.store.drop_pod("uid-default-p")
    assert api(world, "workloads")["total"] == 0


def test_usage_of_a_node_whose_monitor_is_silent_is_unknown_and_the_rest_stays() -> None:
    world = two_nodes()
    world.measured("b", monitor("b-0", "team", "two", used=100 * MIB, host=200 * MIB))
    assert the_device(world, "b-0")["memoryMiB"] == {"total": 8000, "allocated": 4000, "used": 200.0}
    world.now += 120
    world.measured("a", monitor("a-0", "default", "one", used=500 * MIB, host=700 * MIB))
    world.store.not_heard("b", "connection refused")
    assert the_device(world, "b-0")["memoryMiB"] == {"total": 8000, "allocated": 4000, "used": None}
    found = api(world, "nodes/b")["node"]
    assert found["monitor"]["state"] == "stale"
    assert found["monitor"]["reason"] == "stale 2 min: connection refused"
    assert api(world, "nodes/a")["node"]["memoryMiB"]["used"] == 700.0
    alerts = api(world, "summary")["alerts"]
    assert ("staleMonitor", "b") in [(one["kind"], one["subject"]) for one in alerts]


def test_overcommitted_memory_is_told_in_percent_of_the_physical_memory() -> None:
    world = World()
    world.put(
        node("n", card("c-0", devmem=16000)),
        pod("p", "n", "c-0,NVIDIA,12000,0:;", containers=[container("main", gpu=1, gpumem=12000)]),
    )
    world.measured("n", monitor("c-0", "default", "p", used=0, host=0))
    found = the_device(world, "c-0")
    assert found["memoryMiB"]["allocated"] / found["memoryMiB"]["total"] == 0.75
    assert (found["physicalMemoryMiB"], found["overcommitPercent"]) == (8000, 150.0)


def test_an_unhealthy_device_is_marked_and_an_alert() -> None:
    world = two_nodes()
    assert the_device(world, "b-1")["healthy"] is False
    assert [one["uuid"] for one in api(world, "devices?status=unhealthy")["items"]] == ["b-1"]
    assert {"kind": "unhealthyDevice", "subject": "b-1", "detail": "b", "namespace": ""} in api(
        world, "summary"
    )["alerts"]


def test_a_mig_instance_has_its_place_and_its_pod() -> None:
    world = World()
    slices = [
        {
            "containerIndex": 0,
            "deviceIndex": 0,
            "gpuUUID": "c-0",
            "profile": "2g.10gb",
            "placement": {"start": 2, "size": 2},
        }
    ]
    held = {"hami.io/vgpu-mig-allocations": json.dumps(slices)}
    world.put(
        node("n", card("c-0", mode="mig", devmem=40000)),
        pod("p", "n", "c-0,NVIDIA,10240,28:;", annotations=held),
    )
    (found,) = the_device(world, "c-0")["migInstances"]
    assert (found["profile"], found["start"], found["size"], found["pod"]) == ("2g.10gb", 2, 2, "p")


def test_an_unreadable_registration_is_shown_with_its_node_and_costs_no_other() -> None:
    world = two_nodes()
    world.put(node("broken", hami_io="", **{"hami.io__node_nvidia_register": "{not json"}))
    found = api(world, "nodes/broken")["node"]
    assert found["deviceCount"] == 0
    assert found["problems"][0].startswith("NVIDIA: ")
    assert api(world, "devices")["total"] == 4


def test_a_quota_is_shown_with_its_use() -> None:
    world = World()
    world.put(
        node("n", card("c-0", devmem=40000)),
        pod("p", "n", "c-0,NVIDIA,12000,0:;", containers=[container("main", gpu=1, gpumem=12000)]),
    )
    world.store.put_quota(quota("default", gpumem=20000))
    (found,) = api(world, "quotas")["items"]
    assert (found["resource"], found["used"], found["limit"]) == ("nvidia.com/gpumem", 12000, 20000)
    assert found["usedPercent"] == 60.0


def test_a_pod_has_no_devices_until_it_is_bound_and_then_all_of_them() -> None:
    world = World()
    two = [container("one", gpu=1, gpumem=2000), container("two", gpu=1, gpumem=3000)]
    world.put(node("n", card("c-0"), card("c-1", 1)), pod("p", containers=two))
    before = api(world, "workloads/default/p")
    assert (before["status"], before["deviceCount"], before["memoryMiB"]) == ("pending", 0, 0)
    assert api(world, "pending")["total"] == 1
    bound = pod("p", "n", "c-0,NVIDIA,2000,0:;c-1,NVIDIA,3000,0:;", containers=two)
    bound["metadata"]["resourceVersion"] = "2"
    world.put(bound)
    after = api(world, "workloads/default/p")
    assert (after["deviceCount"], after["memoryMiB"]) == (2, 5000)
    assert api(world, "pending")["total"] == 0


def test_idle_and_long_blocked_containers_and_old_locks_are_alerts() -> None:
    world = World()
    locked = node("n", card("c-0"), **{"hami.io__mutex.lock": "2026-08-21T00:00:00Z,team,holder"})
    world.put(locked, pod("p", "n", "c-0,NVIDIA,2000,30:;"))
    text = monitor("c-0", "default", "p", used=MIB, host=MIB, idle=3600, blocked=1)
    world.measured("n", text)
    kinds = {one["kind"] for one in api(world, "summary")["alerts"]}
    assert kinds == {"idle", "oldLock"}, "blocked only since now"
    world.now += 601
    world.measured("n", text)
    assert {one["kind"] for one in api(world, "summary")["alerts"]} == {"idle", "oldLock", "blocked"}


def test_a_source_that_broke_off_is_marked_stale() -> None:
    world = two_nodes()
    world.store.report(Source("pods", "stale", "no answer within 30s", 31.0))
    sources = {one["name"]: one for one in api(world, "summary")["sources"]}
    assert (sources["pods"]["state"], sources["pods"]["ageSeconds"]) == ("stale", 31.0)
    world.put(pod("one", "a", "a-0,NVIDIA,2000,30:;"))
    assert api(world, "workloads")["total"] == 3, "the same pod told again is no second row"


def test_what_a_monitor_says_of_cards_of_other_nodes_is_not_believed() -> None:
    world = two_nodes()
    world.measured("a", monitor("b-0", "team", "two", used=1 * MIB, host=1 * MIB))
    assert the_device(world, "b-0")["memoryMiB"]["used"] is None
    assert api(world, "workloads/team/two")["usedMemoryMiB"] is None


_EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("pod", "gone", "node", "other node", "monitor", "later", "ends")), st.integers(0, 3)
    ),
    max_size=25,
)


@given(_EVENTS)
def test_a_picture_made_from_the_one_before_is_as_one_made_anew(events: list[tuple[str, int]]) -> None:
    world = World()
    for version, (kind, at) in enumerate(events):
        if kind == "pod":
            told = pod(f"p{at}", "n", f"c-{at % 2},NVIDIA,{1000 + version},{at}:;")
            told["metadata"]["resourceVersion"] = str(version)
            world.put(told)
        elif kind == "ends":
            world.put(pod(f"p{at}", "n", "c-0,NVIDIA,2000,30:;", phase="Failed"))
        elif kind == "gone":
            world.store.drop_pod(f"uid-default-p{at}")
        elif kind == "node":
            world.put(node("n", card("c-0", type=f"NVIDIA-{at}"), card("c-1", 1, devmem=4000 + at)))
        elif kind == "other node":
            world.put(node("m", card("c-2")))
        elif kind == "monitor":
            world.measured("n", monitor("c-0", "default", f"p{at}", used=version * MIB, host=MIB))
        else:
            world.now += 50
        assert world.view == build_view(world.store, Memory(), world.now)
