"""Pods share cards, and each sees and gets its own share only (operations.md J3)."""

from __future__ import annotations

from e2e_harness import (
    LOCK,
    NODE,
    NVML_TOTAL,
    PHASE,
    Cluster,
    Hami,
    allocated,
    container,
    limits,
    pod,
    until,
)

BINPACK = {"hami.io/gpu-scheduler-policy": "binpack"}


def test_two_pods_share_a_card_and_each_is_held_to_its_limit(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.create(
        pod(namespace, "one", container(limits(memory_mib=3000)), annotations=BINPACK),
        pod(namespace, "two", container(limits(memory_mib=5000)), annotations=BINPACK),
    )
    found = cluster.running(namespace, "one", "two")
    assert allocated(found[0]) == allocated(found[1])
    for item in found:
        assert item["spec"]["schedulerName"] == "hami-scheduler"
        assert item["metadata"]["annotations"][PHASE] == "success"

    for name, limit_mib in (("one", 3000), ("two", 5000)):
        shown = cluster.execute(namespace, name, "python3", "-c", NVML_TOTAL)
        assert shown.out.split() == ["1", str(limit_mib)], shown
        within = cluster.execute(namespace, name, "gpuprog", "alloc", str(limit_mib - 1000))
        assert within.code == 0, within
        beyond = cluster.execute(namespace, name, "gpuprog", "alloc", str(limit_mib + 1))
        assert beyond.code != 0, beyond
        assert "error 2" in beyond.out + beyond.err, beyond
    assert LOCK not in cluster.get("node", NODE)["metadata"]["annotations"]


def test_a_pod_over_capacity_waits_with_a_reason_and_runs_once_a_pod_ends(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.create(*(pod(namespace, name, container(limits(memory_mib=30000))) for name in ("one", "two")))
    cluster.running(namespace, "one", "two")
    cluster.create(pod(namespace, "three", container(limits(memory_mib=30000))))
    until(
        "the third pod is told why it waits",
        lambda: "2/2 CardInsufficientMemory" in cluster.events(namespace, "three"),
        lambda: cluster.events(namespace, "three"),
    )
    assert cluster.get("pod", "three", namespace)["status"]["phase"] == "Pending"
    cluster.delete("pod", "one", namespace=namespace)
    cluster.running(namespace, "three")


def test_a_pod_gets_two_different_cards_with_its_limit_on_each(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.create(pod(namespace, "pair", container(limits(gpus=2, memory_mib=2000))))
    (found,) = cluster.running(namespace, "pair")
    (cards,) = allocated(found)
    assert len(set(cards)) == 2
    shown = cluster.execute(namespace, "pair", "python3", "-c", NVML_TOTAL)
    assert shown.out.split() == ["2", "2000"], shown
