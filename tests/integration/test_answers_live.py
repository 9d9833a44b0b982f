"""`hami explain`, `top`, `simulate` and `snapshot` on a live cluster: what they read, and that they only
read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_harness import until

from hami.answers.collect import Overrides, collect
from hami.answers.errors import AnswerError
from hami.answers.explain import explain
from hami.answers.replay import Replay
from hami.answers.simulate import pods_of_spec, simulate
from hami.answers.snapshot import Settings, Snapshot
from hami.answers.top import top
from hami.kube.client import Client
from hami.kube.config import load_kubeconfig
from hami.local.api.apiserver import ApiServer
from hami.local.api.resources import CONFIGMAPS, DEPLOYMENTS, NODES, PODS
from hami.local.cluster import Cluster

NOW = 1_787_400_000.0
LABELS = {"app.kubernetes.io/component": "hami-scheduler"}
CONFIG = "nvidia:\n  resourceCountName: example.com/gpu\n  resourceMemoryName: example.com/gpumem\n"
SPIN = "trap 'exit 0' TERM; while :; do sleep 0.05; done"


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[Client]:
    async with Client(load_kubeconfig([kubeconfig])) as open_client:
        yield open_client


async def install(api: ApiServer, namespace: str, config: str, *flags: str) -> None:
    """What the chart makes of the scheduler, as far as the commands look at it."""
    meta = {"name": "hami-scheduler-device", "labels": LABELS}
    await api.registry.create(
        CONFIGMAPS, namespace, {"metadata": meta, "data": {"device-config.yaml": config}}
    )
    container = {"name": "extender", "image": "hami", "command": ["scheduler", *flags]}
    spec = {
        "replicas": 0,
        "selector": {"matchLabels": LABELS},
        "template": {"metadata": {"labels": LABELS}, "spec": {"containers": [container]}},
    }
    await api.registry.create(
        DEPLOYMENTS, namespace, {"metadata": {"name": "hami-scheduler", "labels": LABELS}, "spec": spec}
    )


async def test_config_and_policies_are_those_of_the_installed_scheduler(
    embedded_api: ApiServer, client: Client
) -> None:
    await install(embedded_api, "default", CONFIG, "--node-scheduler-policy=spread", "--scheduler-name=mine")
    snapshot = await collect(client, Overrides(with_usage=False), NOW)
    assert snapshot.device_config == CONFIG
    assert snapshot.settings == Settings(scheduler_name="mine", node_policy="spread")
    assert snapshot.notes == []
    assert "example.com/gpu" in Replay(snapshot).resources
    known_better = Overrides(
        settings={"node-scheduler-policy": "binpack"}, device_config="", with_usage=False
    )
    snapshot = await collect(client, known_better, NOW)
    assert (snapshot.settings.node_policy, snapshot.device_config) == ("binpack", "")


async def test_two_installations_must_be_told_apart(embedded_api: ApiServer, client: Client) -> None:
    await install(embedded_api, "default", CONFIG)
    await install(embedded_api, "kube-system", CONFIG.replace("example", "other"))
    with pytest.raises(AnswerError, match=r"default/hami-scheduler-device, kube-system/.*--hami-namespace"):
        await collect(client, Overrides(with_usage=False), NOW)
    snapshot = await collect(client, Overrides("kube-system", with_usage=False), NOW)
    assert "other.com/gpu" in snapshot.device_config


async def test_what_cannot_be_found_is_noted_and_the_rest_is_answered(
    embedded_api: ApiServer, client: Client
) -> None:
    await embedded_api.registry.create(NODES, "", {"metadata": {"name": "n1"}})
    urls = Overrides(monitor_urls=("http://127.0.0.1:9/metrics",))
    snapshot = await collect(client, urls, NOW)
    assert len(snapshot.notes) == 2
    assert "device-config.yaml" in snapshot.notes[0]
    assert snapshot.notes[1].startswith("usage of http://127.0.0.1:9/metrics is left out")
    assert top(Replay(snapshot)).nodes == ()


def gpu_pod(name: str, memory: int) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": str(memory), "nvidia.com/gpucores": "10"}
    main = {
        "name": "main", "image": "none", "command": ["sh", "-c", SPIN], "resources": {"limits": limits},
        "env": [{"name": "PASSWORD", "value": "hunter2"}],
    }  # fmt: skip
    spec = {"containers": [main], "terminationGracePeriodSeconds": 1}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def test_the_answers_agree_with_what_the_scheduler_did(cluster: Cluster) -> None:
    api = cluster.api
    for name, memory in (("runs", 30000), ("waits", 20000)):
        await api.registry.create(PODS, "default", gpu_pod(name, memory))

    def said(name: str) -> str:
        conditions = api.store.get(PODS, "default", name).get("status", {}).get("conditions") or []
        return " ".join(str(one.get("message", "")) for one in conditions)

    def phase(name: str) -> Any:
        return api.store.get(PODS, "default", name).get("status", {}).get("phase")

    await until(lambda: phase("runs") == "Running" and "Card" in said("waits"), limit_s=60.0)
    metrics = next(iter(cluster.nodes.values())).metrics_url + "/metrics"
    snapshot = await snapshot_of(cluster, metrics)
    assert "hunter2" not in str(snapshot)

    waiting = explain(Replay(snapshot), "default", "waits")
    assert waiting.refusals[0].reason in said("waits")
    assert "ask for nvidia.com/gpumem: 10960 instead of 20000: fits on n1" in waiting.changes
    assert "once pod default/runs has ended it fits on n1" in waiting.changes

    running = explain(Replay(snapshot), "default", "runs")
    assert running.node == "n1"
    assert [card.taken for card in running.cards if card.chosen] == ["30000 MiB, 10 cores"]

    (row,) = top(Replay(snapshot)).pods
    assert (row.pod, row.memory, row.cores) == ("default/runs", 30000, 10)
    assert snapshot.cards_use[0].device == top(Replay(snapshot)).cards[0].id

    text = yaml.safe_dump(gpu_pod("small", 10960)) + "---\n" + yaml.safe_dump(gpu_pod("one-more", 1))
    assert [one.node for one in simulate(Replay(snapshot), pods_of_spec(text)).pods] == ["n1", ""]
    assert {one["metadata"]["name"] for one in api.store.list(PODS)} == {"runs", "waits"}


async def snapshot_of(cluster: Cluster, metrics: str) -> Snapshot:
    config = await asyncio.to_thread(load_kubeconfig, [cluster.kubeconfig])
    async with Client(config) as client:
        return await collect(client, Overrides(monitor_urls=(metrics,)), NOW)
