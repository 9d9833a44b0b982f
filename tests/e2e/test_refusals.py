"""What is refused, and what users are told; and what makes a waiting pod run."""

from __future__ import annotations

import json

from e2e_harness import (
    ALLOCATED,
    NVML_TOTAL,
    Cluster,
    Hami,
    allocated,
    container,
    limits,
    pod,
    until,
)


def test_a_namespace_over_its_quota_is_told_so_and_served_within_it(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.create(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "memory", "namespace": namespace},
            "spec": {"hard": {"limits.nvidia.com/gpumem": "5000"}},
        }
    )
    cluster.create(pod(namespace, "within", container(limits(memory_mib=3000))))
    cluster.running(namespace, "within")
    refusal = cluster.run("kubectl", "create", "-f", "-", text=_text(namespace, "beyond", 3000))
    if refusal.code == 0:
        until(
            "the pod over the quota is told why it waits",
            lambda: "ResourceQuotaNotFit" in cluster.events(namespace, "beyond"),
            lambda: cluster.events(namespace, "beyond"),
        )
        assert cluster.get("pod", "beyond", namespace)["status"]["phase"] == "Pending"
    else:
        assert "quota" in refusal.err
    cluster.create(pod(namespace, "small", container(limits(memory_mib=2000))))
    cluster.running(namespace, "small")


def test_a_pod_that_no_card_could_ever_serve_waits_with_a_reason(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.create(
        pod(namespace, "huge", container(limits(memory_mib=90000))),
        pod(namespace, "many", container(limits(gpus=3, memory_mib=1000))),
        pod(
            namespace,
            "other",
            container(limits(memory_mib=1000)),
            annotations={"nvidia.com/use-gputype": "H100"},
        ),
    )
    for name, reason in (
        ("huge", "2/2 CardInsufficientMemory"),
        ("many", "NodeInsufficientDevice"),
        ("other", "2/2 CardTypeMismatch"),
    ):
        until(
            f"pod {name} is told {reason}",
            lambda name=name, reason=reason: reason in cluster.events(namespace, name),  # type: ignore[misc]
            lambda name=name: cluster.events(namespace, name),  # type: ignore[misc]
        )


def test_impossible_requests_are_denied_at_creation(cluster: Cluster, hami: Hami, namespace: str) -> None:
    beyond = limits() | {"nvidia.com/gpumem-percentage": "101"}
    privileged = container(limits(memory_mib=1000), securityContext={"privileged": True})
    assert "nvidia.com/gpumem-percentage" in cluster.refused(pod(namespace, "beyond", container(beyond)))
    assert "privileged" in cluster.refused(pod(namespace, "strong", privileged))


def test_forged_allocations_give_nothing(cluster: Cluster, hami: Hami, namespace: str) -> None:
    card = hami.registered()[0]["id"]
    forged = f"{card},NVIDIA,40000,100:;"
    notes = {
        ALLOCATED: forged,
        "hami.io/vgpu-devices-to-allocate": forged,
        "hami.io/vgpu-node": "node1",
        "hami.io/bind-phase": "allocating",
    }
    cluster.create(pod(namespace, "honest", container(limits(memory_mib=30000))))
    cluster.running(namespace, "honest")
    done = cluster.run("kubectl", "create", "-f", "-", text=_text(namespace, "forger", 1000, notes))
    if done.code != 0:
        assert "hami.io/" in done.err, done.err
        return
    (found,) = cluster.running(namespace, "forger")
    assert found["metadata"]["annotations"][ALLOCATED] != forged
    assert len(allocated(found)[0]) == 1
    seen = cluster.execute(namespace, "forger", "python3", "-c", NVML_TOTAL)
    assert seen.out.split() == ["1", "1000"], seen


def test_a_pod_cannot_raise_its_own_limits(cluster: Cluster, hami: Hami, namespace: str) -> None:
    own = {"CUDA_DEVICE_MEMORY_LIMIT_0": "30000m", "CUDA_DEVICE_MEMORY_LIMIT": "30000m"}
    env = [{"name": name, "value": value} for name, value in own.items()]
    cluster.create(pod(namespace, "greedy", container(limits(memory_mib=1000), env=env)))
    cluster.running(namespace, "greedy")
    seen = cluster.execute(namespace, "greedy", "python3", "-c", NVML_TOTAL)
    assert seen.out.split() == ["1", "1000"], seen
    beyond = cluster.execute(
        namespace,
        "greedy",
        "env",
        *(f"{name}={value}" for name, value in own.items()),
        "gpuprog",
        "alloc",
        "2000",
    )
    assert beyond.code != 0, beyond


def _text(namespace: str, name: str, memory_mib: int, notes: dict[str, str] | None = None) -> str:
    return json.dumps(pod(namespace, name, container(limits(memory_mib=memory_mib)), annotations=notes))
