"""Install, upgrade, roll back and uninstall by helm, with pods running (operations.md J7 to J9)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from e2e_harness import (
    NODE,
    SYSTEM,
    Cluster,
    Hami,
    Object,
    allocated,
    container,
    limits,
    pod,
    shown_limits,
    until,
)

KINDS = (
    "clusterroles,clusterrolebindings,mutatingwebhookconfigurations,validatingadmissionpolicies,"
    "validatingadmissionpolicybindings"
)

LIBRARIES = "/usr/local/vgpu/lib"
NAMESPACED = "all,configmaps,secrets,serviceaccounts,roles,rolebindings,leases,poddisruptionbudgets"


def _worker(cluster: Cluster, namespace: str) -> Object:
    work = ["gpuprog", "worker", "--mib", "500", "--kernel-us", "500", "--heartbeat", "1"]
    cluster.create(pod(namespace, "worker", container(limits(memory_mib=2000), command=work)))
    (found,) = cluster.running(namespace, "worker")
    return found


def _beats(cluster: Cluster, namespace: str) -> int:
    return len(cluster.kubectl("logs", "-n", namespace, "worker").splitlines())


def _library_in(cluster: Cluster, namespace: str, name: str) -> str:
    """SHA-256 of the library that a pod's programs load."""
    seen = cluster.execute(namespace, name, "sha256sum", "/usr/local/vgpu/libvgpu.so")
    assert seen.code == 0, seen
    return seen.out.split()[0]


def _libraries_on_node(cluster: Cluster) -> dict[str, str]:
    """Each library file on the node, with what would change if it were written to."""
    listed = cluster.node("find", LIBRARIES, "-name", "libvgpu.so", "-printf", "%p %i %s %C@\n")
    return dict(line.split(" ", 1) for line in listed.splitlines())


def test_pods_run_on_with_their_library_through_upgrade_and_rollback(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    before = _worker(cluster, namespace)
    old, on_node = _library_in(cluster, namespace, "worker"), _libraries_on_node(cluster)
    hami.upgrade("--set", "global.imageTag=next")
    cluster.create(pod(namespace, "between", container(limits(memory_mib=3000))))
    cluster.running(namespace, "between")
    new = _library_in(cluster, namespace, "between")
    assert new != old
    assert _library_in(cluster, namespace, "worker") == old
    hami.rollback()
    cluster.create(pod(namespace, "after", container(limits(memory_mib=4000))))
    found = cluster.running(namespace, "worker", "between", "after")
    for item in found:
        assert [status["restartCount"] for status in item["status"]["containerStatuses"]] == [0]
    libraries = [_library_in(cluster, namespace, name) for name in ("worker", "between", "after")]
    assert libraries == [old, new, old]
    now = _libraries_on_node(cluster)
    assert {path: now.get(path) for path in on_node} == on_node, "a library that pods use was written to"
    assert len(now) > 1, now
    assert allocated(found[0]) == allocated(before)
    beats = _beats(cluster, namespace)
    until("the worker works on", lambda: _beats(cluster, namespace) > beats)
    for name, limit_mib in (("between", 3000), ("after", 4000)):
        assert shown_limits(cluster, namespace, name) == (1, limit_mib)
        beyond = cluster.execute(namespace, name, "gpuprog", "alloc", str(limit_mib + 1))
        assert beyond.code != 0, beyond


def test_uninstall_leaves_nothing_but_the_pods_that_run(cluster: Cluster, hami: Hami, namespace: str) -> None:
    _worker(cluster, namespace)
    hami.uninstall()
    try:
        left = json.loads(cluster.kubectl("get", KINDS, "-o", "json"))["items"]
        assert [item["metadata"]["name"] for item in left if "hami" in item["metadata"]["name"]] == []
        names = cluster.kubectl("get", NAMESPACED, "-n", SYSTEM, "-o", "name").split()
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


def _hami(cluster: Cluster, *words: str) -> str:
    """What `hami` prints to an administrator; it must succeed."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hami"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig)},
    )
    assert done.returncode == 0, done
    return done.stdout


def test_a_new_installation_works_over_what_an_old_one_left(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    worker = _worker(cluster, namespace)
    lock = "hami.io/mutex.lock=2026-01-01T00:00:00Z,gone,gone"
    hami.remove_release()
    try:
        secret = cluster.get("secret", "hami-scheduler-tls", SYSTEM)["data"]
        holder = cluster.get("lease", "hami-scheduler", SYSTEM)["spec"]["holderIdentity"]
        cluster.kubectl("annotate", "node", NODE, lock)
        assert len(hami.registered()) == 2, "nothing is left to be taken over"
        listed = _hami(cluster, "cleanup", "--dry-run", "--hami-namespace", SYSTEM).splitlines()
        for line in (f"Secret {SYSTEM}/hami-scheduler-tls", f"Lease {SYSTEM}/hami-scheduler"):
            assert line in listed, "what HAMi made is not known as its own"
    finally:
        hami.install()
    assert cluster.get("secret", "hami-scheduler-tls", SYSTEM)["data"] == secret
    assert cluster.get("lease", "hami-scheduler", SYSTEM)["spec"]["holderIdentity"] != holder
    cluster.create(pod(namespace, "after", container(limits(memory_mib=3000))))
    after, again = cluster.running(namespace, "after", "worker")
    assert shown_limits(cluster, namespace, "after") == (1, 3000)
    assert allocated(again) == allocated(worker)
    assert [status["restartCount"] for status in again["status"]["containerStatuses"]] == [0]
    assert after["spec"]["schedulerName"] == "hami-scheduler"
    # Nobody takes locks of a node in mode exact, so nobody has removed this one.
    cluster.kubectl("annotate", "node", NODE, "hami.io/mutex.lock-")
