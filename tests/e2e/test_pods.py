"""Pods of several containers, their order, and what is free again once they are gone."""

from __future__ import annotations

from e2e_harness import (
    NODE,
    NVML_TOTAL,
    Cluster,
    Hami,
    allocated,
    container,
    deployment,
    limits,
    pod,
    until,
)


def test_each_container_of_a_pod_has_its_own_limit(cluster: Cluster, hami: Hami, namespace: str) -> None:
    cluster.create(
        pod(
            namespace,
            "three",
            container(limits(memory_mib=2000), "small"),
            container({}, "none"),
            container(limits(gpus=2, memory_mib=6000), "large"),
        )
    )
    (found,) = cluster.running(namespace, "three")
    assert [len(cards) for cards in allocated(found)] == [1, 0, 2]
    for name, shown in (("small", ["1", "2000"]), ("large", ["2", "6000"])):
        seen = cluster.execute(namespace, "three", "python3", "-c", NVML_TOTAL, container=name)
        assert seen.out.split() == shown, seen
    without = cluster.execute(namespace, "three", "gpuprog", "info", container="none")
    assert without.code != 0, without


def test_init_containers_and_sidecars_are_limited_too(cluster: Cluster, hami: Hami, namespace: str) -> None:
    asked = limits(memory_mib=2000)
    first = container(asked, "first", command=["python3", "-c", NVML_TOTAL])
    beside = container(limits(memory_mib=3000), "beside", restartPolicy="Always")
    cluster.create(pod(namespace, "steps", container(limits(memory_mib=4000)), init=[first, beside]))
    cluster.running(namespace, "steps")
    printed = cluster.kubectl("logs", "-n", namespace, "steps", "-c", "first")
    assert printed.split() == ["1", "2000"]
    for name, limit in (("beside", "3000"), ("main", "4000")):
        seen = cluster.execute(namespace, "steps", "python3", "-c", NVML_TOTAL, container=name)
        assert seen.out.split() == ["1", limit], seen


def test_a_container_that_restarts_gets_the_same_share(cluster: Cluster, hami: Hami, namespace: str) -> None:
    ends = ["sh", "-c", "trap 'exit 1' TERM; sleep infinity & wait"]
    cluster.create(pod(namespace, "again", container(limits(memory_mib=2500), command=ends)))
    (before,) = cluster.running(namespace, "again")
    cluster.execute(namespace, "again", "sh", "-c", "kill -TERM 1")

    def restarted() -> bool:
        status = cluster.get("pod", "again", namespace)["status"]
        return bool(status["containerStatuses"][0]["restartCount"])

    until("the container was restarted", restarted)
    (after,) = cluster.running(namespace, "again")
    assert allocated(after) == allocated(before)
    seen = cluster.execute(namespace, "again", "python3", "-c", NVML_TOTAL)
    assert seen.out.split() == ["1", "2500"], seen


def test_what_deleted_pods_held_is_used_again(cluster: Cluster, hami: Hami, namespace: str) -> None:
    for turn in range(3):
        names = [f"turn-{turn}-{card}" for card in range(2)]
        cluster.create(*(pod(namespace, name, container(limits(cores=100))) for name in names))
        found = cluster.running(namespace, *names)
        assert {card for item in found for card in allocated(item)[0]} == {
            card["id"] for card in hami.registered()
        }
        cluster.delete("pod", *names, namespace=namespace)


def test_a_pod_that_completed_holds_nothing(cluster: Cluster, hami: Hami, namespace: str) -> None:
    jobs = [
        pod(
            namespace,
            f"job-{number}",
            container(limits(gpus=2, memory_mib=40000), command=["gpuprog", "alloc", "30000"]),
            restartPolicy="Never",
        )
        for number in range(3)
    ]
    cluster.create(*jobs)

    def all_done() -> bool:
        phases = [item["status"]["phase"] for item in cluster.items("pods", namespace)]
        return phases == ["Succeeded"] * 3

    until(
        "three jobs that need all of both cards ran one after another",
        all_done,
        lambda: cluster.kubectl("describe", "pods", "-n", namespace),
        limit_s=180,
    )


def test_a_deployment_runs_all_its_replicas(cluster: Cluster, hami: Hami, namespace: str) -> None:
    cluster.create(deployment(namespace, "many", 8, container(limits(memory_mib=4000))))
    found = cluster.rolled_out(namespace, "many", 8)
    used: dict[str, int] = {}
    for item in found:
        assert item["spec"]["nodeName"] == NODE
        for card in allocated(item)[0]:
            used[card] = used.get(card, 0) + 4000
    assert sum(used.values()) == 32000
    assert max(used.values()) <= 40960
