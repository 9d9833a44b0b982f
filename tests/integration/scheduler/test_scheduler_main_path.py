"""One pod through `/filter` and `/bind`, and what the cluster sees of it (protocol.md cases 54 to 57)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest


async def test_filter_reserves_in_memory_and_writes_nothing(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    world.api.seen.clear()
    answer = await world.filter(pod, "n1")
    assert answer == {
        "Nodes": None,
        "NodeNames": ["n1"],
        "FailedNodes": None,
        "FailedAndUnresolvableNodes": None,
        "Error": "",
    }
    assert world.used_mib("n1") == [1000]
    assert world.writes() == []
    stored = await world.pod("p")
    assert stored["metadata"]["resourceVersion"] == pod["metadata"]["resourceVersion"]
    assert not any(key.startswith("hami.io/") for key in stored["metadata"].get("annotations", {}))


async def test_bind_is_one_lock_patch_and_one_binding_that_carries_everything(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    world.api.seen.clear()
    assert await world.bind(pod, "n1") == ""
    assert world.writes() == [
        ("PATCH", "/api/v1/nodes/n1"),
        ("POST", "/api/v1/namespaces/default/pods/p/binding"),
    ]
    stored = await world.pod("p")
    meta = stored["metadata"]
    assert stored["spec"]["nodeName"] == "n1"
    assert meta["labels"]["hami.io/vgpu-node"] == "n1"
    assert meta["annotations"]["hami.io/vgpu-devices-allocated"].startswith("GPU-n1-0,NVIDIA,1000,0")
    assert meta["annotations"]["hami.io/bind-phase"] == "allocating"
    node = await world.request("GET", "/api/v1/nodes/n1")
    assert node["metadata"]["annotations"]["hami.io/mutex.lock"].endswith(",default,p")
    await world.until(lambda: world.scheduler.state.reservation(meta["uid"]) is None)
    assert world.used_mib("n1") == [1000], "usage moved from the reservation to the pod without a gap"


async def test_no_lock_is_taken_on_a_node_in_mode_exact(world: Any) -> None:
    await world.add_node("n1", annotations={"hami.io/allocation-mode": "exact"})
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    world.api.seen.clear()
    assert await world.bind(pod, "n1") == ""
    assert world.writes() == [("POST", "/api/v1/namespaces/default/pods/p/binding")]


async def test_users_read_what_happened_in_events(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    await world.bind(pod, "n1")
    big = await world.add_pod("big", mem=9000)
    assert (await world.filter(big, "n1"))["NodeNames"] is None
    await world.scheduler.recorder.flush(60)
    events = await world.events()
    assert (
        "Normal",
        "FilteringSucceed",
        "find fit node(n1), 0 nodes not fit, 1 nodes fit(n1:0.00)",
    ) in events
    assert ("Normal", "BindingSucceed", "Successfully binding node [n1] to default/p") in events
    assert ("Warning", "FilteringFailed", "1 nodes CardInsufficientMemory(n1)") in events
    assert ("Warning", "FilteringFailed", "no available node, 1 nodes do not meet") in events


async def test_a_pod_refused_by_its_quota_reads_that_the_nodes_are_not_the_cause(world: Any) -> None:
    await world.add_node("n1")
    await world.add_node("n2", mem=500)
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"limits.nvidia.com/gpumem": "600"}}}
    await world.request("POST", "/api/v1/namespaces/default/resourcequotas", quota)
    await world.until(lambda: any(one.limit == 600 for one in world.scheduler.state.quota_usage()))
    pod = await world.add_pod("p", mem=None)  # a whole card
    assert (await world.filter(pod, "n1", "n2"))["NodeNames"] == ["n2"]
    assert (await world.filter(pod, "n1"))["NodeNames"] is None
    await world.scheduler.recorder.flush(60)
    text = (
        "namespace quota, not node capacity: the quota of namespace default refuses the pod on 1 of 1 nodes"
    )
    assert ("Warning", "FilteringFailed", text) in await world.events()


async def test_the_reason_of_every_node_is_answered_when_nothing_fits(world: Any) -> None:
    await world.add_node("n1", mem=500)
    pod = await world.add_pod("p")
    answer = await world.filter(pod, "n1", "n3")
    assert answer["NodeNames"] is None
    assert answer["FailedNodes"] == {"n1": "1/1 CardInsufficientMemory"}
    assert answer["FailedAndUnresolvableNodes"] == {"n3": "node unregistered"}


async def test_nodes_that_fail_beside_one_that_fits_are_no_failure(world: Any) -> None:
    await world.add_node("n1", mem=500)
    await world.add_node("n2")
    pod = await world.add_pod("p")
    answer = await world.filter(pod, "n1", "n2")
    assert (answer["NodeNames"], answer["FailedNodes"]) == (["n2"], None)
    await world.scheduler.recorder.flush(60)
    assert [reason for _, reason, _ in await world.events()] == ["FilteringSucceed"]


async def test_a_pod_without_devices_gets_its_names_back_unchanged(world: Any) -> None:
    pod = {
        "metadata": {"name": "x", "namespace": "default", "uid": "u"},
        "spec": {"containers": [{"name": "a"}]},
    }
    answer = await world.call("filter", {"pod": pod, "nodeNames": ["n2", "n1"]})
    assert answer["NodeNames"] == ["n2", "n1"]
    nodes = {"items": [{"metadata": {"name": "n9", "odd": 1.50}}]}
    answer = await world.call("filter", {"Pod": pod, "Nodes": nodes})
    assert answer["Nodes"] == nodes


@pytest.mark.parametrize(
    ("body", "error"),
    [
        pytest.param(b"{", "invalid filter request", id="2"),
        (b"", "invalid filter request"),
        pytest.param(b'{"NodeNames":["n1"]}', "extender args missing pod", id="1"),
        (b'{"Pod":null,"NodeNames":["n1"]}', "extender args missing pod"),
        pytest.param(
            b'{"Pod":{"metadata":{}},"Nodes":null,"NodeNames":null}', "extender args missing nodes", id="5"
        ),
        (b'{"Pod":{"metadata":{}}}', "extender args missing nodes"),
        (b'{"Pod":{"metadata":{"name":5}},"NodeNames":[]}', "metadata.name"),
        (b'{"Pod":[],"NodeNames":[]}', "Expected `object`"),
    ],
)
async def test_a_bad_request_is_answered_with_its_error(world: Any, body: bytes, error: str) -> None:
    answer = await world.call("filter", body)
    assert error in answer["Error"]
    assert answer["NodeNames"] is None
    async with world.http.get(f"{world.url}/healthz") as response:
        assert response.status == 200


async def test_a_bad_list_of_names_is_an_error(world: Any) -> None:
    pod = await world.add_pod("p")
    answer = await world.call("filter", {"Pod": pod, "NodeNames": [1, 2]})
    assert "invalid list of node names" in answer["Error"]


async def test_a_dry_run_reserves_nothing_and_returns_all_fitting_nodes(world: Any) -> None:
    await world.add_node("n1")
    await world.add_node("n2", mem=100)
    await world.add_node("n3")
    nodes = [await world.request("GET", f"/api/v1/nodes/{name}") for name in ("n3", "n2", "n1")]
    nodes.append({"metadata": {"name": "bare"}})
    pod = await world.add_pod("p")
    for verb in ("filter", "simulate"):
        answer = await world.call(verb, {"Pod": pod, "Nodes": {"items": nodes}})
        assert [node["metadata"]["name"] for node in answer["Nodes"]["items"]] == ["n3", "n1"]
        assert answer["Nodes"]["items"][0] == nodes[0], "nodes come back whole"
        assert answer["FailedNodes"] == {"n2": "1/1 CardInsufficientMemory", "bare": "node unregistered"}
    assert world.used_mib("n1") == [0]


async def test_many_pods_filtered_and_bound_at_once_share_cards_exactly(world: Any) -> None:
    await world.add_node("n1", cards=2, annotations={"hami.io/allocation-mode": "exact"})
    pods = [await world.add_pod(f"p{number}", mem=4000) for number in range(5)]
    answers = await asyncio.gather(*(world.filter(pod, "n1") for pod in pods))
    fitting = [pod for pod, answer in zip(pods, answers, strict=True) if answer["NodeNames"]]
    assert len(fitting) == 4
    assert await asyncio.gather(*(world.bind(pod, "n1") for pod in fitting)) == ["", "", "", ""]
    assert world.used_mib("n1") == [8000, 8000]


async def test_a_deleted_pod_gives_its_share_back(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    await world.bind(pod, "n1")
    await world.request("DELETE", "/api/v1/namespaces/default/pods/p", {"gracePeriodSeconds": 0})
    await world.until(lambda: world.used_mib("n1") == [0])


async def test_health_routes_and_unknown_ones(world: Any) -> None:
    async def status(method: str, path: str) -> int:
        async with world.http.request(method, world.url + path) as response:
            return int(response.status)

    assert await status("GET", "/healthz") == 200
    assert await status("GET", "/readyz") == 200
    assert await status("GET", "/nothing") == 404
    assert await status("GET", "/filter") == 405
    assert await status("POST", "/healthz") == 405
    assert await status("GET", "/metrics") == 404
    assert await status("GET", "/debug/pprof/") == 404


async def test_metrics_have_the_exact_names_and_values(world: Any) -> None:
    await world.add_node("n1")
    pod = await world.add_pod("p")
    await world.filter(pod, "n1")
    await world.bind(pod, "n1")
    text = await world.metrics()
    card = 'device_index="0",device_type="NVIDIA T4",device_uuid="GPU-n1-0",node="n1",zone="vGPU"'
    lines = text.splitlines()
    assert f"hami_gpu_memory_limit_bytes{{{card}}} {8000 * 1048576}" in lines
    assert f"hami_gpu_shared_count{{{card}}} 1" in lines
    assert f'hami_gpu_memory_allocated_bytes{{device_cores="100",{card}}} {1000 * 1048576}' in lines
    assert f"hami_node_gpu_memory_allocated_ratio{{{card}}} 0.125" in lines
    where = 'container_index="0",device_uuid="GPU-n1-0",namespace="default",node="n1",pod="p",zone="vGPU"'
    assert f"hami_vgpu_memory_allocated_bytes{{{where}}} {1000 * 1048576}" in lines
    assert any(line.startswith("hami_build_info{") for line in lines)
    assert 'hami_scheduler_filter_duration_seconds_count{zone="vGPU"} 1' in lines


async def test_a_body_over_the_limit_is_an_explicit_error(start: Any) -> None:
    async with start(max_request_bytes=10_000) as world:
        body = json.dumps({"Pod": {"metadata": {"name": "x" * 20_000}}, "NodeNames": []}).encode()
        answer = await world.call("filter", body)
        assert answer["Error"] == "the request is longer than 10000 bytes"


async def test_a_privileged_pod_that_was_admitted_is_told_that_its_limits_do_not_hold(start: Any) -> None:
    async with start(privileged="allow-unlimited") as world:
        await world.add_node("n1")
        pod = await world.add_pod("p")
        pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
        await world.filter(pod, "n1")
        assert await world.bind(pod, "n1") == ""
        await world.scheduler.recorder.flush(60)
        text = "container main is privileged, its GPU limits are not enforced"
        assert ("Warning", "HAMiUnlimited", text) in await world.events()
