"""Components die, a card fails, a lock is left behind: pods run on, and waiting ones run in the end."""

from __future__ import annotations

from datetime import UTC, datetime

from e2e_harness import (
    LOCK,
    NODE,
    NVML_TOTAL,
    SYSTEM,
    Cluster,
    Hami,
    Object,
    allocated,
    container,
    deployment,
    limits,
    pod,
    until,
)


def _still_there(before: Object, found: list[Object]) -> None:
    """The pod of before is among those found, and none of its containers was started again."""
    (same,) = (item for item in found if item["metadata"]["uid"] == before["metadata"]["uid"])
    assert [status["restartCount"] for status in same["status"]["containerStatuses"]] == [0]
    assert allocated(same) == allocated(before)


def _limit_is(cluster: Cluster, namespace: str, name: str, memory_mib: int) -> None:
    seen = cluster.execute(namespace, name, "python3", "-c", NVML_TOTAL)
    assert seen.out.split() == ["1", str(memory_mib)], seen


def test_pods_outlive_the_device_plugin_and_new_ones_start_after_it(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    # A bare pod that reaches the kubelet while no plugin is there is rejected for good, as with any plugin.
    cluster.create(deployment(namespace, "served", 1, container(limits(memory_mib=2000))))
    (before,) = cluster.rolled_out(namespace, "served", 1)
    cluster.kubectl("delete", "pod", *hami.pods("device-plugin"), "-n", SYSTEM, "--grace-period=0", "--force")
    cluster.kubectl("scale", "deployment", "served", "--replicas=3", "-n", namespace)
    found = cluster.rolled_out(namespace, "served", 3)
    _still_there(before, found)
    for item in found:
        _limit_is(cluster, namespace, item["metadata"]["name"], 2000)


def test_a_restarted_kubelet_goes_on_with_the_same_plugin(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.create(deployment(namespace, "served", 1, container(limits(memory_mib=2000))))
    (before,) = cluster.rolled_out(namespace, "served", 1)
    plugin = hami.pods("device-plugin")
    done = cluster.run("restart-kubelet", limit_s=240)
    assert done.code == 0, done.err
    cluster.kubectl("scale", "deployment", "served", "--replicas=3", "-n", namespace)
    found = cluster.rolled_out(namespace, "served", 3)
    _still_there(before, found)
    assert hami.pods("device-plugin") == plugin
    for item in found:
        _limit_is(cluster, namespace, item["metadata"]["name"], 2000)


def test_a_burst_is_placed_right_although_the_leading_scheduler_dies(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    names = [f"burst-{number}" for number in range(16)]
    leader = hami.leader()
    cluster.create(*(pod(namespace, name, container(limits(memory_mib=5000))) for name in names))
    cluster.kubectl("delete", "pod", leader, "-n", SYSTEM, "--grace-period=0", "--force")
    found = cluster.running(namespace, *names)
    used: dict[str, int] = {}
    for item in found:
        (cards,) = allocated(item)
        for card in cards:
            used[card] = used.get(card, 0) + 5000
    assert sum(used.values()) == 80000
    assert max(used.values()) <= 40960


def test_a_node_lock_of_a_pod_that_is_gone_holds_nobody_up(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    cluster.kubectl("annotate", "node", NODE, f"{LOCK}={now},{namespace},nobody", "--overwrite")
    try:
        cluster.create(pod(namespace, "next", container(limits(memory_mib=2000))))
        cluster.running(namespace, "next")
    finally:
        cluster.kubectl("annotate", "node", NODE, f"{LOCK}-")


def test_a_failed_card_takes_no_more_pods_until_it_is_whole(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    bad, good = (card["id"] for card in hami.registered())
    cluster.cards("xid", "0", "79")
    until(
        "the card is reported as failed",
        lambda: (
            {card["id"]: card.get("health", False) for card in hami.registered()} == {bad: False, good: True}
        ),
        hami.logs,
    )
    only = {"nvidia.com/use-gpuuuid": bad}
    cluster.create(
        pod(namespace, "elsewhere", container(limits(memory_mib=2000))),
        pod(namespace, "there", container(limits(memory_mib=2000)), annotations=only),
    )
    (found,) = cluster.running(namespace, "elsewhere")
    assert allocated(found) == [[good]]
    until(
        "the pod that wants the failed card is told why it waits",
        lambda: "CardNotHealth" in cluster.events(namespace, "there"),
        lambda: cluster.events(namespace, "there"),
    )
    hami.heal()
    (found,) = cluster.running(namespace, "there")
    assert allocated(found) == [[bad]]


def test_pods_wait_for_a_node_and_run_once_it_is_registered(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.kubectl("label", "node", NODE, "gpu-", "--overwrite")
    try:
        until("the device plugin is gone", lambda: not hami.pods("device-plugin"))
        until("the node offers no cards", lambda: hami.capacity() == 0)
        cluster.create(pod(namespace, "early", container(limits(memory_mib=2000))))
        until(
            "the pod is told why it waits",
            lambda: (
                "FilteringFailed" in cluster.events(namespace, "early")
                or "FailedScheduling" in cluster.events(namespace, "early")
            ),
        )
    finally:
        cluster.kubectl("label", "node", NODE, "gpu=on", "--overwrite")
    cluster.running(namespace, "early")
    _limit_is(cluster, namespace, "early", 2000)
