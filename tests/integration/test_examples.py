"""Every file of ``examples/`` on the embedded cluster does what its first lines say; those of other vendors
are in ``unit/vendors/test_vendor_examples.py``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import yaml
from local_harness import until

from hami.local.api.errors import ApiError
from hami.local.api.objects import Object, annotations_of, dig
from hami.local.api.podlog import LogRequest
from hami.local.api.resources import EVENTS, NAMESPACES, NODES, PODS, RESOURCEQUOTAS
from hami.local.cluster import Cluster, ClusterConfig, GpuNode, default_native

EXAMPLES = Path(__file__).parents[2] / "examples"
KINDS = {"Namespace": NAMESPACES, "Pod": PODS, "ResourceQuota": RESOURCEQUOTAS}


class Applied:
    """Creates what a file holds and looks at it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    async def create(self, text: str, namespace: str = "default") -> None:
        """``namespace``: of what names none."""
        for document in yaml.safe_load_all(text):
            kind = KINDS[document["kind"]]
            where = document["metadata"].get("namespace", namespace) if kind.namespaced else ""
            await self.cluster.api.registry.create(kind, where, document)

    def pod(self, name: str) -> Object:
        return self.cluster.api.store.get(PODS, "default", name)

    def phase(self, name: str) -> str:
        return str(self.pod(name)["status"]["phase"])

    def allocated(self, name: str) -> list[str]:
        """Card, vendor, MiB and percent of a pod with one container and one card."""
        return annotations_of(self.pod(name))["hami.io/vgpu-devices-allocated"].rstrip(":;").split(",")

    async def log(self, name: str) -> str:
        logs = self.cluster.api.logs
        assert logs is not None
        request = LogRequest(self.pod(name), "main", False, False, False, None, None, None)
        return b"".join([chunk async for chunk in logs.read_log(request)]).decode()

    def reasons(self, name: str) -> list[str]:
        """Reasons of the events about a pod."""
        events = self.cluster.api.store.list(EVENTS)
        return [str(event.get("reason")) for event in events if dig(event, "involvedObject", "name") == name]


@pytest.fixture
async def applied() -> AsyncIterator[Applied]:
    nodes = [GpuNode("n1", cards=2, settings={"FAKEGPU_MODEL": "T4,A100-SXM4-40GB"})]
    async with Cluster(ClusterConfig(nodes, default_native())) as cluster:
        yield Applied(cluster)


async def two_pods_one_card(applied: Applied) -> None:
    for name in ("left", "right"):
        await until(lambda name=name: applied.phase(name) == "Running")  # type: ignore[misc]
    assert applied.allocated("left")[2:] == ["4000", "30"]
    memory = {"NVIDIA A100-SXM4-40GB": "10240", "Tesla T4": "3840"}
    assert applied.allocated("right")[2] in memory.values()
    assert applied.allocated("right")[3] == "60"


async def over_the_limit(applied: Applied) -> None:
    await until(lambda: applied.phase("over-the-limit") == "Failed")
    assert '"error": "CUDA_ERROR_OUT_OF_MEMORY"' in await applied.log("over-the-limit")
    await until(lambda: "HAMiMemoryRefused" in applied.reasons("over-the-limit"))


async def chosen_card(applied: Applied) -> None:
    await until(lambda: applied.phase("chosen-card") == "Running")
    (node,) = applied.cluster.nodes
    cards = applied.cluster.api.store.get(NODES, "", node)
    register = msgspec.json.decode(annotations_of(cards)["hami.io/node-nvidia-register"])
    models = {card["id"]: card["type"] for card in register}
    assert models[applied.allocated("chosen-card")[0]] == "NVIDIA A100-SXM4-40GB"


async def waits(applied: Applied) -> None:
    await until(lambda: "FailedScheduling" in applied.reasons("waits"))
    await until(
        lambda: "2/2 CardInsufficientMemory" in str(dig(applied.pod("waits"), "status", "conditions"))
    )
    assert applied.phase("waits") == "Pending"


async def quota(applied: Applied) -> None:
    pod = (EXAMPLES / "over-the-limit.yaml").read_text()
    await until(lambda: _quota_known(applied))
    with pytest.raises(ApiError, match="exceeding resource quota"):
        await applied.create(pod.replace("nvidia.com/gpumem: 2000", "nvidia.com/gpumem: 6001"), "team-a")
    await applied.create(pod, "team-a")


def _quota_known(applied: Applied) -> bool:
    return bool(dig(applied.cluster.api.store.get(RESOURCEQUOTAS, "team-a", "gpu"), "status", "hard"))


CHECKS = {
    "two-pods-one-card.yaml": two_pods_one_card,
    "over-the-limit.yaml": over_the_limit,
    "chosen-card.yaml": chosen_card,
    "waits.yaml": waits,
    "quota.yaml": quota,
}


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
async def test_an_example_does_what_it_says(applied: Applied, name: str) -> None:
    await applied.create((EXAMPLES / name).read_text())
    await CHECKS[name](applied)
