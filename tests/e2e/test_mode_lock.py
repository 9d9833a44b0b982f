"""Allocation mode `lock` on the same cluster: HAMi's own way, one pod at a time per node.

The scenarios are those of mode `exact`, run again; the node changes its mode before and after them, with pods
running.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e_harness import (
    LOCK,
    MODE,
    NODE,
    Cluster,
    Hami,
    allocated,
    container,
    deployment,
    limits,
    pod,
    shown_limits,
    until,
)
from e2e_hostpid import ENDS_ON_TERM, ON, asks, does_without, has_mount, restart
from test_failures import (
    test_a_burst_is_placed_right_although_the_leading_scheduler_dies,
    test_a_node_lock_of_a_pod_that_is_gone_holds_nobody_up,
    test_pods_outlive_the_device_plugin_and_new_ones_start_after_it,
)
from test_pods import (
    test_each_container_of_a_pod_has_its_own_limit,
    test_init_containers_and_sidecars_are_limited_too,
)
from test_sharing import (
    test_a_pod_over_capacity_waits_with_a_reason_and_runs_once_a_pod_ends,
    test_two_pods_share_a_card_and_each_is_held_to_its_limit,
)

__all__ = [
    "test_a_burst_is_placed_right_although_the_leading_scheduler_dies",
    "test_a_node_lock_of_a_pod_that_is_gone_holds_nobody_up",
    "test_a_pod_over_capacity_waits_with_a_reason_and_runs_once_a_pod_ends",
    "test_each_container_of_a_pod_has_its_own_limit",
    "test_init_containers_and_sidecars_are_limited_too",
    "test_pods_outlive_the_device_plugin_and_new_ones_start_after_it",
    "test_two_pods_share_a_card_and_each_is_held_to_its_limit",
]


def _takes(hami: Hami, mode: str, *settings: str) -> None:
    hami.takes("--set", f"devicePlugin.allocationMode={mode}", *settings)
    until(
        f"the node allocates in mode {mode}",
        lambda: hami.cluster.get("node", NODE)["metadata"]["annotations"].get(MODE) == mode,
        hami.logs,
    )


@pytest.fixture
def hami(release: Hami) -> Iterator[Hami]:
    """HAMi, ready, the node in mode lock."""
    _takes(release, "lock")
    yield release
    release.heal()


def test_pods_run_on_and_can_restart_when_the_node_changes_its_mode(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    names = ("in-lock", "in-exact", "in-lock-again")
    modes = ("lock", "exact", "lock")
    before: dict[str, list[list[str]]] = {}
    for number, (name, mode) in enumerate(zip(names, modes, strict=True)):
        if number:
            _takes(hami, mode)
        asked = container(limits(memory_mib=2000 + number), command=ENDS_ON_TERM)
        cluster.create(pod(namespace, name, asked))
        (found,) = cluster.running(namespace, name)
        before[name] = allocated(found)
    for item in cluster.running(namespace, *names):
        assert item["status"]["containerStatuses"][0]["restartCount"] == 0
    for number, name in enumerate(names):
        assert allocated(restart(cluster, namespace, name)) == before[name]
        assert shown_limits(cluster, namespace, name) == (1, 2000 + number)
    assert LOCK not in cluster.get("node", NODE)["metadata"]["annotations"]
    # all three are counted: what they hold is not given away
    cluster.create(pod(namespace, "rest", container(limits(gpus=2, memory_mib=39500))))
    until(
        "the pod that would fit beside none of them is told so",
        lambda: "2/2 CardInsufficientMemory" in cluster.events(namespace, "rest"),
        lambda: cluster.events(namespace, "rest"),
    )


def test_a_node_lock_that_a_bound_pod_left_behind_holds_nobody_up(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    cluster.create(pod(namespace, "holder", container(limits(memory_mib=2000))))
    (holder,) = cluster.running(namespace, "holder")
    taken = holder["metadata"]["creationTimestamp"]
    cluster.kubectl("annotate", "node", NODE, f"{LOCK}={taken},{namespace},holder", "--overwrite")
    cluster.create(pod(namespace, "next", container(limits(memory_mib=3000))))
    cluster.running(namespace, "next")
    assert shown_limits(cluster, namespace, "next") == (1, 3000)
    assert LOCK not in cluster.get("node", NODE)["metadata"]["annotations"]


def test_x14_in_mode_lock_a_pod_that_is_made_again_gets_the_broker(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    """A restarted container keeps the answer that kubelet has; in mode exact it does not (X15)."""
    served = container(limits(memory_mib=3000), command=ENDS_ON_TERM)
    cluster.create(deployment(namespace, "served", 1, served))
    (old,) = cluster.rolled_out(namespace, "served", 1)
    _takes(hami, "lock", *ON)
    restart(cluster, namespace, old["metadata"]["name"])
    does_without(cluster, hami, namespace, old, 1)
    cluster.kubectl("rollout", "restart", "deployment/served", "-n", namespace)
    cluster.kubectl("rollout", "status", "deployment/served", "-n", namespace, "--timeout=60s")
    (new,) = cluster.rolled_out(namespace, "served", 1)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert has_mount(cluster, namespace, new["metadata"]["name"])
    asks(cluster, hami, namespace, new, 1)
