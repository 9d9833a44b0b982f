"""Install, upgrade, roll back and uninstall by helm, with pods running (operations.md J7 to J9)."""

from __future__ import annotations

import json

from e2e_harness import (
    NODE,
    NVML_TOTAL,
    SYSTEM,
    Cluster,
    Hami,
    Object,
    allocated,
    container,
    limits,
    pod,
    until,
)

KINDS = (
    "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingadmissionpolicies,"
    "validatingadmissionpolicybindings"
)

NAMESPACED = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,leases,poddisruptionbudgets"


def _worker(cluster: Cluster, namespace: str) -> Object:
    work = ["gpuprog", "worker", "--mib", "500", "--kernel-us", "500", "--heartbeat", "1"]
    cluster.create(pod(namespace, "worker", container(limits(memory_mib=2000), command=work)))
    (found,) = cluster.running(namespace, "worker")
    return found


def _beats(cluster: Cluster, namespace: str) -> int:
    return len(cluster.kubectl("logs", "-n", namespace, "worker").splitlines())


def test_pods_run_on_through_upgrade_and_rollback(cluster: Cluster, hami: Hami, namespace: str) -> None:
    before = _worker(cluster, namespace)
    cluster.alias("hami.local/hami:dev", "hami.local/hami:next")
    hami.upgrade("--set", "global.imageTag=next")
    cluster.create(pod(namespace, "between", container(limits(memory_mib=3000))))
    cluster.running(namespace, "between")
    hami.rollback()
    cluster.create(pod(namespace, "after", container(limits(memory_mib=4000))))
    found = cluster.running(namespace, "worker", "between", "after")
    for item in found:
        assert [status["restartCount"] for status in item["status"]["containerStatuses"]] == [0]
    assert allocated(found[0]) == allocated(before)
    beats = _beats(cluster, namespace)
    until("the worker works on", lambda: _beats(cluster, namespace) > beats)
    for name, limit in (("between", "3000"), ("after", "4000")):
        seen = cluster.execute(namespace, name, "python3", "-c", NVML_TOTAL)
        assert seen.out.split() == ["1", limit], seen


def test_uninstall_leaves_nothing_but_the_pods_that_run(cluster: Cluster, hami: Hami, namespace: str) -> None:
    _worker(cluster, namespace)
    hami.uninstall()
    try:
        left = json.loads(cluster.kubectl("get", KINDS, "-o", "json"))["items"]
        assert [item["metadata"]["name"] for item in left if "hami" in item["metadata"]["name"]] == []
        names = cluster.kubectl(
            *(
                "get",
                "all,configmaps,secrets,serviceaccounts,roles,rolebindings,leases",
                "-n",
                SYSTEM,
                "-o",
                "name",
            )
        ).split()
        assert set(names) <= {"configmap/kube-root-ca.crt", "serviceaccount/default"}
        notes = cluster.get("node", NODE)["metadata"]["annotations"]
        assert [name for name in notes if "hami.io" in name] == []
        beats = _beats(cluster, namespace)
        until("the worker works on", lambda: _beats(cluster, namespace) > beats)
        cluster.create(pod(namespace, "plain", container({})))
        (plain,) = cluster.running(namespace, "plain")
        assert plain["spec"]["schedulerName"] == "default-scheduler"
    finally:
        hami.install()
    (worker,) = cluster.running(namespace, "worker")
    assert [status["restartCount"] for status in worker["status"]["containerStatuses"]] == [0]
