"""The host PID broker on a real cluster (host-pid-broker.md §12, §15.6): off, on, disturbed, rolled back.

What happens in allocation mode `lock` is in test_mode_lock.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from e2e_harness import ROOT, SYSTEM, Cluster, Hami
from e2e_hostpid import (
    ON,
    asks,
    create,
    does_without,
    has_mount,
    mapping_is_right,
    restart,
    start,
)

SOCKET = "/var/run/hami/hostpid/broker.sock"
WORKLOAD_SOCKET = "/tmp/vgpulock/hostpid/broker.sock"


@pytest.fixture
def on(release: Hami) -> Iterator[Hami]:
    """HAMi with the broker on."""
    release.takes(*ON)
    yield release
    release.heal()


def test_x4_x5_x13_the_broker_is_rolled_out_and_back_with_pods_running(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    old = create(cluster, namespace, "old")
    start(cluster, namespace, "old")
    mapping_is_right(cluster, hami, old, 1)

    hami.upgrade(*ON)
    does_without(cluster, hami, namespace, old, 2)
    new = create(cluster, namespace, "new")
    asks(cluster, hami, namespace, new, 1)

    cluster.kubectl("delete", "pod", *hami.pods("device-plugin"), "-n", SYSTEM, "--wait")
    hami.ready()
    asks(cluster, hami, namespace, new, 2)

    hami.rollback()
    last = create(cluster, namespace, "last")
    for processes, (name, found) in ((3, ("old", old)), (3, ("new", new)), (1, ("last", last))):
        start(cluster, namespace, name)
        mapping_is_right(cluster, hami, found, processes)
    assert not has_mount(cluster, namespace, "last")
    for item in cluster.running(namespace, "old", "new", "last"):
        assert [status["restartCount"] for status in item["status"]["containerStatuses"]] == [0]


def test_x15_a_restarted_container_gets_the_broker_in_mode_exact(
    cluster: Cluster, hami: Hami, namespace: str
) -> None:
    found = create(cluster, namespace, "again")
    hami.upgrade(*ON)
    restart(cluster, namespace, "again")
    assert has_mount(cluster, namespace, "again")
    asks(cluster, hami, namespace, found, 1)


def test_x6_x9_x10_x12_disturbed_broker_falls_back_and_serves_again(
    cluster: Cluster, on: Hami, namespace: str
) -> None:
    strict = {"readOnlyRootFilesystem": True, "runAsUser": 1000, "allowPrivilegeEscalation": False}
    found = create(cluster, namespace, "strict", securityContext=strict)
    asks(cluster, on, namespace, found, 1)
    for attack in (f"rm -f {WORKLOAD_SOCKET}", f"touch {WORKLOAD_SOCKET}.x", f"mv {WORKLOAD_SOCKET} /tmp/x"):
        assert cluster.execute(namespace, "strict", "sh", "-c", attack).code != 0, attack
    assert cluster.execute(namespace, "strict", "test", "-S", WORKLOAD_SOCKET).code == 0

    # another file in the socket's place: never asked, and the process is found all the same
    cluster.node("sh", "-c", f"mv {SOCKET} {SOCKET}.away && touch {SOCKET}")
    try:
        start(cluster, namespace, "strict")
        mapping_is_right(cluster, on, found, 2)
    finally:
        cluster.node("sh", "-c", f"rm -f {SOCKET} && mv {SOCKET}.away {SOCKET}")
    asks(cluster, on, namespace, found, 3)

    # nobody behind the socket: the plugin is killed while a process starts
    cluster.kubectl(
        *("delete", "pod", *on.pods("device-plugin"), "-n", SYSTEM, "--grace-period=0", "--force")
    )
    start(cluster, namespace, "strict")
    on.ready()
    mapping_is_right(cluster, on, found, 4)
    asks(cluster, on, namespace, found, 5)


@pytest.fixture
def crun(cluster: Cluster) -> Iterator[str]:
    """The RuntimeClass of the node's second runtime."""
    meta = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "crun"}}
    cluster.create(meta | {"handler": "crun"})
    yield "crun"
    cluster.kubectl("delete", "runtimeclass", "crun")


def test_x16_the_runtimes_that_the_pages_call_tried_serve_the_broker(
    cluster: Cluster, on: Hami, namespace: str, crun: str
) -> None:
    """Each is asked of its own container's state; the pages name the others as untested."""
    tried = {}
    for name, runtime in (("runc", ""), ("crun", crun)):
        found = create(cluster, namespace, name, runtime=runtime)
        asks(cluster, on, namespace, found, 1)
        uri = cluster.get("pod", name, namespace)["status"]["containerStatuses"][0]["containerID"]
        state = cluster.node("ls", f"/run/containerd/runc/k8s.io/{uri.rpartition('/')[2]}").split()
        tried[
            f"containerd + {'runc' if 'state.json' in state else 'crun' if 'status' in state else state}"
        ] = name
    assert tried == {"containerd + runc": "runc", "containerd + crun": "crun"}
    for page, untested in (("host-pid-broker.md", "untested"), ("host-pid-broker.zh.md", "未测试")):
        matrix = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", (ROOT / "docs" / page).read_text(), re.M))
        print(page, matrix)
        assert all(not matrix[cell].startswith(untested) for cell in tried)
        for other in ("gVisor", "Kata", "CRI-O", "rootless"):
            assert matrix[other].startswith(untested), other
