"""Dynamic MIG from a pod's request to its instance: scheduler, plugin, kubelet and simulated driver."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from local_harness import until

from hami.local.api.objects import Object, annotations_of, dig
from hami.local.api.resources import PODS
from hami.local.cluster import DEVICE_CONFIG, Cluster, ClusterConfig, GpuNode, default_native

NOTE = "hami.io/vgpu-mig-allocations"
ALLOWED = [{"models": ["A100-SXM4-40GB"], "profiles": ["1g.5gb", "2g.10gb", "3g.20gb", "7g.40gb"]}]


def pod(name: str, memory_mib: int) -> Object:
    limits = {"nvidia.com/gpu": 1, "nvidia.com/gpumem": memory_mib}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [
                {
                    "name": "main",
                    "image": "busybox",
                    "command": ["sleep", "60"],
                    "resources": {"limits": limits},
                }
            ],
        },
    }


class Pods:
    """Pods of a cluster with one node in mode ``mig``."""

    def __init__(self, cluster: Cluster) -> None:
        self._api = cluster.api

    def object(self, name: str) -> Object:
        return self._api.store.get(PODS, "default", name)

    async def create(self, name: str, memory_mib: int) -> None:
        await self._api.registry.create(PODS, "default", pod(name, memory_mib))

    async def run(self, name: str, memory_mib: int) -> tuple[str, int, str]:
        """Profile, start and MIG UUID of a pod once it runs."""
        await self.create(name, memory_mib)
        await until(lambda: dig(self.object(name), "status", "phase") == "Running")
        (item,) = json.loads(annotations_of(self.object(name))[NOTE])
        return item["profile"], item["placement"]["start"], item["migUUID"]

    async def end(self, name: str) -> None:
        await self._api.registry.delete(PODS, "default", name)


@pytest.mark.parametrize("mode", ["lock", "exact"])
async def test_requests_become_instances_where_the_scheduler_wanted_them(mode: str, tmp_path: Path) -> None:
    device_config = copy.deepcopy(DEVICE_CONFIG)
    device_config["nvidia"]["migProfileAllowlist"] = ALLOWED
    node_config = tmp_path / "config.json"
    node_config.write_text(json.dumps({"nodeconfig": [{"name": "n1", "operatingmode": "mig"}]}))
    config = ClusterConfig(
        [GpuNode("n1")],
        default_native(),
        device_config=device_config,
        allocation_mode=mode,
        plugin_args=["--node-config-file", str(node_config)],
        monitor=False,
    )
    async with Cluster(config) as cluster:
        pods = Pods(cluster)
        large = await pods.run("large", 9000)
        small = [await pods.run(f"small-{number}", 4000) for number in range(2)]
        assert [found[:2] for found in (large, *small)] == [("2g.10gb", 0), ("1g.5gb", 6), ("1g.5gb", 5)]
        assert len({found[2] for found in (large, *small)}) == 3
        await pods.create("waits", 30000)
        for name in ("large", "small-0", "small-1"):
            await pods.end(name)
        await until(lambda: dig(pods.object("waits"), "status", "phase") == "Running")
        (item,) = json.loads(annotations_of(pods.object("waits"))[NOTE])
        assert (item["profile"], item["placement"]) == ("7g.40gb", {"start": 0, "size": 8})
        assert item["migUUID"]
