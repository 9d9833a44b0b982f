"""A Deployment whose pods share a simulated card, with all of HAMi's programs running."""

from __future__ import annotations

from local_harness import until

from hami.local.api.node_services import ExecRequest
from hami.local.api.objects import Object, dig, labels_of, meta
from hami.local.api.registry import DeleteOptions
from hami.local.api.resources import DEPLOYMENTS, PODS
from hami.local.cluster import Cluster

SCRIPT = "trap 'exit 0' TERM; while :; do sleep 0.05; done"


def pods(cluster: Cluster) -> list[Object]:
    return [pod for pod in cluster.api.store.list(PODS) if labels_of(pod).get("app") == "share"]


async def test_the_pods_of_a_deployment_share_a_card_and_can_be_entered(cluster: Cluster) -> None:
    limits = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4096"}
    container = {
        "name": "main", "image": "none", "command": ["sh", "-c", SCRIPT], "resources": {"limits": limits},
    }  # fmt: skip
    spec = {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "share"}},
        "template": {
            "metadata": {"labels": {"app": "share"}},
            "spec": {"containers": [container], "terminationGracePeriodSeconds": 1},
        },
    }
    body = {"metadata": {"name": "share"}, "spec": spec}
    await cluster.api.registry.create(DEPLOYMENTS, "default", body)
    await until(
        lambda: (
            dig(cluster.api.store.get(DEPLOYMENTS, "default", "share"), "status", "availableReplicas") == 2
        ),
        limit_s=60.0,
    )
    assert {pod["spec"]["schedulerName"] for pod in pods(cluster)} == {"hami-scheduler"}
    assert cluster.api.logs is not None
    for pod in pods(cluster):
        wanted = ExecRequest(
            pod, "main", ("sh", "-c", "echo $CUDA_DEVICE_MEMORY_LIMIT_0"), tty=False, stdin=False
        )
        session = await cluster.api.logs.start_exec(wanted)
        output = b"".join([chunk async for chunk in session.stdout()])
        assert (await session.wait(), output) == (0, b"4096m\n")
    options = DeleteOptions({"propagationPolicy": "Foreground"})
    await cluster.api.registry.delete(DEPLOYMENTS, "default", "share", options)
    await until(lambda: cluster.api.store.find(DEPLOYMENTS, "default", "share") is None, limit_s=60.0)
    assert [meta(pod)["name"] for pod in pods(cluster)] == []
